"""Calls to a set's remote evaluators that outlive the evaluators' processes."""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from rlsample.engine.engine import Future, Handle
from rlsample.errors import WorkerDiedError, first_of

if TYPE_CHECKING:
    from rlsample.evaluation.evaluator_set import EvaluatorSet

__all__ = ["Answer", "Requests"]


class Answer(NamedTuple):
    """A request's outcome.

    Attributes:
        worker: which evaluator, counted from 0; asking it again asks its replacement, should it have died.
        name, tag: of the request.
        value: a SampleBatch for ``"sample"``, else what the method returned.
        version: of the broadcast the evaluator had when it began a sample; None for other requests.
    """

    worker: int
    name: str
    tag: Any
    value: Any
    version: int | None


class _Request(NamedTuple):
    worker: int
    name: str
    args: tuple[Any, ...]
    tag: Any


class Requests:
    """Calls in flight. If an evaluator dies, it is replaced within the set's budget and asked again.

        requests = Requests(evaluators)
        for worker in range(evaluators.num_remote):
            requests.ask(worker)                            # "sample"
        while True:
            for answer in requests.take():
                learn(answer.value)
                evaluators.send_weights(answer.worker)
                requests.ask(answer.worker)

    One thread at a time. Episodes, filter statistics and timers that come with samples go to the set.

    Args:
        absorb: what a result passes on its way into an answer; the default is the set's own.
    """

    def __init__(self, evaluators: EvaluatorSet, absorb: Callable[[Any], tuple[Any, int | None]] | None = None) -> None:
        self._evaluators = evaluators
        self._absorb = absorb or evaluators.absorb
        self._requests: dict[Future, _Request] = {}
        self._ready: collections.deque[Answer] = collections.deque()

    def ask(self, worker: int, name: str = "sample", *args: Any, tag: Any = None) -> None:
        """Starts ``evaluator.name(*args)``; ``"sample_gradients"`` does sample and compute_gradients over there."""
        request = _Request(worker, name, args, tag)
        self._requests[self._evaluators.remote[worker].call(name, *args, tag=tag)] = request

    def in_flight(self, worker: int | None = None) -> int:
        """Requests that were not given out yet: of one evaluator, or of all."""
        if worker is None:
            return len(self._requests) + len(self._ready)
        asked = sum(request.worker == worker for request in self._requests.values())
        return asked + sum(answer.worker == worker for answer in self._ready)

    def ask_all(self, ahead: int) -> None:
        """Asks each evaluator for samples until ``ahead`` requests of it are in flight."""
        busy = collections.Counter(request.worker for request in self._requests.values())
        busy.update(answer.worker for answer in self._ready)
        for worker in range(self._evaluators.num_remote):
            for _ in range(ahead - busy[worker]):
                self.ask(worker)

    def take(self, num_ready: int = 1, timeout_s: float | None = None) -> list[Answer]:
        """Waits as :meth:`wait` does, and returns what is there."""
        self.wait(num_ready, timeout_s)
        return list(self.ready())

    def ready(self) -> Iterator[Answer]:
        """Gives out the answers that are there, one by one. Of a loop that breaks off the rest stays for the next."""
        while self._ready:
            yield self._ready.popleft()

    def wait(self, num_ready: int = 1, timeout_s: float | None = None) -> None:
        """Waits for ``num_ready`` answers, or for all there can be, or for the time to be up.

        Raises:
            WorkerDiedError: an evaluator died and the set's budget for replacements is used up.
            Exception: what an evaluator raised; that request is over. Other answers are kept. Where several raised by
                now, it is the first, and its message names the others.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while self._requests:
            missing = max(0, num_ready - len(self._ready))
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            assert self._evaluators.engine is not None
            done, _ = self._evaluators.engine.wait(list(self._requests), missing, left)
            self._take_in(done)
            if len(self._ready) >= num_ready or (left is not None and not left):
                break

    def _take_in(self, done: list[Future]) -> None:
        failed: list[tuple[str, Exception]] = []
        for future in done:
            who = f"worker {future.handle.index}"
            request = self._requests.pop(future)
            try:
                value, version = self._absorb(future.result(0.0))
            except WorkerDiedError as e:
                try:
                    self._ask_again(request, future.handle, e)
                except Exception as error:
                    failed.append((who, error))
            except Exception as e:
                failed.append((who, e))
            else:
                self._ready.append(Answer(request.worker, request.name, request.tag, value, version))
        if failed:
            raise first_of(failed)

    def _ask_again(self, request: _Request, handle: Handle, error: WorkerDiedError) -> None:
        if handle.alive():
            raise error  # it lives, and has lost a worker of its own
        self._evaluators.replace(request.worker, handle, error)
        self.ask(request.worker, request.name, *request.args, tag=request.tag)
