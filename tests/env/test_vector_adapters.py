"""VectorEnv and gymnasium vector envs behind poll/send: episode ends, copies, infos, failures, seeds, closing."""

import multiprocessing
import threading

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from rlsample.env.base_env import slot_seed
from rlsample.env.env_settings import EnvSettings
from rlsample.env.gymnasium_vector import GymnasiumVectorAdapter, infos_by_slot
from rlsample.env.vector_env import VectorEnv
from rlsample.env.vector_env_adapter import VectorEnvAdapter
from rlsample.errors import ConfigError, EnvClosedError, EnvFailedError, EnvProtocolError, SpaceError
from rlsample.testing.scripted import CountEnv, CountVectorEnv

MODES = list(AutoresetMode)
mode_name = lambda m: m.name if isinstance(m, AutoresetMode) else str(m)  # noqa: E731


@pytest.fixture(autouse=True, scope="module")
def shared_memory_arena():
    """multiprocessing keeps its first arena for reuse, which is no leak of the test that happened to be first."""
    multiprocessing.RawArray("b", 1 << 20)


def sync(mode, *envs, copy=True, **settings):
    made = [(lambda e=e: e) for e in envs]
    venv = SyncVectorEnv(made, autoreset_mode=mode, copy=copy)
    return GymnasiumVectorAdapter(venv, settings=EnvSettings(**settings), seed=0)


def counts(mode, lengths=(3, 3), end="term", **kw):
    return sync(mode, *(CountEnv(n, end) for n in lengths), **kw)


def kinds():
    """Each adapter over CountEnvs of the given lengths."""
    made = {"vector": lambda lengths, end: VectorEnvAdapter(CountVectorEnv(lengths, end))}
    for mode in MODES:
        made[mode.name] = lambda lengths, end, mode=mode: counts(mode, lengths, end)
        made[f"{mode.name}-shared"] = lambda lengths, end, mode=mode: counts(mode, lengths, end, copy=False)
    return made


KINDS = kinds()


# Cases 1 and 2: true final observations, and buffers that are reused


@pytest.mark.parametrize("kind", KINDS)
def test_final_observations_are_true_and_nothing_changes_later(kind, rollout):
    with KINDS[kind]((3, 3), "term") as env:
        got = rollout(env, 6)
        for slot in (0, 1):
            assert got.column(slot, "obs", 6) == [0, 1, 2, 0, 1, 2]
            assert got.column(slot, "next_obs", 6) == [1, 2, 3, 1, 2, 3]
            assert got.column(slot, "terminated", 6) == [False, False, True] * 2
            assert got.column(slot, "truncated", 6) == [False] * 6
            assert got.column(slot, "rewards", 6) == [1, 2, 3, 1, 2, 3]
        assert got.unchanged()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("end", "flags"), [("term", (True, False)), ("trunc", (False, True)), ("both", (True, True))])
def test_ends_are_told_apart_and_slots_end_on_different_steps(kind, end, flags, rollout):
    with KINDS[kind]((2, 3), end) as env:
        got = rollout(env, 6)
        assert got.column(0, "rewards", 6) == [1, 2, 1, 2, 1, 2]
        assert got.column(1, "rewards", 6) == [1, 2, 3, 1, 2, 3]
        for slot, length in ((0, 2), (1, 3)):
            at_end = [(k + 1) % length == 0 for k in range(6)]
            assert got.column(slot, "terminated", 6) == [e and flags[0] for e in at_end]
            assert got.column(slot, "truncated", 6) == [e and flags[1] for e in at_end]
        assert all(obs.item() == 0 for slot in (0, 1) for obs in got.firsts[slot])


def test_async_form_gives_the_same_columns(rollout):
    made = [lambda: CountEnv(2), lambda: CountEnv(3)]
    for mode in MODES:
        with GymnasiumVectorAdapter(AsyncVectorEnv(made, autoreset_mode=mode, copy=False), seed=0) as env:
            got = rollout(env, 6)
        assert got.column(0, "next_obs", 6) == [1, 2, 1, 2, 1, 2]
        assert got.column(1, "obs", 6) == [0, 1, 2, 0, 1, 2]
        assert got.unchanged()


# Case 8c: an episode cut in the middle


