"""The public conformance suite on the pool: ordered and first come, all start methods, 1 to 3 workers, 25 slots."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest

from rlsample.env import as_base_env
from rlsample.testing import CountEnv, check_base_env
from rlsample.testing.faulty_env import Fault, faulty_factory

ENDS = ("term", "trunc", "both")
STEPPED = [1, 2, 3, 6, 8, 9, 10]  # the other rules are kept before a worker hears of anything, in every layout alike
LAYOUTS = [
    ({"num_workers": 1}, None),
    ({"num_workers": 2}, STEPPED),
    ({"num_workers": 3, "reset_ahead": False}, STEPPED),
    ({"num_workers": 3, "groups": 2}, None),
    ({"num_workers": 1, "ordered": False}, STEPPED),
    ({"num_workers": 2, "batch_size": 2}, None),
    ({"num_workers": 3, "ordered": False, "reset_ahead": False}, STEPPED),
    ({"num_workers": 2, "spin_us": 50.0}, STEPPED),
]


def counting(ctx):
    return CountEnv(3 + ctx.slot_index % 3, ENDS[ctx.slot_index % 3])


class Seeded(gymnasium.Env):
    """Every number of it comes from the env's own generator; obs and actions are trees."""

    observation_space = gymnasium.spaces.Dict(
        pos=gymnasium.spaces.Box(-9, 9, (2,), np.float32),
        pair=gymnasium.spaces.Tuple((gymnasium.spaces.Discrete(50), gymnasium.spaces.MultiBinary(3))),
        img=gymnasium.spaces.Box(0, 255, (4, 4), np.uint8),
    )
    action_space = gymnasium.spaces.Tuple(
        (gymnasium.spaces.Discrete(3, start=5), gymnasium.spaces.Box(-1, 1, (), np.float32))
    )

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.k, self.n = 0, int(self.np_random.integers(2, 9))
        return self.observe(), {"n": self.n}

    def observe(self):
        rng = self.np_random
        return {
            "pos": rng.normal(size=2).clip(-9, 9).astype(np.float32),
            "pair": (self.k, rng.integers(0, 2, 3).astype(np.int8)),
            "img": rng.integers(0, 256, (4, 4), np.uint8),
        }

    def step(self, action):
        assert self.action_space.contains(action)
        self.k += 1
        info = {"k": self.k, "word": "x" * self.k} if self.k % 3 == 0 else {}
        reward = float(self.np_random.normal() + action[1])
        return self.observe(), reward, self.k == self.n, self.np_random.random() < 0.05, info


def check(make_env, num_envs, pool, *, rules=None, **conditions):
    def make(seed):
        return as_base_env(make_env, num_envs, seed=seed, backend="process", pool=pool)

    def inline(seed):
        return as_base_env(make_env, num_envs, seed=seed)

    faults = {1: Fault("raise", at=6)}

    def make_faulty(seed):
        return as_base_env(faulty_factory(faults), max(num_envs, 3), seed=seed, backend="process", pool=pool)

    found = check_base_env(make, rules, make_other=inline, make_faulty=make_faulty, **conditions)
    assert set(found.values()) == {"ok"}


@pytest.mark.parametrize(("layout", "rules"), LAYOUTS, ids=str)
def test_forked_pools_of_three(layout, rules):
    pool = {"start_method": "fork", **layout}
    check(counting, 3, pool, rules=rules, reference=lambda s: CountEnv(3 + s % 3, ENDS[s % 3]))


@pytest.mark.parametrize("ordered", [True, False])
def test_trees_of_observations_and_actions(ordered):
    pool = {"start_method": "fork", "num_workers": 2, "ordered": ordered}
    check(Seeded, 3, pool, rules=None if ordered else STEPPED, reference=lambda s: Seeded())


@pytest.mark.parametrize("ordered", [True, False])
def test_25_slots(ordered):
    pool = {"start_method": "fork", "num_workers": 3, "ordered": ordered}
    reference = lambda s: CountEnv(3 + s % 3, ENDS[s % 3])  # noqa: E731
    check(counting, 25, pool, rounds=15, rules=[1, 2, 3, 6, 8, 9], reference=reference)


@pytest.mark.parametrize(("start_method", "ordered", "rules"), [("forkserver", True, [8, 10]), ("spawn", False, [2])])
def test_other_start_methods(start_method, ordered, rules):
    """All rules in all of them: among the slow tests, below."""
    pool = {"start_method": start_method, "num_workers": 2, "ordered": ordered}
    check(counting, 3, pool, rounds=10, rules=rules)


@pytest.mark.slow
@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("start_method", ["fork", "forkserver", "spawn"])
def test_25_slots_in_every_layout(start_method, workers, ordered):
    pool = {"start_method": start_method, "num_workers": workers, "ordered": ordered}
    reference = lambda s: CountEnv(3 + s % 3, ENDS[s % 3])  # noqa: E731
    check(counting, 25, pool, rounds=8, rules=[1, 2, 3, 6, 8, 9], reference=reference)


@pytest.mark.slow
@pytest.mark.parametrize("start_method", ["forkserver", "spawn"])
@pytest.mark.parametrize("ordered", [True, False])
def test_every_rule_with_other_start_methods(start_method, ordered):
    pool = {"start_method": start_method, "num_workers": 2, "ordered": ordered}
    check(counting, 3, pool, reference=lambda s: CountEnv(3 + s % 3, ENDS[s % 3]))
