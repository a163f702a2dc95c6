"""One call to a policy server until it is answered for good: what is sent, what is tried again, what an answer means.

Nothing here does input or output. A call is a generator: it yields a Request, or a Pause, and is given the Reply, or
has NoAnswer raised in it. So the sync and the async client share all of it, and differ only in :func:`play`.
"""

from __future__ import annotations

import random
import time
from collections.abc import Generator, Mapping
from typing import Any, NamedTuple, TypeVar

from rlsample.errors import ConfigError, EpisodeLostError, ServingError, SpaceError
from rlsample.serving import wire
from rlsample.serving.client_settings import ClientSettings

__all__ = [
    "Address",
    "Exchange",
    "NoAnswer",
    "Pause",
    "RefusedCall",
    "Reply",
    "Request",
    "Steps",
    "Unanswered",
    "Unsendable",
]

T = TypeVar("T")
_LONGEST_PAUSE_S = 5.0
_TRY_AGAIN = frozenset((429, 502, 503, 504))
_DECODERS = {kind: wire.decoder(kind) for kind in (wire.JSON, wire.MSGPACK)}
_SHOWN = 200  # characters of an answer that is not ours


class Request(NamedTuple):
    """What goes out; ``headers`` do not hold Host and Content-Length. ``timeout_s``: how long to wait for the reply."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes
    timeout_s: float


class Reply(NamedTuple):
    """What came back; the names of ``headers`` are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class Pause(NamedTuple):
    """Wait before the next try."""

    seconds: float


class NoAnswer(Exception):
    """The connection failed, or no reply came in time. Whether the server did what it was asked is not known."""


class RefusedCall(ServingError):
    """The server has refused a call, by its ``code``; nothing of it was done."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Unsendable(SpaceError):
    """A value that no body can hold: nothing was sent."""


class Unanswered(ServingError):
    """No answer in time: whether the call was done is not known. The same call may be made again, and counts once."""


Steps = Generator[Request | Pause, Reply | None, T]


class Address(NamedTuple):
    """Where a server is: ``http://host:port/prefix``, taken apart."""

    scheme: str
    host: str
    port: int
    prefix: str

    @classmethod
    def parse(cls, text: str) -> Address:
        """Reads an address; ``host:port`` means http.

        Raises:
            ConfigError: it is no such address.
        """
        from urllib.parse import urlsplit

        try:
            parts = urlsplit(text if "://" in text else f"http://{text}")
            port = parts.port or {"http": 80, "https": 443}[parts.scheme]
            if not parts.hostname or parts.query or parts.fragment or parts.username is not None:
                raise ValueError("expected a host, and no query or user")
        except (KeyError, TypeError, ValueError) as e:
            raise ConfigError(f"{text!r} is no address of a policy server, such as http://127.0.0.1:9900: {e}") from e
        return cls(parts.scheme, parts.hostname, port, parts.path.rstrip("/"))

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}{self.prefix}"


