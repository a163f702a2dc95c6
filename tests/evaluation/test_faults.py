"""Envs that raise: which error, what is kept, and how restarts look in the rows."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest

from rlsample.errors import EnvError, EnvFailedError, SamplerError
from rlsample.evaluation import CommonPolicyEvaluator
from rlsample.testing.scripted import CountEnv
from rlsample.testing.scripted_policy import ScriptedPolicy


class FailsOnce(CountEnv):
    """Slot 1's first incarnation raises in its third step."""

    def __init__(self, ctx: Any, made: list[int]):
        super().__init__(5, "term")
        made.append(ctx.slot_index)
        self.bad = ctx.slot_index == 1 and ctx.incarnation == 0

    def step(self, action):
        if self.bad and self.k == 2:
            raise RuntimeError("broken-7")
        return super().step(action)


def test_case_21_inline_a_failed_env_is_restarted_and_its_episode_is_a_cut():
    made: list[int] = []
    with CommonPolicyEvaluator(
        lambda ctx: FailsOnce(ctx, made),
        ScriptedPolicy,
        3,
        rollout_fragment_length=10,
        max_restarts=1,
        restart_backoff_s=0.0,
    ) as ev:
        batch = ev.sample()
        metrics = ev.get_metrics()
        assert ev.sampler.rows_lost == 1
    assert made == [0, 1, 2, 1]
    for slot in (0, 2):
        assert batch["t"][batch["env_id"] == slot].tolist() == [0, 1, 2, 3, 4] * 2
    at = np.flatnonzero(batch["env_id"] == 1)
    assert batch["t"][at].tolist() == [0, 1, 0, 1, 2, 3, 4, 0, 1, 2]
    assert batch["obs"][at].reshape(-1).tolist() == [0, 1, 0, 1, 2, 3, 4, 0, 1, 2]
    assert batch["next_obs"][at].reshape(-1).tolist() == [1, 2, 1, 2, 3, 4, 5, 1, 2, 3]
    assert len(set(batch["eps_id"][at].tolist())) == 3
    assert not batch["terminated"][at][1]
    assert not batch["truncated"][at][1]
    assert [(m.length, m.episode_return) for m in metrics] == [(5, 15.0)] * 5


def test_without_restarts_the_error_names_slot_step_and_cause():
    made: list[int] = []
    with (
        CommonPolicyEvaluator(lambda ctx: FailsOnce(ctx, made), ScriptedPolicy, 3, rollout_fragment_length=10) as ev,
        pytest.raises(EnvFailedError, match=r"slot 1, episode step 3.*broken-7") as caught,
    ):
        ev.sample()
    assert caught.value.slot == 1
    assert caught.value.episode_step == 3
    chain, error = [], caught.value
    while error is not None:
        chain.append(type(error))
        error = error.__cause__
    assert RuntimeError in chain


def test_complete_episodes_drop_the_broken_one():
    made: list[int] = []
    with CommonPolicyEvaluator(
        lambda ctx: FailsOnce(ctx, made),
        ScriptedPolicy,
        2,
        rollout_fragment_length=10,
        batch_mode="complete_episodes",
        max_restarts=1,
        restart_backoff_s=0.0,
    ) as ev:
        batch = ev.sample()
        assert ev.sampler.rows_lost == 3
    assert {tuple(e["t"].tolist()) for e in batch.split_by_episode()} == {(0, 1, 2, 3, 4)}


class BadReset(CountEnv):
    def reset(self, *, seed=None, options=None):
        if self.resets == 1:
            raise OSError("reset-9")
        return super().reset(seed=seed, options=options)


def test_a_reset_that_raises_names_the_slot():
    with (
        CommonPolicyEvaluator(lambda ctx: BadReset(2, "term"), ScriptedPolicy, 2, rollout_fragment_length=5) as ev,
        pytest.raises(EnvFailedError, match=r"slot 0: reset raised OSError: reset-9"),
    ):
        ev.sample()


@pytest.mark.parametrize("slot", [0, 2])
def test_a_constructor_that_raises_closes_the_others(slot: int):
    made: list[CountEnv] = []

    def make(ctx):
        if ctx.slot_index == slot:
            raise ValueError("no-display")
        made.append(CountEnv(3, "term"))
        return made[-1]

    with pytest.raises(EnvFailedError, match=rf"slot {slot}: __init__ raised ValueError: no-display"):
        CommonPolicyEvaluator(make, ScriptedPolicy, 4)
    assert [env.closes for env in made] == [1] * slot


