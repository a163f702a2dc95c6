"""Any env as a dm_env environment. Needs the package dm_env."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from rlsample.env.base_env import BaseEnv, StepBatch
from rlsample.env.convert import as_base_env
from rlsample.env.spaces import ObsWriter, check_observation_space, zeros_columns
from rlsample.errors import ConfigError, EnvClosedError, MissingExtraError
from rlsample.tree import Tree, gather, map_tree

try:
    import dm_env
    from dm_env import specs
except ImportError as e:
    raise MissingExtraError("as_dm_env", "dm") from e

__all__ = ["DmEnvView", "spec_of_space"]


class DmEnvView(dm_env.Environment):
    """One env, spoken to in dm_env's way.

        with as_dm_env("CartPole-v1", seed=0) as env:
            timestep = env.reset()
            while not timestep.last():
                timestep = env.step(0)

    A last step has discount 0 if it is terminated (also when truncated as well), else 1. As dm_env asks, ``step``
    before the first reset or after a last step resets and drops its action. Observations are copies.

    Args:
        env: anything :func:`~rlsample.env.convert.as_base_env` takes; one env.
        seed, options: given on to it.

    Raises:
        ConfigError: several envs.
        SpaceError: a space without a fixed size.
    """

    def __init__(self, env: Any, *, seed: int | None = None, **options: Any) -> None:
        self._env: BaseEnv = as_base_env(env, seed=seed, **options)
        try:
            if self._env.num_envs != 1:
                raise ConfigError(f"dm_env speaks of one env, and this has {self._env.num_envs}")
            self._writer = ObsWriter(self._env.action_space)
            check_observation_space(self._env.observation_space)
        except BaseException:
            self._env.close()
            raise
        self._observation_spec = spec_of_space(self._env.observation_space, "observation")
        self._action_spec = spec_of_space(self._env.action_space, "action")
        self._slot = self._env.all_ids
        self._started, self._running = False, False

    def reset(self) -> dm_env.TimeStep:
        """A first TimeStep.

        Raises:
            EnvFailedError: the env raised.
        """
        if self._started:
            batch = self._env.try_reset(self._slot)
            if batch is None:
                batch = self._env.poll()
        else:
            batch, self._started = self._env.poll(), True
        obs = self._row(batch)
        self._running = True
        return dm_env.restart(obs)

    def step(self, action: Any) -> dm_env.TimeStep:
        """One step, or a reset where none is running.

        Raises:
            SpaceError: ``action`` is outside the space; nothing was stepped.
            EnvFailedError: the env raised.
        """
        if not self._running:
            return self.reset()
        column = zeros_columns(self._env.action_space, (1,))
        self._writer.write(column, 0, action, 0, None)
        self._env.send_actions(self._slot, column)
        batch = self._env.poll()
        obs, reward = self._row(batch), float(batch.rewards[0])
        if batch.terminated[0]:
            self._running = False
            return dm_env.termination(reward, obs)
        if batch.truncated[0]:
            self._running = False
            return dm_env.truncation(reward, obs)
        return dm_env.transition(reward, obs)

    def _row(self, batch: StepBatch) -> Tree:
        for failure in batch.failures.values():
            self._running = False
            raise failure
        if not len(batch.env_ids):
            raise EnvClosedError("the env gave no row")
        return map_tree(np.copy, gather(batch.obs, 0))

    def observation_spec(self) -> Any:
        """A spec, or a dict or tuple of specs."""
        return self._observation_spec

    def action_spec(self) -> Any:
        """A spec, or a dict or tuple of specs."""
        return self._action_spec

    def close(self) -> None:
        """Closes the env. Idempotent."""
        self._env.close()


def spec_of_space(space: gymnasium.Space[Any], name: str) -> Any:
    """The spec of a space of fixed size; Dict and Tuple spaces give dicts and tuples of specs."""
    if isinstance(space, spaces.Dict):
        return {k: spec_of_space(s, k) for k, s in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(spec_of_space(s, f"{name}[{k}]") for k, s in enumerate(space.spaces))
    if isinstance(space, spaces.Discrete):
        if space.start == 0:
            return specs.DiscreteArray(int(space.n), dtype=space.dtype, name=name)
        return specs.BoundedArray((), space.dtype, space.start, space.start + space.n - 1, name)
    if isinstance(space, spaces.MultiDiscrete):
        return specs.BoundedArray(space.shape, space.dtype, space.start, space.start + space.nvec - 1, name)
    if isinstance(space, spaces.MultiBinary):
        return specs.BoundedArray(space.shape, space.dtype, 0, 1, name)
    assert isinstance(space, spaces.Box)
    if np.dtype(space.dtype).kind == "f" and np.isinf(space.low).all() and np.isinf(space.high).all():
        return specs.Array(space.shape, space.dtype, name)
    return specs.BoundedArray(space.shape, space.dtype, space.low, space.high, name)
