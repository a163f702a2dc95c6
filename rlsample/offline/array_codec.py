"""Trees of arrays as JSON, bit for bit and without pickle.

An array is ``{"dtype": "float32", "shape": [3, 2], "zlib": "<base64>"}``: its bytes in C order, little-endian,
compressed. A Dict is ``{"dict": {key: tree}}``, a Tuple ``{"tuple": [tree]}``.
"""

from __future__ import annotations

import base64
import math
import zlib
from typing import Any

import numpy as np

from rlsample.errors import ConfigError
from rlsample.tree import Tree

__all__ = ["MAX_FRAGMENT_SIZE", "ByteBudget", "decode_tree", "encode_tree"]

_KINDS = "biufcSU"  # what numpy stores as plain bytes
_MAX_DEPTH = 32

MAX_FRAGMENT_SIZE = 512 << 20
"""Bytes that the arrays of a fragment may have, unless a reader is told otherwise."""


class ByteBudget:
    """How many bytes of arrays a fragment may still have.

    Args:
        max_fragment_size: all of them.
    """

    def __init__(self, max_fragment_size: int = MAX_FRAGMENT_SIZE) -> None:
        self._total = self._left = max_fragment_size

    def spend(self, size: int) -> None:
        """Takes note of an array. Raises ValueError, if it is too much."""
        if size > self._left:
            raise ValueError(
                f"its arrays have more than {self._total} bytes; for logs that you trust, raise max_fragment_size"
            )
        self._left -= size


def encode_tree(tree: Tree, name: str, level: int = 1) -> dict[str, Any]:
    """The tree as a JSON document.

    Args:
        name: of the column, for errors.
        level: of zlib, 0 (stored) to 9.

    Raises:
        ConfigError: a dtype without a fixed size in bytes, or a Dict key that is no str.
    """
    if isinstance(tree, dict):
        for key in tree:
            if not isinstance(key, str):
                raise ConfigError(f"column {name!r}: the Dict key {key!r} is no str; logs cannot hold it")
        return {"dict": {key: encode_tree(part, f"{name}.{key}", level) for key, part in tree.items()}}
    if isinstance(tree, tuple):
        return {"tuple": [encode_tree(part, f"{name}[{i}]", level) for i, part in enumerate(tree)]}
    array = np.asarray(tree)
    if array.dtype.kind not in _KINDS:
        raise ConfigError(f"column {name!r}: dtype {array.dtype} has no fixed size in bytes; logs cannot hold it")
    data = np.ascontiguousarray(array)
    if array.dtype.str[0] == ">":  # bytes of one order on disk, the dtype says which it was
        data = data.byteswap()
    dtype = array.dtype.name if array.dtype.kind in "biufc" and array.dtype.isnative else array.dtype.str
    packed = base64.b64encode(zlib.compress(data.tobytes(), level)).decode("ascii")
    return {"dtype": dtype, "shape": list(array.shape), "zlib": packed}


def decode_tree(document: Any, budget: ByteBudget | None = None, depth: int = 0) -> Tree:
    """The tree of a document: fresh, writable arrays.

    Never unpacks more bytes than dtype and shape ask for, and nothing beyond the budget.

    Args:
        budget: shared by the trees of a fragment; None: one of its own.

    Raises:
        ValueError: not a document of :func:`encode_tree`, or a damaged one.
    """
    budget = budget or ByteBudget()
    if not isinstance(document, dict) or depth > _MAX_DEPTH:
        raise ValueError(f"expected an array, dict or tuple, got {type(document).__name__}")
    if isinstance(document.get("dict"), dict):
        return {key: decode_tree(part, budget, depth + 1) for key, part in document["dict"].items()}
    if isinstance(document.get("tuple"), list):
        return tuple(decode_tree(part, budget, depth + 1) for part in document["tuple"])
    try:
        dtype, shape, packed = np.dtype(str(document["dtype"])), tuple(document["shape"]), document["zlib"]
    except (KeyError, TypeError, SyntaxError) as error:  # numpy parses a dtype of several parts as Python
        raise ValueError(f"not an array: {error}") from error
    if dtype.kind not in _KINDS:
        raise ValueError(f"dtype {dtype} is none that logs hold")
    if not all(isinstance(size, int) and size >= 0 for size in shape):
        raise ValueError(f"shape {shape} is no shape")
    expected = math.prod(shape) * dtype.itemsize
    budget.spend(expected)
    unpack = zlib.decompressobj()
    try:
        data = unpack.decompress(base64.b64decode(packed, validate=True), expected + 1)
    except (zlib.error, ValueError, TypeError, OverflowError) as error:
        raise ValueError(f"damaged data: {error}") from error
    if len(data) != expected or not unpack.eof:  # eof: the checksum was there and right
        raise ValueError(f"damaged data: not the {expected} bytes of {dtype}{list(shape)}")
    array = np.frombuffer(bytearray(data), dtype).reshape(shape)
    return array.byteswap() if dtype.str[0] == ">" else array
