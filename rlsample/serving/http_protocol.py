"""uvicorn's HTTP protocol, which also notices requests that do not arrive."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from rlsample.errors import MissingExtraError

try:
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
except ImportError as e:
    raise MissingExtraError("rlsample.serving", "serve") from e

__all__ = ["TimedProtocol"]


class TimedProtocol(HttpToolsProtocol):
    """Knows since when a request has been on its way: uvicorn itself limits only the pauses between requests.

    Attributes:
        arriving_since: when the request that is arriving began; None between requests.
    """

    arriving_since: float | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.arriving_since = time.monotonic()
        super().connection_made(transport)

    def on_message_begin(self) -> None:
        """The first byte of a request came."""
        self.arriving_since = time.monotonic()
        super().on_message_begin()

    def on_message_complete(self) -> None:
        """Its last byte came."""
        self.arriving_since = None
        super().on_message_complete()

    def cut_off_if_slow(self, limit_s: float) -> None:
        """Closes the connection if a request has been arriving for longer than that."""
        since: Any = self.arriving_since
        if since is not None and time.monotonic() - since > limit_s:
            self.arriving_since = None
            self.transport.abort()
