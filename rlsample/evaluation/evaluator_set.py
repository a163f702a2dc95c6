"""The evaluators an optimizer works with."""

from __future__ import annotations

import collections
import functools
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from rlsample.engine.engine import Engine, Handle
from rlsample.engine.inline_engine import InlineEngine
from rlsample.errors import ConfigError, WorkerDiedError, first_of
from rlsample.evaluation.evaluator_server import (
    Broadcast,
    EvaluatorServer,
    Fragment,
    SampleGradients,
    SampleInfo,
    check_num_workers,
    filter_of,
    policy_version_of,
    sample_of,
    serve_evaluator,
)
from rlsample.evaluation.policy_evaluator import PolicyEvaluator
from rlsample.evaluation.requests import Requests
from rlsample.sample_batch import SampleBatch
from rlsample.settings import option

__all__ = ["EvaluatorSet", "EvaluatorSetSettings"]

log = logging.getLogger(__name__)

R = TypeVar("R")
_MAX_UNREAD = 100_000  # episodes kept for a caller that never asks; the oldest go first


@dataclass(frozen=True)
class EvaluatorSetSettings:
    """Options of :class:`EvaluatorSet`."""

    max_evaluator_restarts: int = option(
        10, "how many dead evaluators are replaced over the whole run; the death after that is an error"
    )

    def __post_init__(self) -> None:
        if self.max_evaluator_restarts < 0:
            raise ConfigError(f"max_evaluator_restarts must be at least 0, not {self.max_evaluator_restarts}")


