"""The sampler on scripted envs: every column exact, over cuts, ends, horizons and several calls."""

from __future__ import annotations

import functools
from typing import Any

import gymnasium
import numpy as np
import pytest

from rlsample.errors import ConfigError, EnvFailedError
from rlsample.evaluation import Callbacks, CommonPolicyEvaluator
from rlsample.testing.scripted import CountEnv
from rlsample.testing.scripted_policy import ScriptedPolicy

Box, Discrete = gymnasium.spaces.Box, gymnasium.spaces.Discrete


class RewardEnv(gymnasium.Env):
    """Rewards 5, -3, 0.5, then cut by a time limit, always."""

    observation_space, action_space = Box(0, 1e6, (1,), np.float32), Discrete(2)

    def reset(self, *, seed=None, options=None):
        self.k = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.k += 1
        return np.array([self.k], np.float32), (5.0, -3.0, 0.5)[self.k - 1], False, self.k == 3, {}


def count_env(lengths: list[int], end: str = "term") -> Any:
    return lambda ctx: CountEnv(lengths[ctx.slot_index], end)


def evaluator(env: Any, num_envs: int = 1, length: int = 3, policy: Any = ScriptedPolicy, **options: Any):
    return CommonPolicyEvaluator(env, policy, num_envs, rollout_fragment_length=length, seed=3, **options)


def flat(column: np.ndarray) -> list[float]:
    return column.reshape(-1).tolist()


def test_rows_of_two_slots_of_unequal_length_are_exact_over_two_calls():
    with evaluator(count_env([3, 2]), 2, length=4) as ev:
        first, second = ev.sample(), ev.sample()
    assert flat(first["obs"]) == [0, 1, 2, 0, 0, 1, 0, 1]
    assert flat(first["next_obs"]) == [1, 2, 3, 1, 1, 2, 1, 2]
    assert flat(first["rewards"]) == [1, 2, 3, 1, 1, 2, 1, 2]
    assert flat(first["terminated"]) == [False, False, True, False, False, True, False, True]
    assert not first["truncated"].any()
    assert flat(first["t"]) == [0, 1, 2, 0, 0, 1, 0, 1]
    assert flat(first["env_id"]) == [0, 0, 0, 0, 1, 1, 1, 1]
    assert flat(first["eps_id"]) == [0, 0, 0, 3, 1, 1, 2, 2]
    assert flat(first["fragment_id"]) == [0, 0, 0, 0, 1, 1, 1, 1]
    assert flat(second["obs"]) == [1, 2, 0, 1, 0, 1, 0, 1]
    assert flat(second["t"]) == [1, 2, 0, 1, 0, 1, 0, 1]
    assert flat(second["eps_id"]) == [3, 3, 5, 5, 4, 4, 6, 6]
    assert flat(second["fragment_id"]) == [2, 2, 2, 2, 3, 3, 3, 3]
    assert first.fragment_lengths.tolist() == [4, 4]


def test_case_1_final_observation_is_kept_and_never_mixed_with_the_next_episode():
    with evaluator(count_env([3, 3]), 2, length=6) as ev:
        batch = ev.sample()
    assert flat(batch["obs"]) == [0, 1, 2, 0, 1, 2] * 2
    assert flat(batch["next_obs"]) == [1, 2, 3, 1, 2, 3] * 2
    assert flat(batch["terminated"]) == [False, False, True, False, False, True] * 2
    assert flat(batch["rewards"]) == [1, 2, 3, 1, 2, 3] * 2


@pytest.mark.parametrize("mode", ["SAME_STEP", "NEXT_STEP", "DISABLED"])
def test_case_1_through_gymnasium_vector_envs(mode: str):
    make = functools.partial(CountEnv, 3, "term")
    venv = gymnasium.vector.SyncVectorEnv([make, make], autoreset_mode=gymnasium.vector.AutoresetMode[mode])
    with evaluator(venv, 2, length=6) as ev:
        batch = ev.sample()
    # next-step autoreset spends a step on each reset: both slots reset together, so both still reach six rows
    assert flat(batch["obs"]) == [0, 1, 2, 0, 1, 2] * 2
    assert flat(batch["next_obs"]) == [1, 2, 3, 1, 2, 3] * 2
    assert flat(batch["terminated"]) == [False, False, True, False, False, True] * 2
    assert flat(batch["rewards"]) == [1, 2, 3, 1, 2, 3] * 2