@pytest.mark.parametrize("kind", KINDS)
def test_a_horizon_cut_starts_a_whole_new_episode(kind, rollout):
    with KINDS[kind]((99, 99), "never") as env:
        got = rollout(env, 7, horizon=3)
        for slot in (0, 1):
            assert got.column(slot, "obs", 7) == [0, 1, 2, 0, 1, 2, 0]
            assert got.column(slot, "next_obs", 7) == [1, 2, 3, 1, 2, 3, 1]
            assert got.column(slot, "truncated", 7) == [False, False, True] * 2 + [False]


@pytest.mark.parametrize("kind", KINDS)
def test_cuts_and_ends_in_one_step_and_one_call(kind, rollout):
    with KINDS[kind]((3, 99, 2), "term") as env:
        got = rollout(env, 6, horizon=3)
        assert got.column(0, "t", 6) == got.column(1, "t", 6) == [0, 1, 2, 0, 1, 2]
        assert got.column(2, "t", 6) == [0, 1, 0, 1, 0, 1]
        assert got.column(0, "obs", 6) == got.column(1, "obs", 6) == [0, 1, 2, 0, 1, 2]
        assert got.column(1, "truncated", 6) == [False, False, True] * 2
        assert got.column(0, "truncated", 6) == [False] * 6


def test_async_resets_a_slot_in_mid_episode_but_refuses_a_mix_it_would_get_wrong(rollout):
    made = [lambda: CountEnv(99), lambda: CountEnv(3)]
    with GymnasiumVectorAdapter(AsyncVectorEnv(made, shared_memory=False)) as env:
        env.poll()
        for _ in range(3):
            env.send_actions(env.all_ids, np.zeros(2, int))
            env.poll()
        with pytest.raises(EnvProtocolError, match=r"slots \[1\] ended and \[0\] are in mid-episode"):
            env.try_reset([0, 1])
        assert env.try_reset([0]).obs.tolist() == [[0]]
        assert env.try_reset([1]) is None
        env.send_actions([0], np.zeros(1, int))
        batch = env.poll()
        assert batch.obs.tolist() == [[1], [0]]
        assert batch.is_first.tolist() == [False, True]
        env.send_actions(env.all_ids, np.zeros(2, int))
        assert env.poll().obs.tolist() == [[2], [1]]


def test_an_env_without_reset_mask_says_what_to_do():
    with GymnasiumVectorAdapter(gymnasium.make_vec("CartPole-v1", num_envs=2), seed=0) as env:
        env.poll()
        with pytest.raises(EnvProtocolError, match=r"slots \[1\] are in mid-episode.*vectorize='loop'"):
            env.try_reset([1])
        env.send_actions([0, 1], np.array([0, 1]))
        assert len(env.poll().env_ids) == 2


# The protocol in lock-step


@pytest.mark.parametrize("kind", KINDS)
def test_every_slot_needs_an_action_and_parts_are_put_together(kind, rollout):
    with KINDS[kind]((3, 3, 3), "term") as env:
        with pytest.raises(EnvProtocolError, match=r"slot 1 takes no action: it is not yet started"):
            env.send_actions([1], np.array([0]))
        env.poll()
        with pytest.raises(EnvProtocolError, match="nothing to wait for: slots 0, 1, 2: waiting for an action"):
            env.poll()
        env.send_actions([2, 0], np.array([1, 0]))
        with pytest.raises(EnvProtocolError, match=r"step together.*slot 1: waiting for an action; slots 0, 2: busy"):
            env.poll()
        with pytest.raises(SpaceError, match="slot 1 was given 2"):
            env.send_actions([1], np.array([2]))
        env.send_actions([1], np.array([1]))
        assert env.poll().obs.tolist() == [[1], [1], [1]]


def test_actions_reach_their_slots_and_are_not_changed_later(rollout):
    envs = [CountEnv(9) for _ in range(3)]
    for e in envs:
        e.action_space = spaces.Box(-9, 9, (1,), np.float32)
    with sync(AutoresetMode.NEXT_STEP, *envs) as env:
        env.poll()
        mine = np.array([[1], [2], [3]], np.float32)
        env.send_actions(env.all_ids, mine)
        mine[:] = 7
        env.poll()
        env.send_actions([2], np.array([[6.0]]))
        env.send_actions([0, 1], np.array([[4.0], [5.0]]))
        env.poll()
        env.send_actions([0], np.array([[-1.0]]))
    assert [[a.item() for a in e.actions] for e in envs] == [[1, 4], [2, 5], [3, 6]]


