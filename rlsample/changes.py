"""Waiting for a change by another thread, so that Ctrl-C leaves nothing locked."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

__all__ = ["Changes", "Once"]


class Changes:
    """What ``threading.Condition`` does, whole after a KeyboardInterrupt anywhere in it.

        with changes.lock:
            changes.wait_for(lambda: bool(rows))

    A Condition's own ``with`` ends in Python code, which an interrupt may leave before it unlocks; its ``wait`` may end
    without the lock. A lock's ``with`` is one step.

    Attributes:
        lock: to be held when anything else here is called; once, by whoever waits.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._condition = threading.Condition(self.lock)

    def wait(self, timeout_s: float | None = None) -> None:
        """Gives the lock up until there is word or the time is up; has it again however it ends."""
        self.wait_for(Once(), timeout_s)

    def wait_for(self, ready: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Waits until ``ready()``, which is asked with the lock held; false if the time was up first."""
        try:
            return self._condition.wait_for(ready, timeout_s)
        except BaseException:
            with contextlib.suppress(RuntimeError):  # not held
                self.lock.release()
            self.lock.acquire()
            raise

    def notify_all(self) -> None:
        """Has all who wait look again."""
        self._condition.notify_all()


class Once:
    """A ``ready`` that is false the first time it is asked, and true from then on."""

    def __init__(self) -> None:
        self._asked = False

    def __call__(self) -> bool:
        asked, self._asked = self._asked, True
        return asked
