"""as_base_env: which kinds it takes, what is built, closed and seeded, and what its errors say."""

import functools
import logging
import sys
import types

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from rlsample.env import BaseEnv, EnvContext, EnvSettings, as_base_env
from rlsample.env.base_env import slot_seed
from rlsample.env.convert import _takes_context
from rlsample.env.gym_envs import GymEnvs
from rlsample.env.gymnasium_vector import GymnasiumVectorAdapter
from rlsample.env.vector_env_adapter import VectorEnvAdapter
from rlsample.errors import ConfigError, EnvFailedError, EnvProtocolError, SpaceError
from rlsample.evaluation import CommonPolicyEvaluator
from rlsample.policy import RandomPolicy
from rlsample.testing.scripted import CountEnv, CountVectorEnv


class Kept(CountEnv):
    """Remembers every env made, also one whose constructor raises."""

    made: list = []  # noqa: RUF012
    fail_at = None

    def __init__(self, n=3, end="term"):
        super().__init__(n, end)
        if len(Kept.made) == Kept.fail_at:
            raise RuntimeError("no licence")
        Kept.made.append(self)


@pytest.fixture(autouse=True)
def kept():
    Kept.made, Kept.fail_at = [], None
    return Kept


@pytest.fixture
def registered():
    """Registers specs for one test: ``registered("Id-v0", entry_point=...)``."""
    ids = []

    def register(env_id, **spec):
        gymnasium.register(env_id, **spec)
        ids.append(env_id)
        return env_id

    yield register
    for env_id in ids:
        del gymnasium.registry[env_id]


def lengths(env, steps):
    """Steps all slots; how many rows ended in each."""
    batch = env.poll()
    ends = [0] * env.num_envs
    for _ in range(steps):
        env.send_actions(batch.env_ids, np.zeros(len(batch.env_ids), int))
        batch = env.poll()
        for slot in np.flatnonzero(batch.terminated).tolist():
            ends[slot] += 1
    return ends


# Kinds


def test_a_base_env_comes_back_unchanged():
    with as_base_env(CountVectorEnv()) as env:
        assert as_base_env(env) is as_base_env(env, 2) is env
        with pytest.raises(ConfigError, match="has 2 envs, so num_envs cannot be 3"):
            as_base_env(env, 3)


def test_a_factory_is_told_where_its_env_goes(kept):
    seen = []

    def make(ctx):
        seen.append(ctx)
        return Kept(3 + ctx.slot_index)

    with as_base_env(make, 3, seed=5, worker_index=2, env_config={"a": 1}) as env:
        assert isinstance(env, GymEnvs)
        assert seen == [EnvContext(2, slot, 3, 0, {"a": 1}) for slot in range(3)]
        assert lengths(env, 3) == [1, 0, 0]
    assert [e.seeds[0] for e in kept.made] == [slot_seed(5, 2, slot) for slot in range(3)]
    assert [e.closes for e in kept.made] == [1, 1, 1]


@pytest.mark.parametrize(
    "factory",
    [lambda: Kept(2), functools.partial(Kept, 2), lambda n=2: Kept(n), lambda *args: Kept(2), lambda _ctx: Kept(2)],
)
def test_factories_may_take_nothing_or_a_context(factory, kept):
    with as_base_env(factory, 2) as env:
        assert lengths(env, 2) == [1, 1]
    assert len(kept.made) == 2


def test_which_factories_take_a_context():
    assert not _takes_context(functools.partial(gymnasium.make, "CartPole-v1"))
    assert not _takes_context(lambda n=3: None)
    assert _takes_context(lambda ctx=None: None)
    assert _takes_context(lambda anything, more=1: None)
    with pytest.raises(ConfigError, match=r"needs \(a, b\)"):
        _takes_context(lambda a, b: None)
    with pytest.raises(ConfigError, match=r"needs \(a\)"):
        _takes_context(lambda *, a: None)


def test_an_env_class_gets_env_config_as_arguments(kept):
    with as_base_env(Kept, 2, env_config={"n": 2, "end": "trunc"}):
        assert [(e.n, e.end) for e in kept.made] == [(2, "trunc")] * 2


