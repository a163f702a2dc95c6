"""The way from client threads to the sampling thread: a queue, and a bell that rings once per batch."""

from __future__ import annotations

import collections
import contextlib
import sys
import threading
from collections.abc import Callable

from rlsample.env.serving.served_episode import ServedEpisode

__all__ = ["Inbox"]

_NEVER = sys.maxsize


class Inbox:
    """Episodes that have a row to sample, in the order they came. One thread waits and takes, any thread puts.

    The waiting thread says how many entries shall wake it. So K clients cost one wake-up and not K. And where a single
    entry would wake it, the client that brings it may do the sampling thread's work itself: it had to wait for the
    result anyway, and two changes of threads cost as much as the work.

    Attributes:
        ready: the entries.
        take_turn: does one turn of sampling in the calling thread; False: the sampling thread has to go on. It must not
            raise. None: nobody else takes turns.
        called: the sampling thread was woken to go on, not for an entry.
    """

    __slots__ = ("_bell", "_parked", "_target", "called", "ready", "take_turn")

    def __init__(self) -> None:
        self.ready: collections.deque[ServedEpisode] = collections.deque()
        self.take_turn: Callable[[], bool] | None = None
        self.called = False
        self._target = _NEVER
        self._bell = threading.Lock()
        self._bell.acquire()
        self._parked = threading.Lock()  # free: the sampling thread is parked, its turn may be taken
        self._parked.acquire()

    def put(self, episode: ServedEpisode) -> None:
        """Adds an entry and wakes the waiting thread if it is the last one that was waited for."""
        self.ready.append(episode)
        if len(self.ready) >= self._target:
            self._target = _NEVER  # the others need not ring too
            self.ring()

    def put_and_work(self, episode: ServedEpisode) -> None:
        """As :meth:`put`, by a client that will wait for an answer: it may take the turn itself."""
        self.ready.append(episode)
        if len(self.ready) >= self._target:
            self._target = _NEVER
            if self.take_turn is not None and self._parked.acquire(False):
                try:
                    self._work(self.take_turn)
                finally:
                    self._parked.release()
            else:
                self.ring()

    def _work(self, take_turn: Callable[[], bool]) -> None:
        if take_turn():
            self._target = 1
            if not self.ready:
                return
            self._target = _NEVER  # an entry came meanwhile, and saw no target
        else:
            self.called = True
        self.ring()

    def ring(self) -> None:
        """Wakes the thread that waits, or the next one that will."""
        with contextlib.suppress(RuntimeError):  # it rings already
            self._bell.release()

    def wait(self, entries: int, timeout_s: float) -> None:
        """Returns when there are so many entries, when rung, or after the time; may also return early."""
        self._target = entries
        if len(self.ready) < entries:  # after the target was set: whoever puts now, rings
            self._bell.acquire(True, timeout_s)
        self._target = _NEVER

    def park(self, timeout_s: float) -> None:
        """Waits for one entry as :meth:`wait`, while clients may take turns."""
        self._target = 1
        if not self.ready:
            self._parked.release()
            try:
                self._bell.acquire(True, timeout_s)
            finally:
                self._parked.acquire()  # after the turn that a client may be in
        self._target = _NEVER
