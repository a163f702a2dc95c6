"""One episode as the HTTP server sees it, and a request that waits for actions."""

from __future__ import annotations

from typing import Any, Protocol

from rlsample.env.serving.served_episode import ServedEpisode
from rlsample.serving.answers import AnswerBook

__all__ = ["Done", "OpenEpisode", "Waiter"]

_KEPT_ANSWERS = 16  # of one episode


class OpenEpisode:
    """What is known of an episode beside its rows.

    Attributes:
        served: the episode itself. ``t``: actions so far.
        asked: the last of them was asked for, not logged. ``busy``: a request waits for it.
        answers: the latest, by idempotency key.
        total: rewards that counted.
    """

    __slots__ = ("answers", "asked", "busy", "served", "t", "total")

    def __init__(self, served: ServedEpisode) -> None:
        self.served = served
        self.t = 0
        self.asked = self.busy = False
        self.total = 0.0
        self.answers = AnswerBook(_KEPT_ANSWERS)


class Done(Protocol):
    """What a waiter needs of a future."""

    def done(self) -> bool:
        """Whether one of the two below was called."""

    def set_result(self, result: Any) -> None:
        """All actions are there."""

    def set_exception(self, exception: Any) -> None:
        """There will be none."""


class Waiter:
    """A request that waits for K actions.

    Attributes:
        episodes: K that it asked for. ``actions``: theirs, as they come.
        done: gets None when all are there, or the error. To be awaited where it is a future.
        started: when it was posed.
    """

    __slots__ = ("actions", "done", "episodes", "error", "left", "started", "version")

    def __init__(self, episodes: list[OpenEpisode], done: Any, started: float) -> None:
        self.episodes, self.done, self.started = episodes, done, started
        self.actions: list[Any] = [None] * len(episodes)
        self.left = len(episodes)
        self.error: Exception | None = None
        self.version = 0
