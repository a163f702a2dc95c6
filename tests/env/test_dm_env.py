"""dm_env environments as input and as output."""

import collections
import itertools
import pickle

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from rlsample.env import as_base_env
from rlsample.env.base_env import slot_seed
from rlsample.env.dm_env_adapter import DmEnvAsGymnasium, as_dm_env, is_dm_env, is_dm_env_class, space_of_spec
from rlsample.errors import ConfigError, EnvFailedError, SpaceError
from rlsample.testing import CountEnv, check_base_env

dm_env = pytest.importorskip("dm_env", reason="dm_env is not installed")
specs = dm_env.specs


class Counting(dm_env.Environment):
    """Counts to n; the last step has the discount. Hands out one array, rewritten in place."""

    def __init__(self, n=3, discount=0.0, reward=float):
        self.n, self.discount, self.reward = n, discount, reward
        self.k, self.buffer = 0, np.zeros(1, np.float32)
        self.seeds, self.actions, self.closes, self.resets = [], [], 0, 0

    def seed(self, seed):
        self.seeds.append(seed)

    def reset(self):
        self.k, self.buffer[0] = 0, 0
        self.resets += 1
        return dm_env.restart(self.buffer)

    def step(self, action):
        self.k += 1
        self.buffer[0] = self.k
        self.actions.append(action)
        if self.k == self.n:
            return dm_env.TimeStep(dm_env.StepType.LAST, self.reward(self.k), self.discount, self.buffer)
        return dm_env.transition(self.reward(self.k), self.buffer, discount=0.5 if self.k == 2 else 1.0)

    def observation_spec(self):
        return specs.BoundedArray((1,), np.float32, 0, 1e6, "count")

    def action_spec(self):
        return specs.DiscreteArray(2, dtype=np.int32)

    def close(self):
        self.closes += 1


def test_told_by_its_methods():
    assert is_dm_env(Counting())
    assert not is_dm_env(Counting)
    assert is_dm_env_class(Counting)
    assert not is_dm_env(CountEnv())
    assert not is_dm_env_class(CountEnv)


@pytest.mark.parametrize(("discount", "ends"), [(0.0, (True, False)), (1.0, (False, True)), (0.9, (False, True))])
def test_rows(rollout, discount, ends):
    """The rows of the counting env of the field cases: no reuse of its array is seen."""
    with as_base_env(lambda ctx: Counting(3, discount), num_envs=2) as env:
        told = rollout(env, 6)
        for slot in (0, 1):
            assert told.column(slot, "obs", 6) == [0, 1, 2, 0, 1, 2]
            assert told.column(slot, "next_obs", 6) == [1, 2, 3, 1, 2, 3]
            assert told.column(slot, "rewards", 6) == [1, 2, 3, 1, 2, 3]
            assert told.column(slot, "terminated", 3) == [False, False, ends[0]]
            assert told.column(slot, "truncated", 3) == [False, False, ends[1]]
        infos = [(row, info) for row, info in told.infos[0] if row < 3]
        assert infos == [(1, {"discount": 0.5})] + ([(2, {"discount": 0.9})] if discount == 0.9 else [])
        assert told.unchanged()


def test_an_object_a_class_and_a_factory():
    mine = Counting()
    for env, num_envs, options in (
        (mine, 1, {}),
        (Counting, 3, {"env_config": {"n": 2}}),
        (lambda: Counting(4), 2, {}),
    ):
        with as_base_env(env, num_envs, **options) as base:
            assert base.action_space == spaces.Discrete(2)
            assert base.observation_space == spaces.Box(0, 1e6, (1,), np.float32)
            assert base.poll().obs.tolist() == [[0.0]] * num_envs
    assert mine.closes == 1
    with pytest.raises(ConfigError, match="num_envs > 1 needs more envs than this one DmEnvAsGymnasium"):
        as_base_env(Counting(), num_envs=2)


