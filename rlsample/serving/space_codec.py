"""Values of spaces between bodies and episodes, and the spaces themselves in words."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from rlsample.env.serving.lane_rows import LaneRows
from rlsample.env.spaces import ActionCodec, ObsWriter, leaf_spec
from rlsample.errors import SpaceError
from rlsample.serving.wire import ARRAY_KEY, array_of_json
from rlsample.tree import Tree, map_tree

__all__ = ["SpaceCodec", "describe_space", "space_of", "stack_actions"]

Space = gymnasium.Space[Any]
_SAFE = 1e38  # fits into a float32


class SpaceCodec:
    """Observations and actions of requests, checked and brought to the spaces' own dtypes.

    Args:
        lanes: of the served env: its rules are the ones that hold.
    """

    def __init__(self, observation_space: Space, action_space: Space, lanes: LaneRows) -> None:
        self.observation_space, self.action_space = observation_space, action_space
        self._lanes = lanes
        self._obs_spec, self._action_spec = leaf_spec(observation_space), leaf_spec(action_space)
        self._obs_writer, self._action_writer = ObsWriter(observation_space), ObsWriter(action_space)
        self._actions = ActionCodec(action_space)
        shape, self._dtype = lanes.plain
        is_vector = shape is not None and len(shape) == 1 and self._dtype in (np.float32, np.float64)
        self._length = shape[0] if shape and is_vector else 0  # 0: observations are no float vectors

    def obs(self, value: Any) -> Any:
        """One observation, in the form ``get_action`` takes without a further look.

        Raises:
            SpaceError: wrong structure, shape or kind of dtype; NaN or inf. WireError: a broken array.
        """
        if value.__class__ is list and self._length:
            vector = self._vector(value)
            if vector is not None:
                return vector
        with np.errstate(over="ignore"):  # what overflows is infinite then, and refused
            column = self._lanes.obs_copy(_with_arrays(value, self._obs_spec), "obs")
        return map_tree(lambda leaf: leaf[0, ...], column)

    def _vector(self, values: list[Any]) -> np.ndarray | None:
        """The usual observation, quickly; None where a closer look is needed."""
        try:
            total, low, high = sum(values), min(values), max(values)  # TypeError: not all are numbers
            is_plain = total < math.inf and low > -_SAFE and high < _SAFE  # a NaN would be in the sum
            if not is_plain or len(values) != self._length or values[0].__class__ is bool:
                return None
            return np.array(values, self._dtype)
        except (TypeError, ValueError, OverflowError):
            return None

    def obs_batch(self, value: Any, num_rows: int) -> Tree:
        """Observations as a tree [num_rows, ...]. Raises as :meth:`obs`."""
        with np.errstate(over="ignore"):
            column = self._obs_writer.copy_batch(_with_arrays(value, self._obs_spec), num_rows)
        if not self._lanes.allow_nonfinite:
            self._lanes.require_finite(column, "obs")
        return column

    def count_rows(self, value: Any) -> int:
        """How many observations a stacked value seems to hold; 0 where that cannot be seen."""
        spec = self._obs_spec
        while isinstance(spec, (dict, tuple)):
            key: Any = next(iter(spec)) if isinstance(spec, dict) else 0
            try:
                spec, value = spec[key], value[key]
            except (KeyError, IndexError, TypeError):
                return 0
        if isinstance(value, dict) and ARRAY_KEY in value:
            value = array_of_json(value)
        return len(value) if isinstance(value, list) or (isinstance(value, np.ndarray) and value.ndim) else 0

    def action(self, value: Any) -> Any:
        """One action within the space, in the form ``log_action`` takes. Raises as :meth:`obs`."""
        with np.errstate(over="ignore"):
            column = self._lanes.action_copy(_with_arrays(value, self._action_spec), None, "action")
        return self._actions.to_env(column)[0]

    def action_batch(self, value: Any, num_rows: int) -> list[Any]:
        """Actions [num_rows, ...] within the space, as a list of one for each row. Raises as :meth:`obs`."""
        with np.errstate(over="ignore"):
            column = self._action_writer.copy_batch(_with_arrays(value, self._action_spec), num_rows)
        return self._actions.check_and_split(column, range(num_rows))

    def rows_of(self, column: Tree) -> list[Any]:
        """The observations of a tree [K, ...], one by one: views."""
        if type(column) is np.ndarray:
            return list(column) if column.ndim > 1 else [column[k, ...] for k in range(len(column))]
        first = column
        while not isinstance(first, np.ndarray):
            first = next(iter(first.values())) if isinstance(first, dict) else first[0]
        return [map_tree(lambda leaf, k=k: leaf[k, ...], column) for k in range(len(first))]


def _with_arrays(value: Any, spec: Tree) -> Any:
    """The value with its JSON arrays made into arrays; everything else as it came."""
    if isinstance(spec, dict) and isinstance(value, Mapping):
        return {k: _with_arrays(v, spec.get(k)) for k, v in value.items()}
    if isinstance(spec, tuple) and isinstance(value, (list, tuple)) and len(value) == len(spec):
        return tuple(_with_arrays(v, s) for v, s in zip(value, spec, strict=True))
    if isinstance(value, dict) and ARRAY_KEY in value:
        return array_of_json(value)
    if spec is not None and not isinstance(spec, (dict, tuple)) and isinstance(value, (str, bytes, dict, bool)):
        raise SpaceError(f"expected numbers, got {type(value).__name__}: {str(value)[:60]!r}")
    return value


def stack_actions(space: Space, actions: Sequence[Any]) -> Any:
    """K actions as env.step takes them, stacked as a tree [K, ...] in the space's dtypes."""
    if isinstance(space, spaces.Dict):
        return {k: stack_actions(s, [a[k] for a in actions]) for k, s in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(stack_actions(s, [a[i] for a in actions]) for i, s in enumerate(space.spaces))
    return np.array(actions, np.dtype(space.dtype))


# ---------------------------------------------------------------------- spaces in words


def describe_space(space: Space) -> dict[str, Any]:
    """A space as plain data: ``type``, and ``shape, dtype, low, high, n, start, nvec, spaces`` as it has them.

    Bounds that are infinite are null: JSON has no infinity. Bounds that are the same everywhere are one number.
    """
    found: dict[str, Any] = {"type": type(space).__name__}
    if isinstance(space, spaces.Dict):
        found["spaces"] = {k: describe_space(s) for k, s in space.spaces.items()}
        return found
    if isinstance(space, spaces.Tuple):
        found["spaces"] = [describe_space(s) for s in space.spaces]
        return found
    found.update(shape=list(space.shape or ()), dtype=np.dtype(space.dtype).name)
    if isinstance(space, spaces.Box):
        found.update(low=_bounds(space.low), high=_bounds(space.high))
    elif isinstance(space, spaces.Discrete):
        found.update(n=int(space.n), start=int(space.start))
    elif isinstance(space, spaces.MultiDiscrete):
        found.update(nvec=space.nvec.tolist(), start=space.start.tolist())
    elif isinstance(space, spaces.MultiBinary):
        found.update(n=space.n if isinstance(space.n, int) else [int(n) for n in space.n])
    return found


def _bounds(bound: np.ndarray) -> Any:
    values = np.where(np.isfinite(bound), bound, np.nan) if bound.dtype.kind == "f" else bound
    distinct = np.unique(bound)
    plain = values.ravel()[:1].tolist() if len(distinct) == 1 else values.ravel().tolist()
    plain = [None if x != x else x for x in plain]
    return plain[0] if len(distinct) == 1 else plain


def space_of(description: Mapping[str, Any]) -> Space:
    """The space that :func:`describe_space` describes. Bounds may be left out, and are infinite then.

    Raises:
        SpaceError: a description that makes no space; names what is wrong.
    """
    try:
        return _space_of(description)
    except SpaceError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, AssertionError, OverflowError) as e:
        raise SpaceError(f"{str(description)[:120]} describes no space: {type(e).__name__}: {e}") from e


