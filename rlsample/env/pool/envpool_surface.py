"""EnvPool's interface over a polled env: send and recv, with the reset in place of the step after an end."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlsample.env.base_env import BaseEnv, StepBatch
from rlsample.env.pool.broken_off import whole
from rlsample.env.slot_states import ENDED, NEW
from rlsample.errors import SpaceError
from rlsample.tree import Tree, map_tree

__all__ = ["EnvPoolSurface", "Received"]

Received = tuple[Tree, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]
"""obs [K, ...], rewards float32[K], terminated bool[K], truncated bool[K], info."""


class EnvPoolSurface(BaseEnv):
    """``async_reset, send, recv, step, reset``, as EnvPool has them.

    As there, the observation of a row that ends an episode is the true final one, and the next action for that slot is
    dropped: it resets the env, and the row that follows has the first observation, reward 0 and no flag.

    ``info`` has ``env_id`` int32[K], ``elapsed_step`` int32[K] (0 at a first observation), ``is_first`` bool[K],
    a float64[K] for each of ``info_keys`` (NaN where an env gave none), and ``infos`` (row -> dict) for the others.
    A slot that failed is restarted: it is in ``info["failures"]`` (slot -> exception), and its next row is a first one.
    """

    _states: Any
    _requests: Any
    _lock: Any
    batch_size: int
    ordered: bool

    def begun(self) -> np.ndarray:
        """bool[num_envs]: whether a slot has been started since the pool was new, or had to begin anew after Ctrl-C."""
        self.begin_anew_if_broken_off()  # type: ignore[attr-defined]
        started: np.ndarray = self._states.code != NEW
        return started

    @whole
    def async_reset(self) -> None:
        """Asks every slot for a new episode; :meth:`recv` brings the first observations."""
        with self._lock:
            self._require_open()  # type: ignore[attr-defined]
            if (self._states.code == NEW).all():
                self._start_or_refuse()  # type: ignore[attr-defined]
            else:
                self._requests.begin_resets(self._states.require_resettable(self.all_ids))

    @whole
    def send(self, actions: Tree, env_ids: np.ndarray | None = None) -> None:
        """Sends actions [K, ...] to these slots (None: all, in order); for slots that have ended, asks for a reset.

        Raises:
            EnvProtocolError, SpaceError: as in :meth:`send_actions`; nothing was sent.
        """
        ids = self.all_ids if env_ids is None else np.asarray(env_ids)
        with self._lock:
            self._require_open()  # type: ignore[attr-defined]
            known = (
                ids.ndim == 1 and ids.dtype.kind in "iu" and len(ids) and 0 <= ids.min() <= ids.max() < self.num_envs
            )
            ended = self._states.code[ids] == ENDED if known else np.zeros(0, bool)
            if not ended.any():
                return self.send_actions(ids, actions)
            if len(np.unique(ids)) < len(ids):
                self._states.require_waiting(ids)  # names the doubled slot
            self.send_actions(ids[~ended], map_tree(lambda leaf: _those(leaf, ~ended), actions))
            self._requests.begin_resets(ids[ended].astype(np.int64, copy=False))
        return None

    @whole
    def recv(
        self, min_envs: int | None = None, max_envs: int | None = None, timeout_s: float | None = None
    ) -> Received:
        """The rows that came first: at least ``min_envs`` and at most ``max_envs``; None: ``batch_size`` for both.

        Fewer than ``min_envs`` if fewer are owed, or when ``timeout_s`` ran out (possibly none). Ordered: all that are
        owed.

        Raises:
            EnvProtocolError: nothing was sent.
            EnvFailedError: a slot failed and has no restart left. It stays failed; the rows of the others are the next
                recv's. Where several did, those without the least number are in the message.
        """
        least = self.batch_size if min_envs is None else min_envs
        most = max(least, self.batch_size) if max_envs is None else max_envs
        limit = None if self.ordered else most
        batch: StepBatch = self._receive(least, limit, timeout_s, raises_final=True)  # type: ignore[attr-defined]
        if batch.failures:
            with self._lock:
                self._require_open()  # type: ignore[attr-defined]
                batch = batch._replace(failures=self._requests.restart_or_put_back(batch.failures))
                if not len(batch.env_ids) and not batch.failures:
                    self._requests.raise_final_failures()
        return self._received(batch)

    @whole
    def step(self, actions: Tree, env_ids: np.ndarray | None = None) -> Received:
        """:meth:`send`, then :meth:`recv`."""
        self.send(actions, env_ids)
        return self.recv()

    @whole
    def reset(self) -> tuple[Tree, dict[str, Any]]:
        """:meth:`async_reset`, then :meth:`recv`: first observations of ``batch_size`` slots."""
        self.async_reset()
        obs, *_, info = self.recv()
        return obs, info

    def _received(self, batch: StepBatch) -> Received:
        ids = batch.env_ids
        steps = self._team.block.steps[ids]  # type: ignore[attr-defined]
        info: dict[str, Any] = {"env_id": ids.astype(np.int32), "elapsed_step": steps, "is_first": batch.is_first}
        names = self.pool.info_keys  # type: ignore[attr-defined]
        if names:
            for name in names:
                info[name] = np.full(len(ids), np.nan)
            for row, numbers in batch.infos.items():
                for name, value in numbers.items():
                    info[name][row] = value
        elif batch.infos:
            info["infos"] = batch.infos
        if batch.failures:
            info["failures"] = batch.failures
        return batch.obs, batch.rewards, batch.terminated, batch.truncated, info


def _those(leaf: Any, keep: np.ndarray) -> Any:
    """The rows to keep of a column of actions, an array or a list."""
    if not hasattr(leaf, "__len__") or len(leaf) != len(keep):
        got = f"{len(leaf)} actions" if hasattr(leaf, "__len__") else type(leaf).__name__
        raise SpaceError(f"actions: expected one for each of {len(keep)} slots, got {got}")
    return (
        leaf[keep] if isinstance(leaf, np.ndarray) else [value for value, kept in zip(leaf, keep, strict=True) if kept]
    )
