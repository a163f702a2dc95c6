"""Turns of the policy: the questions that requests have posed, answered together, and the way of the answers back."""

from __future__ import annotations

import asyncio
import collections
import functools
import time
from collections.abc import Callable
from typing import Any

from rlsample.env.serving.episode_desk import EpisodeDesk
from rlsample.errors import ServingError
from rlsample.serving.answer_pacer import AnswerPacer
from rlsample.serving.open_episode import Waiter

__all__ = ["LONG_TURN_S", "ActionTurns"]

LONG_TURN_S = 0.005  # the loop takes no requests meanwhile
_SOON_S = 0.001
_MOST_LONG_TURNS = 4  # in a row, that count: after one there are 3 turns elsewhere, after all 255


class ActionTurns:
    """Poses questions at the desk of a served env and has them answered; used by the server's loop only.

    While answers of a turn are held (see :class:`AnswerPacer`), new questions gather for the next one.

    Args:
        desk: of the served env.
        version: the number of the policy's current weights.
        answer: called with a waiter that has all its answers.

    Attributes:
        pacer: holds answers that should not go out yet.
    """

    def __init__(self, desk: EpisodeDesk, version: Callable[[], int], answer: Callable[[Waiter], None]) -> None:
        self._desk, self._version, self._answer = desk, version, answer
        self.pacer = AnswerPacer(answer, self._begin_turn)
        self._loop: asyncio.AbstractEventLoop = None  # type: ignore[assignment]  # set by run_on()
        self._mail: collections.deque[tuple[Waiter, int, Any, int]] = collections.deque()
        self._mail_announced = False
        self._turn_comes = self._posed = False
        self._turns_elsewhere = self._long_turns = 0

    def run_on(self, loop: asyncio.AbstractEventLoop) -> None:
        """Says which loop this runs on, before the first question."""
        self._loop = self.pacer.loop = loop

    def pose(self, waiter: Waiter, rows: list[Any]) -> None:
        """Poses the questions of a waiter, with the observation of each of its episodes."""
        for index, (episode, obs) in enumerate(zip(waiter.episodes, rows, strict=True)):
            try:
                self._desk.ask_later(episode.served, obs, functools.partial(self._mail_in, waiter, index), False)
            except ServingError as e:  # closed between the checks and here
                self._mail_in(waiter, index, e)
                continue
            episode.busy = episode.asked = True
            episode.t += 1
        self._posed = True
        if not self.pacer.held:
            self._begin_turn()

    def _begin_turn(self) -> None:
        if self._posed and not self._turn_comes:
            self._turn_comes = True
            self._loop.call_soon(self._turn)  # after the other requests that have arrived by now

    def _turn(self) -> None:
        """Has everything answered that has been asked. A policy that takes long does it in the sampling thread."""
        self._turn_comes = self._posed = False
        if self._turns_elsewhere:
            self._turns_elsewhere -= 1
            self._desk.inbox.ring()
            return
        started = time.perf_counter()
        self._mail_announced = True  # answers that come now are delivered here
        try:
            done = self._desk.answer_now()
        finally:
            self._deliver()
        if not done:
            self._turn_comes = True
            self._loop.call_later(_SOON_S, self._turn)
        else:
            took_long = time.perf_counter() - started > LONG_TURN_S
            self._long_turns = min(self._long_turns + 1, _MOST_LONG_TURNS) if took_long else 0
            self._turns_elsewhere = 4**self._long_turns - 1

    def _mail_in(self, waiter: Waiter, index: int, answer: Any) -> None:
        """Takes an answer in the sampling thread; the loop is woken once for all that come together."""
        self._mail.append((waiter, index, answer, self._version()))
        if not self._mail_announced:
            self._mail_announced = True
            try:
                self._loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:  # the loop is closed: nobody waits any more
                self._mail.clear()

    def _deliver(self) -> None:
        self._mail_announced = False
        mail, take = self._mail, self.pacer.take
        while mail:
            waiter, index, answer, version = mail.popleft()
            waiter.version = version
            waiter.left -= 1
            if isinstance(answer, ServingError):
                waiter.error = answer
            else:
                waiter.actions[index] = answer
            if not waiter.left:
                if waiter.error is None:
                    take(waiter)
                else:
                    self._answer(waiter)
        self.pacer.hand_out()
