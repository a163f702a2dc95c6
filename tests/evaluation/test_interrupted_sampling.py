"""Ctrl-C inside sample(): the next call gives rows that fit together again."""

from __future__ import annotations

import random
import signal
import time
from typing import Any

import gymnasium
import pytest

from rlsample.evaluation import CommonPolicyEvaluator
from rlsample.testing.interrupts import interrupted_at
from rlsample.testing.scripted import CountEnv, CountVectorEnv
from rlsample.testing.scripted_policy import ScriptedPolicy

# An interrupt in a finalizer is swallowed there, and told.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


class InterruptedEnv(CountEnv):
    """Ctrl-C is pressed in step number ``at`` over all envs, before or after it was made."""

    steps_of_all = 0
    at = -1
    after = False

    def step(self, action: Any) -> Any:
        InterruptedEnv.steps_of_all += 1
        hit = InterruptedEnv.steps_of_all == self.at
        if hit and not self.after:
            raise KeyboardInterrupt
        result = super().step(action)
        if hit:
            raise KeyboardInterrupt
        return result


def check(batch: Any) -> None:
    """Rows of one episode follow each other; CountEnv's observation is the number of steps taken."""
    obs, t = batch["obs"].ravel(), batch["t"]
    assert obs.tolist() == t.tolist()
    assert batch["next_obs"].ravel().tolist() == (t + 1).tolist()
    assert batch["rewards"].tolist() == (t + 1).tolist()
    assert batch["terminated"].tolist() == (t == 4).tolist()


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("mode", ["truncate_episodes", "complete_episodes"])
@pytest.mark.parametrize("at", [1, 6, 17])
def test_a_call_that_broke_off_in_an_env_is_followed_by_whole_episodes(mode, at, after, monkeypatch):
    monkeypatch.setattr(InterruptedEnv, "steps_of_all", 0)
    monkeypatch.setattr(InterruptedEnv, "at", at)
    monkeypatch.setattr(InterruptedEnv, "after", after)
    options = {"rollout_fragment_length": 7, "batch_mode": mode, "vectorize": "loop"}
    with CommonPolicyEvaluator(lambda ctx: InterruptedEnv(5), ScriptedPolicy, 3, **options) as evaluator:
        before = []
        with pytest.raises(KeyboardInterrupt):
            before.extend(evaluator.sample() for _ in range(3))
        for batch in before:
            check(batch)
        batches = [evaluator.sample() for _ in range(3)]
        for batch in batches:
            check(batch)
        assert batches[0]["t"][0] == 0
        assert {(m.length, m.episode_return) for m in evaluator.get_metrics()} == {(5, 15.0)}


def test_calls_that_break_off_anywhere_are_followed_by_rows_that_fit():
    draws, interrupted = random.Random(1), 0
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    options = {"rollout_fragment_length": 40, "vectorize": "loop"}
    try:
        with CommonPolicyEvaluator(lambda ctx: CountEnv(5), ScriptedPolicy, 3, **options) as evaluator:
            started = time.perf_counter()
            check(evaluator.sample())
            usual_s = time.perf_counter() - started
            for _ in range(60):
                try:
                    signal.setitimer(signal.ITIMER_REAL, 1e-6 + draws.random() * usual_s)
                    batch = evaluator.sample()
                    signal.setitimer(signal.ITIMER_REAL, 0)
                    check(batch)
                except KeyboardInterrupt:
                    interrupted += 1
                check(evaluator.sample())
            assert {m.length for m in evaluator.get_metrics()} == {5}
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert interrupted > 5


def count_env(ctx: Any) -> CountEnv:
    return CountEnv(5)


def gym_vector(ctx: Any) -> gymnasium.vector.SyncVectorEnv:
    return gymnasium.vector.SyncVectorEnv([lambda: CountEnv(5)] * 3)


POOL = {"num_workers": 2, "start_method": "fork"}
ENVS: dict[str, tuple[Any, dict[str, Any]]] = {
    "loop": (count_env, {"vectorize": "loop"}),
    "vector env": (lambda ctx: CountVectorEnv((5, 5, 5)), {}),
    "gymnasium vector env": (gym_vector, {}),
    "pool": (count_env, {"backend": "process", "pool": POOL}),
    "pool, first come": (count_env, {"backend": "process", "pool": {**POOL, "batch_size": 1}}),
}


@pytest.mark.parametrize("step", [29, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", ["truncate_episodes", "complete_episodes"])
@pytest.mark.parametrize("name", list(ENVS))
def test_calls_that_break_off_at_every_place_are_followed_by_rows_that_fit(name: str, mode: str, step: int):
    make, options = ENVS[name]
    place = 0
    with CommonPolicyEvaluator(
        make, ScriptedPolicy, 3, rollout_fragment_length=7, batch_mode=mode, **options
    ) as evaluator:
        check(evaluator.sample())
        while interrupted_at(place, evaluator.sample):
            place += step
            for _ in range(2):
                check(evaluator.sample())
        assert place > 300
        assert {(m.length, m.episode_return) for m in evaluator.get_metrics()} == {(5, 15.0)}
