"""Bodies of requests and answers: JSON and msgpack, arrays with dtype and shape, and nothing that runs code.

An array is a nested list, or in JSON ``{"__array__": base64 of its bytes, "dtype": "<f4", "shape": [2, 3]}``, or in
msgpack the extension type 42 that holds a msgpack list of dtype, shape and bytes. Bytes are in C order. Only numbers
and bools.
"""

from __future__ import annotations

import base64
import binascii
import math
import re
from typing import Any

import numpy as np

from rlsample.errors import MissingExtraError

try:
    import msgspec
except ImportError as e:
    raise MissingExtraError("rlsample.serving", "serve") from e

__all__ = [
    "ARRAY_EXT",
    "ARRAY_KEY",
    "JSON",
    "MAX_DEPTH",
    "MSGPACK",
    "WireError",
    "array_of_json",
    "array_to_json",
    "decoder",
    "encode",
]

JSON, MSGPACK = "application/json", "application/msgpack"
ARRAY_EXT, ARRAY_KEY = 42, "__array__"
MAX_DEPTH = 32
# A string without an end matches, too: else each quote in it would be tried as the beginning of one.
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*(?:"|\\?\Z)', re.DOTALL)
_OPEN, _CLOSE = b"[{", b"]}"


class WireError(ValueError):
    """A body that is not what it says: cause, and where."""


# ---------------------------------------------------------------------- decoding


def decoder(media_type: str, body_type: Any = Any) -> Any:
    """``decode(bytes) -> value`` for a media type.

    Args:
        media_type: :data:`JSON` or :data:`MSGPACK`.
        body_type: what msgspec shall decode to: a Struct checks names and types of fields.

    The function raises WireError: no valid body, nested deeper than :data:`MAX_DEPTH`, or not of the type.
    """
    if media_type == JSON:
        decode_json = msgspec.json.Decoder(body_type).decode

        def of_json(body: bytes) -> Any:
            if body.count(b"[") + body.count(b"{") > MAX_DEPTH:
                _check_json_depth(body)
            return _decoded(decode_json, body)

        return of_json
    decode_msgpack = msgspec.msgpack.Decoder(body_type, ext_hook=_array_of_ext).decode

    def of_msgpack(body: bytes) -> Any:
        value = _decoded(decode_msgpack, body)
        _check_depth(value, MAX_DEPTH)
        return value

    return of_msgpack


def _decoded(decode: Any, body: bytes) -> Any:
    try:
        return decode(body)
    except WireError:
        raise
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError, MemoryError, OverflowError) as e:
        raise WireError(f"the body cannot be read: {str(e)[:200] or type(e).__name__}") from None


def _check_json_depth(body: bytes) -> None:
    rest = _STRING.sub(b"", body) if b'"' in body else body
    codes = np.frombuffer(rest, np.uint8)
    opens = (codes == _OPEN[0]) | (codes == _OPEN[1])
    closes = (codes == _CLOSE[0]) | (codes == _CLOSE[1])
    steps = opens.astype(np.int8) - closes.astype(np.int8)
    if len(steps) and int(np.cumsum(steps, dtype=np.int64).max()) > MAX_DEPTH:
        raise WireError(f"the body is nested deeper than {MAX_DEPTH} levels")


def _check_depth(value: Any, left: int) -> None:
    level = [value]
    while level:
        below: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                below += item.values()
            elif isinstance(item, (list, tuple)):
                below += [x for x in item if isinstance(x, (dict, list))]
            elif isinstance(item, msgspec.Struct):
                left += 1  # a Struct is the body itself, counted with its fields
                below += [getattr(item, name) for name in item.__struct_fields__]
        if left == 0 and any(isinstance(x, (dict, list)) for x in level):
            raise WireError(f"the body is nested deeper than {MAX_DEPTH} levels")
        left -= 1
        level = below


def _array_of_ext(code: int, data: memoryview) -> np.ndarray:
    if code != ARRAY_EXT:
        raise WireError(f"msgpack extension type {code} is unknown; arrays are type {ARRAY_EXT}")
    dtype, shape, content = _decoded(_EXT_DECODER.decode, bytes(data))
    return _array(dtype, shape, content)


def array_of_json(value: dict[str, Any]) -> np.ndarray:
    """The array of a JSON object with :data:`ARRAY_KEY`. Read-only.

    Raises:
        WireError: a missing or superfluous field, a dtype that is no number, a shape that does not fit the bytes.
    """
    if set(value) != {ARRAY_KEY, "dtype", "shape"}:
        raise WireError(f"an array has the fields {ARRAY_KEY}, dtype and shape, got {sorted(map(str, value))[:6]}")
    try:
        content = base64.b64decode(value[ARRAY_KEY], validate=True)
    except (binascii.Error, TypeError, ValueError) as e:
        raise WireError(f"{ARRAY_KEY} is no base64: {e}") from None
    return _array(value["dtype"], value["shape"], content)


def _array(dtype: Any, shape: Any, content: bytes) -> np.ndarray:
    if not isinstance(dtype, str) or not re.fullmatch(r"[<>|=]?[biuf][1248]", dtype):
        raise WireError(f"the dtype {str(dtype)[:20]!r} is not allowed; one such as '<f4', '|u1', '<i8' is")
    if not isinstance(shape, (list, tuple)) or len(shape) > MAX_DEPTH:
        raise WireError("the shape of an array is a list of at most 32 numbers")
    if any(type(n) is not int or n < 0 for n in shape):
        raise WireError(f"the shape of an array holds whole numbers from 0 on, got {str(shape)[:60]}")
    try:
        kind = np.dtype(dtype)
    except TypeError:
        raise WireError(f"there is no dtype {dtype!r}") from None
    if kind.itemsize * math.prod(shape) != len(content):
        raise WireError(f"an array of {dtype} and shape {str(list(shape))[:60]} has not {len(content)} bytes")
    try:
        array = np.frombuffer(content, kind).reshape(shape)
    except (ValueError, OverflowError) as e:  # no bytes, and one axis that is huge beside one that is 0
        raise WireError(f"there is no array of shape {str(list(shape))[:60]}: {e}") from None
    return array if kind.isnative else array.astype(kind.newbyteorder("="))


# ---------------------------------------------------------------------- encoding


def array_to_json(array: np.ndarray) -> dict[str, Any]:
    """The compact JSON form of an array."""
    array = np.ascontiguousarray(array)
    content = base64.b64encode(array.tobytes()).decode("ascii")
    return {ARRAY_KEY: content, "dtype": array.dtype.str, "shape": list(array.shape)}


def encode(value: Any, media_type: str) -> bytes:
    """A body. Arrays become nested lists in JSON, extension 42 in msgpack; numpy scalars become numbers."""
    return _JSON_ENCODER.encode(value) if media_type == JSON else _MSGPACK_ENCODER.encode(value)


def _to_plain(value: Any) -> Any:
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} has no place in a body")


def _to_ext(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        array = np.ascontiguousarray(value).reshape(value.shape)  # a 0-d array would come back with one axis
        content = (array.dtype.str, array.shape, array.tobytes())
        return msgspec.msgpack.Ext(ARRAY_EXT, msgspec.msgpack.encode(content))
    return _to_plain(value)


_EXT_DECODER = msgspec.msgpack.Decoder(tuple[str, list[int], bytes])
_JSON_ENCODER = msgspec.json.Encoder(enc_hook=_to_plain)
_MSGPACK_ENCODER = msgspec.msgpack.Encoder(enc_hook=_to_ext)
