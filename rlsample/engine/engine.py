"""Where evaluators run: one contract for inline, threads, processes and other machines.

    with ProcessEngine() as engine:
        worker = engine.create(make_evaluator)          # builds it over there
        future = worker.call("sample")                  # starts at once
        ready, pending = engine.wait([future], num_ready=1, timeout_s=60)
        batch = ready[0].result()                       # raises what sample() raised

Optimizers are written against this alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["Engine", "Future", "Handle"]


class Future(ABC):
    """The outcome of one call, now or later.

    Attributes:
        handle: whose call it is.
        tag: what the caller gave to :meth:`Handle.call`.
    """

    handle: Handle
    tag: Any

    @abstractmethod
    def done(self) -> bool:
        """Whether :meth:`result` returns at once."""

    @abstractmethod
    def result(self, timeout_s: float | None = None) -> Any:
        """The call's value; arrays in it belong to the caller.

        Raises:
            TimeoutError: not there in time; the call goes on.
            WorkerDiedError: the worker ended before it answered; names index, exit code or signal.
            Exception: what the call raised, with the remote traceback as its cause.
        """


class Handle(ABC):
    """An object that an engine made and keeps.

    Attributes:
        index: position in the order of creation; a replacement keeps the index of the one it replaces.
        incarnation: 0, then +1 with each replacement. Futures of an earlier incarnation fail, they never deliver.
    """

    index: int
    incarnation: int

    @abstractmethod
    def call(self, name: str, *args: Any, tag: Any = None) -> Future:
        """Starts ``object.name(*args)``. Calls of one handle run one after another, in order.

        Arguments are taken at once: changing an array afterwards changes nothing over there.
        """

    @abstractmethod
    def post(self, name: str, shared: Any) -> None:
        """Has ``object.name(value)`` run before the next call that has not begun; overtakes calls that wait.

        Of several posts of one name that wait, only the newest is delivered. The value's arrays are read-only. An error
        fails the next call. A worker that is gone gets nothing; its next call says so.

        Args:
            shared: what :meth:`Engine.share` gave.
        """

    @abstractmethod
    def alive(self) -> bool:
        """Whether calls can still succeed."""


class Engine(ABC):
    """Makes objects, runs their methods, waits for the results. A context manager."""

    @abstractmethod
    def create(self, factory: Callable[[int, int], Any]) -> Handle:
        """Starts building ``factory(index, incarnation)`` and returns its handle; errors surface in the first result.

        Process engines pickle the factory: give them a module-level function or functools.partial of one.
        """

    @abstractmethod
    def replace(self, handle: Handle) -> Handle:
        """Ends what is left of a handle's object and builds a new one by the same factory, with the same index."""

    @abstractmethod
    def share(self, value: Any) -> Any:
        """A copy of a value, made once, for any number of :meth:`Handle.post`; the value may be changed afterwards."""

    @abstractmethod
    def wait(
        self, futures: Sequence[Future], num_ready: int = 1, timeout_s: float | None = None
    ) -> tuple[list[Future], list[Future]]:
        """Waits until ``num_ready`` futures are done (also by failure) or the time is up.

        Returns:
            ``(done, pending)``: all that are done, in the order in which they finished where known, and the rest.
        """

    @abstractmethod
    def close(self) -> None:
        """Ends every object (calling its ``close``) and worker. Idempotent, bounded, callable from any thread."""

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
