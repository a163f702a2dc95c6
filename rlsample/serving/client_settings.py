"""How a policy client talks, waits and acts."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rlsample.errors import ConfigError, unknown_name
from rlsample.settings import option

__all__ = ["ClientSettings"]

_CHOICES = {"form": ("json", "msgpack"), "inference": ("local", "remote")}


@dataclass(frozen=True)
class ClientSettings:
    """Options of :class:`~rlsample.serving.policy_client.PolicyClient` and its async twin.

    Raises:
        ConfigError: a value that cannot work.
    """

    form: str = option("msgpack", "how values travel: msgpack or json")
    timeout_s: float = option(60.0, "seconds a call may take, all its tries together")
    try_timeout_s: float = option(15.0, "seconds without an answer after which a call is tried again; counted once")
    backoff_s: float = option(0.1, "seconds before the second try; doubles with each, up to 5, unless Retry-After says")
    inference: str = option("remote", "remote: each action is asked for; local: weights are pulled, rows uploaded")
    update_interval_s: float = option(10.0, "local: seconds after which the weights are looked up again")
    fragment_rows: int = option(200, "local: rows of an episode that are uploaded at once, at most")
    seed: int | None = option(None, "local: of the exploration; null: from the operating system")

    def __post_init__(self) -> None:
        for name, known in _CHOICES.items():
            if getattr(self, name) not in known:
                raise unknown_name(name, str(getattr(self, name)), known)
        for name in ("timeout_s", "try_timeout_s", "backoff_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name} must be a finite number above 0, got {getattr(self, name)!r}")
        if not self.update_interval_s >= 0:
            raise ConfigError(f"update_interval_s must be 0 or more, got {self.update_interval_s!r}")
        if isinstance(self.fragment_rows, bool) or not isinstance(self.fragment_rows, int) or self.fragment_rows < 1:
            raise ConfigError(f"fragment_rows must be an int of at least 1, got {self.fragment_rows!r}")
