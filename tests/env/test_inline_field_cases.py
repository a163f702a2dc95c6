"""Field cases 1 to 4 and 8 on plain envs, at the level of poll and send."""

import numpy as np
import pytest
from gymnasium import spaces

from rlsample.env import as_base_env
from rlsample.testing import CountEnv
from rlsample.tree import flatten


def counts(*lengths, end="term", cls=CountEnv, **options):
    return as_base_env(lambda ctx: cls(lengths[ctx.slot_index], end), len(lengths), **options)


def test_case_1_the_final_observation_is_the_episodes_own(rollout):
    with counts(3, 3) as env:
        got = rollout(env, 6)
    for slot in (0, 1):
        assert got.column(slot, "obs") == [0, 1, 2, 0, 1, 2]
        assert got.column(slot, "next_obs") == [1, 2, 3, 1, 2, 3]
        assert got.column(slot, "terminated") == [False, False, True] * 2
        assert got.column(slot, "rewards") == [1, 2, 3, 1, 2, 3]


class OneBuffer(CountEnv):
    def __init__(self, n, end):
        super().__init__(n, end)
        self.buffer = np.zeros(1, np.float32)

    def observe(self):
        self.buffer[0] = self.k
        return self.buffer


@pytest.mark.parametrize("num_envs", [1, 3])
def test_case_2_an_array_that_the_env_rewrites_is_copied(num_envs, rollout):
    with counts(*[4] * num_envs, cls=OneBuffer) as env:
        first = rollout(env, 8)
        assert env.try_reset(env.all_ids) is not None
        env.send_actions(env.all_ids, np.zeros(num_envs, int))
        env.poll()
        for slot in range(num_envs):
            assert first.column(slot, "obs") == [0, 1, 2, 3, 0, 1, 2, 3]
            assert first.column(slot, "next_obs") == [1, 2, 3, 4, 1, 2, 3, 4]
        assert first.unchanged()


@pytest.mark.parametrize("form", [int, np.float64, lambda r: np.array([r], np.float32), np.float32, np.array])
def test_case_3_reward_forms_are_alike(form, rollout):
    class Form(CountEnv):
        def reward(self):
            return form(self.k)

    with counts(2, 3, cls=Form) as env:
        got = rollout(env, 6)
    assert {(b.rewards.dtype.name, b.rewards.ndim) for b, _ in got.batches} == {("float32", 1)}
    assert got.column(0, "rewards") == [1, 2, 1, 2, 1, 2]
    assert got.column(1, "rewards") == [1, 2, 3, 1, 2, 3]


@pytest.mark.parametrize(
    ("bad", "named"), [(np.array([1.0, 2.0]), r"shape \(2,\)"), (float("nan"), "nan"), ("x", "str"), (None, "NoneType")]
)
def test_case_3_a_bad_reward_fails_its_slot_by_name(bad, named):
    class Bad(CountEnv):
        def reward(self):
            return bad if self.n == 99 and self.k == 2 else float(self.k)

    with counts(5, 99, cls=Bad) as env:
        env.poll()
        for _ in range(2):
            env.send_actions(env.all_ids, np.zeros(2, int))
            batch = env.poll()
        assert batch.env_ids.tolist() == [0]
        assert batch.rewards.tolist() == [2]
        with pytest.raises(Exception, match=f"slot 1, episode step 2: .*{named}"):
            raise batch.failures[1]


class Case4(CountEnv):
    observation_space = spaces.Dict(
        {
            "img": spaces.Box(0, 255, (4, 4), np.uint8),
            "pos": spaces.Box(-1, 1, (), np.float64),
            "n": spaces.Discrete(5),
            "pair": spaces.Tuple((spaces.Box(0, 1, (2,), np.float32), spaces.MultiBinary(3))),
        }
    )

    def observe(self):
        k = self.k
        pair = np.array([k / 8, k / 4], np.float32), np.array([k & 1, 1, 0], np.int8)
        return {"img": np.full((4, 4), k, np.uint8), "pos": 0.1 * k, "n": k % 5, "pair": pair}


def test_case_4_dtype_and_structure_are_kept():
    with counts(99, 99, cls=Case4) as env:
        batches = [env.poll()]
        for _ in range(3):
            env.send_actions(env.all_ids, np.zeros(2, int))
            batches.append(env.poll())
    for k, batch in enumerate(batches):
        got = {path: (leaf.dtype.name, leaf.tolist()) for path, leaf in flatten(batch.obs)}
        assert got == {
            "img": ("uint8", [[[k] * 4] * 4] * 2),
            "pos": ("float64", [0.1 * k] * 2),
            "n": ("int64", [k] * 2),
            "pair[0]": ("float32", [[k / 8, k / 4]] * 2),
            "pair[1]": ("int8", [[k & 1, 1, 0]] * 2),
        }
        assert type(batch.obs["pair"]) is tuple


def test_case_8_a_horizon_starts_a_whole_new_episode(rollout):
    with counts(99, 99, end="never") as env:
        got = rollout(env, 7, horizon=3)
        resets = [e.resets for e in env.sub_envs()]
    for slot in (0, 1):
        assert got.column(slot, "obs") == [0, 1, 2, 0, 1, 2, 0]
        assert got.column(slot, "next_obs") == [1, 2, 3, 1, 2, 3, 1]
    assert resets == [3, 3]


def test_case_8b_an_end_before_the_horizon_leaves_the_next_episode_whole(rollout):
    class EndsOnce(CountEnv):
        def step(self, action):
            self.n = 2 if self.resets == 1 else 99
            return super().step(action)

    with counts(2, cls=EndsOnce) as env:
        got = rollout(env, 5, horizon=3)
    assert got.column(0, "t") == [0, 1, 0, 1, 2]
    assert got.column(0, "terminated") == [False, True, False, False, False]
    assert got.column(0, "truncated") == [False, False, False, False, True]
