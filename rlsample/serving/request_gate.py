"""What a request has to pass before it is looked at: token, rate, size, form."""

from __future__ import annotations

import collections
import hmac
import ipaddress
import re
import time
from collections.abc import Mapping
from typing import Any

from rlsample.serving.http_errors import HttpError
from rlsample.serving.wire import JSON, MSGPACK

__all__ = ["Headers", "RateLimit", "RequestGate"]

_KEY = re.compile(rb"[!-~]{1,128}")
_DROPPED = 4  # times the allowed length are read of a body that is too long
_ADDRESSES = 10_000  # that the rate limit remembers


class Headers:
    """The headers of one request that matter here.

    Attributes:
        sent, wanted: media types of the body and of the answer.
        key: the idempotency key, or None.
        host: of the URL that was asked for.
    """

    __slots__ = ("authorization", "host", "key", "length", "sent", "wanted")

    def __init__(self, headers: list[tuple[bytes, bytes]]) -> None:
        self.authorization = self.host = b""
        self.sent: str | None = None  # no default: pages of other sites may post a body without a type
        self.length = 0
        self.key: str | None = None
        accept = b""
        for name, value in headers:
            if name == b"content-type":
                self.sent = _media_type(value)
            elif name == b"content-length":
                self.length = int(value) if value.isdigit() else 0
            elif name == b"idempotency-key":
                if not _KEY.fullmatch(value):
                    raise HttpError("bad_value", "an Idempotency-Key has 1 to 128 visible ASCII characters")
                self.key = value.decode("ascii")
            elif name == b"accept":
                accept = value
            elif name == b"authorization":
                self.authorization = value
            elif name == b"host":
                self.host = value
        wanted = _media_type(accept) if accept else None
        self.wanted = wanted or self.sent or JSON


def _is_own_name(host: bytes) -> bool:
    """Whether no DNS server of somebody else can have led here by this name."""
    name = host.decode("latin-1").lower()
    if name.startswith("["):
        return True
    name = name.partition(":")[0].rstrip(".")
    if "." not in name or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _media_type(value: bytes) -> str | None:
    if value == b"application/json":
        return JSON
    name = value.partition(b";")[0].strip().lower()
    if name == b"application/json":
        return JSON
    return MSGPACK if name in (b"application/msgpack", b"application/x-msgpack") else None


class RateLimit:
    """A bucket of tokens for each address: so many requests a second, and as many at once.

    Args:
        per_s: requests per second.
    """

    def __init__(self, per_s: float) -> None:
        self._per_s, self._burst = per_s, max(1.0, per_s)
        self._buckets: collections.OrderedDict[str, tuple[float, float]] = collections.OrderedDict()

    def take(self, address: str, now: float) -> bool:
        """Whether one more request of the address may pass at this time (seconds of any clock)."""
        left, since = self._buckets.get(address, (self._burst, now))
        left = min(self._burst, left + (now - since) * self._per_s)
        passes = left >= 1.0
        self._buckets[address] = (left - 1.0 if passes else left, now)
        self._buckets.move_to_end(address)
        if len(self._buckets) > _ADDRESSES:
            self._buckets.popitem(last=False)
        return passes


class RequestGate:
    """Refuses requests without the token, too many of them, and bodies that are too long.

    Args:
        token: or None, where none is asked for. It shows up in no message.
        rate_limit: requests per second and address, or None.
        max_body_bytes: longest body.
        checks_host: refuse names of the public DNS. Where no token is asked for, a page could else point its own name
            at this machine, and browsers would take this server for the page's.
    """

    def __init__(
        self, token: str | None, rate_limit: float | None, max_body_bytes: int, checks_host: bool = False
    ) -> None:
        self._expected = None if token is None else b"Bearer " + token.encode("ascii")
        self._rate = None if rate_limit is None else RateLimit(rate_limit)
        self.max_body_bytes = max_body_bytes
        self._checks_host, self._good_host = checks_host, b""

    def require_rate(self, scope: Mapping[str, Any]) -> None:
        """Raises HttpError if the address asks too often."""
        if self._rate is not None:
            address = (scope.get("client") or ("unknown", 0))[0]
            if not self._rate.take(address, time.monotonic()):
                raise HttpError("rate_limited", "too many requests from this address: slow down")

    def require_host(self, headers: Headers) -> None:
        """Raises HttpError if the request names another host than this machine."""
        if self._checks_host and headers.host != self._good_host:
            if not _is_own_name(headers.host):
                raise HttpError(
                    "wrong_host",
                    f"this server is not {headers.host[:60].decode('latin-1')!r}: use localhost or an IP address; "
                    "or give it a token (--token-file), or allow any name with --insecure",
                )
            self._good_host = headers.host

    def require_token(self, headers: Headers) -> None:
        """Raises HttpError unless the request carries the token, where one is set."""
        if self._expected is not None and not hmac.compare_digest(headers.authorization, self._expected):
            raise HttpError("unauthorized", "send the server's token as Authorization: Bearer TOKEN")

    async def body(self, headers: Headers, receive: Any) -> bytes:
        """The whole body.

        Raises:
            HttpError: it is longer than allowed (if not by much, the rest is read and dropped, so that the client gets
                to read the answer); or the client went away.
        """
        if headers.length <= self.max_body_bytes:
            message = await receive()
            parts, length = [_part(message)], len(message["body"])
            if not message.get("more_body"):
                if length > self.max_body_bytes:
                    raise self._too_long(length)
                return parts[0]
            while message.get("more_body"):
                message = await receive()
                parts.append(_part(message))
                length += len(parts[-1])
                if length > self.max_body_bytes:
                    break
            else:
                return b"".join(parts)
        elif headers.length > _DROPPED * self.max_body_bytes:
            raise self._too_long(headers.length)
        dropped = 0
        while dropped <= _DROPPED * self.max_body_bytes:
            message = await receive()
            dropped += len(_part(message))
            if not message.get("more_body"):
                break
        raise self._too_long(headers.length or dropped)

    def _too_long(self, length: int) -> HttpError:
        return HttpError("too_large", f"the body has {length} bytes or more, at most {self.max_body_bytes} are allowed")


def _part(message: Mapping[str, Any]) -> bytes:
    if message["type"] == "http.disconnect":
        raise HttpError("bad_value", "the client went away")
    body: bytes = message["body"]
    return body