class BadObs(CountEnv):
    def __init__(self, bad: Any):
        super().__init__(9, "term")
        self.bad = bad

    def step(self, action):
        obs, *rest = super().step(action)
        return (self.bad if self.k == 2 else obs), *rest


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        (np.zeros(2, np.float32), r"shape \(2,\)"),
        (np.array([np.nan], np.float32), "nan"),
        (np.array([np.inf], np.float32), "inf"),
        ("text", "str"),
    ],
)
def test_bad_observations_name_slot_step_and_value(bad: Any, named: str):
    make = lambda ctx: BadObs(bad if ctx.slot_index == 1 else np.zeros(1, np.float32))  # noqa: E731
    with (
        CommonPolicyEvaluator(make, ScriptedPolicy, 2, rollout_fragment_length=5) as ev,
        pytest.raises(EnvFailedError, match=named) as caught,
    ):
        ev.sample()
    assert (caught.value.slot, caught.value.episode_step) == (1, 2)


def test_nonfinite_values_pass_if_allowed():
    make = lambda ctx: BadObs(np.array([np.nan], np.float32))  # noqa: E731
    with CommonPolicyEvaluator(make, ScriptedPolicy, 1, rollout_fragment_length=3, allow_nonfinite=True) as ev:
        batch = ev.sample()
    assert np.isnan(batch["obs"]).reshape(-1).tolist() == [False, False, True]


class OldEnv(CountEnv):
    def step(self, action):
        obs, reward, terminated, _, info = super().step(action)
        return obs, reward, terminated, info


def test_an_old_four_tuple_env_is_told_of_shimmy():
    with (
        CommonPolicyEvaluator(OldEnv(3, "term"), ScriptedPolicy) as ev,
        pytest.raises(EnvError, match="Shimmy") as caught,
    ):
        ev.sample()
    assert caught.value.episode_step == 1


class NanReset(CountEnv):
    def reset(self, *, seed=None, options=None):
        obs, info = super().reset(seed=seed, options=options)
        return (obs * np.nan if self.resets == 2 else obs), info


def test_a_bad_first_observation_loses_no_row():
    with CommonPolicyEvaluator(NanReset(2, "term"), ScriptedPolicy, rollout_fragment_length=5) as ev:
        with pytest.raises(EnvFailedError, match="slot 0: reset's observation holds nan") as caught:
            ev.sample()
        assert caught.value.episode_step is None
        assert ev.sampler.rows_lost == 0


def test_rows_collected_before_a_failure_come_with_the_next_call():
    class FailsAtThree(CountEnv):
        def step(self, action):
            if self.steps == 2:
                self.steps += 1
                raise RuntimeError("once")
            return super().step(action)

    made = [CountEnv(0, "never"), FailsAtThree(0, "never")]
    with CommonPolicyEvaluator(lambda ctx: made[ctx.slot_index], ScriptedPolicy, 2, rollout_fragment_length=4) as ev:
        with pytest.raises(EnvFailedError, match="once"):
            ev.sample()
        assert made[0].steps == 3
        with pytest.raises(EnvError):
            ev.sample()
        assert made[0].steps == 4  # the other slot went on to its full fragment and not beyond


def test_an_env_error_in_the_sampling_thread_reaches_sample():
    made: list[int] = []
    with CommonPolicyEvaluator(
        lambda ctx: FailsOnce(ctx, made), ScriptedPolicy, 2, rollout_fragment_length=2, sample_async=True
    ) as ev:
        assert ev.sample().count == 4  # the failing step is in the second batch
        with pytest.raises(SamplerError, match="broken-7") as caught:
            ev.sample()
        assert isinstance(caught.value.__cause__, EnvFailedError)
        with pytest.raises(SamplerError):
            ev.sample()


def test_async_batches_are_the_sync_ones_and_close_ends_the_thread():
    rows = {}
    for sample_async in (False, True):
        with CommonPolicyEvaluator(
            lambda ctx: CountEnv(3 + ctx.slot_index, "term"),
            ScriptedPolicy,
            2,
            rollout_fragment_length=4,
            sample_async=sample_async,
        ) as ev:
            rows[sample_async] = [ev.sample()["obs"].reshape(-1).tolist() for _ in range(5)]
    assert rows[False] == rows[True]


def test_close_is_idempotent_and_closes_each_env_once():
    made = [CountEnv(3, "term") for _ in range(3)]
    ev = CommonPolicyEvaluator(lambda ctx: made[ctx.slot_index], ScriptedPolicy, 3, rollout_fragment_length=2)
    ev.sample()
    ev.close()
    ev.close()
    assert [env.closes for env in made] == [1, 1, 1]
    with pytest.raises(EnvError, match="closed"):
        ev.sample()


class WrongSpaces(gymnasium.Env):
    def __init__(self, size: int):
        self.observation_space = gymnasium.spaces.Box(0, 1, (size,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(2)


def test_slots_with_different_spaces_are_refused():
    with pytest.raises(ValueError, match="slot 1"):
        CommonPolicyEvaluator(lambda ctx: WrongSpaces(1 + ctx.slot_index), ScriptedPolicy, 2)
