"""Results that are almost right, or nonsense: the same answers in line and in the pool, and other slots untouched."""

from __future__ import annotations

import numpy as np
import pytest
from gymnasium.spaces import Discrete

from rlsample.env import EnvSettings, as_base_env
from rlsample.testing import CountEnv

BACKENDS = [{}, {"backend": "process", "pool": {"start_method": "fork", "num_workers": 1}}]
backends = pytest.mark.parametrize("backend", BACKENDS, ids=["inline", "process"])


class Odd(CountEnv):
    """Ends with its second step; slot 0 gives flags and info in another form."""

    def __init__(self, slot, form):
        super().__init__(2)
        self.slot, self.form = slot, form

    def step(self, action):
        obs, reward, terminated, truncated, info = super().step(action)
        if self.slot == 0:
            terminated, truncated, info = self.form(terminated, truncated)
        return obs, reward, terminated, truncated, info


def two_steps(form, backend):
    """The last batch after two steps of both slots."""
    with as_base_env(lambda ctx: Odd(ctx.slot_index, form), 2, **backend) as env:
        batch = env.poll()
        for _ in range(2):
            env.send_actions(batch.env_ids, np.zeros(len(batch.env_ids), np.int64))
            batch = env.poll()
            if batch.failures:
                break
        return batch


@backends
@pytest.mark.parametrize(
    "form",
    [
        lambda term, trunc: (np.array([term]), np.array([trunc]), {}),
        lambda term, trunc: (np.array(term), np.bool_(trunc), {}),
        lambda term, trunc: (int(term), float(trunc), {}),
        lambda term, trunc: (term, None, None),
    ],
    ids=["shape (1,)", "0-d", "numbers", "None"],
)
def test_flags_that_can_only_mean_one_thing_are_taken(form, backend):
    batch = two_steps(form, backend)
    assert batch.env_ids.tolist() == [0, 1]
    assert (batch.terminated.dtype, batch.truncated.dtype) == (bool, bool)
    assert batch.terminated.tolist() == [True, True]
    assert batch.truncated.tolist() == [False, False]


@backends
@pytest.mark.parametrize(
    ("form", "said"),
    [
        (lambda term, trunc: (np.array([term, term]), trunc, {}), "terminated is array([False, False])"),
        (lambda term, trunc: (term, "no", {}), "truncated is 'no', expected True or False"),
        (lambda term, trunc: (term, trunc, np.ones(3)), "the info is array([1., 1., 1.]), expected a dict"),
        (lambda term, trunc: (term, trunc, ["a"]), "the info is ['a'], expected a dict"),
    ],
    ids=["two flags", "a word", "an array as info", "a list as info"],
)
def test_nonsense_fails_its_own_slot_by_name(form, said, backend):
    batch = two_steps(form, backend)
    assert batch.env_ids.tolist() == [1]
    assert str(batch.failures[0]).startswith("slot 0, episode step 1: ")
    assert said in str(batch.failures[0])


class OddReset(CountEnv):
    def __init__(self, slot, info):
        super().__init__(3)
        self.info = info if slot == 0 else {}

    def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed)[0], self.info


@backends
@pytest.mark.parametrize("info", [np.ones(2), ["a"], 1.5], ids=["array", "list", "number"])
def test_the_info_of_a_reset_is_a_mapping_or_its_slot_fails(info, backend):
    with as_base_env(lambda ctx: OddReset(ctx.slot_index, info), 2, **backend) as env:
        batch = env.poll()
    assert batch.env_ids.tolist() == [1]
    assert str(batch.failures[0]).startswith("slot 0: reset's info is ")


class Changes(CountEnv):
    """Fails in its first step; what replaces it has another action space."""

    def __init__(self, incarnation):
        super().__init__(3)
        if incarnation:
            self.action_space = Discrete(3)

    def step(self, action):
        raise RuntimeError("broken on purpose")


@backends
def test_an_env_is_replaced_by_one_with_the_same_spaces(backend):
    options = {"max_restarts": 1, "restart_backoff_s": 0, **backend}
    with as_base_env(lambda ctx: Changes(ctx.incarnation), 1, **options) as env:
        env.poll()
        env.send_actions(env.all_ids, np.zeros(1, np.int64))
        env.try_restart(np.array(list(env.poll().failures)))
        failure = env.poll(20).failures[0]
        assert "slot 0 has space Discrete(3), the slot had Discrete(2)" in str(failure)


class CannotClose(CountEnv):
    """Fails in its first step, and its close fails, too."""

    def __init__(self, incarnation):
        super().__init__(3)
        self.broken = incarnation == 0

    def step(self, action):
        if self.broken:
            raise RuntimeError("broken on purpose")
        return super().step(action)

    def close(self):
        if self.broken:
            raise OSError("the connection is gone")


@backends
def test_an_env_that_cannot_be_closed_is_replaced_all_the_same(backend):
    options = {"max_restarts": 1, "restart_backoff_s": 0, **backend}
    with as_base_env(lambda ctx: CannotClose(ctx.incarnation), 2, **options) as env:
        env.poll()
        env.send_actions(env.all_ids, np.zeros(2, np.int64))
        failures = env.poll().failures
        assert sorted(failures) == [0, 1]
        env.try_restart(np.array([0, 1]))
        ids = []
        while len(ids) < 2:
            ids += env.poll(20).env_ids.tolist()
        env.send_actions(env.all_ids, np.zeros(2, np.int64))
        assert env.poll().obs.ravel().tolist() == [1, 1]


def test_back_off_doubles_to_a_minute():
    settings = EnvSettings(restart_backoff_s=0.5)
    assert [settings.back_off_s(n) for n in (0, 1, 3, 6, 7, 2000)] == [0.5, 1, 4, 32, 60, 60]