def test_an_instance_is_slot_0():
    mine = CountEnv(2)
    with as_base_env(mine, seed=3) as env:
        assert env.sub_envs() == [mine]
        assert lengths(env, 2) == [1]
    assert mine.closes == 1
    assert mine.seeds == [slot_seed(3, 0, 0)]


def test_more_slots_than_an_instance_need_its_spec(registered):
    with pytest.raises(ConfigError, match=r"num_envs > 1 .* CountEnv, which knows no spec.*factory"):
        as_base_env(CountEnv(), 2)
    with pytest.raises(ConfigError, match="max_restarts > 0"):
        as_base_env(CountEnv(), max_restarts=1)
    mine = gymnasium.make(registered("Kept-v0", entry_point=Kept), n=2)
    with as_base_env(mine, 3) as env:
        assert env.sub_envs()[0] is mine
        assert [e.n for e in Kept.made] == [2, 2, 2]
    assert [e.closes for e in Kept.made] == [1, 1, 1]


def test_ids_specs_and_module_ids(registered, monkeypatch):
    env_id = registered("Kept-v0", entry_point=Kept, max_episode_steps=2)
    with as_base_env(env_id, 2, env_config={"end": "never"}) as env:
        assert len(Kept.made) == 2
        env.poll()
        for _ in range(2):
            env.send_actions(env.all_ids, np.zeros(2, int))
            batch = env.poll()
        assert batch.truncated.tolist() == [True, True]
    with as_base_env(gymnasium.spec(env_id)) as env:
        assert env.num_envs == 1
    with as_base_env(EnvSpec("Mine-v0", entry_point=Kept)) as env:
        assert env.num_envs == 1
    module = types.ModuleType("registers_itself")
    monkeypatch.setitem(sys.modules, "registers_itself", module)
    with as_base_env(f"registers_itself:{env_id}") as env:
        assert env.num_envs == 1


def test_vector_envs_of_both_kinds():
    with as_base_env(CountVectorEnv((2, 3)), seed=1) as env:
        assert isinstance(env, VectorEnvAdapter)
        assert env.num_envs == 2
        assert env.env.steps == 0
    with as_base_env(SyncVectorEnv([CountEnv, CountEnv], autoreset_mode="SameStep"), 2) as env:
        assert isinstance(env, GymnasiumVectorAdapter)
        assert env.mode is AutoresetMode.SAME_STEP
    with pytest.raises(ConfigError, match="SyncVectorEnv has 2 envs, so num_envs cannot be 4"):
        as_base_env(SyncVectorEnv([CountEnv, CountEnv]), 4)


def test_a_factory_may_make_a_whole_vector_env_once():
    made = []

    def make(ctx):
        made.append(CountVectorEnv((3,) * ctx.num_envs))
        return made[-1]

    with as_base_env(make, 4, env_config={"x": 1}) as env:
        assert isinstance(env, VectorEnvAdapter)
        assert env.num_envs == 4
    assert len(made) == 1
    assert made[0].closes == 1


# Vector forms of specs


class CountVector(gymnasium.vector.VectorEnv):
    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012
    made = closes = 0

    def __init__(self, num_envs, obs_high=1e6, broken=False, max_episode_steps=None):
        if broken:
            raise RuntimeError("no GPU")
        CountVector.made += 1
        self.num_envs = num_envs
        self.single_observation_space = spaces.Box(0, obs_high, (1,), np.float32)
        self.single_action_space = spaces.Discrete(2)
        self.action_space = spaces.MultiDiscrete([2] * num_envs)
        self.observation_space = gymnasium.vector.utils.batch_space(self.single_observation_space, num_envs)

    def reset(self, *, seed=None, options=None):
        return np.zeros((self.num_envs, 1), np.float32), {}

    def close_extras(self):
        CountVector.closes += 1


class Config(Kept):
    def __init__(self, obs_high=0, broken=False):
        super().__init__()


