"""What this process holds: to find out what something left behind."""

from __future__ import annotations

import contextlib
import os
import re
import threading
from pathlib import Path

__all__ = ["held_resources", "shared_memory"]

_SHARED = ("psm_", "pym-", "sem.", "torch_", "rlsample")
_HARMLESS = ("/dev/null", "/dev/urandom", "/proc/", "/dev/pts", "/dev/shm/pym-")
"""The last: multiprocessing keeps an unlinked arena for reuse."""


def held_resources() -> set[str]:
    """Names of the threads, child processes, open files and shared memory of now. Threads only where /proc is missing.

    Compare two calls: ``held_resources() - before``.
    """
    held = {f"thread {t.name} {t.ident}" for t in threading.enumerate()}
    for task in _listed("/proc/self/task"):
        try:
            held |= {f"process {pid}" for pid in (task / "children").read_text().split()}
        except OSError:
            continue  # the thread has ended
    for fd in _listed("/proc/self/fd"):
        try:
            target = os.readlink(fd)
        except OSError:
            continue  # the descriptor of this very listing
        if not target.startswith(_HARMLESS):
            held.add(f"file {fd.name} -> {target}")
    return held | shared_memory()


def shared_memory() -> set[str]:
    """Names in /dev/shm as Python, torch and this package give them, but for what other processes hold: all but this
    one and its descendants. What an ended process left there is held by nobody, and is named."""
    names = {path.name for path in _listed("/dev/shm") if path.name.startswith(_SHARED)}
    return {f"shared memory {name}" for name in names - (_shared_memory_of_others() if names else set())}


def _shared_memory_of_others() -> set[str]:
    parents: dict[Path, Path] = {}
    for process in _listed("/proc"):
        with contextlib.suppress(OSError):  # it has ended, here and below
            if process.name.isdigit():
                parents[process] = Path("/proc") / (process / "stat").read_text().rpartition(")")[2].split()[1]
    found: set[str] = set()
    for process in parents:
        above: Path | None = process
        while above is not None and above.name != str(os.getpid()):
            above = parents.get(above)
        if above is not None:
            continue
        with contextlib.suppress(OSError):
            found |= set(re.findall(r"/dev/shm/(.*)", (process / "maps").read_text()))
        for fd in _listed(str(process / "fd")):
            with contextlib.suppress(OSError):
                found |= set(re.findall(r"^/dev/shm/(.*)", os.readlink(fd)))
    return found


def _listed(folder: str) -> list[Path]:
    with contextlib.suppress(OSError):
        return list(Path(folder).iterdir())
    return []