class EvaluatorSet:
    """One local evaluator, which learns, and any number of remote ones that sample for it. A context manager.

        make = functools.partial(make_evaluator, "CartPole-v1")       # make(worker_index)
        with EvaluatorSet.create(make, num_workers=2) as evaluators:
            evaluators.sync_weights()
            for batch in evaluators.sample_round(): ...

    What the local evaluator knows goes to the others as one :class:`Broadcast` per version: weights, filter totals,
    progress. What they know comes with their samples: episodes, filter deltas, timers. So nobody waits behind a sample
    for anything but samples. One thread at a time, but for :meth:`close`.

    Args:
        local: owns the weights that are trained; samples itself if there are no others.
        remote: handles of ``engine`` on :class:`~rlsample.evaluation.evaluator_server.EvaluatorServer` objects, as
            :meth:`create` makes them; or evaluators that live in this very thread (these cannot be replaced).
        engine: closed with the set. None: there are no handles.
        settings: see :class:`EvaluatorSetSettings`.

    Attributes:
        remote: the handles; one that died gives its place to its replacement.
        num_restarts: how many were replaced.
        version: of the newest broadcast; 0: there was none.
    """

    def __init__(
        self,
        local: PolicyEvaluator,
        remote: Sequence[PolicyEvaluator] | Sequence[Handle] = (),
        engine: Engine | None = None,
        settings: EvaluatorSetSettings | None = None,
    ) -> None:
        self.local = local
        self.settings = settings or EvaluatorSetSettings()
        if engine is None and remote:
            engine = InlineEngine(copies=False)  # evaluators promise copies themselves
            remote = [engine.create(functools.partial(_adopt, evaluator)) for evaluator in remote]
        self.engine = engine
        self.remote: list[Handle] = list(remote)  # type: ignore[arg-type]
        self.num_restarts = 0
        self.version = 0
        self._env_steps = 0
        self._shared: Any = None  # the newest broadcast
        self._sent = [0] * len(self.remote)
        self._episodes: collections.deque[Any] = collections.deque(maxlen=_MAX_UNREAD)
        self._timers: collections.deque[dict[str, float]] = collections.deque(maxlen=_MAX_UNREAD)
        self._closed = False
        # What comes with a round's samples is merged in the evaluators' order, not in that of arrival: sums of floats
        # depend on it, and a seed shall decide a run.
        self._round = Requests(self, absorb=lambda result: (result, None))
        self._round_ready: dict[int, Any] = {}

    @classmethod
    def create(
        cls,
        make_evaluator: Callable[[int], PolicyEvaluator],
        num_workers: int,
        engine: Engine | None = None,
        settings: EvaluatorSetSettings | None = None,
    ) -> EvaluatorSet:
        """Makes the evaluators: the local one here, the others on the engine, all at the same time.

        Args:
            make_evaluator: ``make_evaluator(worker_index)``: 0 here, 1 to num_workers over there; a replacement of
                number i gets i + 4096, then i + 8192, ...: a number, and with it seeds and ids, that was never used.
                Errors of the remote ones surface with their first result.
            engine: the default is a new ProcessEngine. Closed with the set, also if this fails.
        """
        check_num_workers(num_workers)
        if engine is None and num_workers:
            from rlsample.engine.process_engine import ProcessEngine

            engine = ProcessEngine()
        try:
            serve = functools.partial(serve_evaluator, make_evaluator)
            handles = [engine.create(functools.partial(serve, i)) for i in range(num_workers)] if engine else []
            return cls(make_evaluator(0), handles, engine, settings)
        except BaseException:
            if engine is not None:
                engine.close()
            raise

    @property
    def num_remote(self) -> int:
        """How many evaluators sample for the local one."""
        return len(self.remote)

    # ------------------------------------------------------------------ to the evaluators

    def set_progress(self, env_steps: int) -> None:
        """Tells the local evaluator the total of sampled env steps, and with the next broadcast the others."""
        self._env_steps = env_steps
        self.local.set_progress(env_steps)

    def publish_weights(self) -> int:
        """Makes the local evaluator's weights, filter totals and progress the newest broadcast; returns its version.

        The weights are copied twice, whatever the number of evaluators: by ``get_weights``, and into memory that they
        share. Nothing is sent yet.
        """
        if self.engine is None:
            return self.version
        self.version += 1
        broadcast = Broadcast(
            self.version,
            policy_version_of(self.local),
            self.local.get_weights(),
            filter_of(self.local),
            self._env_steps,
        )
        self._shared = self.engine.share(broadcast)
        return self.version

    def send_weights(self, worker: int) -> bool:
        """Sends the newest broadcast to one evaluator, if it has an older one. It takes effect before its next sample.

        Returns:
            Whether there was something to send.
        """
        if self._sent[worker] == self.version:
            return False
        self._sent[worker] = self.version
        self.remote[worker].post("take_broadcast", self._shared)
        return True

    def sync_weights(self) -> None:
        """Publishes the local weights and sends them to all others."""
        if self.remote:
            self.publish_weights()
            for worker in range(len(self.remote)):
                self.send_weights(worker)

    def sync_filters(self) -> None:
        """Brings all filters to the same statistics, also rows that no sample brought along; waits for running samples.

        Not needed as a rule: samples bring the deltas, and each broadcast has the totals.
        """
        for delta in self._ask_all("flush_filter"):
            self._merge_filter(delta)
        self.sync_weights()

    def foreach_evaluator(self, func: Callable[[PolicyEvaluator], R]) -> list[R]:
        """``func`` of each evaluator, the local one first. The remote ones run beside it, after what they do now."""
        requests = self._asked("apply", func)
        return [func(self.local), *_in_order(requests)]

    def foreach_evaluator_with_index(self, func: Callable[[PolicyEvaluator, int], R]) -> list[R]:
        """As :meth:`foreach_evaluator`; the local one has index 0."""
        requests = Requests(self)
        for worker in range(len(self.remote)):
            requests.ask(worker, "apply", func, worker + 1)
        return [func(self.local, 0), *_in_order(requests)]

    def _ask_all(self, name: str, *args: Any) -> list[Any]:
        return _in_order(self._asked(name, *args))

    def _asked(self, name: str, *args: Any) -> Requests:
        requests = Requests(self)
        for worker in range(len(self.remote)):
            requests.ask(worker, name, *args)
        return requests

    # ------------------------------------------------------------------ from the evaluators

    def sample_round(self) -> Iterator[SampleBatch]:
        """One batch of each remote evaluator, in their order; of the local one where there are no others.

        All sample at the same time. After an error the batches that were not given out are the next round's.

        Raises:
            WorkerDiedError: one died and the budget for replacements is used up.
            Exception: what an evaluator's ``sample`` raised.
        """
        if not self.remote:
            yield sample_of(self.local)
            return
        for worker in range(len(self.remote)):
            if worker not in self._round_ready and not self._round.in_flight(worker):
                self._round.ask(worker)
        for worker in range(len(self.remote)):
            while worker not in self._round_ready:
                for answer in self._round.take():
                    self._round_ready[answer.worker] = answer.value
            yield self.absorb(self._round_ready.pop(worker))[0]

    def absorb(self, result: Any) -> tuple[Any, int | None]:
        """Takes in what came with a remote result.

        Returns:
            The batch of a sample, else the result itself; the version of the broadcast it was sampled under, or None.
        """
        if isinstance(result, Fragment):
            self._take_info(result.info)
            return result.batch, result.info.version
        if isinstance(result, SampleGradients):
            self._take_info(result.info)
            return result, result.info.version
        return result, None

    def _take_info(self, info: SampleInfo) -> None:
        self._episodes.extend(info.episodes)
        self._merge_filter(info.filter_delta)
        if info.timers is not None:
            self._timers.append(info.timers)

    def _merge_filter(self, delta: Any) -> None:
        obs_filter = filter_of(self.local)
        if obs_filter is not None and delta is not None:
            obs_filter.apply_delta(delta)

    def get_metrics(self) -> list[Any]:
        """Episodes finished since the last call: local ones, then those that came with samples. Never waits."""
        episodes = self.local.get_metrics()
        if isinstance(self.engine, InlineEngine):
            for more in self._ask_all("get_metrics"):
                self._episodes.extend(more)
        episodes += [self._episodes.popleft() for _ in range(len(self._episodes))]
        return episodes

    def get_timers(self) -> dict[str, float]:
        """The samplers' timers since the last call: milliseconds are means over all polls of all evaluators; counts, as
        ``sampler/polls``, are sums."""
        timers = [self._timers.popleft() for _ in range(len(self._timers))]
        get_local = getattr(self.local, "get_timers", None)
        if get_local is not None:
            timers.append(get_local())
        return _merged(timers)

    def get_remote_states(self) -> list[Any]:
        """``get_state`` of each remote evaluator, after what it does now."""
        return self._ask_all("get_state")

    def set_remote_states(self, states: Sequence[Any]) -> None:
        """Continues from :meth:`get_remote_states`; they go on with the weights of then until the next broadcast.

        Raises:
            ConfigError: not one state for each.
        """
        if len(states) != len(self.remote):
            raise ConfigError(f"{len(states)} states for {len(self.remote)} remote evaluators")
        requests = Requests(self)
        for worker, state in enumerate(states):
            requests.ask(worker, "set_state", state)
        _in_order(requests)

    # ------------------------------------------------------------------ health and lifetime

    def alive(self) -> list[bool]:
        """For each remote evaluator, whether it can still be asked."""
        return [handle.alive() for handle in self.remote]

    def replace(self, worker: int, handle: Handle, error: WorkerDiedError) -> None:
        """Puts a new evaluator in the place of a dead one, with the newest broadcast; nothing if that has been done.

        Raises:
            WorkerDiedError: the budget is used up.
        """
        if self.remote[worker] is not handle:
            return
        budget = self.settings.max_evaluator_restarts
        if self._closed or self.engine is None:
            raise error
        if self.num_restarts >= budget:
            raise WorkerDiedError(
                f"{error}; {self.num_restarts} evaluators were replaced before (max_evaluator_restarts={budget})"
            ) from error
        self.num_restarts += 1
        # As text: who keeps log records shall not keep the error's frames, and all that they refer to, alive.
        log.warning("%s; it is replaced (%d of %d)", str(error), self.num_restarts, budget)
        self.remote[worker] = self.engine.replace(handle)
        self._sent[worker] = 0
        self.send_weights(worker)

    def close(self) -> None:
        """Closes every evaluator and the engine, also if one fails to; then raises the first failure, which names the
        others."""
        self._closed = True
        failed = []
        closes = {"the local evaluator": self.local.close}
        if self.engine is not None:
            closes["the engine"] = self.engine.close
        for who, close in closes.items():
            try:
                close()
            except Exception as e:
                failed.append((who, e))
        if failed:
            raise first_of(failed)

    def __enter__(self) -> EvaluatorSet:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _adopt(evaluator: Any, index: int, incarnation: int) -> EvaluatorServer:
    return EvaluatorServer(evaluator)


def _in_order(requests: Requests) -> list[Any]:
    answers = requests.take(num_ready=requests.in_flight())
    return [answer.value for answer in sorted(answers, key=lambda answer: answer.worker)]


def _merged(timers: list[dict[str, float]]) -> dict[str, float]:
    if not timers:
        return {}
    polls = sum(t["sampler/polls"] for t in timers)
    merged = {}
    for name in timers[0]:
        if name.endswith("_ms"):
            total = math.fsum(t[name] * t["sampler/polls"] for t in timers if t["sampler/polls"])
            merged[name] = total / polls if polls else math.nan
        else:
            merged[name] = sum(t[name] for t in timers)
    return merged
