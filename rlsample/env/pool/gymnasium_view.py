"""The pool as a ``gymnasium.vector.VectorEnv``, for code and wrappers that want one."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from rlsample.env.async_vector_env import AsyncVectorEnv
from rlsample.env.base_env import StepBatch
from rlsample.env.columns import has_fixed_size
from rlsample.env.convert import as_base_env
from rlsample.env.pool.broken_off import BeginsAnew, whole
from rlsample.env.spaces import empty_columns, object_column
from rlsample.errors import ConfigError, EnvClosedError, EnvProtocolError
from rlsample.tree import Tree, assign, gather, map_tree

__all__ = ["PoolVectorEnv"]

Steps = tuple[Tree, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]


class PoolVectorEnv(VectorEnv[Any, Any, Any], BeginsAnew):
    """A lock-step vector env on worker processes, as Gymnasium's own are, with each of its autoreset modes.

        envs = PoolVectorEnv("CartPole-v1", num_envs=8)
        envs = gymnasium.wrappers.vector.RecordEpisodeStatistics(envs)

    Rows, flags and infos are those of ``gymnasium.vector.SyncVectorEnv`` with the same seeds; rewards are float64 here
    too, rounded to float32 on their way. What has no fixed size comes and goes as a tuple. Actions outside the space
    are refused. Arrays returned never change later. After a call that Ctrl-C broke off all envs are to be reset.

    Args:
        env: what :func:`~rlsample.env.as_base_env` takes with ``backend="process"``, or an ordered
            :class:`~rlsample.env.async_vector_env.AsyncVectorEnv` that nobody else polls.
        num_envs: slots.
        autoreset_mode: ``NextStep``, ``SameStep`` or ``Disabled`` (an ``AutoresetMode`` or its value).
        pool: fields of :class:`~rlsample.env.pool.pool_settings.PoolSettings`.
        options: fields of :class:`~rlsample.env.EnvSettings`, and ``seed`` (used where ``reset`` gets none).

    Raises:
        ConfigError: a pool that is not ordered, or options that cannot work.
        EnvFailedError: in ``reset`` and ``step``: an env failed. There are no restarts in this form.
        EnvProtocolError: in ``step``: an env was never reset.
    """

    def __init__(
        self,
        env: Any,
        num_envs: int = 1,
        *,
        autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
        pool: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.autoreset_mode = AutoresetMode(autoreset_mode)
        if isinstance(env, AsyncVectorEnv):
            self.pool = env
        else:
            # in the other modes the user may look at an env, or reset it with options, between its end and its reset
            ahead = {"reset_ahead": self.autoreset_mode is AutoresetMode.SAME_STEP}
            made = as_base_env(env, num_envs, backend="process", pool={**ahead, **(pool or {})}, **options)
            assert isinstance(made, AsyncVectorEnv)
            self.pool = made
        if not self.pool.ordered or self.pool.pool.groups > 1:
            if self.pool is not env:
                self.pool.close()
            raise ConfigError("a gymnasium VectorEnv moves in lock-step: it needs ordered=True and groups=1")
        self.num_envs = self.pool.num_envs
        self.single_observation_space, self.single_action_space = self.pool.observation_space, self.pool.action_space
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self.metadata = {**self.call("metadata")[0], "autoreset_mode": self.autoreset_mode}
        self.render_mode = self.call("render_mode")[0]
        self._ended = np.zeros(self.num_envs, bool)
        self._started = False
        self._last_obs: Tree = None

    # ------------------------------------------------------------------ reset and step

    def _begin_anew(self) -> None:
        with contextlib.suppress(EnvProtocolError):  # nothing is owed
            self.pool.poll()
        self._ended[:] = self._started = self._broke_off = False

    @whole
    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Tree, dict[str, Any]]:
        """Starts new episodes in every env, or in those of ``options["reset_mask"]`` (bool[num_envs])."""
        seeds = self._seeds(seed)
        mask = np.ones(self.num_envs, bool)
        if options is not None and "reset_mask" in options:
            options = dict(options)
            mask = self._mask(options.pop("reset_mask"))
            options = options or None
        self._ended &= self.pool.begun()  # none is, where the pool had to begin anew after Ctrl-C
        rows = self._blank()
        if self._started:
            assign(rows[0], slice(None), self._last_obs)
        plain = mask & self._ended & np.array([s is None for s in seeds]) & (options is None)
        if plain.any():  # it was reset ahead, and is not reset twice
            first = self.pool.try_reset(np.flatnonzero(plain))
            assert first is not None
            self._fill(rows, first)
        rest = np.flatnonzero(mask & ~plain)
        if len(rest):
            self._fill(rows, self.pool.reset_with(rest, [seeds[slot] for slot in rest.tolist()], options))
        self._ended[mask] = False
        self._started = True
        self._last_obs = rows[0]
        return map_tree(_shown, rows[0]), rows[4]

    @whole
    def step(self, actions: Any) -> Steps:
        """Steps every env; one that ended is reset as the autoreset mode says."""
        if not self._started:
            raise EnvClosedError("reset the envs before the first step")
        rows = self._blank()
        columns = _columns(self.single_action_space, actions)
        mode = self.autoreset_mode
        if mode is AutoresetMode.DISABLED and self._ended.any():
            raise ValueError(f"envs {np.flatnonzero(self._ended).tolist()} have ended: reset them with a reset_mask")
        if self._ended.any():
            live = ~self._ended
            self.pool.send_actions(np.flatnonzero(live), gather(columns, live))
            self.pool.begin_resets(np.flatnonzero(self._ended))
        else:
            self.pool.send_actions(self.pool.all_ids, columns)
        self._fill(rows, self.pool.poll())
        self._ended = rows[2] | rows[3]
        if mode is AutoresetMode.SAME_STEP and self._ended.any():
            rows = self._reset_in_same_step(rows)
        self._last_obs = rows[0]
        return map_tree(_shown, rows[0]), *rows[1:]

    def _reset_in_same_step(self, rows: Steps) -> Steps:
        """Moves final observations and infos of ended envs to ``final_obs`` and ``final_info``, and resets them."""
        infos: dict[str, Any] = {}
        slots = np.flatnonzero(self._ended)
        first = self.pool.try_reset(slots)
        assert first is not None
        self._raise(first)
        finals = gather(rows[0], slots)
        by_slot = {int(slot): row for row, slot in enumerate(first.env_ids.tolist())}
        for slot in range(self.num_envs):
            info = self._sparse.get(slot, {})
            if slot in by_slot:
                row = by_slot[slot]
                final = {"final_obs": map_tree(lambda x, r=row: x[r], finals), "final_info": info}
                infos = self._add_info(infos, final, slot)
                info = first.infos.get(row, {})
            infos = self._add_info(infos, info, slot)
        assign(rows[0], slots, first.obs)
        self._ended = np.zeros(self.num_envs, bool)
        return (*rows[:4], infos)

    # ------------------------------------------------------------------ rows

    def _blank(self) -> Steps:
        self._sparse: dict[int, dict[str, Any]] = {}
        count = self.num_envs
        obs = empty_columns(self.single_observation_space, (count,))
        return obs, np.zeros(count), np.zeros(count, bool), np.zeros(count, bool), {}

    def _fill(self, rows: Steps, batch: StepBatch) -> None:
        """Writes a batch's rows to the places of its slots."""
        self._raise(batch)
        obs, rewards, terminated, truncated, infos = rows
        ids = batch.env_ids
        assign(obs, ids, batch.obs)
        rewards[ids], terminated[ids], truncated[ids] = batch.rewards, batch.terminated, batch.truncated
        for row, info in batch.infos.items():
            slot = int(ids[row])
            self._sparse[slot] = info
            infos.update(self._add_info(infos, info, slot))

    def _raise(self, batch: StepBatch) -> None:
        if batch.failures:
            raise batch.failures[min(batch.failures)]

    def _seeds(self, seed: Any) -> list[int | None]:
        if seed is None:
            return [None] * self.num_envs
        if isinstance(seed, (int, np.integer)):
            return [int(seed) + slot for slot in range(self.num_envs)]
        if len(seed) != self.num_envs:
            raise ValueError(f"{len(seed)} seeds were given for {self.num_envs} envs")
        return list(seed)

    def _mask(self, mask: Any) -> np.ndarray:
        if not isinstance(mask, np.ndarray) or mask.dtype != np.bool_ or mask.shape != (self.num_envs,):
            raise ValueError(f"reset_mask must be a bool array of shape ({self.num_envs},), got {mask!r}")
        if not mask.any():
            raise ValueError("reset_mask names no env to reset")
        return mask

    # ------------------------------------------------------------------ the envs themselves

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Calls a method of every env, or reads its attribute; wrappers are searched."""
        return tuple(self.pool.call(name, *args, **kwargs))

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """An attribute of every env."""
        return self.call(name)

    def set_attr(self, name: str, values: Any) -> None:
        """Sets an attribute of every env: a list or tuple has one value per env, anything else goes to all."""
        if not isinstance(values, (list, tuple)):
            values = [values] * self.num_envs
        if len(values) != self.num_envs:
            raise ValueError(f"{len(values)} values were given for {self.num_envs} envs")
        self.pool.set_attr(name, list(values))

    @property
    def np_random_seed(self) -> tuple[int, ...]:  # type: ignore[override]
        """The seed of each env's generator."""
        return self.call("np_random_seed")

    @property  # type: ignore[misc]
    def np_random(self) -> tuple[np.random.Generator, ...]:  # type: ignore[override]
        """A copy of each env's generator."""
        return self.call("np_random")

    def render(self) -> tuple[Any, ...]:
        """What each env renders."""
        return self.call("render")

    def close_extras(self, **kwargs: Any) -> None:
        """Closes the pool."""
        self.pool.close()


def _columns(space: gymnasium.Space[Any], actions: Any) -> Tree:
    """Batched actions, with lists as arrays; a tuple of actions without a fixed size as an array of objects."""
    if isinstance(space, gymnasium.spaces.Dict):
        return {key: _columns(sub, actions[key]) for key, sub in space.spaces.items()}
    if isinstance(space, gymnasium.spaces.Tuple):
        return tuple(_columns(sub, actions[k]) for k, sub in enumerate(space.spaces))
    return np.asarray(actions) if has_fixed_size(space) else object_column(list(actions))


def _shown(leaf: np.ndarray) -> Any:
    """A copy; of objects a tuple, as Gymnasium batches what has no fixed size."""
    return tuple(leaf) if leaf.dtype.hasobject else leaf.copy()