def test_in_worker_processes():
    with as_base_env(Counting, 2, backend="process", pool={"num_workers": 1}) as env:
        env.poll()
        env.send_actions(env.all_ids, np.array([0, 1]))
        assert env.poll().obs.tolist() == [[1.0], [1.0]]


def test_conformance():
    told = check_base_env(
        lambda seed: as_base_env(lambda ctx: Counting(3 + ctx.slot_index), num_envs=3, seed=seed),
        rounds=12,
        reference=lambda slot: DmEnvAsGymnasium(Counting(3 + slot)),
    )
    assert {rule: said for rule, said in told.items() if said != "ok"} == {8: "no make_faulty was given"}


def test_actions_come_in_the_dtypes_of_the_spec():
    made = []

    def make(ctx):
        made.append(Counting())
        return made[-1]

    with as_base_env(make, num_envs=2) as env:
        env.poll()
        env.send_actions(env.all_ids, np.array([1, 0]))
        env.poll()
    assert [type(e.actions[0]) for e in made] == [np.int32, np.int32]
    assert [int(e.actions[0]) for e in made] == [1, 0]
    made[0].action_spec().validate(made[0].actions[0])


def test_seeds():
    """To a seed method, or to the random state of a dm_control task."""
    made = []

    class Task:
        def __init__(self):
            self._random = np.random.RandomState(0)

    def make(ctx):
        made.append(Counting())
        made[-1].task = Task()
        return made[-1]

    with as_base_env(make, num_envs=2, seed=7) as env:
        env.poll()
        env.try_reset(env.all_ids)
    want = [slot_seed(7, 0, 0), slot_seed(7, 0, 1)]
    assert [e.seeds for e in made] == [[want[0]], [want[1]]]
    draws = [int(e.task._random.randint(2**31)) for e in made]
    assert draws == [int(np.random.RandomState(s).randint(2**31)) for s in want]


@pytest.mark.parametrize("reward", [int, np.float64, lambda k: np.array([k], np.float32), lambda k: np.array(k)])
def test_forms_of_rewards(rollout, reward):
    with as_base_env(lambda: Counting(3, reward=reward)) as env:
        assert rollout(env, 3).column(0, "rewards", 3) == [1.0, 2.0, 3.0]


def test_a_reward_that_is_none_is_an_error():
    with as_base_env(lambda: Counting(3, reward=lambda k: None)) as env:
        env.poll()
        env.send_actions(env.all_ids, np.array([0]))
        failure = env.poll().failures[0]
        assert isinstance(failure, EnvFailedError)
        assert "reward" in str(failure)


def test_an_env_that_begins_anew_by_itself_is_an_error():
    class Restarts(Counting):
        def step(self, action):
            return self.reset()

    with as_base_env(Restarts) as env:
        env.poll()
        env.send_actions(env.all_ids, np.array([0]))
        assert "began a new episode by itself" in str(env.poll().failures[0])


def test_spaces_of_specs():
    Pair = collections.namedtuple("Pair", "left right")
    spec = collections.OrderedDict(
        b=specs.Array((2,), np.float64),
        a=[specs.BoundedArray((), np.int32, -1, 3), specs.Array((3,), bool)],
        c=Pair(specs.DiscreteArray(4), specs.Array((), np.uint8)),
        d=specs.BoundedArray((2,), np.float32, [0, -1], [1, np.inf]),
    )
    assert space_of_spec(spec) == spaces.Dict(
        a=spaces.Tuple([spaces.Box(-1, 3, (), np.int32), spaces.MultiBinary((3,))]),
        b=spaces.Box(-np.inf, np.inf, (2,), np.float64),
        c=spaces.Tuple([spaces.Discrete(4), spaces.Box(0, 255, (), np.uint8)]),
        d=spaces.Box(np.array([0, -1], np.float32), np.array([1, np.inf], np.float32)),
    )
    assert space_of_spec(specs.Array((), bool)) == spaces.Discrete(2)
    with pytest.raises(SpaceError, match=r"the spec at a\[1\] StringArray.* has no space of a fixed size"):
        space_of_spec({"a": [specs.Array((), np.float32), specs.StringArray(())]})


