"""Settings are small frozen dataclasses; each field carries its own help text.

``docs/config.md``, the command line and the error messages are made from these fields, so nothing is written twice.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

from rlsample.errors import ConfigError, unknown_name

__all__ = ["check_at_least", "from_options", "option", "option_help", "to_dict"]

S = TypeVar("S")


def option(default: Any, help: str) -> Any:
    """A dataclass field with a default and one line of help."""
    metadata = {"help": help}
    if isinstance(default, (dict, list)):
        return dataclasses.field(default_factory=lambda: type(default)(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def option_help(field: dataclasses.Field[Any]) -> str:
    """The help text given to :func:`option`."""
    return str(field.metadata.get("help", ""))


def check_at_least(settings: Any, least: Mapping[str, int]) -> None:
    """ConfigError for a field below its least value."""
    for name, smallest in least.items():
        if not getattr(settings, name) >= smallest:
            raise ConfigError(f"{name} must be at least {smallest}, not {getattr(settings, name)}")


def from_options(cls: type[S], options: Mapping[str, Any]) -> S:
    """Builds settings from a mapping.

    Raises:
        ConfigError: an unknown name (the nearest valid one is named), or a value ``__post_init__`` refuses.
    """
    valid = {f.name for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for name in options:
        if name not in valid:
            raise unknown_name("option", name, valid)
    return cls(**options)


def to_dict(settings: Any) -> dict[str, Any]:
    """The fields as a plain dict, ready for JSON."""
    return dataclasses.asdict(settings)
