"""Checks option values against the type of their settings field, from Python, JSON, TOML or a command line.

A settings field is annotated with int, float, bool, str, Any, ``X | None`` and other unions of these,
``tuple[X, ...]`` or ``Mapping[str, Any]``.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Mapping
from typing import Any

from rlsample.errors import ConfigError

__all__ = ["check_value", "describe", "field_types", "parse_text"]

_WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False, "none": None, "null": None}


def field_types(settings_class: type) -> dict[str, Any]:
    """Field name -> annotated type, in the order of the fields."""
    hints = typing.get_type_hints(settings_class)
    return {field.name: hints[field.name] for field in dataclasses.fields(settings_class)}


def check_value(name: str, value: Any, hint: Any) -> Any:
    """The value in the form the field wants: lists become tuples, whole numbers floats where a float is asked for.

    Raises:
        ConfigError: it is of another type; the message names option, value and type.
    """
    for kind in _alternatives(hint):
        ok, converted = _fit(value, kind)
        if ok:
            return converted
    raise ConfigError(f"option {name!r} must be {describe(hint)}, not {value!r}")


def parse_text(name: str, text: str, hint: Any) -> Any:
    """Reads a command line's word: ``true``, ``3``, ``1e-3``, ``none``, ``64,64`` for a tuple, JSON for a mapping.

    Raises:
        ConfigError: no reading fits the type.
    """
    kinds = _alternatives(hint)
    for kind in kinds:
        ok, converted = _fit(_read(text, kind), kind)
        if ok:
            return converted
    raise ConfigError(f"option {name!r} must be {describe(hint)}, not {text!r}")


def describe(hint: Any) -> str:
    """A type in plain words, such as ``a number or none``."""
    return " or ".join(dict.fromkeys(_describe_one(kind) for kind in _alternatives(hint)))


def _alternatives(hint: Any) -> list[Any]:
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        # str last: on a command line every other reading is more telling.
        return sorted(typing.get_args(hint), key=lambda kind: kind is str)
    return [hint]


def _fit(value: Any, kind: Any) -> tuple[bool, Any]:
    """Whether the value fits one plain type, and its converted form."""
    origin = typing.get_origin(kind) or kind
    if kind is Any:
        return True, value
    if kind is type(None):
        return value is None, None
    if kind is float:
        fits = isinstance(value, (int, float)) and not isinstance(value, bool)
        return fits, float(value) if fits else None
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool), value
    if origin is tuple:
        return _fit_tuple(value, typing.get_args(kind)[0])
    if origin in (dict, Mapping):
        return isinstance(value, Mapping), dict(value) if isinstance(value, Mapping) else None
    if origin is typing.Literal:
        return value in typing.get_args(kind), value
    return isinstance(value, origin), value


def _fit_tuple(value: Any, item_kind: Any) -> tuple[bool, Any]:
    if not isinstance(value, (list, tuple)):
        return False, None
    fitted = [_fit(item, item_kind) for item in value]
    return all(ok for ok, _ in fitted), tuple(item for _, item in fitted)


def _read(text: str, kind: Any) -> Any:
    """A word as the closest Python value for one plain type; the word itself if there is none."""
    origin = typing.get_origin(kind) or kind
    if kind is str or origin is typing.Literal:
        return text
    if origin is tuple:
        item_kind = typing.get_args(kind)[0]
        return [_read(item.strip(), item_kind) for item in text.split(",") if item.strip()]
    if kind in (bool, type(None)):
        return _WORDS.get(text.lower(), text)
    try:
        return json.loads(text) if origin in (dict, Mapping) or kind is Any else kind(text)
    except ValueError:
        return text


def _describe_one(kind: Any) -> str:
    origin = typing.get_origin(kind) or kind
    if origin is tuple:
        return f"a list of {_describe_one(typing.get_args(kind)[0]).split(' ', 1)[-1]}s"
    if origin is typing.Literal:
        return " or ".join(repr(choice) for choice in typing.get_args(kind))
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "none"}
    if kind in words:
        return words[kind]
    return "a mapping" if origin in (dict, Mapping) else "any value"
