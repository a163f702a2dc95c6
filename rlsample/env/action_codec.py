"""Batches of actions: checked before any env sees them, then taken apart into the form each env expects."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from rlsample.env.columns import check_action_space, children, has_fixed_size, is_member, join_path, object_column
from rlsample.errors import SpaceError
from rlsample.tree import Tree

__all__ = ["ActionCodec"]

Space = gymnasium.Space[Any]
_SMALL = 64  # entries up to which a Python list beats numpy's min, max and all


class ActionCodec:
    """Checks batches of actions and takes them apart into the form each env expects.

    Every method raises SpaceError that names the slot, the value and the space before it returns anything, so that a
    caller which checks first has stepped nothing.

    Args:
        any_size: allow leaves without a fixed size: their columns are arrays of objects [K], or lists of K values.
    """

    def __init__(self, space: Space, any_size: bool = False) -> None:
        check_action_space(space, any_size)
        self.space = space
        self._root = _codec(space, "")

    def check(self, actions: Tree, env_ids: Sequence[int] | np.ndarray) -> None:
        """Raises SpaceError unless ``actions`` is a tree [K, ...] of values in the space, K = ``len(env_ids)``.

        Structure, shape, kind of dtype (integers for discrete leaves and integer Boxes; integers and floats for float
        Boxes), bounds, and NaN or inf.
        """
        self._root.batch(actions, env_ids)

    def checked_copy(self, actions: Tree, env_ids: Sequence[int] | np.ndarray) -> Tree:
        """Checks like :meth:`check` and returns a copy [K, ...] in the space's own dtypes."""
        return self._root.batch(actions, env_ids)

    def check_and_split(self, actions: Tree, env_ids: Sequence[int] | np.ndarray) -> list[Any]:
        """Checks like :meth:`check` and returns K actions, one per env, that share no memory with ``actions``."""
        return self._root.split(actions, env_ids)

    def to_env(self, actions: Tree) -> list[Any]:
        """Splits a batch into K per-env actions that share no memory with it. Checked, with rows for slot numbers."""
        leaf = actions
        while isinstance(leaf, (dict, tuple)):
            leaf = next(iter(leaf.values())) if isinstance(leaf, dict) else leaf[0]
        return self._root.split(actions, range(len(leaf)))


def _codec(space: Space, path: str) -> _Codec:
    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        return _NestCodec(space, path)
    if isinstance(space, spaces.Discrete):
        return _DiscreteCodec(space, path)
    return _ArrayCodec(space, path) if has_fixed_size(space) else _ObjectCodec(space, path)


class _Codec:
    """One node of the action tree. ``batch`` checks and copies; ``rows`` splits that copy; ``split`` does both."""

    space: Space
    path: str

    def batch(self, actions: Any, env_ids: Any) -> Any:
        raise NotImplementedError

    def rows(self, batch: Any) -> list[Any]:
        raise NotImplementedError

    def split(self, actions: Any, env_ids: Any) -> list[Any]:
        return self.rows(self.batch(actions, env_ids))

    def fail(self, what: str) -> SpaceError:
        at = f" at {self.path}" if self.path else ""
        return SpaceError(f"actions{at}: {what}; the action space there is {self.space}")


class _NestCodec(_Codec):
    def __init__(self, space: Space, path: str) -> None:
        self.space, self.path = space, path
        self.is_dict = isinstance(space, spaces.Dict)
        self.keys = [k for k, _ in children(space)]
        self.parts = [_codec(s, join_path(path, k)) for k, s in children(space)]

    def batch(self, actions: Any, env_ids: Any) -> Any:
        if self.is_dict:
            if not isinstance(actions, Mapping) or set(actions) != set(self.keys):
                got = sorted(map(str, actions)) if isinstance(actions, Mapping) else type(actions).__name__
                raise self.fail(f"expected a dict with the keys {self.keys}, got {got}")
            return {k: p.batch(actions[k], env_ids) for k, p in zip(self.keys, self.parts, strict=True)}
        if not isinstance(actions, tuple) or len(actions) != len(self.parts):
            got = f"{type(actions).__name__}{f' of {len(actions)}' if isinstance(actions, (tuple, list)) else ''}"
            raise self.fail(f"expected a tuple of {len(self.parts)} columns, got {got}")
        return tuple(p.batch(a, env_ids) for a, p in zip(actions, self.parts, strict=True))

    def rows(self, batch: Any) -> list[Any]:
        columns = [p.rows(batch[k]) for k, p in zip(self.keys, self.parts, strict=True)]
        if self.is_dict:
            return [dict(zip(self.keys, row, strict=True)) for row in zip(*columns, strict=True)]
        return list(zip(*columns, strict=True))