def test_next_step_autoreset_gives_a_slot_one_row_less_per_reset_and_never_steps_ahead():
    made = [CountEnv(3, "term"), CountEnv(100, "term")]
    venv = gymnasium.vector.SyncVectorEnv(
        [lambda: made[0], lambda: made[1]], autoreset_mode=gymnasium.vector.AutoresetMode.NEXT_STEP
    )
    with evaluator(venv, 2, length=6) as ev:
        batch = ev.sample()
        assert batch.fragment_lengths.tolist() == [5, 6]
        assert flat(batch["obs"]) == [0, 1, 2, 0, 1, 0, 1, 2, 3, 4, 5]
        assert flat(batch["next_obs"]) == [1, 2, 3, 1, 2, 1, 2, 3, 4, 5, 6]
        assert flat(batch["env_id"]) == [0] * 5 + [1] * 6
        assert flat(batch["t"]) == [0, 1, 2, 0, 1, 0, 1, 2, 3, 4, 5]
        assert made[1].steps == 6
        padded = batch.time_major(6, pad=True)
        assert padded["mask"].sum(axis=0).tolist() == [5, 6]
        again = ev.sample()
        assert flat(again["obs"]) == [2, 0, 1, 2, 6, 7, 8, 9, 10, 11]
        assert made[1].steps == 12


class ReusedBufferEnv(gymnasium.Env):
    observation_space, action_space = Box(0, 1e6, (1,), np.float32), Discrete(2)

    def __init__(self):
        self.buf = np.zeros(1, np.float32)

    def reset(self, *, seed=None, options=None):
        self.buf[0] = 0
        return self.buf, {}

    def step(self, action):
        self.buf[0] += 1
        return self.buf, float(self.buf[0]), bool(self.buf[0] == 4), False, {}


@pytest.mark.parametrize("num_envs", [1, 3])
def test_case_2_an_env_that_rewrites_its_buffer(num_envs: int):
    with evaluator(lambda ctx: ReusedBufferEnv(), num_envs, length=8) as ev:
        first = ev.sample()
        ev.sample()
    assert flat(first["obs"]) == [0, 1, 2, 3, 0, 1, 2, 3] * num_envs
    assert flat(first["next_obs"]) == [1, 2, 3, 4, 1, 2, 3, 4] * num_envs


class RewardFormEnv(CountEnv):
    def __init__(self, n: int, form: Any):
        super().__init__(n, "term")
        self.form = form

    def step(self, action):
        obs, reward, terminated, truncated, info = super().step(action)
        return obs, self.form(reward), terminated, truncated, info


@pytest.mark.parametrize("form", [int, np.float64, lambda r: np.array([r], np.float32), lambda r: np.array(r)])
def test_case_3_reward_forms(form: Any):
    with evaluator(lambda ctx: RewardFormEnv(2 + ctx.slot_index, form), 2, length=6) as ev:
        batch = ev.sample()
    assert batch["rewards"].shape == (12,)
    assert batch["rewards"].dtype == np.float32
    assert flat(batch["rewards"]) == [1, 2, 1, 2, 1, 2, 1, 2, 3, 1, 2, 3]


@pytest.mark.parametrize(("form", "named"), [(lambda r: np.array([r, r]), r"\(2,\)"), (lambda r: np.nan, "nan")])
def test_case_3_a_reward_that_is_no_number_is_named(form: Any, named: str):
    with (
        evaluator(lambda ctx: RewardFormEnv(5, form if ctx.slot_index else float), 2, length=6) as ev,
        pytest.raises(EnvFailedError, match=named) as caught,
    ):
        ev.sample()
    assert caught.value.slot == 1


