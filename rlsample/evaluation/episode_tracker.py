"""Per-slot bookkeeping of the running episodes: id, length, raw return. Nothing is kept of a finished one but its record."""

from __future__ import annotations

import collections
from typing import Any

import numpy as np

from rlsample.evaluation.callbacks import Callbacks, Episode
from rlsample.evaluation.metrics import EpisodeMetrics

__all__ = ["EpisodeTracker"]

_WORKER_SHIFT = 40  # ids: worker index in the upper bits, a counter below
_MAX_UNREAD = 10_000  # finished episodes kept for a caller that never asks; the oldest go first


class EpisodeTracker:
    """Counts steps and rewards of each slot's episode.

    Attributes:
        eps_id: int64[B], unique over workers and time; -1 before the slot's first episode.
        length: int64[B], steps so far.
        returns: float64[B], sum of unclipped rewards so far.
    """

    def __init__(self, slot_ids: np.ndarray, worker_index: int, callbacks: Callbacks | None = None) -> None:
        self._slot_ids = slot_ids
        self._worker_index = worker_index
        self._next_id = worker_index << _WORKER_SHIFT
        self.eps_id = np.full(len(slot_ids), -1)
        self.length = np.zeros(len(slot_ids), np.int64)
        self.returns = np.zeros(len(slot_ids), np.float64)
        self._finished: collections.deque[EpisodeMetrics] = collections.deque(maxlen=_MAX_UNREAD)
        self._callbacks = callbacks
        self.per_step = callbacks is not None and callbacks.uses("on_episode_step")
        self._objects = callbacks is not None and any(
            callbacks.uses(name) for name in ("on_episode_start", "on_episode_step", "on_episode_end")
        )
        self._episodes: dict[int, Episode] = {}

    def start(self, slots: np.ndarray) -> np.ndarray:
        """New episodes in these slots; returns their ids, int64[K]."""
        ids = np.arange(self._next_id, self._next_id + len(slots))
        self._next_id += len(slots)
        self.eps_id[slots] = ids
        self.length[slots] = 0
        self.returns[slots] = 0.0
        if self._objects:
            for slot, eps_id in zip(slots.tolist(), ids.tolist(), strict=True):
                self._episodes[slot] = episode = Episode(env_id=slot, eps_id=eps_id)
                self._callbacks.on_episode_start(episode)  # type: ignore[union-attr]
        return ids

    def add(self, slots: np.ndarray, rewards: np.ndarray) -> None:
        """One more step, with float32[K] raw rewards, in distinct slots."""
        if slots is self._slot_ids:
            self.length += 1
            self.returns += rewards
        else:
            self.length[slots] += 1
            self.returns[slots] += rewards

    def step_callbacks(self, slots: np.ndarray, obs: list[Any], actions: list[Any], infos: list[Any]) -> None:
        """Calls ``on_episode_step`` for these slots; only when :attr:`per_step`. Lists of K values."""
        for k, slot in enumerate(slots.tolist()):
            episode = self._episodes[slot]
            episode.last_reward = float(self.returns[slot]) - episode.episode_return
            episode.length, episode.episode_return = int(self.length[slot]), float(self.returns[slot])
            episode.last_obs, episode.last_action, episode.last_info = obs[k], actions[k], infos[k]
            self._callbacks.on_episode_step(episode)  # type: ignore[union-attr]

    def abandon(self, slot: int) -> None:
        """The slot's episode broke off: it is not recorded."""
        self.length[slot] = 0
        self.returns[slot] = 0.0
        self._episodes.pop(slot, None)

    def finish(self, slots: np.ndarray) -> None:
        """Records these slots' episodes as finished."""
        for slot in slots.tolist():
            custom: dict[str, float] = {}
            if self._objects:
                episode = self._episodes.pop(slot)
                episode.length, episode.episode_return = int(self.length[slot]), float(self.returns[slot])
                self._callbacks.on_episode_end(episode)  # type: ignore[union-attr]
                custom = dict(episode.custom_metrics)
            self._finished.append(
                EpisodeMetrics(
                    episode_return=float(self.returns[slot]),
                    length=int(self.length[slot]),
                    env_id=slot,
                    eps_id=int(self.eps_id[slot]),
                    worker_index=self._worker_index,
                    custom=custom,
                )
            )
        self.length[slots] = 0
        self.returns[slots] = 0.0

    def drain(self) -> list[EpisodeMetrics]:
        """Episodes finished since the last call, each given out once."""
        out = []
        while self._finished:
            out.append(self._finished.popleft())
        return out

    def get_state(self) -> dict[str, Any]:
        """Copies of the running counts and the id counter."""
        return {
            "eps_id": self.eps_id.copy(),
            "length": self.length.copy(),
            "returns": self.returns.copy(),
            "next_id": self._next_id,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues from :meth:`get_state`."""
        self.eps_id[:], self.length[:], self.returns[:] = state["eps_id"], state["length"], state["returns"]
        self._next_id = int(state["next_id"])
        if self._objects:
            self._episodes = {
                s: Episode(env_id=s, eps_id=int(self.eps_id[s])) for s in np.flatnonzero(self.eps_id >= 0).tolist()
            }
