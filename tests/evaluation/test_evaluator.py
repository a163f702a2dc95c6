"""The evaluator with a real policy: bootstraps, weights as copies, resuming bit for bit, bounded memory."""

from __future__ import annotations

import copy
import functools
import tracemalloc
from typing import Any

import gymnasium
import numpy as np
import pytest

from rlsample.evaluation import CommonPolicyEvaluator
from rlsample.policy import PPOPolicy, PPOSettings
from rlsample.policy.advantages import add_advantages
from rlsample.testing.scripted import CountEnv
from rlsample.testing.scripted_policy import ScriptedPolicy


class GaePolicy(ScriptedPolicy):
    gamma, lam = 0.9, 1.0

    def postprocess(self, batch):
        return add_advantages(batch, self, self.gamma, self.lam)


class BothFlags(CountEnv):
    def step(self, action):
        obs, reward, terminated, _, info = super().step(action)
        return obs, reward, terminated, terminated, info


@pytest.mark.parametrize(
    ("env", "lam", "targets", "advantages"),
    [
        (CountEnv(3, "trunc"), 1.0, [12.52, 12.8, 12.0], [11.52, 10.8, 8.0]),
        (CountEnv(3, "trunc"), 0.5, None, [5.04, 7.2, 8.0]),
        (CountEnv(3, "term"), 1.0, [5.23, 4.7, 3.0], None),
        (CountEnv(3, "term"), 0.5, None, [3.2175, 3.15, -1.0]),
        (BothFlags(3, "term"), 1.0, [5.23, 4.7, 3.0], None),
        (BothFlags(3, "term"), 0.5, None, [3.2175, 3.15, -1.0]),
    ],
)
def test_case_12_truncation_bootstraps_from_the_final_observation(env, lam, targets, advantages):
    policy = functools.partial(GaePolicy, values={0: 1, 1: 2, 2: 4, 3: 10})
    with CommonPolicyEvaluator(env, policy, rollout_fragment_length=3) as ev:
        ev.policy.lam = lam
        batch = ev.sample()
    if targets:
        np.testing.assert_allclose(batch["value_targets"], targets, rtol=1e-6)
    if advantages:
        np.testing.assert_allclose(batch["advantages"], advantages, rtol=1e-6)


def test_case_13_a_cut_bootstraps_from_the_observation_after_it():
    policy = functools.partial(GaePolicy, values={k: k for k in range(20)})
    with CommonPolicyEvaluator(CountEnv(0, "never"), policy, rollout_fragment_length=3) as ev:
        ev.policy.gamma = 0.5
        first, second = ev.sample(), ev.sample()
    np.testing.assert_allclose(first["value_targets"], [3.125, 4.25, 4.5], rtol=1e-6)
    np.testing.assert_allclose(second["value_targets"], [8.75, 9.5, 9.0], rtol=1e-6)


def cartpole(seed: int = 5, num_envs: int = 3, **options: Any) -> CommonPolicyEvaluator:
    options = {"rollout_fragment_length": 16, "observation_filter": "MeanStdFilter", "vectorize": "loop", **options}
    return CommonPolicyEvaluator("CartPole-v1", PPOPolicy, num_envs, seed=seed, **options)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return np.array_equal(a, b)


def test_case_29_weights_gradients_and_state_are_copies():
    with cartpole() as ev:
        first, second = ev.sample(), ev.sample()
        w0, state = ev.get_weights(), ev.get_state()
        kept, kept_state = copy.deepcopy(w0), copy.deepcopy(state)
        before = ev.policy.values(first["obs"])
        ev.apply_gradients({name: np.ones_like(w) for name, w in w0.items()})
        assert same(w0, kept)
        assert same(state["policy"], kept_state["policy"])
        assert not np.allclose(ev.policy.values(first["obs"]), before)
        ev.set_weights(w0)
        np.testing.assert_array_equal(ev.policy.values(first["obs"]), before)
        for w in w0.values():
            w += 1
        np.testing.assert_array_equal(ev.policy.values(first["obs"]), before)
        gradients, _ = ev.compute_gradients(first)
        kept = copy.deepcopy(gradients)
        ev.compute_gradients(second)
        assert same(gradients, kept)


def test_the_same_seed_gives_the_same_rows_and_another_seed_others():
    batches = []
    for seed in (1, 1, 2):
        with cartpole(seed) as ev:
            batches.append([ev.sample() for _ in range(3)])
    for a, b, c in zip(*batches, strict=True):
        for name in a:
            np.testing.assert_array_equal(a[name], b[name])
        assert not np.array_equal(a["obs"], c["obs"])


