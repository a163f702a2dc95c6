"""The ASGI application: finds the call, runs it, writes its answer.

Calls on episodes are dispatched by hand, as each action passes here; everything else goes through Starlette.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from rlsample.serving.action_calls import MEDIA, ActionCalls, decoded
from rlsample.serving.answers import Answer, AnswerBook, error_answer
from rlsample.serving.call_bodies import DECODERS
from rlsample.serving.episode_calls import EpisodeCalls
from rlsample.serving.fragments import log_fragment
from rlsample.serving.http_errors import HttpError
from rlsample.serving.request_gate import Headers, RequestGate
from rlsample.serving.wire import JSON, encode

__all__ = ["EPISODE_VERBS", "FLAT_CALLS", "ServingApp"]

log = logging.getLogger(__name__)

_EPISODES = "/v1/episodes/"
EPISODE_VERBS = ("action", "log_action", "returns", "end")
FLAT_CALLS = {"/v1/episodes": "start", "/v1/actions": "actions", "/v1/act": "act", "/v1/fragments": "fragments"}
_KEPT_STARTS = 4096  # answers kept of starts; those of other calls are kept with their episode
_NOTHING = {media_type: encode({}, media_type) for media_type in DECODERS}


class ServingApp:
    """An ASGI callable.

    Args:
        calls: the calls on episodes.
        gate: what every request has to pass.
        act: the answer to observations [K, ...] without an episode.
        others: the ASGI application for all other paths; it checks no token itself.
        is_public: whether a path of ``others`` needs no token.
    """

    def __init__(
        self,
        calls: EpisodeCalls,
        gate: RequestGate,
        act: Callable[[Any], Awaitable[dict[str, Any]]],
        others: Any,
        is_public: Callable[[str], bool],
    ) -> None:
        self.calls, self.gate, self.metrics = calls, gate, calls.metrics
        self._act, self._others, self._is_public = act, others, is_public
        self._answers = AnswerBook(_KEPT_STARTS)
        self._actions = ActionCalls(calls, self._book, self._refuse)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answers one request."""
        path: str = scope["path"]
        headers = None
        try:
            self.gate.require_rate(scope)
            headers = Headers(scope["headers"])
            self.gate.require_host(headers)
            if path.startswith(_EPISODES):
                episode_id, _, verb = path[len(_EPISODES) :].partition("/")
                if verb not in EPISODE_VERBS:
                    raise _no_such(path)
            else:
                episode_id, verb = "", FLAT_CALLS.get(path, "")
            if verb or not self._is_public(path):
                self.gate.require_token(headers)
            if not verb:
                answer = None
            elif scope["method"] == "POST":
                answer = await self._call(verb, episode_id, headers, await self.gate.body(headers, receive))
            else:
                raise HttpError("method", f"{path} takes POST")
        except Exception as e:
            answer = self._refusal_of(e, headers)
        self.metrics.requests += 1
        if answer is None:
            await self._others(scope, receive, send)
            return
        await _send(answer, send)

    async def one_too_many(self, scope: Any, receive: Any, send: Any) -> None:
        """Answers the request of a connection that is more than there may be."""
        self.metrics.requests += 1
        answer = self._refuse(HttpError("busy", "there are too many connections: come back later"), JSON)
        await _send(answer._replace(headers=(*answer.headers, (b"connection", b"close"))), send)

    def lets_in(self, raw_headers: list[tuple[bytes, bytes]]) -> Headers | None:
        """The headers of a call on an episode; None where :meth:`__call__` would refuse it for them."""
        try:
            headers = Headers(raw_headers)
            self.gate.require_host(headers)
            self.gate.require_token(headers)
        except HttpError:
            return None
        return headers if headers.length <= self.gate.max_body_bytes else None

    def answer_action(
        self, episode_id: str, scope: Any, headers: Headers, body: bytes, reply: Callable[[Answer], None]
    ) -> None:
        """Answers a call for an action as :meth:`__call__` does, without a task.

        Args:
            headers: that were let in.
            reply: called once, now or later.
        """
        self.metrics.requests += 1
        try:
            self.gate.require_rate(scope)
            self._actions.begin(episode_id, headers, body, reply)
        except Exception as e:
            reply(self._refusal_of(e, headers))

    def _refusal_of(self, error: Exception, headers: Headers | None) -> Answer:
        if not isinstance(error, HttpError):
            log.error("a request failed in the server", exc_info=error)
            message = f"the server failed: {type(error).__name__}; its log says more"
            error = HttpError("policy_failed", message)
        return self._refuse(error, headers.wanted if headers else JSON)

    def _refuse(self, error: HttpError, wanted: str) -> Answer:
        self.metrics.rejected[error.code] += 1
        return error_answer(error, wanted)

    async def _call(self, verb: str, episode_id: str, headers: Headers, body: bytes) -> Answer:
        """Runs a call, or finds the answer it had when it came before with the same key."""
        if verb == "action":
            return await self._action(episode_id, headers, body)
        call = decoded(verb, headers, body)
        if headers.key is None or verb == "act":  # which books nothing
            return await self._run(verb, episode_id, call, headers.wanted)
        key, request = headers.key, (verb, episode_id, headers.sent, hash(body))
        book = self._book(_home(verb, episode_id, call), key)
        kept = book.find(key, request)
        if kept is not None:
            return await kept.wait()
        kept = book.begin(key, request)
        try:
            answer = await self._run(verb, episode_id, call, headers.wanted)
        except BaseException as e:
            book.fail(key, kept, e)
            raise
        book.finish(key, kept, answer)
        return answer

    async def _action(self, episode_id: str, headers: Headers, body: bytes) -> Answer:
        answered: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()

        def reply(answer: Answer) -> None:
            if not answered.done():  # else its task was cancelled
                answered.set_result(answer)

        self._actions.begin(episode_id, headers, body, reply)
        return await answered

    def _book(self, episode_id: str, key: str) -> AnswerBook:
        if not episode_id:
            return self._answers
        ended = self.calls.ended.get(episode_id)
        if ended is not None and ended.answers.knows(key):
            return ended.answers
        return self.calls.find(episode_id).answers

    async def _run(self, verb: str, episode_id: str, call: Any, wanted: str) -> Answer:
        calls = self.calls
        if verb == "actions":
            waiter = calls.ask_many(call)
            await waiter.done
            actions = calls.stacked(calls.settle(waiter))
            found = {"actions": actions, "policy_version": waiter.version}
            return Answer(200, MEDIA[wanted], encode(found, wanted))
        if verb == "start":
            return Answer(201, MEDIA[wanted], encode({"episode_id": await calls.start(call)}, wanted))
        if verb == "act":
            return Answer(200, MEDIA[wanted], encode(await self._act(call.obs), wanted))
        if verb == "fragments":
            found = log_fragment(calls, call)
            return Answer(200, MEDIA[wanted], encode(found, wanted))
        getattr(calls, verb)(calls.find(episode_id), call)
        return Answer(200, MEDIA[wanted], _NOTHING[wanted])


def _home(verb: str, episode_id: str, call: Any) -> str:
    """The episode whose book has the call: other episodes cannot push it out there."""
    if verb == "actions":
        return call.episode_ids[0] if call.episode_ids else ""
    return call.episode_id if verb == "fragments" else episode_id


async def _send(answer: Answer, send: Any) -> None:
    length = b"%d" % len(answer.body)
    fields = [(b"content-type", answer.media_type), (b"content-length", length), *answer.headers]
    await send({"type": "http.response.start", "status": answer.status, "headers": fields})
    await send({"type": "http.response.body", "body": answer.body})


def _no_such(path: str) -> HttpError:
    return HttpError("not_found", f"there is nothing at {path[:100]!r}: see /openapi.json")
