"""An episode that several agents play in, and one agent's part of it."""

from __future__ import annotations

import threading
from collections.abc import Hashable
from typing import Any

from rlsample.env.serving.served_episode import ServedEpisode

__all__ = ["AgentPart", "SharedEpisode"]


class AgentPart(ServedEpisode):
    """One agent in a shared episode, from its first action to its end: rows in a lane of their own.

    ``mutex`` is the episode's, and is not held while a client waits for an answer: ``in_call`` says that one does.
    ``waiting`` says that it sleeps on this part's answer now.

    Attributes:
        shared: the episode.
        agent: as the user names it; ``index``: its place among the possible agents.
    """

    __slots__ = ("agent", "in_call", "index", "shared")

    def __init__(self, shared: SharedEpisode, agent: Hashable, index: int, lane: int) -> None:
        super().__init__(f"{shared.id}/{agent}", lane, shared.training_enabled)
        self.mutex = shared.mutex  # type: ignore[assignment]
        self.shared, self.agent, self.index = shared, agent, index
        self.in_call = False

    def hold(self, timeout_s: float) -> bool:
        return self.mutex.acquire(timeout=timeout_s)


class SharedEpisode:
    """State of one open episode of several agents.

    Who writes what: ``eps_id`` and ``results``: the polling thread. All else: whoever holds ``mutex``.

    Attributes:
        id, training_enabled: as started. ``lane``: its place, for as many lanes as there are possible agents.
        mutex: held while rows are sent and while the episode is closed; never while somebody waits.
        parts: index of the agent -> its part, also after the part's end.
        lanes_out: lanes that its parts hold. The place is free when the episode is closed and none is left.
        steps: calls that acted.
        closed, touched, idle_since: as for a :class:`ServedEpisode`.
        eps_id: the id its rows carry, from the first row on; ``results``: agent -> (return, length, custom metrics) of
            the parts that ended.
    """

    __slots__ = (
        "closed",
        "eps_id",
        "id",
        "idle_since",
        "lane",
        "lanes_out",
        "mutex",
        "parts",
        "results",
        "steps",
        "touched",
        "training_enabled",
    )

    def __init__(self, episode_id: str, lane: int, training_enabled: bool) -> None:
        self.id, self.lane, self.training_enabled = episode_id, lane, training_enabled
        self.mutex = threading.RLock()
        self.parts: dict[int, AgentPart] = {}
        self.lanes_out = self.steps = 0
        self.closed: str | None = None
        self.touched = True
        self.idle_since = 0.0
        self.eps_id: int | None = None
        self.results: dict[Hashable, tuple[float, int, dict[str, Any]]] = {}

    def playing(self) -> list[AgentPart]:
        """The parts that have not ended, in the order they joined."""
        return [part for part in list(self.parts.values()) if part.closed is None]

    @property
    def standing(self) -> bool:
        """Some agent has a question that stands."""
        return any(part.standing for part in self.playing())

    @property
    def sent(self) -> int:
        """Rows given to the sampler."""
        return sum(part.sent for part in list(self.parts.values()))

    @property
    def taken(self) -> int:
        """Rows it took."""
        return sum(part.taken for part in list(self.parts.values()))
