"""Runs scripts in forks of one process that has loaded torch: to load it takes each script seconds of CPU.

python -m tests.preloaded NUM_AT_ONCE < commands > ends

A command is a line of JSON, ``[[script, *arguments], folder]``: the script runs in that folder, as with ``python``, and
writes to ``out.txt`` and ``err.txt`` there. An end is a line of JSON, ``[script, exit code]``.
"""

import json
import os
import runpy
import sys

from rlsample.nursery import count_threads, die_with_parent


def main(num_at_once):
    import rlsample.algorithms  # noqa: F401  # and with it torch

    assert count_threads() == 1, "a fork has only the thread that forks"
    running = {}
    for line in [*sys.stdin, None]:
        while running and (line is None or len(running) == num_at_once):
            pid, status = os.wait()
            print(json.dumps([running.pop(pid), os.waitstatus_to_exitcode(status)]), flush=True)
        if line is None:
            return
        (script, *arguments), folder = json.loads(line)
        preloaded = os.getpid()
        pid = os.fork()
        if not pid:
            die_with_parent(preloaded)
            run_script(script, arguments, folder)
            return  # and ends as scripts do: waits for its threads, calls what is registered for the exit
        running[pid] = script


def run_script(script, arguments, folder):
    os.chdir(folder)
    for fd, name in enumerate((os.devnull, "out.txt", "err.txt")):
        opened = os.open(name, os.O_RDWR | os.O_CREAT)
        os.dup2(opened, fd)
        os.close(opened)
    sys.argv[:] = [script, *arguments]
    sys.path[0] = os.path.dirname(script)
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main(int(sys.argv[1]))
