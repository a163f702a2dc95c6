"""Per-slot bookkeeping of the running episodes: id, length, raw return. Of a finished one only its record is kept."""

from __future__ import annotations

import collections
from collections.abc import Mapping
from typing import Any

import numpy as np

from rlsample.evaluation.callbacks import Callbacks, Episode
from rlsample.evaluation.metrics import NO_METRICS, EpisodeMetrics

__all__ = ["EpisodeTracker"]

_WORKER_SHIFT = 40  # ids: worker index in the upper bits, a counter below
_MAX_UNREAD = 10_000  # polls with ends, kept for a caller that never asks; the oldest go first
_BLOCK = 64


class EpisodeTracker:
    """Counts steps and rewards of each slot's episode.

    Steps that all slots take together cost one addition: a slot's length is a shared counter less its own start, and
    rewards are summed up in blocks.

    Attributes:
        eps_id: int64[B], unique over workers and time; -1 before the slot's first episode.
        per_step: whether :meth:`step_callbacks` has to be called.
    """

    def __init__(self, slot_ids: np.ndarray, worker_index: int, callbacks: Callbacks | None = None) -> None:
        self._slot_ids = slot_ids
        self._worker_index = worker_index
        self._next_id = worker_index << _WORKER_SHIFT
        self.eps_id = np.full(len(slot_ids), -1)
        self._rounds = 0
        self._started = np.zeros(len(slot_ids), np.int64)
        self._returns = np.zeros(len(slot_ids), np.float64)
        self._unsummed: list[np.ndarray] = []
        self._finished: collections.deque[tuple[Any, ...]] = collections.deque(maxlen=_MAX_UNREAD)
        self._callbacks = callbacks
        self.per_step = callbacks is not None and callbacks.uses("on_episode_step")
        self._objects = callbacks is not None and any(
            callbacks.uses(name) for name in ("on_episode_start", "on_episode_step", "on_episode_end")
        )
        self._episodes: dict[int, Episode] = {}

    def lengths(self, slots: np.ndarray) -> np.ndarray:
        """int64[K]: steps of these slots' episodes so far."""
        return self._rounds - self._started[slots]

    def returns(self, slots: np.ndarray) -> np.ndarray:
        """float64[K]: sums of these slots' unclipped rewards so far."""
        self._sum_up()
        return self._returns[slots]

    def start(self, slots: np.ndarray) -> np.ndarray:
        """New episodes in these slots; returns their ids, int64[K]."""
        ids = self._ids_for(slots)
        self.eps_id[slots] = ids
        self._clear(slots)
        if self._objects:
            for slot, eps_id in zip(slots.tolist(), ids.tolist(), strict=True):
                self._episodes[slot] = episode = self._episode(slot, eps_id)
                self._callbacks.on_episode_start(episode)  # type: ignore[union-attr]
        return ids

    def _ids_for(self, slots: np.ndarray) -> np.ndarray:
        first, self._next_id = self._next_id, self._next_id + len(slots)
        return np.arange(first, self._next_id)

    def _episode(self, slot: int, eps_id: int) -> Episode:
        return Episode(env_id=slot, eps_id=eps_id)

    def add(self, slots: np.ndarray, rewards: np.ndarray) -> None:
        """One more step, with float32[K] raw rewards (kept, not copied), in distinct slots."""
        if slots is self._slot_ids:
            self._rounds += 1
            self._unsummed.append(rewards)
            if len(self._unsummed) == _BLOCK:
                self._sum_up()
        elif len(slots) == 1:  # index arrays would take five times as long
            slot = slots.item()
            self._started[slot] -= 1
            self._returns[slot] += rewards.item()
        else:
            self._started[slots] -= 1
            self._returns[slots] += rewards

    def step_callbacks(self, slots: np.ndarray, obs: list[Any], actions: list[Any], infos: list[Any]) -> None:
        """Calls ``on_episode_step`` for these slots; only when :attr:`per_step`. Lists of K values."""
        lengths, returns = self.lengths(slots).tolist(), self.returns(slots).tolist()
        for k, slot in enumerate(slots.tolist()):
            episode = self._episodes[slot]
            episode.last_reward = returns[k] - episode.episode_return
            episode.length, episode.episode_return = lengths[k], returns[k]
            episode.last_obs, episode.last_action, episode.last_info = obs[k], actions[k], infos[k]
            self._callbacks.on_episode_step(episode)  # type: ignore[union-attr]

    def abandon(self, slot: int) -> None:
        """The slot's episode broke off: it is not recorded."""
        self._clear(np.array([slot]))
        self._episodes.pop(slot, None)

    def finish(self, slots: np.ndarray) -> None:
        """Records these slots' episodes as finished."""
        lengths, returns = self.lengths(slots), self.returns(slots)
        custom: list[dict[str, float]] | None = None
        if self._objects:
            custom = []
            for k, slot in enumerate(slots.tolist()):
                episode = self._episodes.pop(slot)
                episode.length, episode.episode_return = int(lengths[k]), float(returns[k])
                self._callbacks.on_episode_end(episode)  # type: ignore[union-attr]
                custom.append(dict(episode.custom_metrics))
        self._record(slots, returns, lengths, custom)

    def _record(
        self, slots: np.ndarray, returns: np.ndarray, lengths: np.ndarray, custom: list[dict[str, float]] | None
    ) -> None:
        self._finished.append((returns, lengths, slots, self.eps_id[slots], custom))

    def drain(self) -> list[EpisodeMetrics]:
        """Episodes finished since the last call, each given out once."""
        out = []
        while self._finished:
            returns, lengths, slots, eps_ids, custom = self._finished.popleft()
            columns = (returns.tolist(), lengths.tolist(), slots.tolist(), eps_ids.tolist())
            for k, row in enumerate(zip(*columns, strict=True)):
                out.append(EpisodeMetrics(*row, self._worker_index, custom[k] if custom else NO_METRICS))
        return out

    def get_state(self) -> dict[str, Any]:
        """Copies of the running counts and the id counter."""
        return {
            "eps_id": self.eps_id.copy(),
            "lengths": self.lengths(self._slot_ids),
            "returns": self.returns(self._slot_ids),
            "next_id": self._next_id,
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continues from :meth:`get_state`."""
        self._unsummed.clear()
        self.eps_id[:], self._returns[:] = state["eps_id"], state["returns"]
        self._started[:] = self._rounds - state["lengths"]
        self._next_id = int(state["next_id"])
        if self._objects:
            self._episodes = {
                slot: Episode(env_id=slot, eps_id=int(self.eps_id[slot]), episode_return=float(self._returns[slot]))
                for slot in np.flatnonzero(self.eps_id >= 0).tolist()
            }

    def _clear(self, slots: np.ndarray) -> None:
        self._sum_up()
        self._started[slots] = self._rounds
        self._returns[slots] = 0.0

    def _sum_up(self) -> None:
        if len(self._unsummed) > 8:
            self._returns += np.sum(self._unsummed, axis=0, dtype=np.float64)
        else:
            for rewards in self._unsummed:
                self._returns += rewards
        self._unsummed.clear()
