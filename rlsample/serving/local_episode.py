"""An episode whose actions the client chooses: its rows until they are uploaded."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlsample.serving.client_episode import ClientEpisode
from rlsample.tree import Tree, concat

__all__ = ["LocalEpisode"]


class LocalEpisode(ClientEpisode):
    """Rows are complete when the next one begins, or the episode ends.

    Args:
        episode_id: the server's.
        recorded: rows shall be uploaded; False: none are kept.
        number: of the episode in its client.

    Attributes:
        t: actions the server has: the number, in the episode, of the first row that is here.
        num_rows: rows that are here, the last one of them perhaps without its whole reward.
        unanswered_body: of an upload that went without an answer: it has to come again, as it was.
    """

    __slots__ = ("_actions", "_logp", "_obs", "_rewards", "recorded", "unanswered_body")

    def __init__(self, episode_id: str, recorded: bool, number: int) -> None:
        super().__init__(episode_id, number)
        self.recorded = recorded
        self.unanswered_body: dict[str, Any] | None = None
        self._clear()

    def _clear(self) -> None:
        self._obs: list[Tree] = []
        self._actions: list[Tree] = []
        self._logp: list[float | None] = []
        self._rewards: list[float] = []

    @property
    def num_rows(self) -> int:
        return len(self._obs)

    def knows_logp(self) -> bool | None:
        """Whether the rows here have their log-probability; None: there are none."""
        return None if not self._logp else self._logp[-1] is not None

    def begin_row(self, obs: Tree, action: Tree, logp: float | None) -> None:
        """Takes an observation and an action, trees [1, ...] that nobody changes."""
        self._complete()
        if self.recorded:
            self._obs.append(obs)
            self._actions.append(action)
            self._logp.append(logp)
        self.acted = True

    def _complete(self) -> None:
        if len(self._rewards) < len(self._obs):
            self._rewards.append(self.reward)
            self.reward = 0.0

    def fragment(self) -> dict[str, Any]:
        """All rows that are here, as the body of an upload. They stay here until :meth:`uploaded`."""
        rewards = [*self._rewards, self.reward][: len(self._obs)]
        rows = {"obs": concat(self._obs), "actions": concat(self._actions), "rewards": np.array(rewards, np.float64)}
        if self.knows_logp():
            rows["action_logp"] = np.array(self._logp, np.float64)
        return {"episode_id": self.id, "t": self.t, "rows": rows}

    def uploaded(self) -> None:
        """The server has all rows that were here."""
        self.t += len(self._obs)
        self._clear()
        self.reward = 0.0