@pytest.fixture
def count_vector(registered):
    CountVector.made = CountVector.closes = 0
    return registered("Count-v0", entry_point=Config, vector_entry_point=CountVector)


def test_auto_takes_the_vector_form_from_eight_slots_on(count_vector, caplog):
    caplog.set_level(logging.INFO, "rlsample")
    with as_base_env(count_vector, 7) as env:
        assert isinstance(env, GymEnvs)
    assert len(Kept.made) == 7
    assert caplog.text == ""
    with as_base_env(count_vector, 8) as env:
        assert isinstance(env, GymnasiumVectorAdapter)
        assert env.poll().obs.shape == (8, 1)
    assert "Count-v0: stepping 8 envs in its own vector form" in caplog.text
    assert CountVector.made == 1
    assert [e.closes for e in Kept.made] == [1] * 8


def test_auto_loops_where_the_vector_form_is_another_env(count_vector, caplog):
    caplog.set_level(logging.INFO, "rlsample")
    with as_base_env(count_vector, 8, env_config={"obs_high": 9}) as env:
        assert isinstance(env, GymEnvs)
    assert "its vector form has another observation space; 8 envs in a loop instead" in caplog.text
    assert (CountVector.made, CountVector.closes) == (1, 1)
    assert [e.closes for e in Kept.made] == [1] * 8


def test_auto_loops_where_the_vector_form_cannot_be_built(count_vector, caplog):
    with as_base_env(count_vector, 8, env_config={"broken": True}) as env:
        assert isinstance(env, GymEnvs)
    assert "vector form cannot be built (RuntimeError: no GPU); 8 envs in a loop" in caplog.text
    assert [e.closes for e in Kept.made] == [1] * 8


def test_loop_and_native_force_either(count_vector):
    with as_base_env(count_vector, 8, vectorize="loop") as env:
        assert isinstance(env, GymEnvs)
    assert (CountVector.made, len(Kept.made)) == (0, 8)
    with as_base_env(count_vector, 2, vectorize="native", env_config={"obs_high": 9}) as env:
        assert isinstance(env, GymnasiumVectorAdapter)
    assert (CountVector.made, len(Kept.made)) == (1, 8)
    with pytest.raises(ConfigError, match=r"vector form of Count-v0 cannot be built .*no GPU"):
        as_base_env(count_vector, 2, vectorize="native", env_config={"broken": True})
    with pytest.raises(ConfigError, match="has no vector form"):
        as_base_env("Acrobot-v1", 2, vectorize="native")
    with pytest.raises(ConfigError, match="needs a Gymnasium id or spec"):
        as_base_env(CountEnv, 2, vectorize="native")
    with pytest.raises(ConfigError, match="cannot take CountVectorEnv apart"):
        as_base_env(CountVectorEnv(), vectorize="loop")


def test_cartpole_is_native_and_atari_is_not(caplog):
    caplog.set_level(logging.INFO, "rlsample")
    with as_base_env("CartPole-v1", 8) as env:
        assert isinstance(env, GymnasiumVectorAdapter)
    with as_base_env("ALE/Pong-v5", 8) as env:
        assert isinstance(env, GymEnvs)
    assert "ALE/Pong-v5: its vector form" in caplog.text


# Errors


def test_a_failing_constructor_names_its_slot_and_closes_the_earlier_ones(kept):
    for fail_at in (0, 2):
        Kept.made, Kept.fail_at = [], fail_at
        for env in (Kept, lambda ctx: Kept()):
            Kept.made.clear()
            with pytest.raises(EnvFailedError, match=f"slot {fail_at}: __init__ raised RuntimeError: no licence") as e:
                as_base_env(env, 3)
            assert e.value.slot == fail_at
            assert [env.closes for env in Kept.made] == [1] * fail_at


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ("CartPol-v1", "unknown env id 'CartPol-v1'; did you mean 'CartPole-v1'"),
        ("CartPole", "did you mean 'CartPole-v"),
        ("ALE/Pongg-v5", "did you mean 'ALE/Pong-v5'"),
        ("zzzzzz", "none of the .* registered ids is near"),
        ("no_such_module:CartPole-v1", "no_such_module.*module that can be imported"),
        (3, "cannot make an env of int 3"),
        (None, "cannot make an env of NoneType"),
        (dict, "the class builtins.dict is no gymnasium.Env"),
        (CountVectorEnv, "holds several envs; give an object"),
        (types.SimpleNamespace(step=1, reset=2), "has step and reset but is no gymnasium.Env.*Shimmy"),
    ],
)
def test_what_cannot_be_converted(env, message):
    with pytest.raises(ConfigError, match=message):
        as_base_env(env)


