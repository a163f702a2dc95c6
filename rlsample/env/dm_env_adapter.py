"""dm_env environments as gymnasium envs. Known by their methods: dm_env itself is not imported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from rlsample.env.columns import join_path
from rlsample.errors import SpaceError

__all__ = ["DmEnvAsGymnasium", "as_dm_env", "is_dm_env", "is_dm_env_class", "space_of_spec"]

_FIRST, _LAST = 0, 2  # of dm_env.StepType


def is_dm_env(env: Any) -> bool:
    """Whether this is an object with dm_env's interface."""
    return not isinstance(env, (type, gymnasium.Env)) and _has_the_methods(env)


def is_dm_env_class(cls: type) -> bool:
    """Whether objects of this class have dm_env's interface."""
    return not issubclass(cls, gymnasium.Env) and _has_the_methods(cls)


def _has_the_methods(thing: Any) -> bool:
    return all(callable(getattr(thing, name, None)) for name in ("reset", "step", "observation_spec", "action_spec"))


class DmEnvAsGymnasium(gymnasium.Env[Any, Any]):
    """A dm_env environment that steps like a gymnasium env.

    A last step with discount 0 is terminated, any other is truncated. A discount that is neither that 0 nor 1 is in the
    info. The reward of a first step (None) counts as 0.

    dm_env has no seeds. A seed goes to the env's ``seed`` method if it has one, and to a dm_control task's random
    state; other envs have to be seeded by the factory that makes them.

    Args:
        env: stepped and closed by this object from now on.

    Raises:
        SpaceError: a spec that has no space: strings, objects.
    """

    def __init__(self, env: Any) -> None:
        self.env = env
        self._action_spec = env.action_spec()
        self.observation_space = space_of_spec(env.observation_spec())
        self.action_space = space_of_spec(self._action_spec)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """The first observation; ``options`` are not used."""
        if seed is not None:
            self._seed(seed)
        return _plain(self.env.reset().observation), {}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """One step; ``action`` in the form the spaces name, given on in the spec's dtypes."""
        kind, reward, discount, obs = self.env.step(_shaped(action, self._action_spec))
        if kind == _FIRST:
            raise RuntimeError("step returned a first TimeStep: the env began a new episode by itself")
        last = kind == _LAST
        terminated = bool(last and discount is not None and np.all(np.asarray(discount) == 0))
        usual = discount is None or terminated or np.all(np.asarray(discount) == 1)
        return _plain(obs), reward, terminated, bool(last and not terminated), {} if usual else {"discount": discount}

    def _seed(self, seed: int) -> None:
        if callable(getattr(self.env, "seed", None)):
            self.env.seed(seed)
        task = getattr(self.env, "task", None)
        if isinstance(getattr(task, "_random", None), np.random.RandomState):
            task._random = np.random.RandomState(seed)  # type: ignore[union-attr]

    def close(self) -> None:
        """Closes the env, once."""
        env, self.env = self.env, None
        if hasattr(env, "close"):
            env.close()


def space_of_spec(spec: Any, path: str = "") -> gymnasium.Space[Any]:
    """The space of a spec, or of a nest (mappings, lists, tuples) of specs.

    Raises:
        SpaceError: strings or objects; names the path.
    """
    if isinstance(spec, Mapping):
        return spaces.Dict({str(k): space_of_spec(s, join_path(path, str(k))) for k, s in spec.items()})
    if isinstance(spec, (list, tuple)):
        return spaces.Tuple([space_of_spec(s, join_path(path, k)) for k, s in enumerate(spec)])
    if hasattr(spec, "num_values"):
        return spaces.Discrete(int(spec.num_values))
    dtype, shape = np.dtype(spec.dtype), tuple(spec.shape)
    if dtype.kind == "b":
        return spaces.MultiBinary(shape) if shape else spaces.Discrete(2)
    if dtype.kind not in "iuf":
        raise SpaceError(f"the spec{f' at {path}' if path else ''} {spec!r} has no space of a fixed size")
    if dtype.kind == "f":
        low, high = getattr(spec, "minimum", -np.inf), getattr(spec, "maximum", np.inf)
    else:
        low = getattr(spec, "minimum", np.iinfo(dtype).min)
        high = getattr(spec, "maximum", np.iinfo(dtype).max)
    low, high = (np.broadcast_to(np.asarray(b, dtype), shape).copy() for b in (low, high))
    return spaces.Box(low, high, shape, dtype.type)


def _plain(obs: Any) -> Any:
    """Mappings and lists as dicts and tuples, which the spaces have."""
    if isinstance(obs, Mapping):
        return {str(k): _plain(v) for k, v in obs.items()}
    if isinstance(obs, (list, tuple)):
        return tuple(_plain(v) for v in obs)
    return obs


def _shaped(action: Any, spec: Any) -> Any:
    """An action of the space in the nest and the dtypes of the spec."""
    if isinstance(spec, Mapping):
        return {k: _shaped(action[str(k)], s) for k, s in spec.items()}
    if isinstance(spec, (list, tuple)):
        parts = [_shaped(a, s) for a, s in zip(action, spec, strict=True)]
        return type(spec)(*parts) if hasattr(spec, "_fields") else type(spec)(parts)
    if spec.shape == ():
        return np.dtype(spec.dtype).type(action)
    return np.asarray(action, spec.dtype)


def as_dm_env(env: Any, *, seed: int | None = None, **options: Any) -> Any:
    """Any env as a ``dm_env.Environment``; see :class:`~rlsample.env.dm_env_view.DmEnvView`.

    Args:
        env: anything :func:`~rlsample.env.convert.as_base_env` takes; one env.
        seed, options: given on to it.

    Raises:
        MissingExtraError: dm_env is not installed.
        ConfigError: several envs.
    """
    from rlsample.env.dm_env_view import DmEnvView

    return DmEnvView(env, seed=seed, **options)
