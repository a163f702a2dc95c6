"""The benches of the pool: keys, plausible numbers, and the tuner's choice and words."""

from __future__ import annotations

import dataclasses
import time

import gymnasium
import numpy as np
import pytest

from rlsample.bench.pool import bench_pool, drive, frame_skip
from rlsample.bench.straggler import SleepyEnv, bench_straggler
from rlsample.bench.tune import EnvCosts, format_report, layouts_to_try, measure_env, tune
from rlsample.env import as_base_env
from rlsample.errors import ConfigError, EnvFailedError

EVEN = EnvCosts(100.0, 110.0, 0.1, 1.0, 50.0, 1.0, 1000, 10)


def test_bench_pool_counts_steps():
    found = bench_pool("CartPole-v1", 6, 2, seconds=0.2, start_method="fork")
    assert found["steps_per_s"] == pytest.approx(found["rows_per_poll"] * found["polls"] / found["seconds"])
    assert found["frames_per_s"] == found["steps_per_s"] > 0
    assert (found["num_workers"], found["batch_size"], found["ordered"]) == (2, 6, True)
    assert found["rows_per_poll"] == 6  # resets ahead cost no row
    first = bench_pool("CartPole-v1", 6, 2, 3, seconds=0.2, start_method="fork")
    assert (first["batch_size"], first["ordered"]) == (3, False)
    with pytest.raises(ConfigError, match="seconds"):
        bench_pool(seconds=0)


def test_frame_skip_comes_from_the_registry():
    gymnasium.register("rlsample-tests/Skips-v0", entry_point=SleepyEnv, kwargs={"frameskip": 4})
    assert frame_skip("rlsample-tests/Skips-v0") == 4
    assert frame_skip("CartPole-v1") == 1
    assert frame_skip("nothing") == 1
    del gymnasium.registry["rlsample-tests/Skips-v0"]


def test_sleeping_envs_do_not_wait_for_each_other():
    found = bench_straggler(6, 10.0, 0.8, start_method="fork")
    assert found["possible_steps_per_s"] == 600
    assert found["num_workers"] == 6
    assert found["share"] == pytest.approx(found["steps_per_s"] / 600)
    assert found["share"] > 0.55  # a barrier gives 1 / H(6) = 0.41
    with pytest.raises(ConfigError, match="mean_ms"):
        bench_straggler(2, 0.0)


class Timed(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        time.sleep(0.004)
        self.k = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        time.sleep(0.002)
        self.k += 1
        return np.zeros(2, np.float32), 0.0, self.k == 5, False, {}


def test_one_env_is_measured():
    costs = measure_env(Timed, 0.2)
    assert 2000 < costs.step_us < 6000
    assert 4000 < costs.reset_us < 12000
    assert costs.cpu_share < 0.3
    assert costs.steps // 5 - 1 <= costs.episodes <= costs.steps // 5 + 1


def test_layouts_fit_the_env():
    names = [name for name, _ in layouts_to_try(EVEN, 16, 4)]
    assert names == [
        "one after the other, in this process",
        "4 workers, in order",
        "4 workers, half at a time",
        "3 workers, in order",
    ]
    assert layouts_to_try(EVEN, 16, 4, has_vector_form=True)[1][0] == "its own vector form, in this process"
    waits = dataclasses.replace(EVEN, cpu_share=0.05)
    assert "16 workers, first come" in [name for name, _ in layouts_to_try(waits, 16, 4)]
    uneven = dataclasses.replace(EVEN, spread=1.2)
    assert "4 workers, first come" in [name for name, _ in layouts_to_try(uneven, 16, 4)]
    assert len(layouts_to_try(EVEN, 1, 4)) == 1


def test_the_tuner_names_the_layout_and_why():
    report = tune(SleepyEnv, 6, 0.4, {"mean_s": 0.01})
    assert report.best.config["pool"]["num_workers"] == 6
    assert report.best.config["pool"].get("batch_size", 6) < 6
    assert "needs a core, so more workers than cores pay" in report.reason
    text = format_report(report)
    assert "use: num_envs=6, backend='process'" in text
    assert text.count("\n* ") == 1
    assert all(trial.name in text for trial in report.trials)
    assert [t.steps_per_s for t in report.trials] == sorted((t.steps_per_s for t in report.trials), reverse=True)


class Breaks(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Sequence(gymnasium.spaces.Discrete(3))

    def __init__(self, at=3):
        self.at, self.steps = at, 0

    def reset(self, *, seed=None, options=None):
        return np.zeros(2, np.float32), {}

    def step(self, action):
        assert isinstance(action, tuple)
        self.steps += 1
        if self.steps == self.at:
            raise RuntimeError("broken on purpose")
        return np.zeros(2, np.float32), 0.0, False, False, {}


def test_a_failing_env_is_named_and_actions_may_have_any_size():
    with (
        as_base_env(Breaks, 2) as env,
        pytest.raises(EnvFailedError, match=r"slot 0, episode step 3.*broken on purpose"),
    ):
        drive(env, 1.0)


@pytest.mark.parametrize("measure", [bench_pool, tune])
def test_atari_on_threads_of_its_own_has_a_bench_of_its_own(measure):
    with pytest.raises(ConfigError, match="rlsample bench atari --game Pong-v5"):
        measure("atari:Pong-v5", 2, seconds=0.1)


def test_a_vector_form_that_is_not_used_is_not_named():
    names = [trial.name for trial in tune("CartPole-v1", 2, 0.05).trials]
    assert names
    assert not [name for name in names if "vector form" in name]
