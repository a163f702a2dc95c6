"""Sampling beside a learner: who is asked for samples, and who gets which weights."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator

from rlsample.evaluation.evaluator_set import EvaluatorSet
from rlsample.evaluation.requests import Answer, Requests
from rlsample.optimizers.background import Timers
from rlsample.optimizers.learner_thread import LearnerThread

__all__ = ["SampleRequests"]

_NUM_VERSIONS_KEPT = 10_000


class SampleRequests:
    """Keeps all remote evaluators sampling, with weights of a learner that goes on meanwhile.

        requests.start()
        while True:
            requests.ask()
            for answer in requests.take(timeout_s=0.25):
                use(answer.value)
                requests.send_weights(answer.worker)

    How many requests are in flight is read off them, never counted: :meth:`ask` makes up for whatever went wrong. An
    evaluator that dies or hangs is replaced within the set's budget; its replacement gets the newest weights and is
    asked again.

    Args:
        evaluators: the remote ones sample; the local one is the learner's.
        learner: whose weights go out.
        ahead: requests in flight per evaluator.
        timers: gets "sample_wait".
    """

    def __init__(self, evaluators: EvaluatorSet, learner: LearnerThread, ahead: int, timers: Timers) -> None:
        self._evaluators, self._learner, self._ahead, self._timers = evaluators, learner, ahead, timers
        self._requests = Requests(evaluators)
        self._versions: dict[int, int] = {}  # broadcast -> the version of its weights

    def start(self) -> None:
        """Gives all evaluators the local weights; before the learner starts."""
        self._evaluators.sync_weights()
        self._note_version()

    def ask(self) -> None:
        """Asks each evaluator for as many samples as it lacks."""
        self._requests.ask_all(self._ahead)

    def in_flight(self) -> int:
        """Requests whose answers were not given out yet."""
        return self._requests.in_flight()

    def take(self, timeout_s: float) -> Iterator[Answer]:
        """Waits for an answer, or until the time is up; gives out what is there, as :meth:`Requests.ready` does.

        Raises:
            WorkerDiedError, Exception: as :meth:`Requests.wait`.
        """
        started = time.perf_counter()
        self._requests.wait(1, timeout_s)
        self._timers.add("sample_wait", time.perf_counter() - started)
        return self._requests.ready()

    def publish_weights(self, env_steps: int) -> bool:
        """Makes the learner's weights of now the newest broadcast, if they have changed since the last; waits for the
        end of an update.

        Returns:
            Whether they had changed.
        """
        if self._versions.get(self._evaluators.version) == self._learner.version():
            return False
        self._learner.between_updates(functools.partial(self._publish, env_steps))
        return True

    def _publish(self, env_steps: int) -> None:
        self._evaluators.set_progress(env_steps)
        self._evaluators.publish_weights()
        self._note_version()

    def _note_version(self) -> None:
        self._versions[self._evaluators.version] = self._learner.version()
        if len(self._versions) > _NUM_VERSIONS_KEPT:
            del self._versions[next(iter(self._versions))]

    def send_weights(self, worker: int) -> bool:
        """Sends an evaluator the newest broadcast, for its next sample; whether it had an older one."""
        return self._evaluators.send_weights(worker)

    def version_of(self, answer: Answer) -> int:
        """The version of the weights that a sample was begun with."""
        return self._versions.get(answer.version or 0, 0)
