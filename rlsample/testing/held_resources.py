"""What this process holds: to find out what something left behind."""

from __future__ import annotations

import os
import threading
from pathlib import Path

__all__ = ["held_resources"]

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
    return held | {f"shared memory {p.name}" for p in _listed("/dev/shm")}


def _listed(folder: str) -> list[Path]:
    path = Path(folder)
    return list(path.iterdir()) if path.is_dir() else []