def test_next_step_gives_the_ended_slot_a_legal_filler_and_no_transition():
    envs = [CountEnv(1), CountEnv(99)]
    for e in envs:
        e.action_space = spaces.Discrete(3, start=5)
    with sync(AutoresetMode.NEXT_STEP, *envs) as env:
        env.poll()
        env.send_actions([0, 1], np.array([5, 6]))
        assert env.poll().terminated.tolist() == [True, False]
        with pytest.raises(EnvProtocolError, match="slot 0 takes no action: it is at its episode's end"):
            env.send_actions([0, 1], np.array([5, 6]))
        assert env.try_reset([0]) is None
        with pytest.raises(EnvProtocolError, match="slot 0 cannot be reset: it is resetting"):
            env.try_reset([0])
        env.send_actions([1], np.array([7]))
        batch = env.poll()
    assert batch.is_first.tolist() == [True, False]
    assert batch.rewards.tolist() == [0, 2]
    assert batch.obs.tolist() == [[0], [2]]
    assert envs[0].actions == [5]
    assert envs[1].actions == [6, 7]


def test_what_a_next_step_env_says_with_a_reset_is_no_transition():
    class Chatty(SyncVectorEnv):
        def step(self, actions):
            resetting = self._autoreset_envs.copy()
            obs, rewards, terminated, truncated, infos = super().step(actions)
            return obs, rewards + 5 * resetting, terminated | resetting, truncated | resetting, infos

    with GymnasiumVectorAdapter(Chatty([lambda: CountEnv(1), lambda: CountEnv(99)])) as env:
        env.poll()
        env.send_actions([0, 1], np.array([0, 0]))
        env.poll()
        env.try_reset([0])
        env.send_actions([1], np.array([0]))
        batch = env.poll()
        assert batch.rewards.tolist() == [0, 2]
        assert not batch.terminated.any()
        assert not batch.truncated.any()
        env.send_actions([0, 1], np.array([0, 0]))
        assert env.poll().terminated.tolist() == [True, False]


# Cases 3 and 4: rewards and dtypes


class Nested(CountEnv):
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
        return {
            "img": np.full((4, 4), k, np.uint8),
            "pos": np.array(0.1 * k),
            "n": k % 5,
            "pair": (np.array([k, k + 1], np.float32) / 8, np.array([k & 1, k & 2, 1], np.int8).clip(0, 1)),
        }


@pytest.mark.parametrize("mode", MODES, ids=mode_name)
@pytest.mark.parametrize("async_form", [False, True])
def test_dtype_and_structure_are_kept(mode, async_form, rollout):
    made = [lambda: Nested(3), lambda: Nested(2)]
    venv = (AsyncVectorEnv if async_form else SyncVectorEnv)(made, autoreset_mode=mode)
    with GymnasiumVectorAdapter(venv) as env:
        got = rollout(env, 3)
        obs = got.batches[0][0].obs
    assert {k: (v.dtype.name, v.shape) for k, v in obs.items() if k != "pair"} == {
        "img": ("uint8", (2, 4, 4)),
        "pos": ("float64", (2,)),
        "n": ("int64", (2,)),
    }
    assert type(obs["pair"]) is tuple
    assert [(p.dtype.name, p.shape) for p in obs["pair"]] == [("float32", (2, 2)), ("int8", (2, 3))]
    for slot, length in ((0, 3), (1, 2)):
        for k, row in enumerate(got.rows[slot][:3]):
            after = k % length + 1
            want = Nested(9)
            want.k = after
            for part in ("img", "pos", "n"):
                assert np.array_equal(row[1][part], want.observe()[part])
            assert np.array_equal(row[1]["pair"][0], want.observe()["pair"][0])
            assert np.array_equal(row[1]["pair"][1], want.observe()["pair"][1])


