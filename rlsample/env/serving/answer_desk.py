"""The way back to the clients: who waits for an answer, and who wakes whom when there is one."""

from __future__ import annotations

import collections
from typing import Any

from rlsample.env.serving.episode_errors import refused
from rlsample.env.serving.served_episode import Refusal, ServedEpisode

__all__ = ["AnswerDesk"]

_WAKE_AT_ONCE = 3  # clients; measured best with 16 and with 64 of them on two cores


class AnswerDesk:
    """Hands answers to the clients that wait for them, from whichever thread has them.

    Attributes:
        asking: lane -> episode that waits for an answer. Whoever pops an entry owes the answer.
        answered: episodes whose answer is there and whose client sleeps. A client that runs wakes the next one: all at
            once would queue up for the interpreter's lock, at two sleeps each.
    """

    def __init__(self) -> None:
        self.asking: dict[int, ServedEpisode] = {}
        self.answered: collections.deque[ServedEpisode] = collections.deque()

    def hand_over(self, lanes: list[int], answers: list[Any]) -> None:
        """Gives each lane its answer, if a client waits for one."""
        owed = self.asking.pop
        for lane, answer in zip(lanes, answers, strict=True):
            episode = owed(lane, None)
            if episode is not None:
                episode.answer = answer
                if episode.on_answer is None:
                    self.answered.append(episode)
                else:
                    _call_back(episode)
        for _ in range(_WAKE_AT_ONCE):
            if self.answered:
                self.pass_on()

    def pass_on(self) -> None:
        """Wakes the next client that has its answer; it will wake the one after it when it runs itself."""
        try:
            while True:
                episode = self.answered.popleft()
                episode.answered.release()
                if episode.waiting:
                    return
        except IndexError:
            pass

    def wake_all(self) -> None:
        """Wakes everyone who has an answer, whoever should have done it."""
        while self.answered:
            self.pass_on()

    def refuse(self, lane: int, error: BaseException) -> bool:
        """Answers the client that waits in a lane with an error; whether there was one."""
        episode = self.asking.pop(lane, None)
        if episode is None:
            return False
        episode.answer = Refusal(error)
        if episode.on_answer is None:
            episode.answered.release()
        else:
            _call_back(episode)
        return True


def _call_back(episode: ServedEpisode) -> None:
    on_answer, episode.on_answer = episode.on_answer, None
    episode.standing = False
    answer = episode.answer
    assert on_answer is not None
    on_answer(refused(episode, answer) if answer.__class__ is Refusal else answer)