def test_no_two_slots_and_no_two_workers_share_a_seed_and_the_global_state_is_untouched():
    np.random.seed(7)
    before = np.random.get_state()[1].copy()
    starts = []
    for worker in (0, 1):
        with CommonPolicyEvaluator("CartPole-v1", PPOPolicy, 3, seed=0, worker_index=worker) as ev:
            starts += ev.sampler.env.poll().obs[:, 0].tolist()
    assert len(set(starts)) == 6
    np.testing.assert_array_equal(np.random.get_state()[1], before)


@pytest.mark.parametrize("vectorize", ["loop", "native"])
def test_a_resumed_evaluator_goes_on_bit_for_bit(vectorize: str):
    with cartpole(vectorize=vectorize) as ev:
        for _ in range(3):
            ev.compute_apply(ev.sample())
        ev.get_metrics()
        state = ev.get_state()
        assert state["sampler"] is not None
        expected = [ev.sample() for _ in range(2)]
        finished = ev.get_metrics()
    with cartpole(seed=99, vectorize=vectorize) as again:
        again.set_state(state)
        for batch in expected:
            got = again.sample()
            for name in [*batch, "next_obs"]:
                np.testing.assert_array_equal(got[name], batch[name], err_msg=name)
        assert again.get_metrics() == finished
    assert finished


def test_an_env_that_cannot_give_its_state_says_so():
    class Local(CountEnv):
        pass  # local classes do not pickle

    with CommonPolicyEvaluator(Local(3, "term"), ScriptedPolicy, rollout_fragment_length=2) as ev:
        ev.sample()
        assert ev.get_state()["sampler"] is None


@pytest.mark.parametrize(("batch_mode", "episodes"), [("truncate_episodes", 5000), ("complete_episodes", 1500)])
def test_case_10_thousands_of_episodes_leave_nothing(batch_mode: str, episodes: int):
    with CommonPolicyEvaluator(
        lambda ctx: CountEnv(1, "term"), ScriptedPolicy, 2, rollout_fragment_length=50, batch_mode=batch_mode
    ) as ev:

        def run(episodes: int) -> None:
            done = 0
            while done < episodes:
                ev.sample()
                done += len(ev.get_metrics())
                ev.policy.seen.clear()

        run(episodes // 5)
        tracemalloc.start()
        try:
            before = tracemalloc.take_snapshot()
            run(episodes - episodes // 5)
            after = tracemalloc.take_snapshot()
        finally:
            tracemalloc.stop()
        grown = sum(stat.size_diff for stat in after.compare_to(before, "filename") if "tracemalloc" not in str(stat))
        assert grown < 100_000
        owned = [*vars(ev.sampler).values(), *vars(ev.sampler.episodes).values(), *vars(ev.env).values()]
        sizes = [len(o) for o in owned if isinstance(o, (list, dict, set)) or hasattr(o, "popleft")]
        assert max(sizes) <= 100


class Frames(gymnasium.Env):
    """84 x 84 x 4 bytes, a fresh array each step, episodes of 37."""

    observation_space = gymnasium.spaces.Box(0, 255, (84, 84, 4), np.uint8)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        self.k = 0
        return np.full((84, 84, 4), 7, np.uint8), {}

    def step(self, action):
        self.k += 1
        return np.full((84, 84, 4), self.k % 256, np.uint8), 1.0, self.k == 37, False, {}


def test_peak_memory_is_little_more_than_one_copy_of_the_rows():
    with CommonPolicyEvaluator(lambda ctx: Frames(), ScriptedPolicy, 8, rollout_fragment_length=64) as ev:
        ev.policy.act = functools.partial(_act_blind, ev.policy)
        ev.sample()
        tracemalloc.start()
        try:
            batch = ev.sample()
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        rows = batch.nbytes
    assert batch["obs"].dtype == np.uint8
    assert batch["obs"].nbytes == 8 * 64 * 84 * 84 * 4
    assert peak <= 1.3 * rows, f"peak {peak / rows:.2f} x rows"


def _act_blind(policy: ScriptedPolicy, obs: Any, explore: bool = True) -> Any:
    out = ScriptedPolicy.act(policy, obs)
    policy.seen.clear()
    return out


def test_ppo_settings_reach_the_policy():
    policy = functools.partial(PPOPolicy, settings=PPOSettings(gamma=0.5))
    with CommonPolicyEvaluator("CartPole-v1", policy, rollout_fragment_length=4) as ev:
        assert ev.policy.settings.gamma == 0.5
        assert {"advantages", "value_targets"} <= set(ev.sample().keys())