class Rewards(CountVectorEnv):
    form = staticmethod(list)

    def vector_step(self, actions):
        obs, rewards, *rest = super().vector_step(actions)
        return obs, self.form(rewards.copy()), *rest


@pytest.mark.parametrize(
    "form",
    [
        list,
        lambda r: r.astype(np.int32),
        lambda r: r.astype(np.float32)[:, None],
        lambda r: [np.array([x], np.float32) for x in r],
        lambda r: [int(r[0]), np.array([r[1]])],
    ],
)
def test_reward_forms_are_alike(form, rollout):
    venv = Rewards((2, 3))
    venv.form = form
    with VectorEnvAdapter(venv) as env:
        got = rollout(env, 6)
    assert got.batches[1][0].rewards.dtype == np.float32
    assert got.column(0, "rewards", 6) == [1, 2, 1, 2, 1, 2]
    assert got.column(1, "rewards", 6) == [1, 2, 3, 1, 2, 3]


# Case 5 through Gymnasium's own batching


def test_discrete_start_and_tuple_actions_pass(rollout):
    envs = [CountEnv(99), CountEnv(99)]
    for e in envs:
        e.action_space = spaces.Tuple((spaces.Discrete(3, start=5), spaces.Box(-1, 1, (2,), np.float32)))
    with sync(AutoresetMode.NEXT_STEP, *envs) as env:
        rollout(env, 3, choose=lambda slot, k: (np.int64(5 + k), np.array([0.5, slot / 4], np.float32)))
    for slot, e in enumerate(envs):
        assert [a[0] for a in e.actions] == [5, 6, 7]
        assert [a[1].tolist() for a in e.actions] == [[0.5, slot / 4]] * 3
        assert all(type(a) is tuple for a in e.actions)


# Infos


def test_infos_by_slot():
    infos = {
        "a": np.array([3, 0, 5]),
        "_a": np.array([True, False, True]),
        "v": np.arange(6).reshape(3, 2),
        "_v": np.array([False, False, True]),
        "deep": {"x": np.array([0.0, 1.5, 0.0]), "_x": np.array([False, True, False])},
        "_deep": np.array([False, True, False]),
        "o": np.array([None, "s", None], object),
        "_o": np.array([False, True, False]),
    }
    got = infos_by_slot(infos, 3)
    assert got[2].pop("v").tolist() == [4, 5]
    assert got == {0: {"a": 3}, 1: {"deep": {"x": 1.5}, "o": "s"}, 2: {"a": 5}}
    assert type(got[0]["a"]) is int
    assert infos_by_slot({"lives": np.array([1, 2]), "fps": 60}, 2) == {
        0: {"lives": 1, "fps": 60},
        1: {"lives": 2, "fps": 60},
    }
    assert infos_by_slot({}, 2) == {}


class Told(CountEnv):
    """Infos that say where they come from; nothing at odd steps."""

    def __init__(self, name, n):
        super().__init__(n)
        self.name = name

    def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed)[0], {"at": f"{self.name} reset {self.resets}"}

    def step(self, action):
        obs, reward, terminated, truncated, _ = super().step(action)
        info = {"at": f"{self.name} step {self.k}"} if self.k % 2 == 0 else {}
        return obs, reward, terminated, truncated, info


@pytest.mark.parametrize("mode", MODES, ids=mode_name)
def test_infos_belong_to_their_own_row(mode, rollout):
    with sync(mode, Told("a", 2), Told("b", 99)) as env:
        got = rollout(env, 4)
    want = [(0, "a reset 1"), (1, "a step 2"), (2, "a reset 2"), (3, "a step 2"), (4, "a reset 3")]
    assert [(k, i["at"]) for k, i in got.infos[0]][:4] == want[:4]
    assert all(set(i) == {"at"} for _, i in got.infos[0])
    assert [i["at"] for _, i in got.infos[1]][:3] == ["b reset 1", "b step 2", "b step 4"]


