"""Every optimizer keeps the rules of the public suite, and an optimizer that breaks one is found out."""

from __future__ import annotations

import functools
import threading
from collections.abc import Mapping
from typing import Any

import pytest

from rlsample.engine import InlineEngine, ProcessEngine, ProcessSettings, ThreadEngine
from rlsample.errors import WorkerDiedError
from rlsample.evaluation import CommonPolicyEvaluator
from rlsample.optimizers import (
    AsyncGradientsOptimizer,
    AsyncGradientsSettings,
    MicrobatchOptimizer,
    MicrobatchSettings,
    SyncSamplesOptimizer,
    SyncSamplesSettings,
)
from rlsample.testing import ConformanceError
from rlsample.testing.optimizer_rules import OPTIMIZER_RULES, check_optimizer
from rlsample.testing.row_evaluator import RowEvaluator

OPTIMIZERS: dict[str, Any] = {
    "sync": SyncSamplesOptimizer,
    "sync minibatches": lambda e: SyncSamplesOptimizer(
        e, SyncSamplesSettings(train_batch_size=60, num_sgd_iter=2, minibatch_size=16)
    ),
    "async gradients": lambda e: AsyncGradientsOptimizer(e, AsyncGradientsSettings(grads_per_step=5)),
    "microbatch": lambda e: MicrobatchOptimizer(e, MicrobatchSettings(train_batch_size=60, microbatch_size=11)),
}
NO_PROCESSES = {8: "workers are no processes"}


def all_ok(name: str) -> dict[int, str]:
    needs_remote = {9: "needs remote evaluators"} if name == "async gradients" else {}
    return {**dict.fromkeys(OPTIMIZER_RULES, "ok"), **needs_remote}


@pytest.mark.parametrize("engine", [InlineEngine, ThreadEngine])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name: str, engine: Any):
    assert check_optimizer(OPTIMIZERS[name], RowEvaluator, make_engine=engine) == {**all_ok(name), **NO_PROCESSES}


@pytest.mark.parametrize("name", ["sync minibatches", "async gradients", "microbatch"])
def test_an_evaluator_is_killed_in_the_middle_of_a_sample(name: str):
    engine = functools.partial(ProcessEngine, ProcessSettings(close_timeout_s=1.0))
    assert check_optimizer(OPTIMIZERS[name], RowEvaluator, [8], make_engine=engine, mortal=True) == {8: "ok"}


def test_optimizers_without_workers():
    for name in ("sync", "sync minibatches", "microbatch"):
        report = check_optimizer(OPTIMIZERS[name], RowEvaluator, num_workers=0)
        assert report == {**all_ok(name), **NO_PROCESSES, 3: "no remote evaluators"}


@pytest.mark.parametrize("name", ["sync minibatches", "async gradients", "microbatch"])
def test_optimizers_over_an_env_and_a_policy(name: str):
    rules = [1, 3, 4, 6]
    report = check_optimizer(OPTIMIZERS[name], make_cartpole, rules, make_engine=InlineEngine)
    assert report == dict.fromkeys(rules, "ok")


def make_cartpole(worker_index: int) -> CommonPolicyEvaluator:
    from rlsample.policy import A2CPolicy

    return CommonPolicyEvaluator(
        "CartPole-v1", A2CPolicy, num_envs=2, rollout_fragment_length=5, seed=3, worker_index=worker_index
    )


class Plain(SyncSamplesOptimizer):
    """An optimizer to break."""


class CountsFromConfiguration(Plain):
    def step(self) -> dict[str, float]:
        before = self.num_steps_sampled
        stats = super().step()
        self.num_steps_sampled = before + 20
        return stats


class TrainedIsSampled(SyncSamplesOptimizer):
    def __init__(self, evaluators: Any) -> None:
        super().__init__(evaluators, SyncSamplesSettings(num_sgd_iter=2))

    def step(self) -> dict[str, float]:
        stats = super().step()
        self.num_steps_trained = self.num_steps_sampled
        return stats


class NoStatistics(Plain):
    def step(self) -> dict[str, float]:
        super().step()
        return {}


class InfiniteStatistics(Plain):
    def step(self) -> dict[str, float]:
        return {**super().step(), "loss": float("inf")}


class NoCounters(Plain):
    def stats(self) -> dict[str, float]:
        return {}


class SendsNothing(Plain):
    def __init__(self, evaluators: Any) -> None:
        super().__init__(evaluators)
        evaluators.sync_weights = lambda: None


class Swallows(Plain):
    def step(self) -> dict[str, float]:
        try:
            return super().step()
        except FloatingPointError:
            return {"loss": 0.0}