class Exchange:
    """Makes calls of one client, and judges their answers.

    Args:
        address: of the server; ``token``: what it asks for, or None.

    Attributes:
        closed: the client is closed: calls raise.
    """

    def __init__(self, address: Address, token: str | None, settings: ClientSettings) -> None:
        self.address, self.settings = address, settings
        self.closed = False
        self._type = wire.JSON if settings.form == "json" else wire.MSGPACK
        self._headers = {"Content-Type": self._type, "Accept": self._type}
        if token is not None:
            if not token.isascii() or not token.isprintable() or not token:
                raise ConfigError("the token must be visible ASCII")
            self._headers["Authorization"] = f"Bearer {token}"
        self._jitter = random.Random()

    def call(
        self,
        method: str,
        path: str,
        values: Any = None,
        key: str | None = None,
        timeout_s: float | None = None,
        of_episode: bool = False,
    ) -> Steps[Any]:
        """Sends until there is an answer, and returns its values; None for "not modified".

        Args:
            values: the body; None: none.
            key: the Idempotency-Key: with it, whatever was sent twice is done once.
            timeout_s: for all tries; None: as the settings say.
            of_episode: it makes sense on this run of the server only; other calls wait for the next one.

        Raises:
            SpaceError: the server says that a value does not fit; or it cannot be sent at all.
            EpisodeLostError: the server knows no such episode, or shuts down (``of_episode``).
            RefusedCall: any other refusal, with the server's words.
            Unanswered: no answer in time.
            ServingError: the client is closed.
        """
        headers = self._headers if key is None else {**self._headers, "Idempotency-Key": key}
        body = b"" if values is None else self._body(values)
        limit_s = self.settings.timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + limit_s
        tries = 0
        while True:
            left_s = max(deadline - time.monotonic(), 0.01)
            tries += 1
            asked_s = None
            try:
                self._require_open()
                try_s = min(left_s, self.settings.try_timeout_s)
                reply = yield Request(method, self.address.prefix + path, headers, body, try_s)
                assert reply is not None
                if reply.status < 400:
                    return self._values(reply)
                code, message = self._problem(reply)
                if reply.status not in _TRY_AGAIN or (code == "closed" and of_episode):
                    raise _error(code, message)
                asked_s, problem = _retry_after(reply), f"{reply.status} {message}"
            except NoAnswer as e:
                problem = str(e)
            pause_s = self._pause_s(tries, asked_s)
            if time.monotonic() + pause_s >= deadline:
                raise Unanswered(
                    f"{method} {path}: no answer of {self.address} in {limit_s} s, {tries} tries; the last: {problem}. "
                    "The same call may be made again and is counted once"
                )
            self._require_open()
            yield Pause(pause_s)

    def _body(self, values: Any) -> bytes:
        try:
            return wire.encode(values, self._type)
        except (TypeError, ValueError, OverflowError) as e:
            raise Unsendable(f"a value that cannot be sent: {e}") from e

    def _require_open(self) -> None:
        if self.closed:
            raise ServingError("the policy client is closed")

    def _pause_s(self, tries: int, asked_s: float | None) -> float:
        """With some randomness, so that many clients of a server that was restarted do not come all at once."""
        own_s = min(self.settings.backoff_s * 2.0 ** min(tries - 1, 16), _LONGEST_PAUSE_S)
        own_s *= self._jitter.uniform(0.5, 1)
        return own_s if asked_s is None else asked_s + 0.1 * own_s

    def _values(self, reply: Reply) -> Any:
        if reply.status == 304:
            return None
        try:
            return _decoded(reply)
        except wire.WireError as e:
            raise ServingError(f"{self.address} sent what is no answer of a policy server: {e}") from e

    def _problem(self, reply: Reply) -> tuple[str, str]:
        """Code and message of a refusal."""
        try:
            error = _decoded(reply)["error"]
            return str(error["code"]), str(error["message"])
        except (wire.WireError, KeyError, TypeError):
            text = reply.body[:_SHOWN].decode("utf-8", "replace").strip()
            return "", f"{self.address} answered {reply.status}: {text or 'nothing'}"


def _decoded(reply: Reply) -> Any:
    kind = reply.headers.get("content-type", "").partition(";")[0].strip()
    if kind not in _DECODERS:
        raise wire.WireError(f"content-type {kind!r}")
    return _DECODERS[kind](reply.body)


def _error(code: str, message: str) -> Exception:
    if code == "bad_value":
        return SpaceError(message)
    if code == "unknown_episode":
        return EpisodeLostError(f"{message}. The server has it no more: start a new episode")
    if code == "closed":
        return EpisodeLostError(f"{message}. The server shuts down: start a new episode when it is back")
    return RefusedCall(code, message)


def _retry_after(reply: Reply) -> float | None:
    try:
        seconds = float(reply.headers.get("retry-after", ""))
    except ValueError:
        return None
    return seconds if 0 <= seconds < float("inf") else None
