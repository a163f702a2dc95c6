"""Which spaces have a fixed size, and columns for them and for those that have none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from rlsample.errors import SpaceError
from rlsample.tree import Tree

__all__ = [
    "LeafSpec",
    "check_action_space",
    "check_observation_space",
    "children",
    "clip_to_space",
    "empty_columns",
    "has_fixed_size",
    "is_member",
    "join_path",
    "leaf_spec",
    "object_column",
    "unsquash",
    "zeros_columns",
]

Space = gymnasium.Space[Any]
_LEAVES = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)


@dataclass(frozen=True)
class LeafSpec:
    """Shape and dtype of one row of one leaf. A space without a fixed size: ``()``, object, and the space itself."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    space: Any = None


def check_observation_space(space: Space, any_size: bool = False) -> None:
    """Raises SpaceError unless observations of ``space`` have a fixed size; names the path and what to wrap.

    Args:
        any_size: leaves without a fixed size will do, but no empty Dict or Tuple, and nothing that is no space.
    """
    _check(space, any_size, "observation", "gymnasium.wrappers.TransformObservation(env, f, Box(...))")


def check_action_space(space: Space, any_size: bool = False) -> None:
    """As :func:`check_observation_space`, for actions."""
    _check(space, any_size, "action", "gymnasium.wrappers.TransformAction(env, f, Box(...))")


def _check(space: Any, any_size: bool, what: str, wrapper: str, path: str = "") -> None:
    where = f"{what} space{f' at {path}' if path else ''}"
    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        parts = children(space)
        if not parts:
            raise SpaceError(f"{where} is an empty {type(space).__name__}: it has no columns")
        for key, sub in parts:
            _check(sub, any_size, what, wrapper, join_path(path, key))
    elif not isinstance(space, gymnasium.Space if any_size else _LEAVES):
        raise SpaceError(
            f"{where} is {space!r}, which has no fixed size or is unknown; map it to a space of fixed size first, "
            f"e.g. with {wrapper}"
        )


def children(space: Space) -> list[tuple[Any, Space]]:
    """``(key or index, sub-space)`` of a Dict or Tuple, in its own order."""
    if isinstance(space, spaces.Dict):
        return list(space.spaces.items())
    return list(enumerate(space.spaces))  # type: ignore[attr-defined]


def join_path(path: str, key: Any) -> str:
    """``path.key`` or ``path[index]``, as :func:`rlsample.tree.flatten` names leaves."""
    if isinstance(key, int):
        return f"{path}[{key}]"
    return f"{path}.{key}" if path else str(key)


def has_fixed_size(space: Any) -> bool:
    """Whether it is a leaf (no Dict, no Tuple) whose values all have one shape and dtype."""
    return isinstance(space, _LEAVES)


def is_member(space: gymnasium.Space[Any], value: Any) -> bool:
    """Whether the value is in the space; not if the space's own check raises."""
    try:
        return bool(space.contains(value))
    except Exception:
        return False


def leaf_spec(space: Space) -> Tree:
    """A tree of the space's structure with a :class:`LeafSpec` as each leaf; Dict and Tuple are its only branches."""
    if isinstance(space, spaces.Dict):
        return {k: leaf_spec(s) for k, s in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(leaf_spec(s) for s in space.spaces)
    if isinstance(space, _LEAVES):
        return LeafSpec(tuple(space.shape or ()), np.dtype(space.dtype))
    return LeafSpec((), np.dtype(object), space)


def empty_columns(space: Space, lead: tuple[int, ...]) -> Tree:
    """Uninitialised arrays [*lead, ...] in the space's own structure and dtypes."""
    return _columns(leaf_spec(space), lead, np.empty)


def zeros_columns(space: Space, lead: tuple[int, ...]) -> Tree:
    """Like :func:`empty_columns`, filled with zeros."""
    return _columns(leaf_spec(space), lead, np.zeros)


def _columns(spec: Tree, lead: tuple[int, ...], new: Any) -> Tree:
    if isinstance(spec, dict):
        return {k: _columns(s, lead, new) for k, s in spec.items()}
    if isinstance(spec, tuple):
        return tuple(_columns(s, lead, new) for s in spec)
    return new((*lead, *spec.shape), spec.dtype)


def object_column(values: Sequence[Any]) -> np.ndarray:
    """object[K], with each value as it is: numpy would make more dimensions of tuples and arrays."""
    column = np.empty(len(values), object)
    for row, value in enumerate(values):
        column[row] = value
    return column


def clip_to_space(space: Space, actions: Tree) -> Tree:
    """Clips the Box leaves of ``actions`` [K, ...] to their bounds: new arrays. Other leaves pass through uncopied.

    Float Box leaves come back in the space's dtype. NaN stays NaN.
    """
    return _map_boxes(_clip_leaf, space, actions)


def unsquash(space: Space, actions: Tree) -> Tree:
    """Maps [-1, 1] to [low, high] in the float Box leaves of ``actions`` [K, ...]: new arrays in the space's dtype.

    ``low + (a + 1) / 2 * (high - low)``, with a clipped to [-1, 1] first, so that the bounds are met exactly.
    Entries without two finite bounds, integer Boxes and other leaves pass through unchanged.
    """
    return _map_boxes(_unsquash_leaf, space, actions)


def _map_boxes(f: Any, space: Space, actions: Tree) -> Tree:
    if isinstance(space, spaces.Dict):
        return {k: _map_boxes(f, s, actions[k]) for k, s in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_map_boxes(f, s, actions[i]) for i, s in enumerate(space.spaces))
    return f(space, actions) if isinstance(space, spaces.Box) else actions


def _clip_leaf(space: spaces.Box, actions: np.ndarray) -> np.ndarray:
    clipped = np.clip(actions, space.low, space.high)
    return clipped.astype(space.dtype, copy=False) if np.dtype(space.dtype).kind == "f" else clipped


def _unsquash_leaf(space: spaces.Box, actions: np.ndarray) -> np.ndarray:
    if np.dtype(space.dtype).kind != "f":
        return actions
    bounded = space.bounded_below & space.bounded_above
    low = np.where(bounded, space.low, -1).astype(np.float64)
    high = np.where(bounded, space.high, 1).astype(np.float64)
    unit = np.clip(actions.astype(np.float64), -1.0, 1.0)
    # The weighted form gives exactly low at -1 and high at 1, and cannot overflow where high - low would.
    scaled = low * (0.5 - 0.5 * unit) + high * (0.5 + 0.5 * unit)
    return np.where(bounded, scaled, actions).astype(space.dtype)