def test_old_gym_envs_are_sent_to_shimmy():
    old = type("Env", (), {"__module__": "gym.core", "step": None, "reset": None})
    mine = type("OldPole", (old,), {})
    for env in (mine, mine()):
        with pytest.raises(ConfigError, match=r"OldPole.*old package gym.*4 values.*Shimmy"):
            as_base_env(env)
    with pytest.raises(EnvFailedError, match=r"slot 0.*Shimmy"):
        as_base_env(lambda: mine())


def test_a_step_of_four_values_names_shimmy():
    class Four(CountEnv):
        def step(self, action):
            return super().step(action)[:4]

    with as_base_env(Four) as env:
        env.poll()
        env.send_actions(env.all_ids, np.array([0]))
        assert "Shimmy" in str(env.poll().failures[0])


def test_a_factory_that_returns_no_env():
    with pytest.raises(EnvFailedError, match=r"slot 0.*returned int 5, expected a gymnasium.Env"):
        as_base_env(lambda: 5)


@pytest.mark.parametrize("num_envs", [0, -1, 1.5, True, "2"])
def test_num_envs_is_a_count(num_envs):
    with pytest.raises(ConfigError, match="num_envs must be an int of at least 1"):
        as_base_env(CountEnv, num_envs)


def test_num_envs_may_be_a_numpy_int():
    with as_base_env(CountEnv, np.int64(2)) as env:
        assert type(env.num_envs) is int


def test_options_are_checked_and_override_settings():
    with pytest.raises(ConfigError, match="unknown option 'max_restart'; did you mean 'max_restarts'"):
        as_base_env(CountEnv, max_restart=1)
    with pytest.raises(ConfigError, match="unknown vectorize 'nativ'; did you mean 'native'"):
        as_base_env(CountEnv, vectorize="nativ")
    with pytest.raises(ConfigError, match="unknown backend 'inlin'; did you mean 'inline'"):
        EnvSettings(backend="inlin")
    for bad in ({"max_restarts": -1}, {"max_restarts": 1.5}, {"restart_backoff_s": -1}, {"env_config": 3}):
        with pytest.raises(ConfigError, match=next(iter(bad))):
            EnvSettings(**bad)
    with as_base_env(Kept, settings=EnvSettings(env_config={"n": 7}, max_restarts=2), env_config={"n": 4}) as env:
        assert Kept.made[0].n == 4
        assert env._settings.max_restarts == 2


def test_env_config_for_an_object_is_an_error_and_not_ignored():
    for env in (CountEnv(), CountVectorEnv(), SyncVectorEnv([CountEnv])):
        with pytest.raises(ConfigError, match="env_config cannot reach"):
            as_base_env(env, env_config={"n": 1})


def test_an_empty_space_is_refused_and_everything_closed(kept):
    class Empty(Kept):
        observation_space = spaces.Dict({"x": spaces.Tuple(())})

    with pytest.raises(SpaceError, match="x"):
        as_base_env(Empty, 2)
    assert [e.closes for e in kept.made] == [1, 1]


def test_an_evaluator_refuses_a_space_without_size_and_closes_everything(kept):
    class Text(Kept):
        observation_space = spaces.Text(3)

    with pytest.raises(SpaceError, match="TransformObservation"):
        CommonPolicyEvaluator(Text, RandomPolicy, num_envs=2)
    assert [e.closes for e in kept.made] == [1, 1]


