"""Waiting without a thread of its own: whoever waits reads for all."""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import threading
import time
from collections.abc import Callable

__all__ = ["Pump"]

_CLOSE_WAIT_S = 1.0  # for a thread that reads to look up


class Pump:
    """Calls back when descriptors are readable, from inside :meth:`wait_for` and :meth:`poll`.

    The first thread that waits reads; others that wait are told after each reading, and one of them takes over when the
    first has what it wanted. Callbacks run in one thread at a time. They must not wait here themselves. An exception in
    one, such as Ctrl-C, comes out where it was waited; others go on waiting, and reading.

    Args:
        look: called after a reading, from the same thread, when it is due; returns the seconds until it is due again.
    """

    def __init__(self, look: Callable[[], float] | None = None) -> None:
        self._look = look or _never
        self._next_look = time.monotonic()
        self._selector = selectors.DefaultSelector()
        self._changed = threading.Condition()
        self._reading = False
        self._closed = False
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self.register(self._wake_read, self._drain_wakes)

    def register(self, fd: int, on_readable: Callable[[], None]) -> None:
        """Watches a descriptor, from any thread."""
        with self._changed:
            self._selector.register(fd, selectors.EVENT_READ, on_readable)
        self.wake()

    def unregister(self, fd: int) -> None:
        """Stops watching; call it before the descriptor is closed. Nothing happens if it is not watched."""
        with self._changed, contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(fd)

    def wait_for(self, ready: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Reads until ``ready()``; False if the time was up first. Returns at once where it is ready already."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not ready():
            left = None if deadline is None else deadline - time.monotonic()
            mine = False
            try:
                with self._changed:
                    if self._reading:
                        if left is not None and left <= 0:
                            return ready()
                        self._changed.wait(left)
                        continue
                    mine = self._reading = True  # in this order, and in here: Ctrl-C may come after each of the two
                self._read(left)
            finally:
                if mine:
                    with self._changed:
                        self._reading = False
                        self._changed.notify_all()
            if left is not None and left <= 0:
                return ready()
        return True

    def poll(self) -> None:
        """Reads what is there now, unless another thread is reading anyway."""
        self.wait_for(_Once(), 0.0)

    def wake(self) -> None:
        """Has all who wait look again whether they are ready. From any thread."""
        with self._changed:
            self._wake()

    def _wake(self) -> None:
        self._changed.notify_all()
        if self._reading and not self._closed:
            with contextlib.suppress(BlockingIOError):
                os.write(self._wake_write, b"w")

    def _read(self, timeout_s: float | None) -> None:
        if self._closed:
            return
        until_look = self._next_look - time.monotonic()
        left = min(until_look, math.inf if timeout_s is None else timeout_s)
        for key, _ in self._selector.select(None if left == math.inf else max(0.0, left)):
            key.data()
        if time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + self._look()

    def _drain_wakes(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while os.read(self._wake_read, 4096):
                pass

    def close(self) -> None:
        """Frees the descriptors; those who wait must have been served before. Idempotent."""
        with self._changed:
            deadline = time.monotonic() + _CLOSE_WAIT_S
            while self._reading and time.monotonic() < deadline:
                self._wake()
                self._changed.wait(0.1)
            if self._closed:
                return
            self._closed = True
            self._selector.close()
            os.close(self._wake_read)
            os.close(self._wake_write)


def _never() -> float:
    return math.inf


class _Once:
    """Not ready the first time it is asked, ready from then on."""

    def __init__(self) -> None:
        self._asked = False

    def __call__(self) -> bool:
        asked, self._asked = self._asked, True
        return asked