def test_infos_of_a_reset_of_ended_and_running_slots_together():
    with sync(AutoresetMode.SAME_STEP, Told("a", 1), Told("b", 99)) as env:
        env.poll()
        env.send_actions(env.all_ids, np.zeros(2, int))
        env.poll()
        first = env.try_reset([1, 0])
    assert first.env_ids.tolist() == [1, 0]
    assert first.infos == {0: {"at": "b reset 2"}, 1: {"at": "a reset 2"}}


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP], ids=mode_name)
def test_recorded_episode_statistics_are_told_with_the_end(mode, rollout):
    venv = SyncVectorEnv([lambda: CountEnv(2), lambda: CountEnv(99)], autoreset_mode=mode)
    with GymnasiumVectorAdapter(gymnasium.wrappers.vector.RecordEpisodeStatistics(venv)) as env:
        got = rollout(env, 3)
    assert next((k, i["episode"]["r"], i["episode"]["l"]) for k, i in got.infos[0] if "episode" in i) == (1, 3.0, 2)
    assert got.infos[1] == []


# Seeds


def test_each_slot_gets_its_own_seed():
    want = [slot_seed(7, 2, slot) for slot in range(2)]
    envs = [CountEnv(9), CountEnv(9)]
    venv = SyncVectorEnv([lambda: envs[0], lambda: envs[1]])
    GymnasiumVectorAdapter(venv, seed=7, worker_index=2).poll()
    assert [e.seeds for e in envs] == [[want[0]], [want[1]]]
    mine = CountVectorEnv()
    VectorEnvAdapter(mine, seed=7, worker_index=2).poll()
    assert mine.seeds == want
    unseeded = CountVectorEnv()
    VectorEnvAdapter(unseeded).poll()
    assert unseeded.seeds == [None, None]
    cart = [GymnasiumVectorAdapter(gymnasium.make_vec("CartPole-v1", num_envs=3), seed=s).poll().obs for s in (1, 1, 2)]
    assert np.array_equal(cart[0], cart[1])
    assert not np.array_equal(cart[0], cart[2])


# What goes wrong


class Faulty(CountEnv):
    def __init__(self, n=99, at=None, fault=None):
        super().__init__(n)
        self.at, self.fault = at, fault

    def step(self, action):
        out = super().step(action)
        if self.steps == self.at:
            if self.fault == "raise":
                raise RuntimeError("broken leg")
            value = float(self.fault)
            return np.array([value], np.float32), *out[1:]
        return out

    def reward(self):
        return float("nan") if self.fault == "reward" and self.steps == self.at else super().reward()


@pytest.mark.parametrize("mode", MODES, ids=mode_name)
def test_a_bad_observation_fails_its_slot_and_the_others_go_on(mode):
    with sync(mode, Faulty(), Faulty(at=2, fault="nan"), Faulty()) as env:
        env.poll()
        for _ in range(2):
            env.send_actions(env.all_ids, np.zeros(3, int))
            batch = env.poll()
        assert batch.env_ids.tolist() == [0, 2]
        assert batch.obs.tolist() == [[2], [2]]
        assert list(batch.failures) == [1]
        assert "slot 1, episode step 2: observation holds nan" in str(batch.failures[1])
        with pytest.raises(EnvProtocolError, match="slot 1 takes no action: it is failed"):
            env.send_actions(env.all_ids, np.zeros(3, int))
        with pytest.raises(EnvFailedError, match=r"slot 1, episode step 2.*cannot be restarted") as e:
            env.try_restart([1])
        assert (e.value.slot, e.value.episode_step) == (1, 2)
        assert e.value.__cause__ is batch.failures[1]
        env.send_actions([0, 2], np.zeros(2, int))
        batch = env.poll()
        assert batch.env_ids.tolist() == [0, 2]
        assert batch.obs.tolist() == [[3], [3]]
        assert batch.failures == {}


@pytest.mark.parametrize("mode", MODES, ids=mode_name)
def test_steps_are_counted_from_the_start_of_the_running_episode(mode):
    env_0 = Faulty(3, at=5, fault="nan")
    with sync(mode, env_0, Faulty()) as env:
        batch = env.poll()
        while not batch.failures:
            ready = np.flatnonzero(~(batch.terminated | batch.truncated))
            if 0 not in ready and env.try_reset([0]) is not None:
                ready = env.all_ids
            env.send_actions(ready, np.zeros(len(ready), int))
            batch = env.poll()
    assert batch.failures[0].episode_step == 2


