"""Everything but the calls on episodes: spaces, weights, statistics, health, metrics, and the pages."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
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

__all__ = ["PUBLIC_PATHS", "make_other_routes"]

PUBLIC_PATHS = frozenset({*PAGE_PATHS, "/healthz", "/docs", "/openapi.json"})
"""Paths that need no token: they hold no data of episodes and no weights."""

_Source = Callable[[], Mapping[str, Any]]
_API_PAGE_POLICY = "default-src 'none'; connect-src 'self'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def make_other_routes(
    spaces: Mapping[str, Any],
    openapi: Mapping[str, Any],
    stats: _Source,
    health: Callable[[], str | None],
    metrics: Callable[[], bytes],
    weights: Callable[[int | None], bytes | None],
    refused: Callable[[HttpError], None],
) -> Starlette:
    """The ASGI application of these routes.

    Args:
        spaces, openapi: as they are sent.
        stats: what ``/v1/stats`` shows.
        health: what is wrong, or None.
        metrics: the text for Prometheus.
        weights: of ``(the version the client has)``: version, model and weights as msgpack, or None if it has the
            newest. Called in a thread.
        refused: is told of each refusal.
    """

    one_at_a_time = asyncio.Lock()

    async def get_spaces(request: Request) -> Response:
        return _answer(spaces, request)

    async def get_stats(request: Request) -> Response:
        return _answer(stats(), request)

    async def get_weights(request: Request) -> Response:
        have = request.query_params.get("have")
        if have is not None and not (have.isascii() and have.isdigit() and len(have) < 19):
            raise HttpError("bad_value", f"have is the version of weights, a whole number; got {have[:40]!r}")
        async with one_at_a_time:  # and not in the loop: large weights take a while
            body = await asyncio.to_thread(weights, None if have is None else int(have))
        return Response(status_code=304) if body is None else Response(body, media_type=MSGPACK)

    async def get_health(request: Request) -> Response:
        wrong = health()
        if wrong is None:
            return Response(encode({"status": "ok"}, JSON), media_type=JSON)
        body = encode({"status": "failed", "error": {"code": "closed", "message": wrong}}, JSON)
        return Response(body, 503, {"retry-after": "5"}, JSON)

    async def get_metrics(request: Request) -> Response:
        return Response(metrics(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def get_openapi(request: Request) -> Response:
        return Response(encode(openapi, JSON), media_type=JSON)

    async def get_docs(request: Request) -> Response:
        return Response(API_PAGE, headers={"content-security-policy": _API_PAGE_POLICY}, media_type="text/html")

    async def get_page(request: Request) -> Response:
        found = page_file(request.url.path)
        if found is None:
            raise HttpError("not_found", "there is no such page")
        response = Response(found.body)
        response.raw_headers = list(found.headers)
        return response

    gets: dict[str, Callable[[Request], Any]] = {
        "/v1/spaces": get_spaces,
        "/v1/stats": get_stats,
        "/v1/weights": get_weights,
        "/healthz": get_health,
        "/metrics": get_metrics,
        "/openapi.json": get_openapi,
        "/docs": get_docs,
        **dict.fromkeys(PAGE_PATHS, get_page),
    }
    routes = [Route(path, endpoint, methods=["GET"]) for path, endpoint in gets.items()]

    async def refuse(request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException):
            error = _in_our_words(request, error)
        assert isinstance(error, HttpError)
        refused(error)
        answer = error_answer(error, _wanted(request))
        response = Response(answer.body, answer.status, media_type=answer.media_type.decode())
        response.raw_headers += answer.headers
        return response

    app = Starlette(routes=routes, exception_handlers={HTTPException: refuse, HttpError: refuse})
    app.router.redirect_slashes = False
    return app


def _answer(value: Mapping[str, Any], request: Request) -> Response:
    wanted = _wanted(request)
    return Response(encode(value, wanted), media_type=wanted)


def _wanted(request: Request) -> str:
    return Headers([header for header in request.scope["headers"] if header[0] == b"accept"]).wanted


def _in_our_words(request: Request, error: HTTPException) -> HttpError:
    path = request.url.path[:100]
    if error.status_code == 405:
        return HttpError("method", f"{path!r} does not take {request.method}")
    return HttpError("not_found", f"there is nothing at {path!r}: see /openapi.json")
