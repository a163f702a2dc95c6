"""A small process that starts a pool's workers, tells how they ended, and takes them along when it goes.

It exists so that workers have a parent that never changes: the pool may be made in any thread, and may be killed. The
kernel ends a worker when its nursery ends; the nursery ends when the pool's end of the socket closes, which the kernel
sees to as well. In ``forkserver`` mode it has loaded what workers need, and forks: a worker starts in milliseconds.
It runs in a session of its own, where Ctrl-C at the terminal does not reach.

Started as ``python -c "from rlsample.env.pool.nursery import main; main(JSON)"``. Loads nothing heavy itself.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import sys
from typing import Any

from rlsample.env.pool.messages import Channel

__all__ = ["NUM_FDS_MAX", "count_threads", "die_with_parent", "main", "python_command", "worker_main"]

NUM_FDS_MAX = 8
_PR_SET_PDEATHSIG = 1


def python_command(call: str, argument: dict[str, Any]) -> list[str]:
    """The command line of a fresh interpreter that runs ``call(JSON)``, with this one's module path."""
    module, _, function = call.rpartition(".")
    code = f"import sys; sys.path[:] = {sys.path!r}; from {module} import {function}; {function}(sys.argv[1])"
    return [sys.executable, "-c", code, json.dumps(argument)]


def die_with_parent(parent: int) -> None:
    """Has the kernel kill this process when the thread that started it ends; ends now if ``parent`` is gone.

    Linux: prctl(2), PR_SET_PDEATHSIG. Elsewhere nothing.
    """
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def main(argument: str) -> None:
    """Serves until the socket closes; ``argument`` is JSON: ``fd``, ``forks`` and ``parent`` (a process id)."""
    given = json.loads(argument)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sock = socket.socket(fileno=given["fd"])
    if given["forks"]:
        import rlsample.env.pool.pool_worker  # noqa: F401  loaded here once, for every fork
    _Nursery(sock, given["forks"], given["parent"]).run()
    os._exit(0)


def worker_main(argument: str) -> None:
    """The life of a worker in a fresh interpreter; JSON: ``plan``, ``fds`` and ``parent``."""
    given = json.loads(argument)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent(given["parent"])
    from rlsample.env.pool.pool_worker import run_worker

    run_worker(given["plan"], given["fds"])


def count_threads() -> int:
    """Threads of this process, those of C libraries included; 1 where the system does not say."""
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return 1


class _Nursery:
    def __init__(self, sock: socket.socket, forks: bool, parent: int) -> None:
        self.sock, self.forks, self.parent = sock, forks, parent
        self.channel = Channel(sock)
        self.children: set[int] = set()
        self.loaded: dict[str, Any] | None = None  # the plans, which every fork finds in its memory
        self.wake_read, self.wake_write = os.pipe()
        os.set_blocking(self.wake_read, False)
        os.set_blocking(self.wake_write, False)

    def run(self) -> None:
        signal.set_wakeup_fd(self.wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        poller = select.poll()
        poller.register(self.sock, select.POLLIN)
        poller.register(self.wake_read, select.POLLIN)
        try:
            while os.getppid() == self.parent:  # the socket could be held open by another child of the pool's process
                ready = {fd for fd, _ in poller.poll(1000)}
                if self.wake_read in ready:
                    os.read(self.wake_read, 4096)
                if self.sock.fileno() in ready:
                    self.serve()
                self.reap()
        except (EOFError, OSError):
            pass
        for pid in self.children:
            os.kill(pid, signal.SIGKILL)

    def serve(self) -> None:
        marker, fds, _, _ = socket.recv_fds(self.sock, 1, NUM_FDS_MAX)
        if not marker:
            raise EOFError
        message = self.channel.receive()
        if message[0] == "kill":
            if message[1] in self.children:  # else it was reaped, and the number may be another process by now
                os.kill(message[1], signal.SIGKILL)
            return
        plan = message[1]
        if self.forks and self.loaded is None:
            self.load(plan, fds[2])
        pid = self.fork({**plan, **(self.loaded or {})}, list(fds)) if self.forks else self.spawn(plan, list(fds))
        self.children.add(pid)
        for fd in fds:
            os.close(fd)
        self.channel.send(("started", pid))

    def load(self, plan: dict[str, Any], fd: int) -> None:
        """Loads what the plans need, once. Threads that come with it rule out forking: fresh interpreters then."""
        from rlsample.env.pool.pool_worker import read_plans, warm_up

        warm_up()
        try:
            envs, loop = read_plans(fd, plan["config"])
            self.loaded = {"envs": envs, "loop": loop}
        except Exception:
            self.loaded = {}  # a worker will find out for itself, and tell
        if count_threads() > 1:
            self.forks = False

    def fork(self, plan: dict[str, Any], fds: list[int]) -> int:
        nursery = os.getpid()
        pid = os.fork()
        if pid:
            return pid
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            die_with_parent(nursery)
            self.sock.close()
            os.close(self.wake_read)
            os.close(self.wake_write)
            from rlsample.env.pool.pool_worker import run_worker

            run_worker(plan, fds)
        finally:
            os._exit(1)  # a child never returns into the nursery's loop

    def spawn(self, plan: dict[str, Any], fds: list[int]) -> int:
        for fd in fds:
            os.set_inheritable(fd, True)
        argument = {"plan": plan, "fds": fds, "parent": os.getpid()}
        command = python_command("rlsample.env.pool.nursery.worker_main", argument)
        return os.posix_spawn(command[0], command, os.environ)

    def reap(self) -> None:
        while self.children:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            self.children.discard(pid)
            self.channel.send(("ended", pid, os.waitstatus_to_exitcode(status)))