def test_nonfinite_passes_when_allowed():
    with sync(AutoresetMode.NEXT_STEP, Faulty(at=1, fault="inf"), allow_nonfinite=True) as env:
        env.poll()
        env.send_actions([0], np.zeros(1, int))
        assert env.poll().obs.tolist() == [[np.inf]]


def test_an_exception_fails_every_slot_with_its_cause():
    with sync(AutoresetMode.NEXT_STEP, Faulty(), Faulty(at=2, fault="raise")) as env:
        env.poll()
        env.send_actions(env.all_ids, np.zeros(2, int))
        env.poll()
        env.send_actions(env.all_ids, np.zeros(2, int))
        batch = env.poll()
        assert len(batch.env_ids) == len(batch.obs) == 0
        assert sorted(batch.failures) == [0, 1]
        assert "slot 0, episode step 2" in str(batch.failures[0])
        assert "RuntimeError: broken leg" in str(batch.failures[1])
        assert isinstance(batch.failures[1].__cause__, RuntimeError)
        with pytest.raises(EnvProtocolError, match="nothing to wait for: slots 0, 1: failed"):
            env.poll()


def broken(**methods):
    return VectorEnvAdapter(type("Broken", (CountVectorEnv,), methods)((3, 3)))


STEP = CountVectorEnv.vector_step


@pytest.mark.parametrize(
    ("methods", "message"),
    [
        ({"vector_reset": lambda s, seeds: np.zeros((3, 1), np.float32)}, r"reset returned.*shape \(3, 1\).*\(2, 1\)"),
        ({"vector_reset": lambda s, seeds: 1 / 0}, "slot 1: the vector env's reset raised ZeroDivisionError"),
        ({"vector_step": lambda s, a: (s.obs[:1], *STEP(s, a)[1:])}, r"step returned.*shape \(1, 1\) of float32"),
        ({"vector_step": lambda s, a: (s.obs, np.ones((2, 2)), *STEP(s, a)[2:])}, r"rewards are shape \(2, 2\)"),
        ({"vector_step": lambda s, a: (s.obs, None, *STEP(s, a)[2:])}, "rewards are NoneType, expected 2 numbers"),
        ({"vector_step": lambda s, a: (*STEP(s, a)[:2], [True], [False, False], {})}, r"terminated is of shape \(1,\)"),
        ({"vector_step": lambda s, a: STEP(s, a)[:4]}, "ValueError"),
    ],
)
def test_a_bad_batch_fails_every_slot_and_says_why(methods, message):
    with broken(**methods) as env:
        batch = env.poll()
        if not batch.failures:
            env.send_actions(env.all_ids, np.zeros(2, int))
            batch = env.poll()
        assert sorted(batch.failures) == [0, 1]
        with pytest.raises(EnvFailedError, match=message):
            raise batch.failures[1]


def test_a_bad_reward_fails_its_slot_alone():
    with broken(vector_step=lambda s, a: (STEP(s, a)[0], [1.0, np.array([1.0, 2.0])], s.never, s.never, {})) as env:
        env.poll()
        env.send_actions(env.all_ids, np.zeros(2, int))
        batch = env.poll()
        assert batch.env_ids.tolist() == [0]
        assert "slot 1, episode step 1: the reward" in str(batch.failures[1])
        assert "shape (2,)" in str(batch.failures[1])


@pytest.mark.parametrize(
    ("reset_at", "message"),
    [
        (lambda s, slot, seed=None: np.zeros(2, np.float32), r"slot 1: observation is shape \(2,\)"),
        (lambda s, slot, seed=None: 1 / 0, "slot 1: reset_at raised ZeroDivisionError"),
        (lambda s, slot, seed=None: np.array([np.nan], np.float32), "slot 1: observation holds nan"),
    ],
)
def test_a_failed_reset_fails_its_slot_alone(reset_at, message):
    def only_slot_1(s, slot, seed=None):
        return reset_at(s, slot) if slot == 1 else CountVectorEnv.reset_at(s, slot)

    with broken(reset_at=only_slot_1) as env:
        env.poll()
        batch = env.try_reset([1, 0])
        assert batch.env_ids.tolist() == [0]
        assert list(batch.failures) == [1]
        with pytest.raises(EnvFailedError, match=message) as e:
            raise batch.failures[1]
        assert e.value.episode_step is None
        env.send_actions([0], np.zeros(1, int))
        assert env.poll().env_ids.tolist() == [0]