class DictEnv(gymnasium.Env):
    observation_space = gymnasium.spaces.Dict(
        {
            "img": Box(0, 255, (4, 4), np.uint8),
            "pos": Box(-1, 1, (), np.float64),
            "n": Discrete(5),
            "pair": gymnasium.spaces.Tuple((Box(0, 1, (2,), np.float32), gymnasium.spaces.MultiBinary(3))),
        }
    )
    action_space = Discrete(2)

    def _obs(self):
        k = self.k
        pair = (np.array([k / 10, k / 20], np.float32), np.array([k & 1, k >> 1 & 1, 1], np.int8))
        return {"img": np.full((4, 4), k, np.uint8), "pos": np.array(0.1 * k), "n": k % 5, "pair": pair}

    def reset(self, *, seed=None, options=None):
        self.k = 0
        return self._obs(), {}

    def step(self, action):
        self.k += 1
        return self._obs(), 1.0, False, False, {}


def test_case_4_dtypes_and_structure_survive():
    with evaluator(lambda ctx: DictEnv(), 2, length=3) as ev:
        batch = ev.sample()
    obs = batch["obs"]
    assert obs["img"].dtype == np.uint8
    assert obs["img"].shape == (6, 4, 4)
    assert obs["img"][:, 1, 2].tolist() == [0, 1, 2, 0, 1, 2]
    assert obs["pos"].dtype == np.float64
    assert obs["pos"].tolist() == [0.0, 0.1, 0.2] * 2
    assert obs["n"].dtype == np.int64
    assert obs["n"].tolist() == [0, 1, 2] * 2
    assert type(obs["pair"]) is tuple
    assert len(obs["pair"]) == 2
    assert obs["pair"][1].tolist()[1] == [1, 0, 1]
    assert batch["next_obs"]["img"][:, 0, 0].tolist() == [1, 2, 3] * 2


class LookupEnv(gymnasium.Env):
    """Takes only actions of its space, in the form its space contains."""

    observation_space = Box(0, 1e6, (1,), np.float32)

    def __init__(self, action_space: Any):
        self.action_space, self.log = action_space, []

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        self.log.append({5: "l", 6: "m", 7: "r"}[action] if isinstance(self.action_space, Discrete) else action)
        return np.zeros(1, np.float32), 0.0, False, False, {}


@pytest.mark.parametrize("num_envs", [1, 3])
def test_case_5_discrete_start_and_plain_ints(num_envs: int):
    made = [LookupEnv(Discrete(3, start=5)) for _ in range(num_envs)]
    policy = functools.partial(ScriptedPolicy, actions=[a for a in (5, 6, 7) for _ in range(num_envs)])
    with evaluator(lambda ctx: made[ctx.slot_index], num_envs, length=6, policy=policy) as ev:
        batch = ev.sample()
    assert [env.log for env in made] == [["l", "m", "r", "l", "m", "r"]] * num_envs
    assert flat(batch["actions"]) == [5, 6, 7, 5, 6, 7] * num_envs


@pytest.mark.parametrize(
    ("space", "action", "shape"),
    [
        (gymnasium.spaces.MultiDiscrete([2, 3]), [1, 2], (2, 2)),
        (gymnasium.spaces.MultiDiscrete([[2, 3], [4, 5]]), [[1, 2], [3, 4]], (2, 2, 2)),
        (Box(-1, 1, (), np.float32), 0.25, (2,)),
        (gymnasium.spaces.MultiBinary(3), [1, 0, 1], (2, 3)),
    ],
)
def test_case_5_other_action_spaces(space: Any, action: Any, shape: tuple[int, ...]):
    env = LookupEnv(space)
    with evaluator(env, length=2, policy=functools.partial(ScriptedPolicy, actions=[action])) as ev:
        batch = ev.sample()
    assert len(env.log) == 2
    assert env.log[0].dtype == space.dtype
    assert env.log[0].tolist() == action
    assert batch["actions"].shape == shape


def test_case_5_tuple_actions():
    space = gymnasium.spaces.Tuple((Discrete(2), Box(-1, 1, (2,))))
    env = LookupEnv(space)
    policy = functools.partial(ScriptedPolicy, actions=[(1, np.array([0.5, -0.5]))])
    with evaluator(env, length=2, policy=policy) as ev:
        batch = ev.sample()
    assert env.log[1][0] == 1
    assert env.log[1][1].tolist() == [0.5, -0.5]
    assert batch["actions"][1].shape == (2, 2)


