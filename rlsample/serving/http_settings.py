"""Where and how a policy is served over HTTP."""

from __future__ import annotations

import ipaddress
import math
from dataclasses import dataclass
from typing import Any

import gymnasium

from rlsample.env.spaces import leaf_spec
from rlsample.errors import ConfigError
from rlsample.settings import option
from rlsample.tree import leaves

__all__ = ["HttpSettings", "is_loopback"]

_LEAST_BODY = 1 << 20
_BYTES_PER_NUMBER = 32  # of a number written out in JSON
_LARGEST_BATCH = 256  # observations of one /v1/actions that a body shall have room for
_MOST_BODY = 64 << 20


@dataclass(frozen=True)
class HttpSettings:
    """Options of :class:`~rlsample.serving.PolicyServer`.

    Raises:
        ConfigError: a value that cannot work; or no token on an address that other machines reach.
    """

    host: str = option("127.0.0.1", "address to listen on; one that is not loopback needs a token")
    port: int = option(8080, "TCP port; 0: any free one")
    token: str | None = option(None, "what clients have to send as Authorization: Bearer TOKEN; null: nothing")
    insecure: bool = option(False, "allow an address that others reach without a token")
    max_pending: int = option(1024, "most requests that wait for an action; more get 503")
    max_body_bytes: int = option(0, "longest request body; 0: by the size of the spaces, at least 1 MiB")
    max_connections: int = option(1000, "most open connections; more get 503")
    request_timeout_s: float = option(10.0, "seconds a request may take to arrive; then it is cut off")
    action_timeout_s: float = option(60.0, "seconds an action may take; then the episode is closed")
    keep_alive_s: float = option(75.0, "seconds a connection may be idle")
    rate_limit: float | None = option(None, "requests per second and client address; null: no limit")
    drain_s: float = option(2.0, "seconds close() gives answers to reach their clients")

    def __post_init__(self) -> None:
        for name in ("request_timeout_s", "action_timeout_s", "keep_alive_s", "drain_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name} must be a number above 0, got {getattr(self, name)!r}")
        for name in ("max_pending", "max_connections"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)!r}")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port must be within 0 and 65535, got {self.port!r}")
        if self.max_body_bytes < 0:
            raise ConfigError(f"max_body_bytes must be 0 or more, got {self.max_body_bytes!r}")
        if self.rate_limit is not None and not self.rate_limit > 0:
            raise ConfigError(f"rate_limit must be above 0 or None, got {self.rate_limit!r}")
        if self.token is not None and not (self.token and self.token.isascii() and self.token.isprintable()):
            raise ConfigError("the token must be visible ASCII and not empty")
        if self.token is None and not self.insecure and not is_loopback(self.host):
            raise ConfigError(
                f"{self.host} can be reached from other machines: set a token (--token-file, or RLSAMPLE_TOKEN), "
                "listen on 127.0.0.1, or allow it with --insecure"
            )

    def body_limit(self, observation_space: gymnasium.Space[Any]) -> int:
        """The longest body in bytes: as set, or room for 256 observations written out, within 1 and 64 MiB."""
        if self.max_body_bytes:
            return self.max_body_bytes
        numbers = sum(math.prod(leaf.shape) for leaf in leaves(leaf_spec(observation_space)))
        return min(_MOST_BODY, max(_LEAST_BODY, numbers * _BYTES_PER_NUMBER * _LARGEST_BATCH))


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