def test_same_step_without_final_obs_is_an_error_and_not_a_ghost():
    venv = SyncVectorEnv([lambda: CountEnv(1)], autoreset_mode=AutoresetMode.NEXT_STEP)
    venv.metadata = {"autoreset_mode": "SameStep"}
    with GymnasiumVectorAdapter(venv) as env:
        env.poll()
        env.send_actions([0], np.array([0]))
        assert 'hold no "final_obs"' in str(env.poll().failures[0])


def test_same_step_takes_final_obs_as_a_whole_array(rollout):
    class Whole(SyncVectorEnv):
        def step(self, actions):
            *out, infos = super().step(actions)
            if "final_obs" in infos:
                infos["final_obs"] = np.stack([np.zeros(1) if o is None else o for o in infos["final_obs"]])
            return *out, infos

    venv = Whole([lambda: CountEnv(2), lambda: CountEnv(3)], autoreset_mode="SameStep")
    with GymnasiumVectorAdapter(venv) as env:
        got = rollout(env, 4)
    assert got.column(0, "next_obs", 4) == [1, 2, 1, 2]
    assert got.column(1, "next_obs", 4) == [1, 2, 3, 1]


def test_autoreset_mode_must_be_known(caplog):
    venv = SyncVectorEnv([lambda: CountEnv(1)])
    venv.metadata = {"autoreset_mode": "Sometimes"}
    with pytest.raises(ConfigError, match="'Sometimes'; known: NextStep, SameStep, Disabled"):
        GymnasiumVectorAdapter(venv)
    venv.metadata = {}
    assert GymnasiumVectorAdapter(venv).mode is AutoresetMode.NEXT_STEP
    assert "does not say its autoreset mode" in caplog.text


# Closing


def test_close_is_idempotent_and_everything_after_it_refused():
    mine = CountVectorEnv()
    env = VectorEnvAdapter(mine)
    env.poll()
    env.close()
    env.close()
    assert mine.closes == 1
    for call in (env.poll, lambda: env.send_actions([0], np.array([0])), lambda: env.try_reset([0])):
        with pytest.raises(EnvClosedError):
            call()


def test_close_waits_for_no_step_and_the_step_closes_the_env(poll_in_thread):
    class Slow(CountVectorEnv):
        inside, go_on = threading.Event(), threading.Event()

        def vector_step(self, actions):
            self.inside.set()
            assert self.go_on.wait(10)
            assert self.closes == 0
            return super().vector_step(actions)

    mine = Slow()
    env = VectorEnvAdapter(mine)
    env.poll()
    env.send_actions(env.all_ids, np.zeros(2, int))
    poll = poll_in_thread(env)
    assert Slow.inside.wait(10)
    env.close()
    assert mine.closes == 0
    Slow.go_on.set()
    assert poll.ended()
    assert mine.closes == 1


class Stuck(CountEnv):
    def step(self, action):
        threading.Event().wait(60)


def test_close_ends_a_poll_that_waits_for_a_stuck_worker(poll_in_thread):
    venv = AsyncVectorEnv([lambda: Stuck(3), lambda: CountEnv(3)])
    env = GymnasiumVectorAdapter(venv)
    env.poll()
    env.send_actions(env.all_ids, np.zeros(2, int))
    poll = poll_in_thread(env)
    env.close()
    assert poll.ended()
    assert multiprocessing.active_children() == []


def test_close_after_a_killed_worker_returns():
    venv = AsyncVectorEnv([lambda: CountEnv(3), lambda: CountEnv(3)])
    env = GymnasiumVectorAdapter(venv)
    env.poll()
    venv.processes[1].kill()
    venv.processes[1].join()
    env.send_actions(env.all_ids, np.zeros(2, int))
    assert sorted(env.poll().failures) == [0, 1]
    env.close()
    assert multiprocessing.active_children() == []


def test_the_interface_is_abstract():
    with pytest.raises(TypeError, match="vector_step"):
        type("Half", (VectorEnv,), {"vector_reset": None, "reset_at": None})()