@pytest.mark.parametrize(("clip", "rewards"), [(True, [1, -1, 1]), (1.0, [1, -1, 0.5]), (False, [5, -3, 0.5])])
def test_case_7_clipping_changes_the_column_and_not_the_return(clip: Any, rewards: list[float]):
    with evaluator(lambda ctx: RewardEnv(), length=6, clip_rewards=clip) as ev:
        assert ev.get_metrics() == []
        batch = ev.sample()
        episodes = ev.get_metrics()
        assert ev.get_metrics() == []
    assert flat(batch["rewards"]) == rewards * 2
    assert [(e.episode_return, e.length) for e in episodes] == [(2.5, 3), (2.5, 3)]


def test_case_8_horizon_on_an_env_that_never_ends():
    env = CountEnv(0, "never")
    with evaluator(env, length=7, horizon=3) as ev:
        batch = ev.sample()
        episodes = ev.get_metrics()
    assert flat(batch["obs"]) == flat(batch["t"]) == [0, 1, 2, 0, 1, 2, 0]
    assert flat(batch["truncated"]) == [False, False, True, False, False, True, False]
    assert not batch["terminated"].any()
    assert flat(batch["next_obs"])[2] == flat(batch["next_obs"])[5] == 3
    assert [(e.length, e.episode_return) for e in episodes] == [(3, 6.0), (3, 6.0)]
    assert env.resets == 3


class FirstEndsEnv(CountEnv):
    def step(self, action):
        obs, reward, _, _, info = super().step(action)
        return obs, reward, self.resets == 1 and obs[0] == 2, False, info


def test_case_8_b_the_counter_is_reset_after_a_real_end():
    with evaluator(FirstEndsEnv(0, "never"), length=5, horizon=3) as ev:
        ev.sample()
        assert [e.length for e in ev.get_metrics()] == [2, 3]


@pytest.mark.parametrize("mode", ["SAME_STEP", "NEXT_STEP", "DISABLED"])
def test_case_8_c_horizon_on_a_gymnasium_vector_env(mode: str):
    make = functools.partial(CountEnv, 0, "never")
    venv = gymnasium.vector.SyncVectorEnv([make, make], autoreset_mode=gymnasium.vector.AutoresetMode[mode])
    with evaluator(venv, 2, length=7, horizon=3) as ev:
        batch = ev.sample()
    assert flat(batch["obs"]) == [0, 1, 2, 0, 1, 2, 0] * 2
    assert flat(batch["truncated"]) == [False, False, True, False, False, True, False] * 2
    assert flat(batch["next_obs"])[2] == 3


def test_soft_horizon_renews_the_episode_and_leaves_the_env_alone():
    env = CountEnv(0, "never")
    with evaluator(env, length=5, horizon=2, soft_horizon=True) as ev:
        batch = ev.sample()
        episodes = ev.get_metrics()
    assert flat(batch["obs"]) == [0, 1, 2, 3, 4]
    assert flat(batch["next_obs"]) == [1, 2, 3, 4, 5]
    assert flat(batch["t"]) == [0, 1, 0, 1, 0]
    assert flat(batch["eps_id"]) == [0, 0, 1, 1, 2]
    assert not (batch["terminated"] | batch["truncated"]).any()
    assert [(e.length, e.episode_return) for e in episodes] == [(2, 3.0), (2, 7.0)]
    assert env.resets == 1


def test_no_done_at_end_hides_the_flags_and_keeps_the_final_observation():
    with evaluator(count_env([3]), length=5, no_done_at_end=True) as ev:
        batch = ev.sample()
        assert [e.length for e in ev.get_metrics()] == [3]
    assert not (batch["terminated"] | batch["truncated"]).any()
    assert flat(batch["obs"]) == [0, 1, 2, 0, 1]
    assert flat(batch["next_obs"]) == [1, 2, 3, 1, 2]
    assert flat(batch["eps_id"]) == [0, 0, 0, 1, 1]