def _space_of(given: Mapping[str, Any]) -> Space:
    kind = given["type"]
    if kind == "Dict":
        return spaces.Dict({k: space_of(s) for k, s in given["spaces"].items()})
    if kind == "Tuple":
        return spaces.Tuple([space_of(s) for s in given["spaces"]])
    if kind == "Discrete":
        return spaces.Discrete(int(given["n"]), start=int(given.get("start", 0)))
    dtype: Any = np.dtype(given.get("dtype", {"Box": "float32", "MultiBinary": "int8"}.get(kind, "int64")))
    if kind == "MultiDiscrete":
        nvec = np.array(given["nvec"], dtype)
        return spaces.MultiDiscrete(nvec, dtype=dtype, start=np.array(given.get("start", np.zeros_like(nvec)), dtype))
    if kind == "MultiBinary":
        return spaces.MultiBinary(given["n"])
    if kind != "Box":
        raise SpaceError(f"there is no space type {kind!r}: Box, Discrete, MultiDiscrete, MultiBinary, Dict or Tuple")
    shape = tuple(int(n) for n in given["shape"])
    limits = np.iinfo(dtype) if dtype.kind in "iu" else None
    low = _filled(given.get("low"), shape, -np.inf if limits is None else limits.min, dtype)
    high = _filled(given.get("high"), shape, np.inf if limits is None else limits.max, dtype)
    return spaces.Box(low, high, shape, dtype)


def _filled(given: Any, shape: tuple[int, ...], missing: Any, dtype: Any) -> np.ndarray:
    if not isinstance(given, list):
        return np.full(shape, missing if given is None else given, dtype)
    flat = [missing if x is None else x for x in np.array(given, object).ravel().tolist()]
    return np.array(flat, dtype).reshape(shape)
