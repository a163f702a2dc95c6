"""Waiting without a thread of its own: whoever waits reads for all."""

from __future__ import annotations

import contextlib
import io
import math
import os
import selectors
import time
from collections.abc import Callable

from rlsample.changes import Changes, Once

__all__ = ["Pump"]

_CLOSE_WAIT_S = 1.0  # for a thread that reads to look up
_LOOK_UP_S = 1.0  # so often a thread that waits looks whether it has to read: Ctrl-C may have cost it the word


class Pump:
    """Calls back when descriptors are readable, from inside :meth:`wait_for` and :meth:`poll`.

    The first thread that waits reads; others that wait are told after each reading, and one of them takes over when the
    first has what it wanted. Callbacks run in one thread at a time. They must not wait here themselves. An exception in
    one, such as Ctrl-C, comes out where it was waited, and the callback is called once more at the next reading, also
    if nothing is readable then; others go on waiting, and reading.

    Args:
        look: called after a reading, from the same thread, when it is due; returns the seconds until it is due again.
    """

    def __init__(self, look: Callable[[], float] | None = None) -> None:
        self._look = look or _never
        self._next_look = time.monotonic()
        self._selector = selectors.DefaultSelector()
        self._changes = Changes()
        self._lock = self._changes.lock
        self._reading = False
        self._broken_off: Callable[[], None] | None = None
        self._closed = False
        self._wake_read, self._wake_write = map(io.FileIO, os.pipe(), ("r", "w"))
        for end in (self._wake_read, self._wake_write):
            os.set_blocking(end.fileno(), False)
        self.register(self._wake_read.fileno(), self._drain_wakes)

    def register(self, fd: int, on_readable: Callable[[], None]) -> None:
        """Watches a descriptor, from any thread."""
        with self._lock:
            self._selector.register(fd, selectors.EVENT_READ, on_readable)
        self.wake()

    def unregister(self, fd: int) -> None:
        """Stops watching; call it before the descriptor is closed. Nothing happens if it is not watched."""
        with self._lock, contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(fd)

    def wait_for(self, ready: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Reads until ``ready()``; False if the time was up first. Returns at once where it is ready already."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not ready():
            left = None if deadline is None else deadline - time.monotonic()
            mine = False
            try:
                with self._lock:
                    if self._reading:
                        if left is not None and left <= 0:
                            return ready()
                        self._changes.wait(_LOOK_UP_S if left is None else min(left, _LOOK_UP_S))
                        continue
                    mine = self._reading = True
                self._read(left)
            finally:
                if mine:
                    self._reading = False  # first, and with no call before it: Ctrl-C comes between calls
                    with self._lock:
                        self._changes.notify_all()
            if left is not None and left <= 0:
                return ready()
        return True

    def poll(self) -> None:
        """Reads what is there now, unless another thread is reading anyway."""
        self.wait_for(Once(), 0.0)

    def wake(self) -> None:
        """Has all who wait look again whether they are ready. From any thread."""
        with self._lock:
            self._wake()

    def _wake(self) -> None:
        self._changes.notify_all()
        if self._reading and not self._closed:
            self._wake_write.write(b"w")  # or it is full

    def _read(self, timeout_s: float | None) -> None:
        if self._closed:
            return
        if self._broken_off is not None:
            self._broken_off()
            self._broken_off = None
            timeout_s = 0.0  # that may have been what was waited for
        until_look = self._next_look - time.monotonic()
        left = min(until_look, math.inf if timeout_s is None else timeout_s)
        for key, _ in self._selector.select(None if left == math.inf else max(0.0, left)):
            self._broken_off = key.data
            key.data()
            self._broken_off = None
        if time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + self._look()

    def _drain_wakes(self) -> None:
        while self._wake_read.read(4096):
            pass

    def close(self) -> None:
        """Frees the descriptors; those who wait must have been served before. Idempotent."""
        with self._lock:
            deadline = time.monotonic() + _CLOSE_WAIT_S
            while self._reading and time.monotonic() < deadline:
                self._wake()
                self._changes.wait(0.1)
            self._closed = True
            self._selector.close()
            self._wake_read.close()
            self._wake_write.close()


def _never() -> float:
    return math.inf