class Nested(dm_env.Environment):
    """Observations and actions in nests, as mujoco tasks and grid worlds have them."""

    Pair = collections.namedtuple("Pair", "left right")

    def observation_spec(self):
        return collections.OrderedDict(
            z=specs.Array((2,), np.float64), a=[specs.Array((), np.int32), specs.Array((2,), bool)]
        )

    def action_spec(self):
        return self.Pair(specs.DiscreteArray(3), {"force": specs.BoundedArray((2,), np.float64, -1, 1)})

    def reset(self):
        self.got = []
        return dm_env.restart(self.observe())

    def observe(self):
        k = len(self.got)
        return collections.OrderedDict(z=np.array([k, -k], np.float64), a=[k, np.array([k % 2 == 0, True])])

    def step(self, action):
        self.got.append(action)
        return dm_env.transition(1.0, self.observe())


def test_nests():
    mine = Nested()
    with as_base_env(mine) as env:
        env.poll()
        env.send_actions(env.all_ids, (np.array([2]), {"force": np.array([[0.5, -0.25]])}))
        obs = env.poll().obs
        assert obs["z"].tolist() == [[1.0, -1.0]]
        assert obs["a"][0].tolist() == [1]
        assert obs["a"][1].tolist() == [[0, 1]]
        (action,) = mine.got
        assert isinstance(action, Nested.Pair)
        assert (int(action.left), action.right["force"].tolist()) == (2, [0.5, -0.25])
        assert action.right["force"].dtype == np.float64


# ---------------------------------------------------------------------- as output


@pytest.mark.parametrize(("end", "discount"), [("term", 0.0), ("trunc", 1.0), ("both", 0.0)])
def test_time_steps(end, discount):
    env = CountEnv(2, end)
    with as_dm_env(env) as dm:
        assert isinstance(dm, dm_env.Environment)
        steps = [dm.step(0), dm.step(1), dm.step(0), dm.step(1), dm.step(1)]  # the first and the fourth reset
    assert [s.step_type.value for s in steps] == [0, 1, 2, 0, 1]
    assert [s.observation.tolist() for s in steps] == [[0.0], [1.0], [2.0], [0.0], [1.0]]
    assert [s.reward for s in steps] == [None, 1.0, 2.0, None, 1.0]
    assert [s.discount for s in steps] == [None, 1.0, discount, None, 1.0]
    assert (env.resets, env.actions, env.closes) == (2, [1, 0, 1], 1)


def test_reset_in_mid_episode_and_step_type_of_the_first():
    with as_dm_env(CountEnv(5)) as dm:
        assert dm.reset().first()
        dm.step(0)
        assert dm.reset().observation.tolist() == [0.0]
        assert dm.step(0).observation.tolist() == [1.0]


def test_its_seed_is_that_of_slot_0():
    env = CountEnv(1)
    with as_dm_env(env, seed=3) as dm:
        dm.reset()
        dm.reset()
    assert env.seeds == [slot_seed(3, 0, 0), None]


def test_any_env_becomes_one_ids_and_lock_step_vectors_too():
    with as_dm_env("CartPole-v1", seed=0) as dm:
        dm.observation_spec().validate(dm.reset().observation)
        assert dm.action_spec().num_values == 2
        assert dm.step(1).reward == 1.0
    vector = gymnasium.make_vec("CartPole-v1", 1, vectorization_mode="vector_entry_point")
    with as_dm_env(vector, seed=0) as dm:  # it resets by stepping
        ends = [dm.step(1).step_type.value for _ in range(25)]
        assert ends[0] == 0
        assert [b for a, b in itertools.pairwise(ends) if a == 2] == [0] * (ends.count(2))
        assert ends.count(2) >= 2
    with pytest.raises(ConfigError, match="this has 2"):
        as_dm_env(gymnasium.make_vec("CartPole-v1", 2, vectorization_mode="vector_entry_point"))


