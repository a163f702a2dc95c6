"""EnvPool's interface of an Atari env: send and recv."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from rlsample.env.atari_group import AtariGroup
from rlsample.env.atari_settings import AtariSettings
from rlsample.env.base_env import BaseEnv, StepBatch
from rlsample.env.pool.broken_off import whole
from rlsample.env.slot_states import ENDED, SlotStates
from rlsample.env.spaces import ActionCodec

__all__ = ["AtariSurface", "Received"]

Received = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]
"""obs uint8[K, ...], rewards float32[K], terminated bool[K], truncated bool[K], info."""


class AtariSurface(BaseEnv):
    """``async_reset, send, recv, step, reset``, as EnvPool's Atari envs have them.

    As there, the observation of a row that ends an episode is the true final one, and the next action for that slot is
    dropped: it resets the game (or goes on with it after a lost life, with ``episodic_life``), and the row that follows
    has the first observation and reward 0.

    ``info`` has columns: ``env_id`` int32[K], ``elapsed_step`` int32[K] (of the game, 0 at its first observation),
    ``is_first`` bool[K], ``lives`` int32[K], ``reward`` float32[K] (the game's own, where rewards are clipped),
    ``terminated`` bool[K] (the game is over, not just a life lost); and ``infos`` (row -> dict) as poll has them.
    """

    settings: AtariSettings
    batch_size: int
    _least: int
    _states: SlotStates
    _lock: threading.RLock
    _codec: ActionCodec
    _lives: np.ndarray
    _lengths: np.ndarray

    @whole
    def async_reset(self) -> None:
        """Starts a new game in every slot; :meth:`recv` brings the first observations.

        Raises:
            EnvProtocolError: a slot is busy.
        """
        with self._lock:
            if not self._open(polled=False):
                self._begin_resets(self._states.require_resettable(self.all_ids))

    @whole
    def send(self, actions: np.ndarray, env_ids: np.ndarray | None = None) -> None:
        """Sends actions int[K] to these slots (None: all, in order); slots that have ended are reset instead.

        Raises:
            EnvProtocolError, SpaceError: as in :meth:`send_actions`; nothing was sent.
        """
        with self._lock:
            for group in self._groups:
                if env_ids is group.ids32 and group.all_wait(self._states.code):  # as recv gave it
                    self._launch_whole(group, actions)
                    return
            ids = self._slots(env_ids)
            ended = self._ended_among(ids)
            if ended is None:
                self.send_actions(ids, actions)
                return
            self._states.require_resettable(ids)
            actions = self._codec.checked_copy(actions, ids)
            self.send_actions(ids[~ended], actions[~ended])
            self._begin_resets(ids[ended])

    def _slots(self, env_ids: np.ndarray | None) -> np.ndarray:
        for group in self._groups:
            if env_ids is group.ids32:  # as recv gave it
                return group.ids
        return self.all_ids if env_ids is None else np.asarray(env_ids).astype(np.int64, copy=False)

    def _ended_among(self, ids: np.ndarray) -> np.ndarray | None:
        """bool[K]; None if no slot of these has ended, or one is none at all."""
        if ids is self.all_ids or (ids.ndim == 1 and len(ids) and ids.min() >= 0 and ids.max() < self.num_envs):
            codes = self._states.code[ids]
            if ENDED in codes.tobytes():
                return codes == ENDED
        return None

    @whole
    def recv(
        self, min_envs: int | None = None, max_envs: int | None = None, timeout_s: float | None = None
    ) -> Received:
        """The rows that are next: at least ``min_envs`` and at most ``max_envs``; None: ``batch_size``, or one group.

        Fewer than ``min_envs`` if no more can come, or when ``timeout_s`` ran out (possibly none). With a
        ``batch_size`` no more can come until each row of the batch before was answered, but for ``recv_ahead``.

        Raises:
            EnvProtocolError: nothing that could be stepped was sent, or rows of the batch before wait for actions.
            EnvFailedError: ale-py raised. Rows of other groups come with the next call.
        """
        with self._lock:
            self._open(polled=False)
        least = self._least if min_envs is None else min_envs
        most = max(least, self.batch_size) if max_envs is None else max_envs
        batch = self._receive(min(least, most), most, timeout_s)
        if batch.failures:
            self._keep(batch._replace(failures={}))
            raise next(iter(batch.failures.values()))
        return self._received(batch)

    @whole
    def step(self, actions: np.ndarray, env_ids: np.ndarray | None = None) -> Received:
        """:meth:`send`, then :meth:`recv`."""
        self.send(actions, env_ids)
        return self.recv()

    @whole
    def reset(self) -> tuple[np.ndarray, dict[str, Any]]:
        """:meth:`async_reset`, then :meth:`recv`: first observations of ``batch_size`` slots."""
        self.async_reset()
        obs, *_, info = self.recv()
        return obs, info

    def _received(self, batch: StepBatch) -> Received:
        ids, terminated = batch.env_ids, batch.terminated
        at: Any = ids
        ids32 = None
        for group in self._groups:
            if ids is group.ids:
                at, ids32 = group.at, group.ids32
        game_over = terminated
        if self.settings.episodic_life and batch.infos:
            game_over = np.zeros(len(ids), bool)
            game_over[[row for row, info in batch.infos.items() if info.get("game_over")]] = True
            game_over &= terminated
        info = {
            "env_id": ids.astype(np.int32) if ids32 is None else ids32,
            "elapsed_step": self._lengths[at].copy(),
            "is_first": batch.is_first,
            "lives": self._lives[at].copy(),
            "reward": batch.rewards,
            "terminated": game_over,
            "infos": batch.infos,
        }
        rewards = np.sign(batch.rewards) if self.settings.reward_clip else batch.rewards
        return batch.obs, rewards, terminated, batch.truncated, info

    # ------------------------------------------------------------------ what the env provides

    @property
    def _groups(self) -> list[AtariGroup]:
        raise NotImplementedError

    def _open(self, polled: bool) -> bool:
        """Starts the games for one interface; whether that was now."""
        raise NotImplementedError

    def _launch_whole(self, group: AtariGroup, actions: Any) -> None:
        raise NotImplementedError

    def _begin_resets(self, ids: np.ndarray) -> list[AtariGroup]:
        raise NotImplementedError

    def _receive(self, least: int, most: int | None, timeout_s: float | None) -> StepBatch:
        raise NotImplementedError

    def _keep(self, batch: StepBatch) -> None:
        """Gives these rows out first at the next call."""
        raise NotImplementedError
