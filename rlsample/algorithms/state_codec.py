"""Nested state as JSON and plain arrays, exact and without pickle.

A state is made of dicts, lists, tuples, None, bool, int of any size, float, str, bytes, numpy scalars and numpy arrays
of any dtype that holds no objects. :func:`encode` splits it into a JSON document and a flat dict of arrays; what JSON
cannot say is a one-key object whose key starts with ``$``:

    {"$array": "a3"}    the array of that name             {"$scalar": "a4"}   a numpy scalar, kept as a 0-d array
    {"$bytes": "a5"}    bytes, kept as uint8[len]          {"$tuple": [...]}   a tuple
    {"$float": "nan"}   nan, inf or -inf                   {"$dict": [[k, v]]} keys that are no str, or start with $
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from rlsample.errors import CheckpointError

__all__ = ["decode", "encode"]

Arrays = dict[str, np.ndarray]


def encode(state: Any) -> tuple[Any, Arrays]:
    """Splits a state into a JSON-ready document and the arrays it names.

    The arrays are the state's own (no copy): write them out before the state changes.

    Raises:
        CheckpointError: a value of another kind; the message says where it is.
    """
    arrays: Arrays = {}
    return _encode(state, "state", arrays), arrays


def decode(document: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    """The inverse of :func:`encode`: equal values, types, dtypes and shapes."""
    if isinstance(document, list):
        return [decode(item, arrays) for item in document]
    if not isinstance(document, dict):
        return document
    if len(document) == 1:
        ((key, value),) = document.items()
        if key.startswith("$"):
            return _decode_tagged(key, value, arrays)
    return {key: decode(value, arrays) for key, value in document.items()}


def _encode(value: Any, path: str, arrays: Arrays) -> Any:
    if isinstance(value, np.generic):
        return {"$scalar": _store(np.asarray(value), path, arrays)}
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": str(value)}
    if isinstance(value, np.ndarray):
        return {"$array": _store(value, path, arrays)}
    if isinstance(value, (bytes, bytearray)):
        return {"$bytes": _store(np.frombuffer(value, np.uint8), path, arrays)}
    if isinstance(value, list):
        return [_encode(item, f"{path}[{i}]", arrays) for i, item in enumerate(value)]
    if isinstance(value, tuple):
        return {"$tuple": [_encode(item, f"{path}[{i}]", arrays) for i, item in enumerate(value)]}
    if isinstance(value, Mapping):
        pairs = [(key, _encode(item, f"{path}.{key}", arrays)) for key, item in value.items()]
        if all(isinstance(key, str) and not key.startswith("$") for key, _ in pairs):
            return dict(pairs)
        return {"$dict": [[_encode(key, f"{path}, key {key!r}", arrays), item] for key, item in pairs]}
    raise CheckpointError(
        f"{path} is a {type(value).__name__}; a checkpoint holds dicts, lists, tuples, numbers, text, bytes and arrays"
    )


def _store(array: np.ndarray, path: str, arrays: Arrays) -> str:
    if array.dtype.hasobject:
        raise CheckpointError(
            f"{path} is an array of Python objects ({array.dtype}); give it a numeric or string dtype"
        )
    name = f"a{len(arrays)}"
    arrays[name] = array
    return name


def _decode_tagged(tag: str, value: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    if tag == "$array":
        return arrays[value]
    if tag == "$scalar":
        return arrays[value][()]
    if tag == "$bytes":
        return arrays[value].tobytes()
    if tag == "$float":
        return float(value)
    if tag == "$tuple":
        return tuple(decode(item, arrays) for item in value)
    if tag == "$dict":
        return {decode(key, arrays): decode(item, arrays) for key, item in value}
    raise CheckpointError(f"unknown tag {tag!r}: written by a newer version of rlsample?")