def test_there_and_back_again():
    """A dm_env environment through both conversions gives the same time steps."""
    through, plain = as_dm_env(Counting(3, 0.0)), Counting(3, 0.0)
    for k in range(8):
        a, b = through.step(1), plain.reset() if k % 4 == 0 else plain.step(1)
        assert (a.step_type, a.reward, a.observation.tolist()) == (b.step_type, b.reward, b.observation.tolist())
        assert a.discount == (1.0 if b.discount == 0.5 else b.discount)
    through.close()


def test_specs_of_spaces():
    space = spaces.Dict(
        image=spaces.Box(0, 255, (2, 2), np.uint8),
        free=spaces.Box(-np.inf, np.inf, (3,), np.float32),
        pair=spaces.Tuple([spaces.Discrete(3), spaces.Discrete(3, start=5)]),
        many=spaces.MultiDiscrete([2, 3]),
        bits=spaces.MultiBinary(4),
    )

    class Env(CountEnv):
        observation_space = action_space = space

        def observe(self):
            space.seed(self.k)
            return space.sample()

    with as_dm_env(Env(3)) as dm:
        spec, step = dm.observation_spec(), dm.reset()
        assert set(spec) == set(space.spaces)
        assert spec["pair"][0].num_values == 3
        assert (spec["pair"][1].minimum, spec["pair"][1].maximum) == (5, 7)
        assert not isinstance(spec["free"], specs.BoundedArray)
        assert spec["many"].maximum.tolist() == [1, 2]
        for _ in range(2):
            for name in ("image", "free", "many", "bits"):
                spec[name].validate(step.observation[name])
            for k in (0, 1):
                spec["pair"][k].validate(step.observation["pair"][k])
            step = dm.step(space.sample())
        with pytest.raises((SpaceError, EnvFailedError)):
            dm.step({**space.sample(), "pair": (7, 5)})


@pytest.mark.parametrize(
    ("name", "space"), [("observation_space", spaces.Text(3)), ("action_space", spaces.Sequence(spaces.Discrete(2)))]
)
def test_what_cannot_be_told_in_specs_is_refused_and_closed(name, space):
    env = CountEnv(3)
    setattr(env, name, space)
    with pytest.raises(SpaceError, match="no fixed size"):
        as_dm_env(env)
    assert env.closes == 1


def test_several_envs_are_refused_and_closed():
    envs = [CountEnv(3), CountEnv(3)]
    with pytest.raises(ConfigError, match="one env"):
        as_dm_env(gymnasium.vector.SyncVectorEnv([lambda env=env: env for env in envs]))
    assert [env.closes for env in envs] == [1, 1]


def test_a_failing_env_raises():
    class Breaks(CountEnv):
        def step(self, action):
            raise ValueError("boom")

    with as_dm_env(Breaks()) as dm:
        dm.reset()
        with pytest.raises(EnvFailedError, match="boom"):
            dm.step(0)


def test_the_public_suite_of_dm_env_passes():
    from dm_env import test_utils

    class Suite(test_utils.EnvironmentTestMixin):
        def make_object_under_test(self):
            return as_dm_env("CartPole-v1", seed=0)

        def make_action_sequence(self):
            for _ in range(60):
                yield self.make_action()

    from absl.testing import absltest

    case = type("Case", (Suite, absltest.TestCase), {})
    names = [name for name in dir(case) if name.startswith("test")]
    assert len(names) >= 4
    result = absltest.unittest.TestResult()
    for name in names:
        case(name).run(result)
    assert result.testsRun == len(names)
    assert not result.errors, result.errors[0][1]
    assert not result.failures, result.failures[0][1]


def test_factories_of_classes_can_be_sent_to_workers():
    from rlsample.env.foreign_kinds import in_gymnasium_terms

    factory = in_gymnasium_terms(Counting)
    assert pickle.loads(pickle.dumps(factory)).cls is Counting
