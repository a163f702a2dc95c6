"""The fields of each request body. Unknown fields and wrong types are refused when a body is decoded."""

from __future__ import annotations

from typing import Any

from rlsample.serving.wire import JSON, MSGPACK, decoder

try:
    from msgspec import Struct
except ImportError as e:
    from rlsample.errors import MissingExtraError

    raise MissingExtraError("rlsample.serving", "serve") from e

__all__ = ["BODIES", "DECODERS"]


class _Start(Struct, forbid_unknown_fields=True):
    episode_id: str | None = None
    training_enabled: bool = True


class _Action(Struct, forbid_unknown_fields=True):
    obs: Any
    t: int | None = None
    reward: float | None = None


class _LogAction(Struct, forbid_unknown_fields=True):
    obs: Any
    action: Any
    action_logp: float | None = None
    t: int | None = None
    reward: float | None = None


class _Returns(Struct, forbid_unknown_fields=True):
    reward: float
    info: dict[str, Any] | None = None
    t: int | None = None


class _End(Struct, forbid_unknown_fields=True):
    obs: Any
    truncated: bool = False
    reward: float | None = None
    t: int | None = None


class _Actions(Struct, forbid_unknown_fields=True):
    episode_ids: list[str]
    obs: Any
    rewards: list[float] | None = None


class _Act(Struct, forbid_unknown_fields=True):
    obs: Any


class _Fragment(Struct, forbid_unknown_fields=True):
    episode_id: str
    rows: dict[str, Any]
    policy_version: int = 0
    t: int | None = None
    final_obs: Any = None
    truncated: bool = False


BODIES: dict[str, Any] = {
    "start": _Start,
    "action": _Action,
    "log_action": _LogAction,
    "returns": _Returns,
    "end": _End,
    "actions": _Actions,
    "act": _Act,
    "fragments": _Fragment,
}
"""Call -> its body."""

DECODERS: dict[str, dict[str, Any]] = {
    media_type: {call: decoder(media_type, body) for call, body in BODIES.items()} for media_type in (JSON, MSGPACK)
}
"""Media type -> call -> ``decode(bytes)``, which raises WireError."""
