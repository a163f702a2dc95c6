"""The way from client threads to the sampling thread: a queue, and a bell that rings once per batch."""

from __future__ import annotations

import collections
import contextlib
import sys
import threading
from collections.abc import Callable, Sequence

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
    """

    __slots__ = ("_bell", "_called", "_error", "_may_go_on", "_parked", "_take_turn", "_target", "ready")

    def __init__(self) -> None:
        self.ready: collections.deque[ServedEpisode] = collections.deque()
        self._target = _NEVER
        self._bell = threading.Lock()
        self._bell.acquire()
        self._parked = threading.Lock()  # free: the sampling thread is parked, its turn may be taken
        self._parked.acquire()
        self._take_turn: Callable[[], None] | None = None
        self._may_go_on: Callable[[], bool] = bool
        self._called = False
        self._error: BaseException | None = None

    def lend_turns(self, take_turn: Callable[[], None] | None, may_go_on: Callable[[], bool] = bool) -> None:
        """Lets clients work while the sampling thread is parked.

        Args:
            take_turn: does one turn of sampling in the calling thread. None: nobody else does.
            may_go_on: whether after it the sampling thread may stay parked.
        """
        self._take_turn, self._may_go_on = take_turn, may_go_on

    def put(self, episode: ServedEpisode) -> None:
        """Adds an entry and wakes the waiting thread if it is the last one that was waited for."""
        self.ready.append(episode)
        if len(self.ready) >= self._target:
            self._target = _NEVER  # the others need not ring too
            self.ring()

    def put_all(self, episodes: Sequence[ServedEpisode]) -> None:
        """As :meth:`put`, several entries in one: whoever takes all that is there takes all of them or none."""
        self.ready.extend(episodes)
        if len(self.ready) >= self._target:
            self._target = _NEVER
            self.ring()

    def put_and_work(self, episode: ServedEpisode) -> None:
        """As :meth:`put`, by a client that will wait for an answer: it may take the turn itself."""
        self.ready.append(episode)
        if len(self.ready) >= self._target:
            self._target = _NEVER
            if self._take_turn is not None and self._parked.acquire(False):
                try:
                    self._work(self._take_turn)
                finally:
                    self._parked.release()
            else:
                self.ring()

    def work_now(self) -> bool:
        """Takes a turn for all entries that were added to ``ready`` without a call, if the sampling thread is parked.

        Returns:
            False: that thread is awake. It takes them with its next look, or parks just now: come again soon. To ring
            here would keep it awake for ever, and two threads busy with the work of one.
        """
        if not self.ready:
            return True
        waits = self._target != _NEVER  # else a turn before this one has called it, and it is still to wake
        if not waits or self._take_turn is None or not self._parked.acquire(False):
            return False
        self._target = _NEVER
        try:
            self._work(self._take_turn)
        finally:
            self._parked.release()
        return True

    def _work(self, take_turn: Callable[[], None]) -> None:
        done = False
        try:
            take_turn()
            done = self._may_go_on()
        except BaseException as e:
            self._error = e
            if not isinstance(e, Exception):  # Ctrl-C is for the client too
                raise
        finally:
            if done:
                self._target = 1
            if not done or self.ready:  # entries that came meanwhile saw no target
                self._target = _NEVER
                self._called = not done
                self.ring()

    def was_called(self) -> bool:
        """Whether a client's turn woke the sampling thread to go on itself. What that turn raised is raised here."""
        called, self._called = self._called, False
        error, self._error = self._error, None
        if error is not None:
            raise error
        return called

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
