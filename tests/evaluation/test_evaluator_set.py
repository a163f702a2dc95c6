"""The set over engines: who is told what, what comes back with samples, and what a death changes."""

from __future__ import annotations

import functools
import math
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

import cloudpickle
import numpy as np
import pytest

from rlsample.engine import InlineEngine, ProcessEngine, ThreadEngine
from rlsample.errors import ConfigError, WorkerDiedError, first_of
from rlsample.evaluation import CommonPolicyEvaluator, EvaluatorSet, PolicyEvaluator
from rlsample.evaluation.evaluator_set import EvaluatorSetSettings
from rlsample.evaluation.requests import Requests
from rlsample.testing.row_evaluator import RowEvaluator
from rlsample.testing.scripted import CountEnv
from rlsample.testing.scripted_policy import ScriptedPolicy


@pytest.fixture(autouse=True, scope="module")
def by_value() -> Iterator[None]:
    """Processes cannot import test modules."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


@pytest.fixture(params=[InlineEngine, ThreadEngine])
def engine(request: pytest.FixtureRequest) -> Iterator[Any]:
    return request.param()


class Watched(RowEvaluator):
    """Remembers what it was told; samples wait for ``gate``."""

    def __init__(self, worker_index: int) -> None:
        super().__init__(worker_index, (2 + worker_index,))
        self.got: list[float] = []
        self.progress: list[int] = []
        self.copies = 0
        self.gate = threading.Event()
        self.gate.set()
        self.closed = 0

    def sample(self) -> Any:
        assert self.gate.wait(20)
        return super().sample()

    def get_weights(self) -> Any:
        self.copies += 1
        return super().get_weights()

    def set_weights(self, weights: Any) -> None:
        self.got.append(float(weights["w"][1]))
        super().set_weights(weights)

    def set_progress(self, env_steps: int) -> None:
        self.progress.append(env_steps)

    def close(self) -> None:
        self.closed += 1


def test_who_is_who(engine: Any):
    with EvaluatorSet.create(Watched, 2, engine) as evaluators:
        assert evaluators.num_remote == 2
        assert evaluators.foreach_evaluator(lambda e: e.worker_index) == [0, 1, 2]
        assert evaluators.foreach_evaluator_with_index(lambda e, i: (e.worker_index, i)) == [(0, 0), (1, 1), (2, 2)]
        assert evaluators.alive() == [True, True]


def test_without_workers_no_engine_is_made_and_the_local_one_samples():
    with EvaluatorSet.create(RowEvaluator, 0) as evaluators:
        assert evaluators.engine is None
        evaluators.sync_weights()
        assert [b.count for _ in range(3) for b in evaluators.sample_round()] == [7, 13, 5]


def test_each_version_is_copied_once_and_sent_once(engine: Any):
    with EvaluatorSet.create(Watched, 3, engine) as evaluators:
        local: Any = evaluators.local
        assert evaluators.version == 0
        evaluators.set_progress(500)
        local.weights = np.array([0.0, 7.0])
        assert evaluators.publish_weights() == 1
        local.weights = np.array([0.0, 8.0])
        assert [evaluators.send_weights(0), evaluators.send_weights(0), evaluators.send_weights(2)] == [
            True,
            False,
            True,
        ]
        list(evaluators.sample_round())
        assert evaluators.foreach_evaluator(lambda e: e.got) == [[], [7.0], [], [7.0]]
        assert local.copies == 1
        evaluators.sync_weights()
        list(evaluators.sample_round())
        assert evaluators.foreach_evaluator(lambda e: e.got) == [[], [7.0, 8.0], [8.0], [7.0, 8.0]]
        assert evaluators.foreach_evaluator(lambda e: e.progress) == [[500], [500, 500], [500], [500, 500]]
        assert (local.copies, evaluators.version) == (2, 2)


def test_only_the_newest_weights_reach_an_evaluator_that_is_busy():
    with EvaluatorSet.create(Watched, 1, ThreadEngine(copies=False)) as evaluators:
        local: Any = evaluators.local
        remote: Any = evaluators.foreach_evaluator(lambda e: e)[1]
        requests = Requests(evaluators)
        remote.gate.clear()
        requests.ask(0)
        requests.ask(0)
        for value in (1.0, 2.0, 3.0):
            local.weights = np.array([0.0, value])
            evaluators.sync_weights()
        remote.gate.set()
        answers = requests.take(2, 20)
        assert [a.value["update"][0] for a in answers][1] == 3.0
        assert remote.got in ([3.0], [1.0, 3.0], [2.0, 3.0], [1.0, 2.0, 3.0])  # the first call may have begun late
        assert [a.version for a in answers][1] == 3


def test_rounds_are_in_order_and_an_error_loses_no_batch(engine: Any):
    class Fails(RowEvaluator):
        def sample(self) -> Any:
            if self.worker_index == 1 and self.num_samples == 1:
                self.num_samples += 1
                raise FloatingPointError("nan-7")
            return super().sample()

    make = functools.partial(Fails, sizes=(3,))
    with EvaluatorSet.create(make, 2, engine) as evaluators:
        ids = [batch["id"][0] for batch in evaluators.sample_round()]
        assert ids == [1_000_000, 2_000_000]
        with pytest.raises(FloatingPointError, match="nan-7"):
            list(evaluators.sample_round())
        ids = [batch["id"][0] for batch in evaluators.sample_round()]
        assert ids == [1_000_003, 2_000_003]
        ids = [batch["id"][0] for batch in evaluators.sample_round()]
        assert ids == [1_000_006, 2_000_006]


def test_what_comes_with_a_round_is_in_order_also_if_the_last_is_first():
    class Late(RowEvaluator):
        others_done = threading.Event()

        def sample(self) -> Any:
            if self.worker_index == 1:
                assert self.others_done.wait(20)
            else:
                self.others_done.set()
            return super().sample()

    with EvaluatorSet.create(Late, 2, ThreadEngine(copies=False)) as evaluators:
        list(evaluators.sample_round())
        assert [episode.worker_index for episode in evaluators.get_metrics()] == [1, 2]


def test_requests_keep_the_answers_of_others_when_one_raises():
    class Fails(RowEvaluator):
        def sample(self) -> Any:
            if self.worker_index == 1:
                raise FloatingPointError("nan-7")
            return super().sample()

    with EvaluatorSet.create(Fails, 3, InlineEngine()) as evaluators:
        requests = Requests(evaluators)
        for worker in range(3):
            requests.ask(worker, tag=f"t{worker}")
        assert [requests.in_flight(), requests.in_flight(0), requests.in_flight(2)] == [3, 1, 1]
        with pytest.raises(FloatingPointError):
            requests.take()
        assert [(a.worker, a.tag, a.value.count) for a in requests.take()] == [(1, "t1", 7), (2, "t2", 7)]
        assert requests.in_flight() == 0
        assert requests.take() == []


class FailsInNumbers(RowEvaluator):
    def sample(self) -> Any:
        if self.worker_index == 2:
            return super().sample()
        raise (KeyError if self.worker_index == 3 else ValueError)(f"bad-{self.worker_index}")

    def close(self) -> None:
        if self.worker_index in (1, 3):
            raise OSError(f"held-{self.worker_index}")


def test_of_several_errors_the_first_names_the_others():
    evaluators = EvaluatorSet.create(FailsInNumbers, 4, InlineEngine())
    requests = Requests(evaluators)
    for worker in range(4):
        requests.ask(worker)
    with pytest.raises(ValueError, match="bad-1") as caught:
        requests.take()
    assert str(caught.value) == "bad-1; and 2 more: worker 2: KeyError: 'bad-3'; worker 3: ValueError: bad-4"
    assert [answer.worker for answer in requests.take()] == [1]
    with pytest.raises(OSError, match="held-1; and 1 more: worker 2: OSError: held-3"):
        evaluators.close()


def test_an_error_that_makes_its_own_message_tells_of_the_others_too(caplog: pytest.LogCaptureFixture):
    error = KeyError("a")
    others = [("worker 1", ValueError("b")), ("worker 2", ValueError("c"))]
    text = "and 2 more: worker 1: ValueError: b; worker 2: ValueError: c"
    assert first_of([("worker 0", error), *others]) is error
    assert error.args == ("a",)
    assert getattr(error, "__notes__", None) == [text] or caplog.messages == [f"KeyError: 'a'; {text}"]
    plain = ValueError("a")
    for _ in range(2):  # raised again, it does not grow
        assert str(first_of([("worker 0", plain), *others])) == f"a; {text}"


def test_take_gives_what_is_there_when_the_time_is_up():
    with EvaluatorSet.create(Watched, 2, ThreadEngine(copies=False)) as evaluators:
        slow: Any = evaluators.foreach_evaluator(lambda e: e)[1]
        slow.gate.clear()
        requests = Requests(evaluators)
        requests.ask(0)
        requests.ask(1)
        assert [a.worker for a in requests.take(1, 20)] == [1]
        assert requests.take(1, 0.01) == []
        slow.gate.set()
        assert [a.worker for a in requests.take(5, 20)] == [0]


def test_episodes_come_with_samples_and_get_metrics_never_waits():
    with EvaluatorSet.create(Watched, 2, ThreadEngine(copies=False)) as evaluators:
        busy: Any = evaluators.foreach_evaluator(lambda e: e)[1]
        list(evaluators.sample_round())
        busy.gate.clear()
        requests = Requests(evaluators)
        requests.ask(0)
        assert [(m.worker_index, m.length) for m in evaluators.get_metrics()] == [(1, 3), (2, 4)]
        assert evaluators.get_metrics() == []
        busy.gate.set()
        requests.take()
        assert [m.eps_id for m in evaluators.get_metrics()] == [1_000_003]


def make_filtered(worker_index: int, **options: Any) -> CommonPolicyEvaluator:
    return CommonPolicyEvaluator(
        functools.partial(CountEnv, 1000),
        ScriptedPolicy,
        1,
        rollout_fragment_length=10,
        observation_filter="MeanStdFilter",
        worker_index=worker_index,
        **options,
    )


def _statistics(evaluator: Any) -> tuple[float, ...]:
    f = evaluator.filter
    return f.count, float(f.mean[0]), float(f.std[0])


def test_case_27_filters_over_processes():
    """Each worker sees 11 rows, then 10 more each round: all filters know all rows, and none twice."""
    with EvaluatorSet.create(make_filtered, 2) as evaluators:
        seen = [0.0, 0.0]
        for i in range(3):
            evaluators.sync_weights()
            assert sum(batch.count for batch in evaluators.sample_round()) == 20
            seen += [float(k) for k in range(10 * i + 1, 10 * i + 11)] * 2
            evaluators.sync_filters()
            for _ in range(2):  # the second time there is nothing new
                statistics = evaluators.foreach_evaluator(_statistics)
                assert statistics == [statistics[0]] * 3
                assert statistics[0] == pytest.approx((len(seen), np.mean(seen), np.std(seen, ddof=1)), rel=1e-9)
                evaluators.sync_filters()


def _policy_version(evaluator: Any) -> int:
    return evaluator.policy.version


def test_rows_carry_the_local_policys_version_also_if_that_was_set_back(engine: Any):
    make = functools.partial(make_filtered)
    with EvaluatorSet.create(make, 2, engine) as evaluators:
        policy: Any = evaluators.local.policy  # type: ignore[attr-defined]
        for version in (5, 6, 3, 4):
            policy.version = version
            evaluators.sync_weights()
            for batch in evaluators.sample_round():
                assert batch["policy_version"].tolist() == [version] * 10
        assert evaluators.foreach_evaluator(_policy_version) == [4, 4, 4]


def test_a_killed_evaluator_is_replaced_with_weights_filter_and_counters():
    with EvaluatorSet.create(make_filtered, 2) as evaluators:
        policy: Any = evaluators.local.policy  # type: ignore[attr-defined]
        policy.version = 9
        evaluators.set_progress(1234)
        evaluators.sync_weights()
        first = {int(i) for batch in evaluators.sample_round() for i in batch["eps_id"]}
        evaluators.sync_weights()
        requests = Requests(evaluators)
        dead: Any = evaluators.remote[0]
        os.kill(dead.pid, signal.SIGSTOP)  # it is asked, and will never answer
        requests.ask(0)
        os.kill(dead.pid, signal.SIGKILL)
        (answer,) = requests.take(1, 20)
        assert answer.worker == 0
        assert answer.value["policy_version"].tolist() == [9] * 10
        assert answer.version == evaluators.version
        assert first.isdisjoint(answer.value["eps_id"].tolist())
        assert (evaluators.num_restarts, evaluators.alive(), evaluators.remote[0].incarnation) == (1, [True, True], 1)
        assert evaluators.remote[0] is not dead
        evaluators.sync_filters()
        assert [s[0] for s in evaluators.foreach_evaluator(_statistics)] == [22 + 11] * 3
        assert evaluators.foreach_evaluator(lambda e: e.worker_index) == [0, 4097, 2]


def test_a_death_over_the_budget_is_an_error_that_says_so():
    with EvaluatorSet.create(RowEvaluator, 1, settings=EvaluatorSetSettings(max_evaluator_restarts=1)) as evaluators:
        list(evaluators.sample_round())
        for expected in (None, r"worker 0 \(incarnation 1\) was killed by SIGKILL.*1 evaluators were replaced before"):
            worker: Any = evaluators.remote[0]
            os.kill(worker.pid, signal.SIGKILL)
            if expected is None:
                assert [batch["id"][0] for batch in evaluators.sample_round()] == [4097 * 1_000_000]
            else:
                with pytest.raises(WorkerDiedError, match=expected):
                    list(evaluators.sample_round())
        assert evaluators.num_restarts == 1


def test_an_evaluators_own_worker_error_is_no_death(engine: Any):
    class LostItsOwn(RowEvaluator):
        def sample(self) -> Any:
            raise WorkerDiedError("inner")

    with EvaluatorSet.create(LostItsOwn, 1, engine) as evaluators:
        with pytest.raises(WorkerDiedError, match="inner"):
            list(evaluators.sample_round())
        assert evaluators.num_restarts == 0


def test_closing_while_a_thread_waits_for_samples_releases_it():
    evaluators = EvaluatorSet.create(Watched, 1, ThreadEngine(copies=False, close_timeout_s=0.2))
    busy: Any = evaluators.foreach_evaluator(lambda e: e)[1]
    busy.gate.clear()
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            list(evaluators.sample_round())
        except WorkerDiedError as e:
            errors.append(e)

    thread = threading.Thread(target=wait)
    thread.start()
    while not evaluators._round.in_flight():
        pass
    evaluators.close()
    thread.join(5)
    busy.gate.set()
    assert [str(e) for e in errors] == ["worker 0 was closed before it answered 'sample'"]
    assert evaluators.num_restarts == 0


def test_errors_of_building(engine: Any):
    def make(worker_index: int) -> PolicyEvaluator:
        if worker_index == 2:
            raise ValueError("no-2")
        return Watched(worker_index)

    with EvaluatorSet.create(make, 2, engine) as evaluators, pytest.raises(ValueError, match="no-2"):
        list(evaluators.sample_round())


def test_the_engine_is_closed_if_the_local_evaluator_cannot_be_made():
    made: list[Watched] = []

    def make(worker_index: int) -> PolicyEvaluator:
        if worker_index == 0:
            raise ValueError("no-0")
        made.append(Watched(worker_index))
        return made[-1]

    with pytest.raises(ValueError, match="no-0"):
        EvaluatorSet.create(make, 2, InlineEngine())
    assert [e.closed for e in made] == [1, 1]


def test_timers_are_means_over_polls(engine: Any):
    class Timed(RowEvaluator):
        def get_timers(self) -> dict[str, float]:
            n = self.worker_index
            return {"sampler/env_ms": 10.0 * n if n else math.nan, "sampler/polls": n}

    with EvaluatorSet.create(Timed, 2, engine) as evaluators:
        list(evaluators.sample_round())
        timers = evaluators.get_timers()
        assert timers == {"sampler/env_ms": pytest.approx((10 + 2 * 20) / 3), "sampler/polls": 3}
        empty = evaluators.get_timers()
        assert empty["sampler/polls"] == 0
        assert math.isnan(empty["sampler/env_ms"])


@pytest.mark.parametrize("num_workers", [-1, 4096])
def test_impossible_numbers_of_workers(num_workers: int):
    with pytest.raises(ConfigError, match="num_workers"):
        EvaluatorSet.create(RowEvaluator, num_workers, InlineEngine())
    with pytest.raises(ConfigError, match="max_evaluator_restarts"):
        EvaluatorSetSettings(max_evaluator_restarts=-1)


def test_the_same_seed_gives_the_same_rows_inline_and_in_processes():
    rows = []
    for engine in (InlineEngine(), ProcessEngine()):
        make = functools.partial(CommonPolicyEvaluator, "CartPole-v1", ScriptedPolicy, 2, rollout_fragment_length=20)
        with EvaluatorSet.create(functools.partial(_with_index, make), 2, engine) as evaluators:
            rows.append([batch["obs"] for _ in range(2) for batch in evaluators.sample_round()])
    assert all((a == b).all() for a, b in zip(*rows, strict=True))
    assert not (rows[0][0] == rows[0][1]).all()


def _with_index(make: Any, worker_index: int) -> CommonPolicyEvaluator:
    return make(seed=5, worker_index=worker_index)
