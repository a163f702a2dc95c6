"""Calls for one action, from body to answer in the loop's own callbacks: a task for each would cost as much again."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from rlsample.serving.answers import Answer, AnswerBook, KeptAnswer
from rlsample.serving.call_bodies import DECODERS
from rlsample.serving.episode_calls import EpisodeCalls
from rlsample.serving.http_errors import HttpError
from rlsample.serving.open_episode import Waiter
from rlsample.serving.request_gate import Headers
from rlsample.serving.wire import JSON, WireError, encode

__all__ = ["MEDIA", "ActionCalls", "decoded"]

log = logging.getLogger(__name__)

MEDIA = {media_type: media_type.encode() for media_type in DECODERS}
_EMPTY = {media_type: encode({}, media_type) for media_type in DECODERS}

Reply = Callable[[Answer], None]


class ActionCalls:
    """Begins calls for an action; used by the server's loop only.

    Args:
        calls: on episodes.
        book_of: (episode id, key) -> the book that has answers of that episode.
        refuse: (error, media type) -> its answer, counted.
    """

    def __init__(
        self,
        calls: EpisodeCalls,
        book_of: Callable[[str, str], AnswerBook],
        refuse: Callable[[HttpError, str], Answer],
    ) -> None:
        self.calls, self.refuse = calls, refuse
        self._book_of = book_of

    def begin(self, episode_id: str, headers: Headers, body: bytes, reply: Reply) -> None:
        """Asks, or finds the answer this call had when it came before with the same key.

        Args:
            reply: called once with the answer, which may be a refusal; now or later.

        Raises:
            HttpError: refused at once; ``reply`` is not called.
        """
        call = decoded("action", headers, body)
        key = headers.key
        if key is None:
            self._ask(episode_id, call, _Asked(self, headers.wanted, reply))
            return
        request = ("action", episode_id, headers.sent, hash(body))
        book = self._book_of(episode_id, key)
        kept = book.find(key, request)
        if kept is not None:
            kept.tell(reply, lambda error: self.refuse(error, headers.wanted))
            return
        kept = book.begin(key, request)
        try:
            self._ask(episode_id, call, _Asked(self, headers.wanted, reply, (book, key, kept)))
        except BaseException as e:
            book.fail(key, kept, e)
            raise

    def _ask(self, episode_id: str, call: Any, asked: _Asked) -> None:
        episode = self.calls.find(episode_id)
        asked.waiter = self.calls.ask(episode, call, asked)
        asked.t = episode.t


class _Asked:
    """Stands for a waiter's future: writes the answer as soon as there is an action."""

    __slots__ = ("_booked", "_calls", "_over", "_reply", "_wanted", "t", "waiter")

    def __init__(
        self, calls: ActionCalls, wanted: str, reply: Reply, booked: tuple[AnswerBook, str, KeptAnswer] | None = None
    ) -> None:
        self._calls, self._wanted, self._reply, self._booked = calls, wanted, reply, booked
        self._over = False
        self.t = 0
        self.waiter: Waiter = None  # type: ignore[assignment]  # set when it was asked

    def done(self) -> bool:
        """Whether it was answered."""
        return self._over

    def set_result(self, result: None) -> None:
        """The action is there."""
        try:
            answer = self._answer()
        except Exception as e:
            log.exception("a request failed in the server")
            self.set_exception(HttpError("policy_failed", f"the server failed: {type(e).__name__}; its log says more"))
            return
        self._over = True
        if self._booked is not None:
            book, key, kept = self._booked
            book.finish(key, kept, answer)
        self._reply(answer)

    def set_exception(self, error: HttpError) -> None:
        """There will be none."""
        self._over = True
        if self._booked is not None:
            book, key, kept = self._booked
            book.fail(key, kept, error)
        self._reply(self._calls.refuse(error, self._wanted))

    def _answer(self) -> Answer:
        wanted, waiter = self._wanted, self.waiter
        (action,) = self._calls.calls.settle(waiter)
        if wanted == JSON and action.__class__ is int:
            body = b'{"action":%d,"policy_version":%d,"t":%d}' % (action, waiter.version, self.t)
        else:
            body = encode({"action": action, "policy_version": waiter.version, "t": self.t}, wanted)
        return Answer(200, MEDIA[wanted], body)


def decoded(verb: str, headers: Headers, body: bytes) -> Any:
    """The fields of a call's body.

    Raises:
        HttpError: ``media_type``, ``bad_value``.
    """
    if headers.sent is None:
        raise HttpError("media_type", "a body is application/json or application/msgpack")
    try:
        return DECODERS[headers.sent][verb](body or _EMPTY[headers.sent])
    except WireError as e:
        raise HttpError("bad_value", str(e)) from None