def test_case_9_rows_per_call_and_no_step_ahead():
    made = [CountEnv(0, "never") for _ in range(3)]
    with evaluator(lambda ctx: made[ctx.slot_index], 3, length=4) as ev:
        ids = set()
        for call in range(3):
            batch = ev.sample()
            assert batch.count == 12
            assert flat(batch["t"]) == [4 * call + t for t in range(4)] * 3
            assert sum(env.steps for env in made) == 12 * (call + 1)
            ids |= {(e, i) for e, i in zip(flat(batch["env_id"]), flat(batch["eps_id"]), strict=True)}
        assert len(ids) == 3


def test_case_13_a_cut_keeps_every_reward_and_is_no_end():
    with evaluator(CountEnv(0, "never"), length=3) as ev:
        first, second = ev.sample(), ev.sample()
    assert flat(first["obs"]) + flat(second["obs"]) == [0, 1, 2, 3, 4, 5]
    assert flat(first["next_obs"])[-1] == 3
    assert flat(first["rewards"]) + flat(second["rewards"]) == [1, 2, 3, 4, 5, 6]
    assert not (first["terminated"] | first["truncated"] | second["terminated"]).any()
    assert first["eps_id"][-1] == second["eps_id"][0]


def test_complete_episodes_returns_whole_episodes_of_at_least_the_target():
    with evaluator(count_env([3, 5]), 2, length=4, batch_mode="complete_episodes") as ev:
        batches = [ev.sample() for _ in range(3)]
        episodes = ev.get_metrics()
    for batch in batches:
        assert batch.count >= 8
        for episode in batch.split_by_episode():
            length = 5 if episode["env_id"][0] else 3
            assert flat(episode["t"]) == list(range(length))
            assert flat(episode["obs"]) == list(range(length))
            assert flat(episode["next_obs"]) == list(range(1, length + 1))
            assert flat(episode["terminated"]) == [False] * (length - 1) + [True]
    ids = [int(e["eps_id"][0]) for b in batches for e in b.split_by_episode()]
    assert len(set(ids)) == len(ids)
    assert set(ids) <= {e.eps_id for e in episodes}


def test_complete_episodes_grow_past_the_fragment_length():
    with evaluator(count_env([23]), length=2, batch_mode="complete_episodes") as ev:
        batch = ev.sample()
    assert flat(batch["obs"]) == list(range(23))
    assert flat(batch["t"]) == list(range(23))


def test_soft_horizon_with_complete_episodes():
    with evaluator(CountEnv(0, "never"), length=4, horizon=2, soft_horizon=True, batch_mode="complete_episodes") as ev:
        batch = ev.sample()
    assert flat(batch["obs"]) == [0, 1, 2, 3]
    assert flat(batch["next_obs"]) == [1, 2, 3, 4]
    assert flat(batch["t"]) == [0, 1, 0, 1]


def test_policy_version_is_that_of_the_choice():
    with evaluator(count_env([3, 2]), 2, length=2) as ev:
        first = ev.sample()
        ev.set_weights({})
        second = ev.sample()
    assert set(flat(first["policy_version"])) == {0}
    assert set(flat(second["policy_version"])) == {1}


class BoxActionEnv(gymnasium.Env):
    observation_space = Box(0, 1, (1,), np.float32)
    action_space = Box(np.array([-2.0, 0.0], np.float32), np.array([2.0, 10.0], np.float32))

    def __init__(self):
        self.log = []

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.log.append(action.tolist())
        return np.zeros(1, np.float32), 0.0, False, False, {}


@pytest.mark.parametrize(
    ("options", "got"),
    [({}, [2.0, 0.0]), ({"normalize_actions": True}, [2.0, 2.5])],
)
def test_the_env_gets_the_mapped_action_and_the_batch_keeps_the_policys(options: dict[str, Any], got: list[float]):
    env = BoxActionEnv()
    policy = functools.partial(ScriptedPolicy, actions=[[3.0, -0.5]])
    with evaluator(env, length=2, policy=policy, **options) as ev:
        batch = ev.sample()
    assert env.log == [got, got]
    assert batch["actions"].tolist() == [[3.0, -0.5]] * 2


