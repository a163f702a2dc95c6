"""How many clients get their answers at a time, where more would only stand in each other's way."""

from __future__ import annotations

import asyncio
import collections
import time
from collections.abc import Callable
from typing import Any

from rlsample.serving.open_episode import OpenEpisode, Waiter

__all__ = ["AnswerPacer"]

_AT_ONCE, _REFILL = 8, 2
_RETURN_S = 0.005  # longest time for which an answer counts as out
_TICK_S = 0.0001
_SKIPPED, _TIMED = 128, 256  # answers of a measurement
_ROUNDS, _AS_LONG = 2, 1.25
_MOST_OVERDUE = 0.75  # share of answers
_PACED_S, _FIRST_REST_S, _LONGEST_REST_S = 64.0, 1.0, 64.0
_WATCHING, _COMPARING, _TRYING, _PACING, _RESTING = range(5)


class AnswerPacer:
    """Hands out answers at once, or a few at a time; used by the server's loop only.

    The threads of one Python process share its lock. Answered all at once they wake in vain again and again, lose their
    place in the queue for the lock, and a request costs them nearly twice the work. So at most 8 answers are *out*:
    handed to clients that have not come back and had less than 5 ms to do so. The next ones go when 2 are left.

    Clients that share nothing would only lose by that. So it is tried when more than 8 want to be answered at a time:
    384 answers go out at once, then 384 so paced, and both once more. Unless pacing takes a quarter longer, it goes on
    for 64 s. Else, or when three of four clients need more than 5 ms, answers go at once, for a second; after each more
    trial in vain for twice as long, up to 64 s.

    Args:
        give: gives a waiter its answer.
        resume: called when held answers have all been handed out.
        clock: seconds.

    Attributes:
        held: waiters whose answers wait to go out.
        out: episodes whose answers are out, the oldest first -> when they went.
        loop: for timers; set before the first answer.
    """

    def __init__(
        self,
        give: Callable[[Waiter], None],
        resume: Callable[[], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._give_one, self._resume, self._clock = give, resume, clock
        self.held: collections.deque[Waiter] = collections.deque()
        self.out: dict[OpenEpisode, float] = {}
        self.loop: Any = None
        self._handle: asyncio.Handle | None = None
        self._soon = self._full = False
        self._mode, self._until, self._rest_s = _WATCHING, 0.0, _FIRST_REST_S
        self._given, self._timed_from = 0, 0.0  # of the measurement
        self._seconds = {_COMPARING: 0.0, _TRYING: 0.0}
        self._rounds = 0
        self._back = self._overdue = 0  # of the latest answers that were paced

    def take(self, waiter: Waiter) -> None:
        """Gives a waiter its answer, or holds it. Call :meth:`hand_out` after all that came together."""
        if self._mode == _RESTING and self._clock() >= self._until:
            self._mode = _WATCHING
        if self._mode in (_RESTING, _COMPARING):
            self._give(waiter)
        else:
            self.held.append(waiter)

    def back(self, episode: OpenEpisode) -> None:
        """A call on the episode came."""
        if self.out.pop(episode, None) is not None:
            self._count(0)
        if self.held and not self._soon and len(self.out) <= _REFILL:
            self._run(self.loop.call_soon(self.hand_out))
            self._soon = True

    def hand_out(self) -> None:
        """Gives as many waiters their answers as may have them now, and comes back for the others by itself."""
        self._cancel()
        now = self._clock()
        held, out = self.held, self.out
        for episode in [episode for episode, sent in out.items() if now - sent >= _RETURN_S]:
            if out.pop(episode, None) is not None:
                self._count(1)
        if not held:
            return
        if self._mode == _PACING and now >= self._until:
            self._mode = _WATCHING
        if self._mode == _WATCHING and len(held) + len(out) > _AT_ONCE:
            self._rounds, self._seconds = 0, dict.fromkeys(self._seconds, 0.0)
            self._begin(_COMPARING)
        if len(out) <= _REFILL:
            self._full = False
        try:
            self._give_some(now)
        finally:
            if held:
                oldest = next(iter(out.values()), now)
                self._run(self.loop.call_later(max(_TICK_S, oldest + _RETURN_S - now), self.hand_out))
            else:
                self._resume()

    def _give_some(self, now: float) -> None:
        held, out = self.held, self.out
        while held and not self._full:
            if self._mode in (_RESTING, _COMPARING):
                self._give(held.popleft())
            elif len(out) < _AT_ONCE:
                waiter = held.popleft()
                out[waiter.episodes[0]] = now
                self._give(waiter)
            else:
                self._full = True

    def flush(self) -> None:
        """Gives all waiters their answers."""
        self._cancel()
        self.out.clear()
        while self.held:
            self._give_one(self.held.popleft())

    # ------------------------------------------------------------------ the trial

    def _begin(self, mode: int) -> None:
        self._mode, self._given, self._back, self._overdue = mode, 0, 0, 0
        self._full = False
        if mode in (_RESTING, _COMPARING):
            self.out.clear()

    def _give(self, waiter: Waiter) -> None:
        self._give_one(waiter)
        if self._mode not in (_COMPARING, _TRYING):
            return
        self._given += 1
        if self._given == _SKIPPED:
            self._timed_from = self._clock()
            self._back = self._overdue = 0
        elif self._given == _SKIPPED + _TIMED:
            self._seconds[self._mode] += self._clock() - self._timed_from
            if self._mode == _COMPARING:
                self._begin(_TRYING)
            elif self._rounds < _ROUNDS - 1:
                self._rounds += 1
                self._begin(_COMPARING)
            elif self._seconds[_TRYING] <= _AS_LONG * self._seconds[_COMPARING] and not self._mostly_overdue():
                self._mode, self._until = _PACING, self._clock() + _PACED_S
                self._rest_s = _FIRST_REST_S
            else:
                self._rest()

    def _rest(self) -> None:
        self._begin(_RESTING)
        self._until = self._clock() + self._rest_s
        self._rest_s = min(2 * self._rest_s, _LONGEST_REST_S)

    def _count(self, overdue: int) -> None:
        """A client came back, or was not back in time."""
        self._back += 1 - overdue
        self._overdue += overdue
        if self._mode == _PACING and self._back + self._overdue >= _TIMED:
            if self._mostly_overdue():
                self._rest()
            self._back = self._overdue = 0

    def _mostly_overdue(self) -> bool:
        return self._overdue > _MOST_OVERDUE * (self._back + self._overdue)

    # ------------------------------------------------------------------ timers

    def _run(self, handle: asyncio.Handle) -> None:
        self._cancel()
        self._handle = handle

    def _cancel(self) -> None:
        self._soon = False
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
