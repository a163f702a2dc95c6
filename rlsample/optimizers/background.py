"""Threads that work beside the caller of ``step()`` and cannot die unnoticed."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from rlsample.changes import Changes
from rlsample.errors import LearnerError

__all__ = ["BackgroundThreads", "Stopped", "Timers"]

log = logging.getLogger(__name__)


class Stopped(Exception):
    """The threads were asked to end, or one of them failed: whoever waits gives up."""


class BackgroundThreads:
    """Threads with one lock between them. The first that fails ends all the others, and its error is kept.

    Attributes:
        lock: guards everything the threads share. One for all: whoever stops or fails wakes every waiter.
    """

    def __init__(self) -> None:
        self._changes = Changes()
        self.lock = self._changes.lock
        self._threads: list[threading.Thread] = []
        self._failure: tuple[str, BaseException] | None = None
        self._stopped = False

    def start(self, name: str, work: Callable[[], None]) -> None:
        """Starts a thread, unless one of this name was started. It ends by raising :class:`Stopped`; if it returns or
        raises else, that is a failure."""
        thread = next((t for t in self._threads if t.name == f"rlsample {name}"), None)
        if thread is None:
            thread = threading.Thread(target=self._run, args=(name, work), name=f"rlsample {name}", daemon=True)
            self._threads.append(thread)
        if thread.ident is None:
            thread.start()

    def _run(self, name: str, work: Callable[[], None]) -> None:
        try:
            work()
            raise RuntimeError(f"the {name} thread ended by itself")
        except Stopped:
            pass
        except BaseException as error:
            self.fail(name, error)

    def fail(self, name: str, error: BaseException) -> None:
        """Keeps the error, if it is the first, and stops all threads."""
        with self.lock:
            if self._failure is None and not self._stopped:
                self._failure = (name, error)
        self.stop()

    def stop(self) -> None:
        """Asks all threads to end and wakes them; does not wait for them."""
        with self.lock:
            self._stopped = True
            self.notify_all()

    def notify_all(self) -> None:
        """Has all who wait look again; the lock is held."""
        self._changes.notify_all()

    @property
    def stopped(self) -> bool:
        """Whether they were asked to end."""
        return self._stopped

    def wait_for(self, ready: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Waits, holding the lock, until ``ready()`` is true; false if the time ran out.

        Raises:
            Stopped: the threads were asked to end, before or while this waited.
        """
        met = self._changes.wait_for(lambda: self._stopped or ready(), timeout_s)
        if self._stopped:
            raise Stopped
        return met

    def check(self) -> None:
        """Raises :class:`~rlsample.errors.LearnerError`, with the cause, if a thread failed or all were stopped."""
        if self._failure is not None:
            name, error = self._failure
            raise LearnerError(f"the {name} thread failed: {type(error).__name__}: {error}") from error
        if self._stopped:
            raise LearnerError("the optimizer is closed")

    def close(self, timeout_s: float = 4.0) -> None:
        """Ends all threads, in bounded time: one that is in the middle of an update longer than that is left to end."""
        self.stop()
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(0.0, deadline - time.monotonic()))
        left = [thread.name for thread in self._threads if thread.is_alive()]
        if left:
            log.warning("still busy %.0f s after close: %s; a daemon thread, ends with its work", timeout_s, left)


class Timers:
    """Seconds by name, added up over all threads. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds: dict[str, float] = {}

    def add(self, name: str, seconds: float) -> None:
        """Adds a duration."""
        with self._lock:
            self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def drain(self) -> dict[str, float]:
        """``{name}_s``: the sums since the last call."""
        with self._lock:
            seconds, self._seconds = self._seconds, {}
        return {f"{name}_s": value for name, value in seconds.items()}
