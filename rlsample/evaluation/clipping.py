"""What lies between policy and env: actions brought into bounds, rewards clipped for learning."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np

from rlsample.env.spaces import clip_to_space, unsquash
from rlsample.evaluation.sampler_settings import SamplerSettings
from rlsample.tree import Tree

__all__ = ["action_mapping", "reward_clipping"]


def action_mapping(space: gymnasium.Space[Any], settings: SamplerSettings) -> Callable[[Tree], Tree] | None:
    """From the policy's actions [K, ...] to the env's, or None where they are the same."""
    if settings.normalize_actions:
        mapping: Callable[[Tree], Tree] = functools.partial(unsquash, space)
    elif settings.clip_actions:
        mapping = functools.partial(clip_to_space, space)
    else:
        return None
    return mapping if _has_box(space) else None


def _has_box(space: gymnasium.Space[Any]) -> bool:
    if isinstance(space, gymnasium.spaces.Dict):
        return any(_has_box(s) for s in space.spaces.values())
    if isinstance(space, gymnasium.spaces.Tuple):
        return any(_has_box(s) for s in space.spaces)
    return isinstance(space, gymnasium.spaces.Box)


def reward_clipping(clip: bool | float) -> Callable[[np.ndarray], np.ndarray] | None:
    """From the env's rewards to the batch's, as ``clip_rewards`` says; None where they are the same."""
    if clip is False:
        return None
    if clip is True:
        return np.sign
    return lambda rewards: np.clip(rewards, -clip, clip)
