"""What an env returned: checked, then written into columns."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np

from rlsample.env.columns import LeafSpec, check_observation_space, is_member, join_path, leaf_spec
from rlsample.errors import EnvFailedError, SpaceError
from rlsample.tree import Tree, flatten

__all__ = ["ObsWriter", "check_finite", "coerce_reward", "nonfinite_rows"]


class ObsWriter:
    """Writes one env's observation into a row of preallocated columns.

    Args:
        any_size: allow leaves without a fixed size: columns of objects, whose values must be in their space.

    Attributes:
        shape: the shape of a single-array space, else None (Dict, Tuple, no fixed size). With ``dtype`` a caller can
            inline the usual case: ``type(obs) is np.ndarray and obs.shape == w.shape and obs.dtype == w.dtype`` allows
            ``column[row] = obs`` without a call.
        dtype: the dtype of a single-array space, else None.
    """

    def __init__(self, space: gymnasium.Space[Any], any_size: bool = False) -> None:
        check_observation_space(space, any_size)
        self._spec = leaf_spec(space)
        single = isinstance(self._spec, LeafSpec) and self._spec.space is None
        self.shape: tuple[int, ...] | None = self._spec.shape if single else None
        self.dtype: np.dtype[Any] | None = self._spec.dtype if single else None

    def write(self, target: Tree, row: int, obs: Any, slot: int, episode_step: int | None) -> None:
        """Copies ``obs`` into row ``row`` of ``target`` (tree [K, ...] in the space's dtypes).

        A dtype may differ from the space's if it is narrower (uint8 for int64), of the same kind (float64 for float32,
        which Gymnasium's own envs return), or a Python number or list. Bounds are not checked.

        Values without a fixed size are copied deeply.

        Raises:
            EnvFailedError: wrong structure, shape or kind of dtype, or a value without a fixed size that is not in its
                space; names slot, step, path, what came and what was expected. The row may then be partly written.
        """
        if type(obs) is np.ndarray and obs.shape == self.shape and obs.dtype == self.dtype:
            target[row] = obs
        else:
            _write(target, row, obs, self._spec, ("", slot, episode_step))

    def copy_batch(self, obs: Any, num_rows: int, copy: bool = True) -> Tree:
        """A batch of observations as a tree [num_rows, ...] in the space's dtypes.

        Args:
            obs: tree of arrays (or nested lists) [num_rows, ...]; dtypes may differ as in :meth:`write`.
            copy: False lets arrays that already fit pass through, for a source that never writes to them again.

        Raises:
            SpaceError: wrong structure, shape or kind of dtype; names the path, what came and what was expected.
        """
        fits = type(obs) is np.ndarray and obs.dtype == self.dtype and self.shape is not None
        if fits and obs.shape == (num_rows, *self.shape):  # type: ignore[misc]
            return obs.copy() if copy else obs
        return _copy_batch(obs, self._spec, num_rows, "", copy)


def _copy_batch(obs: Any, spec: Tree, num_rows: int, path: str, copy: bool) -> Tree:
    where = f"observations{f' at {path}' if path else ''}"
    if isinstance(spec, dict):
        if not isinstance(obs, Mapping) or set(obs) != set(spec):
            got = f"keys {list(obs)}" if isinstance(obs, Mapping) else type(obs).__name__
            raise SpaceError(f"{where} are {got}, expected a dict with keys {list(spec)}")
        return {k: _copy_batch(obs[k], s, num_rows, join_path(path, k), copy) for k, s in spec.items()}
    if isinstance(spec, tuple):
        if not isinstance(obs, (tuple, list)) or len(obs) != len(spec):
            raise SpaceError(f"{where} are {type(obs).__name__}, expected a tuple of {len(spec)} batches")
        parts = zip(obs, spec, strict=True)
        return tuple(_copy_batch(o, s, num_rows, join_path(path, i), copy) for i, (o, s) in enumerate(parts))
    try:
        array = _as_leaf(obs, LeafSpec((num_rows, *spec.shape), spec.dtype), (path, 0, None))
    except EnvFailedError as e:
        raise SpaceError(str(e).partition(": ")[2]) from e.__cause__
    return array.astype(spec.dtype, order="C", copy=copy)


def _write(target: Tree, row: int, obs: Any, spec: Tree, at: tuple[str, int, int | None]) -> None:
    path, slot, step = at
    if isinstance(spec, dict):
        if not isinstance(obs, Mapping) or len(obs) != len(spec) or any(k not in obs for k in spec):
            got = f"keys {list(obs)}" if isinstance(obs, Mapping) else type(obs).__name__
            raise _bad_obs(at, got, f"a dict with keys {list(spec)}")
        for k, sub in spec.items():
            _write(target[k], row, obs[k], sub, (join_path(path, k), slot, step))
    elif isinstance(spec, tuple):
        if not isinstance(obs, (tuple, list)) or len(obs) != len(spec):
            size = f" of {len(obs)}" if isinstance(obs, (tuple, list)) else ""
            raise _bad_obs(at, f"{type(obs).__name__}{size}", f"a tuple of {len(spec)}")
        for i, sub in enumerate(spec):
            _write(target[i], row, obs[i], sub, (join_path(path, i), slot, step))
    elif spec.space is None:
        target[row] = _as_leaf(obs, spec, at)
    elif is_member(spec.space, obs):
        target[row] = copy.deepcopy(obs)
    else:
        raise _bad_obs(at, f"{repr(obs)[:200]} ({type(obs).__name__})", f"a value in {spec.space}")


def _as_leaf(obs: Any, spec: LeafSpec, at: tuple[str, int, int | None]) -> np.ndarray:
    literal = isinstance(obs, (bool, int, float, list, tuple))
    try:
        array = np.asarray(obs)
    except (ValueError, TypeError) as e:
        raise _bad_obs(at, f"{type(obs).__name__} ({e})", _describe(spec)) from e
    if array.shape != spec.shape or array.dtype.kind not in "biuf":
        got = type(obs).__name__ if array.dtype.kind not in "biuf" else f"shape {array.shape} of {array.dtype}"
        raise _bad_obs(at, got, _describe(spec))
    want = spec.dtype
    if array.dtype == want or np.can_cast(array.dtype, want, "safe"):
        return array
    if want.kind == "f" and (array.dtype.kind == "f" or (literal and array.dtype.kind in "iu")):
        return array
    if want.kind in "iu" and (array.dtype.kind == want.kind or (literal and array.dtype.kind in "iu")):
        limits = np.iinfo(want)
        if not array.size or (array.min() >= limits.min and array.max() <= limits.max):
            return array
        raise _bad_obs(at, f"{array.dtype} values up to {array.max()} and down to {array.min()}", _describe(spec))
    raise _bad_obs(at, f"shape {array.shape} of {array.dtype}", _describe(spec))


def _describe(spec: LeafSpec) -> str:
    return f"shape {spec.shape} of {spec.dtype}"


def _bad_obs(at: tuple[str, int, int | None], got: str, expected: str) -> EnvFailedError:
    path, slot, step = at
    where = f" at {path}" if path else ""
    return EnvFailedError(
        f"slot {slot}{_at_step(step)}: observation{where} is {got}, expected {expected}", slot=slot, episode_step=step
    )


def _at_step(step: int | None) -> str:
    return "" if step is None else f", episode step {step}"


def nonfinite_rows(tree: Tree) -> list[tuple[int, str, float]]:
    """``(row, path, first bad value)`` for each row of the float leaves [K, ...] that holds NaN or inf.

    One dot product over a leaf that is all finite; rows in order, each once. Of objects: the floats within them.
    """
    if type(tree) is np.ndarray and tree.dtype.kind != "O":
        if tree.dtype.kind != "f":
            return []
        # A sum of squares is finite only if each is; huge x may overflow it, hence the exact check. vdot never warns.
        if math.isfinite(np.vdot(tree, tree)):
            return []
    found: dict[int, tuple[int, str, float]] = {}
    for path, leaf in flatten(tree):
        if leaf.dtype.kind == "O":
            for row, value in enumerate(leaf):
                for bad_value in _nonfinite_in(value):
                    found.setdefault(row, (row, path, bad_value))
        if leaf.dtype.kind != "f":
            continue
        bad = ~np.isfinite(leaf)
        if bad.any():
            for index in np.argwhere(bad):
                row = int(index[0])
                found.setdefault(row, (row, path, float(leaf[tuple(index)])))
    return [found[row] for row in sorted(found)]


def _nonfinite_in(value: Any) -> Iterator[float]:
    """NaN and inf among the floats and arrays of nested containers."""
    if isinstance(value, (float, np.floating)):
        if not math.isfinite(value):
            yield float(value)
    elif isinstance(value, np.ndarray):
        if value.dtype.kind == "f":
            yield from value[~np.isfinite(value)].ravel().tolist()
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _nonfinite_in(part)
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _nonfinite_in(part)


def check_finite(
    obs: Tree, env_ids: Sequence[int] | np.ndarray, episode_steps: Sequence[int] | np.ndarray | None = None
) -> None:
    """Raises EnvFailedError for the first row of ``obs`` [K, ...] with NaN or inf; names slot, step, path and value.

    Args:
        env_ids: int[K], the slot of each row.
        episode_steps: int[K], for the message.
    """
    bad = nonfinite_rows(obs)
    if bad:
        row, path, value = bad[0]
        slot = int(env_ids[row])
        step = None if episode_steps is None else int(episode_steps[row])
        where = f" at {path}" if path else ""
        raise EnvFailedError(
            f"slot {slot}{_at_step(step)}: observation{where} holds {value}; mend the env, or set allow_nonfinite=True",
            slot=slot,
            episode_step=step,
        )


def coerce_reward(value: Any, slot: int, episode_step: int | None, allow_nonfinite: bool = False) -> float:
    """The reward as a float: from an int, a float, a numpy scalar, or an array of shape () or (1,).

    Raises:
        EnvFailedError: any other type or shape, and NaN or inf unless ``allow_nonfinite``; names them.
    """
    if type(value) is float:
        reward = value
    elif isinstance(value, (int, float, np.number, np.bool_)) and not isinstance(value, np.complexfloating):
        reward = float(value)
    else:
        array = np.asarray(value) if hasattr(value, "__array__") else None
        if array is None or array.shape not in ((), (1,)) or array.dtype.kind not in "biuf":
            got = type(value).__name__ if array is None else f"of shape {array.shape} and dtype {array.dtype}"
            shown = repr(value)[:80]
            raise EnvFailedError(
                f"slot {slot}{_at_step(episode_step)}: the reward {shown} is {got}, expected one number",
                slot=slot,
                episode_step=episode_step,
            )
        reward = float(array.reshape(()))
    if not math.isfinite(reward) and not allow_nonfinite:
        raise EnvFailedError(
            f"slot {slot}{_at_step(episode_step)}: the reward is {reward}; mend the env, or set allow_nonfinite=True",
            slot=slot,
            episode_step=episode_step,
        )
    return reward
