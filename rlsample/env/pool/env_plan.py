"""What every worker of a pool is told about its envs, and the check that they are alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import gymnasium

from rlsample.env.base_env import EnvContext
from rlsample.errors import SpaceError

__all__ = ["EnvPlan", "require_same_spaces"]


@dataclass(frozen=True)
class EnvPlan:
    """What every worker of a pool is told about its envs.

    Attributes:
        make: builds the env of one slot.
        num_envs, seed, worker_index, env_config, allow_nonfinite, info_keys: as in the pool.
    """

    make: Callable[[EnvContext], gymnasium.Env[Any, Any]]
    num_envs: int
    seed: int | None = None
    worker_index: int = 0
    env_config: Mapping[str, Any] = field(default_factory=dict)
    allow_nonfinite: bool = False
    info_keys: tuple[str, ...] = ()


def require_same_spaces(env: Any, slot: int, spaces: tuple[Any, Any], first: int | None) -> None:
    """Raises SpaceError unless the env has these spaces."""
    for mine, want in zip((env.observation_space, env.action_space), spaces, strict=True):
        if mine is not want and mine != want:
            whose = "the pool" if first is None else f"slot {first}"
            raise SpaceError(f"slot {slot} has space {mine}, {whose} has {want}: all slots need the same spaces")
