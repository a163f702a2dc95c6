"""Everything but the calls on episodes: spaces, weights, statistics, health, metrics, and the pages."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rlsample.errors import MissingExtraError
from rlsample.serving.answers import error_answer
from rlsample.serving.api_page import API_PAGE
from rlsample.serving.http_errors import HttpError
from rlsample.serving.page_files import PAGE_PATHS, page_file
from rlsample.serving.request_gate import Headers
from rlsample.serving.wire import JSON, MSGPACK, encode

try:
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route
except ImportError as e:
    raise MissingExtraError("rlsample.serving", "serve") from e

__all__ = ["PUBLIC_PATHS", "OtherRoutes"]

PUBLIC_PATHS = frozenset({*PAGE_PATHS, "/healthz", "/docs", "/openapi.json"})
"""Paths that need no token: they hold no data of episodes and no weights."""

_API_PAGE_POLICY = "default-src 'none'; connect-src 'self'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


@dataclass(frozen=True)
class OtherRoutes:
    """Where these routes get what they answer.

    Attributes:
        spaces, openapi: as they are sent.
        stats: what ``/v1/stats`` shows.
        health: what is wrong, or None.
        metrics: the text for Prometheus.
        weights: of ``(the version the client has)``: version, model and weights as msgpack, or None if it has the
            newest. Called in a thread, one call at a time.
        refused: is told of each refusal.
    """

    spaces: Mapping[str, Any]
    openapi: Mapping[str, Any]
    stats: Callable[[], Mapping[str, Any]]
    health: Callable[[], str | None]
    metrics: Callable[[], bytes]
    weights: Callable[[int | None], bytes | None]
    refused: Callable[[HttpError], None]

    def app(self) -> Starlette:
        """The ASGI application; checks no tokens."""
        one_at_a_time = asyncio.Lock()

        async def get_weights(request: Request) -> Response:
            async with one_at_a_time:  # and not in the loop: large weights take a while
                body = await asyncio.to_thread(self.weights, _version(request.query_params.get("have")))
            return Response(status_code=304) if body is None else Response(body, media_type=MSGPACK)

        gets: dict[str, Callable[[Request], Any]] = {
            "/v1/spaces": _answering(lambda: self.spaces),
            "/v1/stats": _answering(self.stats),
            "/v1/weights": get_weights,
            "/healthz": self._get_health,
            "/metrics": self._get_metrics,
            "/openapi.json": _answering(lambda: self.openapi),
            "/docs": _get_docs,
            **dict.fromkeys(PAGE_PATHS, _get_page),
        }
        routes = [Route(path, endpoint, methods=["GET"]) for path, endpoint in gets.items()]
        app = Starlette(routes=routes, exception_handlers={HTTPException: self._refuse, HttpError: self._refuse})
        app.router.redirect_slashes = False
        return app

    async def _get_health(self, request: Request) -> Response:
        wrong = self.health()
        if wrong is None:
            return Response(encode({"status": "ok"}, JSON), media_type=JSON)
        body = encode({"status": "failed", "error": {"code": "closed", "message": wrong}}, JSON)
        return Response(body, 503, {"retry-after": "5"}, JSON)

    async def _get_metrics(self, request: Request) -> Response:
        return Response(self.metrics(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _refuse(self, request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException):
            error = _in_our_words(request, error)
        assert isinstance(error, HttpError)
        self.refused(error)
        answer = error_answer(error, _wanted(request))
        response = Response(answer.body, answer.status, media_type=answer.media_type.decode())
        response.raw_headers += answer.headers
        return response


def _answering(source: Callable[[], Mapping[str, Any]]) -> Callable[[Request], Any]:
    async def get(request: Request) -> Response:
        wanted = _wanted(request)
        return Response(encode(source(), wanted), media_type=wanted)

    return get


async def _get_docs(request: Request) -> Response:
    return Response(API_PAGE, headers={"content-security-policy": _API_PAGE_POLICY}, media_type="text/html")


async def _get_page(request: Request) -> Response:
    found = page_file(request.url.path)
    if found is None:
        raise HttpError("not_found", "there is no such page")
    response = Response(found.body)
    response.raw_headers = list(found.headers)
    return response


def _version(have: str | None) -> int | None:
    if have is None:
        return None
    if not (have.isascii() and have.isdigit() and len(have) < 19):
        raise HttpError("bad_value", f"have is the version of weights, a whole number; got {have[:40]!r}")
    return int(have)


def _wanted(request: Request) -> str:
    return Headers([header for header in request.scope["headers"] if header[0] == b"accept"]).wanted


def _in_our_words(request: Request, error: HTTPException) -> HttpError:
    path = request.url.path[:100]
    if error.status_code == 405:
        return HttpError("method", f"{path!r} does not take {request.method}")
    return HttpError("not_found", f"there is nothing at {path!r}: see /openapi.json")
