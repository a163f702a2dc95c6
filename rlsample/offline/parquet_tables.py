"""A batch as an Arrow table, one row group of a Parquet file.

Every leaf is a column: ``rewards``, ``obs``, ``obs.camera``, ``actions[0]``. A leaf [N] is of its own type, a leaf
[N, a, b] a fixed-size list of a*b. ``next_obs`` is null where the next row's ``obs`` follows.
"""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np

from rlsample.errors import ConfigError, MissingExtraError
from rlsample.offline.json_lines import VERSION, require_like_obs
from rlsample.sample_batch import NEXT_OBS, OBS, NextObs, SampleBatch
from rlsample.tree import Tree

__all__ = ["from_table", "import_pyarrow", "size_of_rows", "to_table", "values_per_row"]

_FRAGMENT = "fragment"  # of the batch's lane fragments, the one a row is in
_MAX_FRAGMENTS = 1 << 24
_COLUMN, _EXTRA, _LANES = "column", "next_obs", "fragment_lengths"  # what a table's column is


def import_pyarrow() -> tuple[Any, Any]:
    """The modules ``pyarrow`` and ``pyarrow.parquet``.

    Raises:
        MissingExtraError: not installed.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise MissingExtraError("Parquet", "offline") from error
    return pyarrow, pyarrow.parquet


def to_table(batch: SampleBatch) -> Any:
    """The batch as a ``pyarrow.Table``; batches of equal columns have equal schemas.

    Raises:
        ConfigError: a column that Parquet cannot hold (use JSONL).
    """
    pa, _ = import_pyarrow()
    arrays: list[Any] = []
    fields: list[Any] = []

    def add(tree: Tree, path: list[str | int], role: str, at: Any = None) -> None:
        if isinstance(tree, (dict, tuple)):
            for key, part in tree.items() if isinstance(tree, dict) else enumerate(tree):
                if not isinstance(key, (str, int)) or isinstance(key, int) == isinstance(tree, dict):
                    raise ConfigError(f"column {_name(path)!r}: the Dict key {key!r} is no str; logs cannot hold it")
                add(part, [*path, key], role, at)
            return
        array = _array(pa, tree, _name(path))
        arrays.append(array if at is None else array.take(at))
        facts = {"role": role, "path": json.dumps(path), "shape": json.dumps(tree.shape[1:])}
        fields.append(pa.field(_name(path), array.type, metadata=facts))

    for name, column in batch.items():
        add(column, [name], _COLUMN)
    if batch.next_obs_source is not None and NEXT_OBS not in batch.keys():  # noqa: SIM118
        jumps = _jumps(batch)
        at = np.full(batch.count, -1)
        at[jumps] = np.arange(len(jumps))
        nulls = pa.array(at, pa.int64(), mask=at < 0)
        add(batch.next_obs_source.select(jumps, batch.get(OBS)).gather(None), [NEXT_OBS], _EXTRA, nulls)
    if batch.fragment_lengths is not None:
        lengths = batch.fragment_lengths
        add(np.repeat(np.arange(len(lengths)), lengths), [_FRAGMENT], _LANES)
    return pa.Table.from_arrays(arrays, schema=pa.schema(fields, metadata={"rlsample": str(VERSION)}))


def from_table(table: Any) -> SampleBatch:
    """The batch of one row group: columns as they were, fresh arrays. Where next_obs came from may be told otherwise.

    Raises:
        ValueError: the file was not written by :func:`to_table`, or by a newer version.
    """
    _require_ours(table.schema)
    parts: dict[str, list[tuple[list[Any], np.ndarray]]] = {_COLUMN: [], _EXTRA: [], _LANES: []}
    valid = np.zeros(0, bool)
    for field, column in zip(table.schema, table.columns, strict=True):
        about = {key.decode(): value.decode() for key, value in (field.metadata or {}).items()}
        path, shape, role = json.loads(about["path"]), json.loads(about["shape"]), about["role"]
        array = column.combine_chunks()
        if role == _EXTRA:
            valid = array.is_valid().to_numpy(zero_copy_only=False)
            array = array.drop_null()
        flat = array.flatten() if shape else array
        values = np.array(flat.to_numpy(zero_copy_only=False))
        parts[role].append((path, values.reshape(len(array), *shape)))
    columns = _tree(parts[_COLUMN]) if parts[_COLUMN] else {}
    nxt = None
    if parts[_EXTRA]:
        index = np.arange(1, table.num_rows + 1)
        index[valid] = -1 - np.arange(int(valid.sum()))
        nxt = NextObs(index, _tree(parts[_EXTRA])[NEXT_OBS])
    lengths = None
    if parts[_LANES]:
        fragment = parts[_LANES][0][1]
        if fragment.max(initial=0) > _MAX_FRAGMENTS:
            raise ValueError(f"fragment {fragment.max()} of a row group")
        lengths = np.bincount(fragment)
    batch = SampleBatch(columns, nxt, lengths)
    if nxt is not None:
        require_like_obs(nxt.extra, batch[OBS])
    return batch


def size_of_rows(schema: Any, num_rows: int) -> int:
    """Bytes of so many rows of a Parquet file of ours.

    Raises:
        ValueError: it is no such file, or has a column whose values have no fixed size.
    """
    _require_ours(schema)
    width = 0
    for field, count in zip(schema, values_per_row(schema), strict=True):
        kind = field.type.value_type if hasattr(field.type, "list_size") else field.type
        try:
            width += count * -(-kind.bit_width // 8)
        except ValueError:
            raise ValueError(f"column {field.name!r} is of type {field.type}, which no rlsample wrote") from None
    return width * num_rows


def values_per_row(schema: Any) -> list[int]:
    """How many values a row has in each column."""
    return [getattr(field.type, "list_size", 1) for field in schema]


def _require_ours(schema: Any) -> None:
    if (schema.metadata or {}).get(b"rlsample") != str(VERSION).encode():
        raise ValueError(f"no Parquet file of rlsample version {VERSION}")


def _name(path: list[str | int]) -> str:
    return str(path[0]) + "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path[1:])


def _array(pa: Any, leaf: np.ndarray, name: str) -> Any:
    width = math.prod(leaf.shape[1:])
    if leaf.dtype.kind not in "biuf" or leaf.dtype.itemsize > 8 or not width:
        raise ConfigError(f"column {name!r}: Parquet cannot hold {leaf.dtype}{list(leaf.shape[1:])}; use jsonl")
    flat = np.ascontiguousarray(leaf, leaf.dtype.newbyteorder("=")).reshape(-1)
    values = pa.array(flat)
    return pa.FixedSizeListArray.from_arrays(values, width) if leaf.ndim > 1 else values


def _jumps(batch: SampleBatch) -> np.ndarray:
    """int64: rows whose next observation is not that of the next row of this batch."""
    nxt = batch.next_obs_source
    assert nxt is not None
    if nxt.source is not None:
        return np.arange(batch.count)
    return np.flatnonzero(nxt.index != np.arange(1, batch.count + 1))


def _tree(leaves: list[tuple[list[Any], np.ndarray]]) -> Any:
    """The tree of leaves by path: a str is a Dict's key, an int a Tuple's index."""
    if len(leaves) == 1 and not leaves[0][0]:
        return leaves[0][1]
    groups: dict[Any, list[tuple[list[Any], np.ndarray]]] = {}
    for path, leaf in leaves:
        groups.setdefault(path[0], []).append((path[1:], leaf))
    found = {key: _tree(group) for key, group in groups.items()}
    return tuple(found.values()) if isinstance(next(iter(found)), int) else found
