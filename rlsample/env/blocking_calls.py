"""Calls that block inside foreign code, made in a thread of their own so that whoever waits can stop waiting."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

__all__ = ["BlockingCalls", "Outcome"]


class Outcome(NamedTuple):
    """How a call ended.

    Attributes:
        tag: what ``begin`` was given.
        value: what the call returned, None if it raised.
        error: what it raised, else None.
    """

    tag: Any
    value: Any = None
    error: BaseException | None = None


class BlockingCalls:
    """Makes calls one after the other; each outcome goes into a queue that several of these may share.

    The thread starts with the first call. It is a daemon and refers to nothing but its queues, so a call that never
    returns keeps neither the program nor the owner of this object alive.

    Args:
        name: of the thread.
        outcomes: where :class:`Outcome` objects go.
    """

    def __init__(self, name: str, outcomes: queue.SimpleQueue[Any]) -> None:
        self._name, self._outcomes = name, outcomes
        self._jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._end = weakref.finalize(self, self._jobs.put, None)

    def begin(self, tag: Any, call: Callable[..., Any], *args: Any) -> None:
        """Asks for ``call(*args)``; returns at once."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=_work, args=(self._jobs, self._outcomes), name=self._name, daemon=True
            )
            self._thread.start()
        self._jobs.put((tag, call, args))

    def end(self) -> None:
        """The thread ends after the calls asked for."""
        self._end()

    def join(self, timeout_s: float) -> bool:
        """Whether the thread has ended by then."""
        if self._thread is None or self._thread.ident is None:
            return True
        self._thread.join(max(0.0, timeout_s))
        return not self._thread.is_alive()


def _work(jobs: queue.SimpleQueue[Any], outcomes: queue.SimpleQueue[Any]) -> None:
    while (job := jobs.get()) is not None:
        tag, call, args = job
        try:
            outcome = Outcome(tag, call(*args))
        except BaseException as e:
            outcome = Outcome(tag, None, e)
        outcomes.put(outcome)
        del job, tag, call, args, outcome  # hold on to nothing while waiting
