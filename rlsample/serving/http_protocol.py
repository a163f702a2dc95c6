"""uvicorn's HTTP protocol, which also notices requests that do not arrive, and sends an answer in one piece."""

from __future__ import annotations

import time
from typing import Any

from rlsample.errors import MissingExtraError

try:
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
except ImportError as e:
    raise MissingExtraError("rlsample.serving", "serve") from e

__all__ = ["MAX_HEAD_BYTES", "JoinedWrites", "ServingProtocol"]

MAX_HEAD_BYTES = 65536
_INFORMATION = b"HTTP/1.1 1"
_HEAD = b"HTTP/1.1 "


class ServingProtocol(HttpToolsProtocol):
    """Limits what uvicorn does not: how long a request may take to arrive, and how much it may be beside its body.

    Attributes:
        arriving_since: when the request that is arriving began; None between requests.
    """

    arriving_since: float | None = None
    _beside_body = 0  # bytes of the request that is arriving: head, marks of chunks, trailers

    def connection_made(self, transport: Any) -> None:
        """A client has connected; its first request is on its way."""
        self.arriving_since = time.monotonic()
        super().connection_made(JoinedWrites(transport))  # type: ignore[arg-type]
        limit = self.config.limit_concurrency
        self.limit_concurrency = None  # uvicorn's way refuses those that were here before, too
        if limit is not None and len(self.connections) > limit:
            self.app = self.app.one_too_many
            if len(self.connections) > 2 * limit:
                self.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Bytes came."""
        self._beside_body += len(data)
        super().data_received(data)
        if self._beside_body > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response(f"The head of a request has more than {MAX_HEAD_BYTES} bytes.")

    def on_body(self, body: bytes) -> None:
        """A part of a body."""
        self._beside_body -= len(body)
        super().on_body(body)

    def on_message_begin(self) -> None:
        """The first byte of a request came."""
        self.arriving_since = time.monotonic()
        self.transport.head_comes = True  # type: ignore[attr-defined]
        super().on_message_begin()

    def on_message_complete(self) -> None:
        """Its last byte came."""
        self.arriving_since = None
        self._beside_body = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """The answer was written; that to a HEAD has no body."""
        self.transport.flush()  # type: ignore[attr-defined]
        super().on_response_complete()

    def cut_off_if_slow(self, limit_s: float) -> None:
        """Closes the connection if a request has been arriving for longer than that."""
        since = self.arriving_since
        if since is not None and time.monotonic() - since > limit_s:
            self.arriving_since = None
            self.transport.abort()


class JoinedWrites:
    """A transport that keeps an answer's head back until its body comes.

    uvicorn writes the two apart. Each write is a system call, and a client that gets them apart is woken twice:
    together that is a third of the time a small request takes.

    Attributes:
        head_comes: the next write that looks like the head of an answer is one.
    """

    __slots__ = ("_head", "_transport", "head_comes")

    def __init__(self, transport: Any) -> None:
        self._transport = transport
        self._head = b""
        self.head_comes = False

    def write(self, data: bytes) -> None:
        """Writes, or keeps it if it is the head of an answer."""
        if self._head:
            head, self._head = self._head, b""
            self._transport.write(head + data)
        elif self.head_comes and data[:9] == _HEAD and data[:10] != _INFORMATION:
            self._head, self.head_comes = data, False
        else:
            self._transport.write(data)

    def close(self) -> None:
        """Sends what was kept, then closes."""
        self.flush()
        self._transport.close()

    def flush(self) -> None:
        """Sends what was kept: no body comes."""
        if self._head:
            self.write(b"")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)
