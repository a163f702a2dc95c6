"""What a file says it unpacks to, looked up before anything of it is unpacked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, BinaryIO

__all__ = ["hdf5_size", "require_page_sizes"]

_HEADER = 1 << 16  # bytes, at most, of the head of a page
_MOST_PAGES = 1 << 16  # of one column of a row group
_MOST_PARTS = 1 << 16  # of an episode
_MOST_LEVELS = 32
_TYPE_SIZES = {1: 0, 2: 0, 3: 1, 7: 8}  # thrift: true, false, byte, double
_NUMBERS, _BYTES, _LISTS, _STRUCT = (4, 5, 6), 8, (9, 10), 12
_UNPACKED, _PACKED, _KINDS_OF_DATA = 2, 3, (5, 8)  # fields of a page's head


def require_page_sizes(file: BinaryIO, row_group: Any, values_per_row: Sequence[int], limit: int) -> None:
    """Looks at the head of each page of a row group of a Parquet file: what it says is what a reader sets aside.

    Args:
        file: open at any place; left at another.
        row_group: its metadata.
        values_per_row: of each column.
        limit: bytes that all pages together may unpack to.

    Raises:
        ValueError: they have more, or more values than there are rows for, or are none.
    """
    left = limit
    for number, per_row in enumerate(values_per_row):
        column = row_group.column(number)
        at = column.data_page_offset
        if column.dictionary_page_offset:
            at = min(at, column.dictionary_page_offset)
        end = at + column.total_compressed_size
        values, pages = row_group.num_rows * per_row, 0
        while at < end:
            file.seek(at)
            head, size = _struct(file.read(_HEADER), 0, _MOST_LEVELS)
            unpacked, packed = head.get(_UNPACKED), head.get(_PACKED)
            pages += 1
            if type(unpacked) is not int or type(packed) is not int or min(unpacked, packed) < 0 or pages > _MOST_PAGES:
                raise ValueError(f"the head of page {pages} of column {column.path_in_schema!r} is none")
            left -= unpacked
            if left < 0:
                raise ValueError(
                    f"its pages unpack to more than {limit} bytes; for logs that you trust, raise max_fragment_size"
                )
            for kind in _KINDS_OF_DATA:
                values -= max(0, head[kind].get(1, 0)) if isinstance(head.get(kind), dict) else 0
            if values < 0:
                raise ValueError(f"column {column.path_in_schema!r} has more values than {row_group.num_rows} rows")
            at += size + packed


def _struct(data: bytes, at: int, levels: int) -> tuple[dict[int, Any], int]:
    """A thrift struct in compact form: whole numbers and structs by field, and where it ends."""
    if not levels:
        raise ValueError("the head of a page is nested too deep")
    found: dict[int, Any] = {}
    field = 0
    try:
        while data[at]:
            kind, step = data[at] & 15, data[at] >> 4
            at += 1
            if step:
                field += step
            else:
                field, at = _number(data, at)
            found[field], at = _value(data, at, kind, levels)
    except IndexError:
        raise ValueError("the head of a page is cut, or too long") from None
    return found, at + 1


def _value(data: bytes, at: int, kind: int, levels: int) -> tuple[Any, int]:
    if kind in _NUMBERS:
        return _number(data, at)
    if kind == _STRUCT:
        return _struct(data, at, levels - 1)
    if kind == _BYTES:
        size, at = _varint(data, at)
        return None, at + size
    if kind in _LISTS:
        size, part = data[at] >> 4, data[at] & 15
        at += 1
        if size == 15:
            size, at = _varint(data, at)
        for _ in range(size):
            at = at + 1 if part in (1, 2) else _value(data, at, part, levels - 1)[1]
            if at >= len(data):
                raise IndexError
        return None, at
    if kind not in _TYPE_SIZES:
        raise ValueError(f"the head of a page has a field of type {kind}")
    return None, at + _TYPE_SIZES[kind]


def _number(data: bytes, at: int) -> tuple[int, int]:
    value, at = _varint(data, at)
    return (value >> 1) ^ -(value & 1), at


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value, at
        if shift > 63:
            raise ValueError("the head of a page has a number of more than 64 bits")


def hdf5_size(group: Any, size_of_object: int) -> int:
    """Bytes of all arrays in a group of an HDF5 file, also behind its links.

    Args:
        size_of_object: counted for each value that has no size of its own, such as a JPEG image.

    Raises:
        ValueError: more than 65536 parts, or groups within themselves.
    """
    total, groups, parts = 0, [group], 0
    while groups:
        group = groups.pop()
        for name in group:
            part = group[name]
            parts += 1
            if parts > _MOST_PARTS:
                raise ValueError(f"it has more than {_MOST_PARTS} arrays and groups")
            if hasattr(part, "keys"):
                groups.append(part)
            else:
                total += part.size * (size_of_object if part.dtype.hasobject else part.dtype.itemsize)
    return total
