"""When a micro-batch goes: as soon as all have come that usually come in time, or after a while."""

from __future__ import annotations

from collections.abc import Iterable

from rlsample.env.serving.episode_desk import EpisodeDesk
from rlsample.env.serving.served_episode import ServedEpisode

__all__ = ["BatchGate"]

_MOST_HASTY = 63


class BatchGate:
    """Keeps account of the episodes that ask in time, for the sampling thread.

    An episode is *prompt* from its first question on, until a batch has waited for it in vain or its last row came.

    Args:
        max_batch: most entries of a batch.
        max_wait_s: longest wait for prompt episodes; 0: none.

    Attributes:
        num_prompt: how many there are.
        driven: somebody collects batches elsewhere (see :meth:`ServingEnvAdapter.be_driven`): none waits here.
    """

    def __init__(self, desk: EpisodeDesk, max_batch: int, max_wait_s: float) -> None:
        self._desk, self._max_batch, self._max_wait_s = desk, max_batch, max_wait_s
        self.num_prompt = 0
        self.driven = False
        self._late = False
        self._vain = self._num_hasty = 0

    def expected(self) -> int:
        """How many entries make the next batch: all prompt ones, or 1 while waiting for them has been in vain."""
        self._late = False
        if self.driven:
            return 1
        if self._num_hasty:
            self._num_hasty -= 1
            return 1
        return min(self._max_batch, self.num_prompt) if self._max_wait_s else 1

    def wait(self, expected: int) -> None:
        """Gives so many entries the time to come. Each time in vain doubles the batches that do without a wait.

        The time counts from when the last client was woken for its answer: before, it cannot have asked again.
        """
        inbox, answered = self._desk.inbox, self._desk.answered
        untold = len(answered) + 1
        while len(answered) < untold and not self._desk.registry.stopped:
            untold = len(answered)
            inbox.wait(expected, self._max_wait_s)
            if len(inbox.ready) >= expected:
                self._vain = 0
                return
        if inbox.ready:
            self._late = True
            self._vain = self._num_hasty = min(2 * self._vain + 1, _MOST_HASTY)
        if answered:
            self._desk.wake_all()  # those who should have been woken by others

    def wait_long(self, expected: int, timeout_s: float) -> None:
        """For a first entry after a silence; then for those that usually come with it."""
        inbox = self._desk.inbox
        if expected <= 1:
            inbox.park(timeout_s)
        else:
            inbox.wait(1, timeout_s)
            if inbox.ready:
                self.wait(expected)

    def came(self, episodes: Iterable[ServedEpisode]) -> None:
        """The episodes of a batch; those that it waited for in vain are prompt no longer."""
        if self._late:
            for episode in self._desk.by_lane:
                if episode is not None:
                    episode.prompt = False
            self.num_prompt = 0
        for episode in episodes:
            if not episode.prompt:
                episode.prompt = True
                self.num_prompt += 1

    def left(self, episode: ServedEpisode) -> None:
        """It asks no more, or brought its own action."""
        if episode.prompt:
            episode.prompt = False
            self.num_prompt -= 1
