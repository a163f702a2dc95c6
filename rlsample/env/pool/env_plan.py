"""What every worker of a pool is told about its envs, and the check that they are alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import gymnasium

from rlsample.env.base_env import EnvContext
from rlsample.errors import EnvFailedError, SpaceError

__all__ = ["EnvPlan", "require_gym_env", "require_same_spaces"]


@dataclass(frozen=True)
class EnvPlan:
    """What every worker of a pool is told about its envs.

    Attributes:
        make: builds the env of one slot.
        num_envs, seed, worker_index, env_config, allow_nonfinite, info_keys: as in the pool.
        incarnations: per slot, of the first env there; empty: 0.
    """

    make: Callable[[EnvContext], gymnasium.Env[Any, Any]]
    num_envs: int
    seed: int | None = None
    worker_index: int = 0
    env_config: Mapping[str, Any] = field(default_factory=dict)
    allow_nonfinite: bool = False
    info_keys: tuple[str, ...] = ()
    incarnations: tuple[int, ...] = ()


def require_gym_env(env: Any, slot: int) -> None:
    """Raises EnvFailedError unless the factory made a single Gymnasium env."""
    if not isinstance(env, gymnasium.Env):
        raise EnvFailedError(
            f"slot {slot}: the factory made {type(env).__name__}, but backend='process' takes a gymnasium.Env per "
            "slot; use backend='inline' for vector envs",
            slot=slot,
        )


def require_same_spaces(env: Any, slot: int, spaces: tuple[Any, Any], first: int | None) -> None:
    """Raises SpaceError unless the env has these spaces: those of slot ``first``, or of its predecessor (None)."""
    for mine, want in zip((env.observation_space, env.action_space), spaces, strict=True):
        if mine is not want and mine != want:
            whose = "the slot had" if first is None else f"slot {first} has"
            raise SpaceError(f"slot {slot} has space {mine}, {whose} {want}: all slots need the same spaces")
