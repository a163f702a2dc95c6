"""Kinds of envs that come from other packages, told by their shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gymnasium.vector import VectorEnv as GymnasiumVectorEnv

from rlsample.env.ale_vector import AleVectorAdapter, is_ale_vector
from rlsample.env.base_env import BaseEnv, EnvContext
from rlsample.env.dm_env_adapter import DmEnvAsGymnasium, is_dm_env, is_dm_env_class
from rlsample.env.envpool_env import EnvPoolAdapter, EnvPoolLike
from rlsample.env.gymnasium_vector import GymnasiumVectorAdapter
from rlsample.env.vector_env import VectorEnv
from rlsample.env.vector_env_adapter import VectorEnvAdapter
from rlsample.errors import ConfigError

__all__ = ["adapter_of", "in_gymnasium_terms"]


def in_gymnasium_terms(env: Any) -> Any:
    """A dm_env object as a gymnasium env, a dm_env class as a factory; all else as it is."""
    if isinstance(env, EnvPoolLike):
        if not hasattr(env, "observation_space"):
            raise ConfigError("this EnvPool env speaks dm_env; make it with envpool.make_gymnasium")
        return env
    if isinstance(env, type):
        return _DmEnvFactory(env) if is_dm_env_class(env) else env
    return DmEnvAsGymnasium(env) if is_dm_env(env) else env


class _DmEnvFactory:
    """Makes envs of a dm_env class; ``env_config`` has the arguments."""

    def __init__(self, cls: type) -> None:
        self.cls = cls

    def __call__(self, ctx: EnvContext) -> DmEnvAsGymnasium:
        return DmEnvAsGymnasium(self.cls(**ctx.config))


def adapter_of(env: Any) -> Callable[..., BaseEnv]:
    """The adapter of an object that holds several envs."""
    if isinstance(env, EnvPoolLike):
        return EnvPoolAdapter
    if isinstance(env, VectorEnv):
        return VectorEnvAdapter
    if isinstance(env, GymnasiumVectorEnv) and is_ale_vector(env):
        return AleVectorAdapter
    return GymnasiumVectorAdapter