class _ObjectCodec(_Codec):
    """Values without a fixed size, as they are; copied deeply."""

    def __init__(self, space: Space, path: str) -> None:
        self.space, self.path = space, path

    def batch(self, actions: Any, env_ids: Any) -> np.ndarray:
        count = len(env_ids)
        if not isinstance(actions, (np.ndarray, list, tuple)):
            raise self.fail(f"expected an array of {count} objects, got {type(actions).__name__}")
        shape = actions.shape if isinstance(actions, np.ndarray) else (len(actions),)
        if shape != (count,):
            raise self.fail(f"expected shape {(count,)}, got {shape}")
        for slot, value in zip(env_ids, actions, strict=True):
            if not is_member(self.space, value):
                raise self.fail(f"slot {int(slot)} was given {repr(value)[:200]}, which is outside the space")
        return object_column([copy.deepcopy(value) for value in actions])

    def rows(self, batch: np.ndarray) -> list[Any]:
        return list(batch)


class _ArrayCodec(_Codec):
    """Box, MultiDiscrete and MultiBinary: arrays between two bounds of the same shape."""

    def __init__(self, space: Any, path: str) -> None:
        self.space, self.path = space, path
        self.shape, self.dtype = tuple(space.shape), np.dtype(space.dtype)
        self.kinds = {"f": "fiu", "b": "b"}.get(self.dtype.kind, "iu")
        if isinstance(space, spaces.Box):
            self.low, self.high = space.low, space.high
            if self.dtype.kind == "f":  # inf is no action, even where the Box is unbounded
                most = np.finfo(self.dtype).max
                self.low, self.high = np.maximum(self.low, -most), np.minimum(self.high, most)
        elif isinstance(space, spaces.MultiDiscrete):
            self.low, self.high = space.start, space.start + space.nvec - 1
        elif isinstance(space, spaces.MultiBinary):
            self.kinds = "iub"
            self.low, self.high = np.int8(0), np.int8(1)
        else:
            self.low, self.high = np.int64(space.start), np.int64(space.start + space.n - 1)
        low, high = np.unique(self.low), np.unique(self.high)
        self.range = (low.item(), high.item()) if low.size == high.size == 1 else None

    def batch(self, actions: Any, env_ids: Any) -> np.ndarray:
        if type(actions) is not np.ndarray:
            actions = self._as_array(actions)
        if actions.shape != (len(env_ids), *self.shape):
            raise self.fail(f"expected shape {(len(env_ids), *self.shape)}, got {actions.shape}")
        if actions.dtype.kind not in self.kinds:
            raise self.fail(f"dtype {actions.dtype} does not fit {self.dtype}")
        if actions.dtype == self.dtype:
            own = actions.copy()
        else:
            with np.errstate(over="ignore"):
                own = actions.astype(self.dtype, order="C")
        # Bounds of floats hold for what the env gets, so after rounding to its dtype; integers may wrap around.
        judged = own if self.dtype.kind == "f" else actions
        if not self._inside(judged):
            outside = np.argwhere(~((judged >= self.low) & (judged <= self.high)))
            if len(outside):
                row = int(outside[0][0])
                given = actions[row].tolist()
                raise self.fail(f"slot {int(env_ids[row])} was given {given!r}, which is outside the space")
        return own

    def _inside(self, values: np.ndarray) -> bool:
        if self.range is None or values.size > _SMALL:
            return bool(((values >= self.low) & (values <= self.high)).all())
        flat = values.ravel().tolist()
        low, high = self.range
        # min and max may pass over a NaN, the sum cannot.
        return not flat or (min(flat) >= low and max(flat) <= high and math.isfinite(sum(flat)))

    def _as_array(self, actions: Any) -> np.ndarray:
        try:
            array = np.asarray(actions)
        except (ValueError, TypeError) as e:
            raise self.fail(f"expected an array, got {type(actions).__name__} ({e})") from e
        if array.dtype == object:
            raise self.fail(f"expected an array of numbers, got {type(actions).__name__}")
        return array

    def rows(self, batch: np.ndarray) -> list[Any]:
        return list(batch) if self.shape else [batch[i, ...] for i in range(len(batch))]


class _DiscreteCodec(_ArrayCodec):
    """The list of Python ints is made anyway, and to judge it is faster than numpy up to a hundred rows."""

    def __init__(self, space: spaces.Discrete, path: str) -> None:
        super().__init__(space, path)
        self.first, self.last = int(space.start), int(space.start + space.n - 1)
        # a set's look-ups beat min and max
        self.legal = frozenset(range(self.first, self.last + 1)) if space.n <= _SMALL else None

    def split(self, actions: Any, env_ids: Any) -> list[Any]:
        if type(actions) is np.ndarray and actions.ndim == 1 and actions.dtype.kind == "i":
            values = actions.tolist()
            if len(values) == len(env_ids) and self._all_legal(values):
                return values
        return self.rows(self.batch(actions, env_ids))

    def batch(self, actions: Any, env_ids: Any) -> np.ndarray:
        if (
            type(actions) is np.ndarray
            and actions.dtype == self.dtype
            and actions.shape == (len(env_ids),)
            and len(env_ids) <= 256
            and self._all_legal(actions.tolist())
        ):
            return actions.copy()
        return super().batch(actions, env_ids)

    def _all_legal(self, values: list[int]) -> bool:
        if self.legal is not None:
            return self.legal.issuperset(values)
        return bool(values) and min(values) >= self.first and max(values) <= self.last

    def rows(self, batch: np.ndarray) -> list[Any]:
        return batch.tolist()