# Case 15 on the inline loop, and case 5


def test_wrong_use_names_the_slot_and_steps_nothing(kept):
    with as_base_env(Kept, 3) as env:
        steps = lambda: [e.steps for e in kept.made]  # noqa: E731
        with pytest.raises(EnvProtocolError, match="slot 0 takes no action: it is not yet started"):
            env.send_actions([0], np.array([0]))
        assert env.poll().is_first.tolist() == [True] * 3
        env.send_actions([0], np.array([0]))
        batch = env.poll()
        assert (batch.env_ids.tolist(), batch.obs.tolist(), batch.rewards.tolist()) == ([0], [[1]], [1])
        with pytest.raises(EnvProtocolError, match="nothing to wait for"):
            env.poll()
        with pytest.raises(EnvProtocolError, match="slot 7 does not exist"):
            env.send_actions([1, 7], np.array([0, 0]))
        with pytest.raises(EnvProtocolError, match="slot 0 is named twice"):
            env.send_actions([0, 0], np.array([0, 0]))
        for wrong in (np.array([0.5]), np.array([0, 0]), np.array([[0, 0]]), np.array([2])):
            with pytest.raises(SpaceError):
                env.send_actions([0], wrong)
        assert steps() == [1, 0, 0]
        for _ in range(2):
            env.send_actions([0], np.array([1]))
            batch = env.poll()
        assert batch.terminated.tolist() == [True]
        with pytest.raises(EnvProtocolError, match="slot 0 takes no action: it is at its episode's end"):
            env.send_actions([0], np.array([0]))
        assert steps() == [3, 0, 0]
        assert env.try_reset([0]).obs.tolist() == [[0]]
        env.send_actions(env.all_ids, np.zeros(3, int))
        with pytest.raises(EnvProtocolError, match="slot 2 takes no action: it is busy"):
            env.send_actions([2], np.array([0]))
        assert env.poll().obs.tolist() == [[1], [1], [1]]
        assert steps() == [4, 1, 1]


class Letters(CountEnv):
    action_space = spaces.Discrete(3, start=5)

    def __init__(self):
        super().__init__(99)
        self.log = []

    def step(self, action):
        assert self.action_space.contains(action)
        self.log.append({5: "l", 6: "m", 7: "r"}[action])
        return super().step(action)


@pytest.mark.parametrize("num_envs", [1, 3])
def test_discrete_actions_arrive_as_hashable_ints(num_envs, rollout):
    with as_base_env(Letters, num_envs) as env:
        got = rollout(env, 6, choose=lambda slot, k: np.int64(5 + k % 3))
        assert ["".join(e.log) for e in env.sub_envs()] == ["lmrlmr"] * num_envs
        assert got.column(0, "actions") == [5, 6, 7, 5, 6, 7]


@pytest.mark.parametrize("num_envs", [1, 3])
@pytest.mark.parametrize(
    "space",
    [
        spaces.MultiDiscrete([2, 3]),
        spaces.Box(-1, 1, (), np.float32),
        spaces.Tuple((spaces.Discrete(2), spaces.Box(-1, 1, (2,)))),
        spaces.Dict({"a": spaces.MultiBinary(2), "b": spaces.Box(-1, 1, (), np.float64)}),
    ],
    ids=lambda s: type(s).__name__,
)
def test_actions_arrive_in_the_form_their_space_contains(space, num_envs, rollout):
    class Strict(CountEnv):
        action_space = space

        def step(self, action):
            assert not isinstance(space, spaces.Box) or type(action) is np.ndarray
            assert self.action_space.contains(action)
            return super().step(action)

    space.seed(0)
    with as_base_env(Strict, num_envs, env_config={"n": 99}) as env:
        sent = {}
        rollout(env, 4, choose=lambda slot, k: sent.setdefault((slot, k), space.sample()))
        for slot, sub in enumerate(env.sub_envs()):
            for k in range(4):
                np.testing.assert_equal(sub.actions[k], sent[slot, k])
        assert isinstance(env, BaseEnv)
