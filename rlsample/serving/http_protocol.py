"""uvicorn's HTTP protocol, and what it lacks: requests that do not arrive are noticed, an answer goes in one piece, and
a call for an action is answered without a task and the events around it, which cost more than all the rest of it.
"""

from __future__ import annotations

import re
import time
from typing import Any

from rlsample.errors import MissingExtraError
from rlsample.serving.answers import Answer
from rlsample.serving.request_gate import Headers

try:
    from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
except ImportError as e:
    raise MissingExtraError("rlsample.serving", "serve") from e

__all__ = ["MAX_HEAD_BYTES", "JoinedWrites", "ServingProtocol"]

MAX_HEAD_BYTES = 65536
_INFORMATION = b"HTTP/1.1 1"
_HEAD = b"HTTP/1.1 "
_ACTION = re.compile(rb"/v1/episodes/([A-Za-z0-9._~-]{1,128})/action")
_CLOSE = (b"connection", b"close")


class ServingProtocol(HttpToolsProtocol):
    """Limits what uvicorn does not: how long a request may take to arrive, and how much it may be beside its body.

    Attributes:
        arriving_since: when the request that is arriving began; None between requests.
        idle_since: when a call for an action was answered, if nothing came after it.
    """

    arriving_since: float | None = None
    idle_since: float | None = None
    _unsent = 0, 0.0  # bytes of answers that wait for the client to take them, and since when there are so many
    _beside_body = 0  # bytes of the request that is arriving: head, marks of chunks, trailers
    _headers: Headers | None = None  # of the call for an action that is arriving
    _episode_id = ""
    _body = bytearray()

    def connection_made(self, transport: Any) -> None:
        """A client has connected; its first request is on its way."""
        self.arriving_since = time.monotonic()
        super().connection_made(JoinedWrites(transport))  # type: ignore[arg-type]
        self._plain_transport = transport
        self._awaited = _AwaitedAction()
        self._answer_action = self.app.answer_action
        limit = self.config.limit_concurrency
        self.limit_concurrency = None  # uvicorn's way refuses those that were here before, too
        if limit is not None and len(self.connections) > limit:
            self.app, self._answer_action = self.app.one_too_many, None
            if len(self.connections) > 2 * limit:
                self.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Bytes came."""
        self._beside_body += len(data)
        self.idle_since = None
        super().data_received(data)
        if self._beside_body > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response(f"The head of a request has more than {MAX_HEAD_BYTES} bytes.")

    def on_headers_complete(self) -> None:
        """The head of a request is there."""
        action = _ACTION.fullmatch(self.url)
        if action is not None and self._is_plain():
            self._headers = self.app.lets_in(self.headers)
            if self._headers is not None:
                self._episode_id, self._body = action[1].decode("ascii"), bytearray()
                return
        super().on_headers_complete()

    def _is_plain(self) -> bool:
        """Whether a request is a POST as usual, with nothing before it that waits."""
        parser, cycle = self.parser, self.cycle
        return (
            self._answer_action is not None
            and (cycle is None or cycle.response_complete)
            and parser.get_method() == b"POST"
            and parser.get_http_version() == "1.1"
            and parser.should_keep_alive()
            and not parser.should_upgrade()
            and not self.expect_100_continue
            and not self.flow.write_paused
        )

    def on_body(self, body: bytes) -> None:
        """A part of a body."""
        self._beside_body -= len(body)
        if self._headers is None:
            super().on_body(body)
            return
        self._body += body
        if len(self._body) > self.app.gate.max_body_bytes:  # and no content-length said so
            self._headers = None
            super().on_headers_complete()
            super().on_body(bytes(self._body))

    def on_message_begin(self) -> None:
        """The first byte of a request came."""
        self.arriving_since = time.monotonic()
        self.transport.head_comes = True  # type: ignore[attr-defined]
        super().on_message_begin()

    def on_message_complete(self) -> None:
        """Its last byte came."""
        self.arriving_since = None
        self._beside_body = 0
        headers, self._headers = self._headers, None
        if headers is None:
            super().on_message_complete()
            return
        awaited = self._awaited
        awaited.response_complete = False
        self.cycle = awaited  # type: ignore[assignment]
        self._answer_action(self._episode_id, self.scope, headers, bytes(self._body), self._reply)

    def _reply(self, answer: Answer) -> None:
        """Answers a call for an action."""
        awaited, transport = self._awaited, self._plain_transport
        awaited.response_complete = True
        if transport.is_closing():
            return
        closes = not awaited.keep_alive or _CLOSE in answer.headers
        transport.write(_written(answer, closes))
        if closes:
            transport.close()
        elif self.pipeline:  # what came after it
            super().on_response_complete()
        else:
            self.idle_since = time.monotonic()

    def on_response_complete(self) -> None:
        """The answer was written; that to a HEAD has no body."""
        self.transport.flush()  # type: ignore[attr-defined]
        super().on_response_complete()

    def cut_off_if_slow(self, limit_s: float) -> None:
        """Closes the connection if a request has been arriving, or nothing of an answer been taken, for longer.

        And if none came since the last answer, for longer than uvicorn was told.
        """
        now, since, idle = time.monotonic(), self.arriving_since, self.idle_since
        unsent: int = self.transport.get_write_buffer_size()
        if unsent != self._unsent[0]:
            self._unsent = unsent, now
        if (since is not None and now - since > limit_s) or (unsent and now - self._unsent[1] > limit_s):
            self.arriving_since = None
            self.transport.abort()
        elif idle is not None and now - idle > self.timeout_keep_alive:
            self.idle_since = None
            self.transport.close()


class _Nobody:
    def set(self) -> None:
        """Nobody waits for this event."""


class _AwaitedAction:
    """Stands where uvicorn looks for the state of the request it answers last.

    Attributes:
        response_complete: no action is awaited.
        keep_alive: False: close the connection after the answer.
    """

    __slots__ = ("disconnected", "keep_alive", "response_complete")
    message_event = _Nobody()

    def __init__(self) -> None:
        self.response_complete = self.keep_alive = True
        self.disconnected = False


def _written(answer: Answer, closes: bool) -> bytes:
    if answer.status == 200 and not answer.headers and not closes:
        return b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n%b" % (
            answer.media_type,
            len(answer.body),
            answer.body,
        )
    fields = [(b"content-type", answer.media_type), (b"content-length", b"%d" % len(answer.body)), *answer.headers]
    if closes and _CLOSE not in fields:
        fields.append(_CLOSE)
    head = b"".join(b"%b: %b\r\n" % field for field in fields)
    return b"%b%b\r\n%b" % (STATUS_LINE[answer.status], head, answer.body)


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
