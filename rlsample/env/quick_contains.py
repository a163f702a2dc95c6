"""A Discrete action space that answers ``contains`` quickly for the actions this package hands out.

Many envs begin ``step`` with ``assert self.action_space.contains(action)``. Gymnasium's check of a Python int looks up
the dtype's limits each time: 2.8 of the 7.5 microseconds of a CartPole step. Actions were checked before they got
there; the env's own check stays, and gives the same answers.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np

__all__ = ["quicken"]


class _QuickContains:
    """``contains`` of one Discrete space; stands in for its method, and can be pickled and copied with it."""

    __slots__ = ("first", "last", "space")

    def __init__(self, space: gymnasium.spaces.Discrete) -> None:
        self.space, self.first, self.last = space, int(space.start), int(space.start + space.n - 1)

    def __call__(self, x: Any) -> bool:
        if type(x) is int:
            return self.first <= x <= self.last
        return gymnasium.spaces.Discrete.contains(self.space, x)


class _QuickBatchContains:
    """The same for a vector env's batch of Discrete actions: a flat MultiDiscrete whose entries are all alike."""

    __slots__ = ("dtype", "first", "last", "shape", "space")

    def __init__(self, space: gymnasium.spaces.MultiDiscrete) -> None:
        self.space, self.shape, self.dtype = space, space.shape, space.dtype
        self.first, self.last = int(space.start[0]), int(space.start[0] + space.nvec[0] - 1)

    def __call__(self, x: Any) -> bool:
        if type(x) is np.ndarray and x.shape == self.shape and x.dtype == self.dtype:
            values = x.tolist()  # its min and max are faster than numpy's up to a few hundred
            return self.first <= min(values) and max(values) <= self.last
        return gymnasium.spaces.MultiDiscrete.contains(self.space, x)


def quicken(env: Any) -> None:
    """Gives the env's own action space the quick check, if it is a plain Discrete, or a vector env's batch of one.

    Args:
        env: a ``gymnasium.Env`` or ``gymnasium.vector.VectorEnv``; any other action space is left alone.
    """
    space = getattr(env.unwrapped, "action_space", None)
    if space is None or "contains" in vars(space):
        return
    if type(space) is gymnasium.spaces.Discrete:
        space.contains = _QuickContains(space)  # type: ignore[method-assign]
    elif type(space) is gymnasium.spaces.MultiDiscrete and _is_batch(space):
        space.contains = _QuickBatchContains(space)  # type: ignore[method-assign]


def _is_batch(space: gymnasium.spaces.MultiDiscrete) -> bool:
    alike = (space.nvec == space.nvec.flat[0]).all() and (space.start == space.start.flat[0]).all()
    return space.nvec.ndim == 1 and space.nvec.size <= 256 and bool(alike)
