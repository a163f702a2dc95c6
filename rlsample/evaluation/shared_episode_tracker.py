"""Bookkeeping of episodes that several agents play in, each in a slot of its own."""

from __future__ import annotations

import math

import numpy as np

from rlsample.env.serving import ServingEnvAdapter
from rlsample.env.serving.shared_episode import AgentPart
from rlsample.evaluation.callbacks import Callbacks, Episode
from rlsample.evaluation.episode_tracker import EpisodeTracker
from rlsample.evaluation.metrics import EpisodeMetrics

__all__ = ["SharedEpisodeTracker"]


class SharedEpisodeTracker(EpisodeTracker):
    """Counts each agent's part as an episode, under the id they share. Metrics tell of the whole."""

    def __init__(self, env: ServingEnvAdapter, worker_index: int, callbacks: Callbacks | None = None) -> None:
        super().__init__(env.all_ids, worker_index, callbacks)
        self._env = env

    def drain(self) -> list[EpisodeMetrics]:
        """Episodes that all agents have finished since the last call, each given out once."""
        out = []
        for shared in self._env.shared_finished():
            assert shared.eps_id is not None
            custom: dict[str, list[float]] = {}
            for _, _, metrics in shared.results.values():
                for name, value in metrics.items():
                    custom.setdefault(name, []).append(value)
            returns = {str(agent): result[0] for agent, result in shared.results.items()}
            means = {name: math.fsum(values) / len(values) for name, values in custom.items()}
            total = math.fsum(returns.values())
            out.append(
                EpisodeMetrics(total, shared.steps, shared.lane, shared.eps_id, self._worker_index, means, returns)
            )
        return out

    def _part(self, slot: int) -> AgentPart:
        part = self._env.episode_in(slot)
        assert isinstance(part, AgentPart)
        return part

    def _ids_for(self, slots: np.ndarray) -> np.ndarray:
        ids = np.empty(len(slots), np.int64)
        for k, slot in enumerate(slots.tolist()):
            shared = self._part(slot).shared
            if shared.eps_id is None:
                shared.eps_id, self._next_id = self._next_id, self._next_id + 1
            ids[k] = shared.eps_id
        return ids

    def _episode(self, slot: int, eps_id: int) -> Episode:
        part = self._part(slot)
        return Episode(env_id=part.shared.lane, eps_id=eps_id, agent=part.agent)

    def _record(
        self, slots: np.ndarray, returns: np.ndarray, lengths: np.ndarray, custom: list[dict[str, float]] | None
    ) -> None:
        for k, slot in enumerate(slots.tolist()):
            part = self._part(slot)
            part.shared.results[part.agent] = (float(returns[k]), int(lengths[k]), custom[k] if custom else {})