def test_an_unclipped_action_outside_the_bounds_is_refused_before_the_env():
    env = BoxActionEnv()
    policy = functools.partial(ScriptedPolicy, actions=[[3.0, -0.5]])
    with (
        evaluator(env, length=2, policy=policy, clip_actions=False) as ev,
        pytest.raises(ValueError, match="slot 0"),
    ):
        ev.sample()
    assert env.log == []


class Recorder(Callbacks):
    def __init__(self):
        self.events = []

    def on_episode_start(self, episode):
        episode.user_data["first"] = episode.eps_id

    def on_episode_step(self, episode):
        self.events.append((episode.env_id, episode.length, episode.last_reward, episode.last_obs.tolist()))
        episode.custom_metrics["steps"] = episode.length

    def on_episode_end(self, episode):
        self.events.append(("end", episode.user_data["first"], episode.length, episode.episode_return))

    def on_sample_end(self, evaluator, batch):
        self.events.append(("sample", batch.count))


def test_callbacks_see_every_step_and_their_numbers_reach_the_metrics():
    recorder = Recorder()
    with evaluator(count_env([2, 9]), 2, length=3, callbacks=recorder) as ev:
        ev.sample()
        episodes = ev.get_metrics()
    assert recorder.events == [
        (0, 1, 1.0, [1.0]),
        (1, 1, 1.0, [1.0]),
        (0, 2, 2.0, [2.0]),
        (1, 2, 2.0, [2.0]),
        ("end", 0, 2, 3.0),
        (0, 1, 1.0, [1.0]),
        (1, 3, 3.0, [3.0]),
        ("sample", 6),
    ]
    assert episodes[0].custom == {"steps": 2}


def test_case_28_filtering_a_single_action_leaves_the_statistics_alone():
    space = Box(-100, 100, (1,), np.float32)
    policy = ScriptedPolicy(space, Discrete(2))
    env = CountEnv(3, "term")
    env.observation_space = space
    with evaluator(env, policy=policy, observation_filter="MeanStdFilter") as ev:
        ev.filter(np.array([[1], [2], [3], [4], [10]], np.float32), update=True)
        ev.compute_action(np.array([4.0], np.float32))
        ev.compute_action(np.array([7.5355339], np.float32))
        assert [pytest.approx(s.item(), abs=1e-6) for s in policy.seen] == [0.0, 1.0]
        assert ev.filter.count == 5


def test_the_filter_sees_each_observation_once_and_the_batch_holds_filtered_ones():
    with evaluator(count_env([3]), length=4, observation_filter="MeanStdFilter") as ev:
        batch = ev.sample()
        # 0; 1, 2, 3 and the reset's 0; 1
        assert ev.filter.count == 6
    assert batch["obs"].dtype == np.float32
    assert batch["next_obs"].dtype == np.float32
    assert abs(batch["obs"]).max() < 10


def test_unknown_options_name_the_nearest():
    with pytest.raises(ConfigError, match="rollout_fragment_length"):
        CommonPolicyEvaluator(CountEnv(3, "term"), ScriptedPolicy, rollout_fragment_lenght=3)
    with pytest.raises(ConfigError, match="truncate_episodes"):
        CommonPolicyEvaluator(CountEnv(3, "term"), ScriptedPolicy, batch_mode="truncated_episodes")


def test_twenty_five_slots_of_different_lengths():
    lengths = [1 + i % 7 for i in range(25)]
    with evaluator(count_env(lengths), 25, length=21) as ev:
        batch = ev.sample()
        episodes = ev.get_metrics()
    for slot, n in enumerate(lengths):
        rows = batch["env_id"] == slot
        assert flat(batch["obs"][rows]) == [k % n for k in range(21)]
        assert [e.episode_return for e in episodes if e.env_id == slot] == [n * (n + 1) / 2] * (21 // n)
    assert len(np.unique(batch["eps_id"])) == sum(-(-21 // n) for n in lengths)