class LosesTheCause(Plain):
    def step(self) -> dict[str, float]:
        try:
            return super().step()
        except FloatingPointError:
            raise RuntimeError("something failed") from None


class CountsBeforeItLearns(Plain):
    def _learn(self, batch: Any) -> dict[str, float]:
        self.num_steps_trained += batch.count
        before = self.num_steps_trained
        stats = super()._learn(batch)
        self.num_steps_trained = before
        return stats


class HangsOnErrors(Plain):
    def step(self) -> dict[str, float]:
        try:
            return super().step()
        except FloatingPointError:
            threading.Event().wait(1.0)  # longer than the suite waits, see below
            raise


class ForgetsState(Plain):
    def restore(self, state: Mapping[str, Any]) -> None:
        pass


class SavesObjects(Plain):
    def save(self) -> dict[str, Any]:
        return {**super().save(), "settings": self.settings}


class ClosesEvaluators(Plain):
    def close(self) -> None:
        for handle in self.evaluators.remote:
            self.evaluators.engine.replace(handle).refuse("was closed")  # type: ignore


class LeavesAThread(Plain):
    def __init__(self, evaluators: Any) -> None:
        super().__init__(evaluators)
        self.stop = threading.Event()
        threading.Thread(target=self.stop.wait, args=(3.0,), daemon=True).start()


class CountsTheLostSampleToo(Plain):
    def step(self) -> dict[str, float]:
        before = self.evaluators.num_restarts
        stats = super().step()
        self.num_steps_sampled += 5 * (self.evaluators.num_restarts - before)
        return stats


class GivesUpAfterADeath(Plain):
    def _learn(self, batch: Any) -> dict[str, float]:
        return {"loss": 0.0} if self.evaluators.num_restarts else super()._learn(batch)


class ReplacesTheHealthyToo(Plain):
    def step(self) -> dict[str, float]:
        stats = super().step()
        if self.evaluators.num_restarts == 1:
            self.evaluators.replace(1, self.evaluators.remote[1], WorkerDiedError("a mistake"))
        return stats


class HidesConfigErrors(AsyncGradientsOptimizer):
    def __init__(self, evaluators: Any) -> None:
        if not evaluators.num_remote:
            from rlsample.errors import ConfigError

            raise ConfigError("no")
        super().__init__(evaluators)


BROKEN = [
    (CountsFromConfiguration, 1, "num_steps_sampled"),
    (TrainedIsSampled, 1, "num_steps_trained"),
    (NoStatistics, 2, "steps returned"),
    (InfiniteStatistics, 2, "loss=inf"),
    (NoCounters, 2, "num_steps_sampled"),
    (SendsNothing, 3, r"got \[1, 2\]"),
    (Swallows, 4, "no error"),
    (Swallows, 5, "no error"),
    (LosesTheCause, 4, "nan-7"),
    (CountsBeforeItLearns, 5, "num_steps_trained"),
    (HangsOnErrors, 4, "nothing after"),
    (ForgetsState, 6, "after restore"),
    (SavesObjects, 6, "settings"),
    (LeavesAThread, 7, "what is left"),
    (HidesConfigErrors, 9, "what is missing"),
]


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (CountsTheLostSampleToo, "num_steps_sampled"),
        (GivesUpAfterADeath, "training went on"),
        (ReplacesTheHealthyToo, "replacements"),
    ],
)
def test_who_cannot_take_a_death_is_found_out(make: Any, what: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("rlsample.testing.optimizer_rules._MOST_STEPS", 20)
    engine = functools.partial(ProcessEngine, ProcessSettings(close_timeout_s=1.0))
    with pytest.raises(ConformanceError, match=what) as caught:
        check_optimizer(make, RowEvaluator, [8], make_engine=engine, mortal=True)
    assert caught.value.rule == 8


@pytest.mark.parametrize(("make", "rule", "what"), BROKEN, ids=[f"{make.__name__}-{rule}" for make, rule, _ in BROKEN])
def test_a_broken_optimizer_is_found_out(make: Any, rule: int, what: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("rlsample.testing.optimizer_rules._STEP_S", 0.5)
    monkeypatch.setattr("rlsample.testing.optimizer_rules._VANISH_S", 0.1)
    monkeypatch.setattr("rlsample.testing.optimizer_rules._MOST_STEPS", 20)
    made: list[Any] = []

    def remember(evaluators: Any) -> Any:
        made.append(make(evaluators))
        return made[-1]

    with pytest.raises(ConformanceError, match=what) as caught:
        check_optimizer(remember, RowEvaluator, [rule], make_engine=InlineEngine)
    assert caught.value.rule == rule
    for optimizer in made:
        getattr(optimizer, "stop", threading.Event()).set()
