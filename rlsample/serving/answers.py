"""Answers to requests, and the ones that are kept so that a repeated request is not done twice."""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Callable
from typing import Any, NamedTuple

from rlsample.serving.http_errors import HttpError
from rlsample.serving.wire import encode

__all__ = ["Answer", "AnswerBook", "KeptAnswer", "error_answer"]


class Answer(NamedTuple):
    """What goes back: status, media type and body."""

    status: int
    media_type: bytes
    body: bytes
    headers: tuple[tuple[bytes, bytes], ...] = ()


class KeptAnswer:
    """A call with a key: in progress, answered or failed.

    Attributes:
        request: what was asked, to notice a key that is used for something else.
        answer: None while it is in progress.
        done: for those who wait for the same answer; made when there are any.
    """

    __slots__ = ("answer", "done", "request")

    def __init__(self, request: object) -> None:
        self.request = request
        self.answer: Answer | None = None
        self.done: asyncio.Future[Answer] | None = None

    async def wait(self) -> Answer:
        """The answer, as soon as it is there. Raises what the call raised."""
        if self.answer is not None:
            return self.answer
        if self.done is None:
            self.done = asyncio.get_running_loop().create_future()
        return await asyncio.shield(self.done)

    def tell(self, reply: Callable[[Answer], None], refuse: Callable[[Any], Answer]) -> None:
        """Calls ``reply`` with the answer as soon as it is there, or with what ``refuse`` makes of the error."""
        if self.answer is not None:
            reply(self.answer)
            return
        if self.done is None:
            self.done = asyncio.get_running_loop().create_future()

        def pass_on(done: asyncio.Future[Answer]) -> None:
            error = done.exception()
            reply(done.result() if error is None else refuse(error))

        self.done.add_done_callback(pass_on)


class AnswerBook:
    """The latest answers by key; used by the server's loop only.

    A call that was refused did nothing: its key is free again, and a retry may succeed. Nor does it push out another
    one's answer; and a call in progress stays in the book until it is answered.

    Args:
        size: how many answers are kept; the oldest goes first.
    """

    __slots__ = ("_kept", "_num_answered", "_size")

    def __init__(self, size: int) -> None:
        self._size, self._num_answered = size, 0
        self._kept: collections.OrderedDict[str, KeptAnswer] = collections.OrderedDict()

    def find(self, key: str, request: object) -> KeptAnswer | None:
        """The call that had this key, or None.

        Raises:
            HttpError: the key came with another request.
        """
        kept = self._kept.get(key)
        if kept is not None and kept.request != request:
            raise HttpError(
                "key_reused", f"the Idempotency-Key {key[:40]!r} came before with another call or body: make a new one"
            )
        return kept

    def knows(self, key: str) -> bool:
        """Whether a call with this key is in progress or answered."""
        return key in self._kept

    def begin(self, key: str, request: object) -> KeptAnswer:
        """Notes that a call is in progress. Follow with :meth:`finish` or :meth:`fail`."""
        kept = self._kept[key] = KeptAnswer(request)
        return kept

    def finish(self, key: str, kept: KeptAnswer, answer: Answer) -> None:
        """The call was done; whoever repeats it gets this answer."""
        kept.answer = answer
        self._kept.move_to_end(key)
        self._num_answered += 1
        if self._num_answered > self._size:
            del self._kept[next(k for k, other in self._kept.items() if other.answer is not None)]
            self._num_answered -= 1
        if kept.done is not None and not kept.done.done():
            kept.done.set_result(answer)

    def fail(self, key: str, kept: KeptAnswer, error: BaseException) -> None:
        """The call was refused: those who wait are told, the key is free."""
        if self._kept.get(key) is kept:
            del self._kept[key]
        if kept.done is not None and not kept.done.done():
            kept.done.set_exception(error)


def error_answer(error: HttpError, wanted: str) -> Answer:
    """The body and headers of a refusal."""
    body = encode({"error": {"code": error.code, "message": error.message}}, wanted)
    headers: list[tuple[bytes, bytes]] = []
    if error.retry_after_s is not None:
        headers.append((b"retry-after", b"%d" % error.retry_after_s))
    if error.code == "unauthorized":
        headers.append((b"www-authenticate", b"Bearer"))
    if error.code == "closed":
        headers.append((b"connection", b"close"))
    return Answer(error.status, wanted.encode(), body, tuple(headers))
