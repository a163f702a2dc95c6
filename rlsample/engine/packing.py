"""Objects as one piece of bytes whose arrays can be used in place (pickle protocol 5, PEP 574).

The layout is: the pickle, then each array's bytes, every part on a multiple of 64.
"""

from __future__ import annotations

import io
import pickle
import types
from collections.abc import Sequence
from typing import Any, NamedTuple

import cloudpickle
import numpy as np

__all__ = ["Packed", "copy_into", "layout", "pack", "unpack"]

_ALIGN = 64


class Packed(NamedTuple):
    """A pickled object: the pickle and the memory of its arrays, not copied yet.

    Attributes:
        parts: what to write, in order.
        sizes: bytes of each part.
        offsets: where each part goes.
        total: bytes of the whole layout.
    """

    parts: list[Any]
    sizes: tuple[int, ...]
    offsets: tuple[int, ...]
    total: int


def pack(value: Any) -> Packed:
    """Pickles a value; contiguous arrays stay where they are, others are copied into the pickle.

    Functions and classes of ``__main__``, and of modules given to ``cloudpickle.register_pickle_by_value``, go by
    value: a fresh process need not import them.

    Raises:
        TypeError, pickle.PicklingError, AttributeError: something in it does not pickle.
    """
    try:
        # Modules that were registered with cloudpickle go by value too.
        plain = not cloudpickle.list_registry_pickle_by_value()
        stream, buffers = _dump(_PlainPickler if plain else cloudpickle.Pickler, value)
    except (_ByValue, pickle.PicklingError, AttributeError, TypeError):
        stream, buffers = _dump(cloudpickle.Pickler, value)
    parts = [stream.getbuffer(), *(buffer.raw() for buffer in buffers)]
    sizes = tuple(len(part) for part in parts)
    offsets, total = layout(sizes)
    return Packed(parts, sizes, offsets, total)


class _ByValue(Exception):
    """A function or class that another process cannot import."""


class _PlainPickler(pickle.Pickler):
    """Twice as fast as cloudpickle; gives up where only that will do."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, (type, types.FunctionType)) and value.__module__ == "__main__":
            raise _ByValue
        return NotImplemented


def _dump(pickler: Any, value: Any) -> tuple[io.BytesIO, list[pickle.PickleBuffer]]:
    stream, buffers = io.BytesIO(), list[pickle.PickleBuffer]()
    pickler(stream, protocol=5, buffer_callback=buffers.append).dump(value)
    return stream, buffers


def layout(sizes: Sequence[int]) -> tuple[tuple[int, ...], int]:
    """The offset of each part, and the bytes of all."""
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end += -(-size // _ALIGN) * _ALIGN
    return tuple(offsets), end


def copy_into(target: np.ndarray, packed: Packed) -> None:
    """Writes the parts into uint8 memory: the one copy on this side."""
    for part, size, offset in zip(packed.parts, packed.sizes, packed.offsets, strict=True):
        if size:
            target[offset : offset + size] = np.frombuffer(part, np.uint8)


def unpack(memory: memoryview, sizes: Sequence[int]) -> Any:
    """The value; its arrays are views of ``memory`` (and keep it alive), writable if that is."""
    offsets, _ = layout(sizes)
    first, *rest = [memory[offset : offset + size] for offset, size in zip(offsets, sizes, strict=True)]
    return pickle.loads(first, buffers=rest)
