"""Spaces without a fixed size, inline and in the pool: columns of objects, alike on both."""

from __future__ import annotations

import os
import signal

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from rlsample.env import as_base_env
from rlsample.env.pool.gymnasium_view import PoolVectorEnv
from rlsample.env.spaces import object_column
from rlsample.errors import EnvFailedError, SpaceError
from rlsample.evaluation import CommonPolicyEvaluator
from rlsample.policy import RandomPolicy
from rlsample.testing import check_base_env
from rlsample.testing.base_env_player import Player, keys_of
from rlsample.tree import num_rows

GRAPH = spaces.Graph(spaces.Box(-9, 9, (2,), np.float32), spaces.Discrete(4))


class Chatty(gymnasium.Env):
    """Texts, graphs and sequences, of its own generator; it reuses its list of objects and its graph's array."""

    observation_space = spaces.Dict(
        text=spaces.Text(12),
        parts=spaces.Tuple((spaces.Sequence(spaces.Box(-9, 9, (2,), np.float64)), spaces.Discrete(100))),
        graph=GRAPH,
        pos=spaces.Box(-9, 9, (2,), np.float32),
    )
    action_space = spaces.Tuple(
        (spaces.OneOf((spaces.Discrete(3), spaces.Text(5))), spaces.Sequence(spaces.Discrete(4)), spaces.Discrete(2))
    )

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.k, self.n, self.said = 0, int(self.np_random.integers(2, 7)), "reset"
        self.nodes = np.zeros((3, 2), np.float32)
        return self.observe(), {"said": self.said}

    def observe(self):
        rng = self.np_random
        self.nodes[...] = rng.normal(size=(3, 2)).clip(-9, 9)
        edges = None if self.k % 2 else np.array([1, 3])
        links = None if self.k % 2 else np.array([[0, 1], [1, 2]], np.int32)
        return {
            "text": (self.said + "x" * self.k)[:12],
            "parts": (tuple(rng.normal(size=(self.k % 3, 2)).clip(-9, 9)), self.k),
            "graph": spaces.GraphInstance(self.nodes, edges, links),
            "pos": rng.normal(size=2).clip(-9, 9).astype(np.float32),
        }

    def step(self, action):
        assert self.action_space.contains(action), action
        (branch, word), numbers, bit = action
        self.k += 1
        self.said = str(word) if branch else "n" + str(int(word))
        reward = float(sum(int(number) for number in numbers) + bit)
        info = {"k": self.k} if self.k % 3 == 0 else {}
        return self.observe(), reward, self.k == self.n, self.np_random.random() < 0.1, info


class Wordy(gymnasium.Env):
    """A text is all it says, a sequence all it takes; ``mishap(k)`` is called in each step."""

    observation_space = spaces.Text(50, charset="abc")
    action_space = spaces.Sequence(spaces.Discrete(9))

    def __init__(self, mishap=lambda k: None):
        self.mishap = mishap

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.k = 0
        return "a", {}

    def step(self, action):
        self.k += 1
        obs = "b" * (1 + sum(int(number) for number in action))
        other = self.mishap(self.k)
        return obs if other is None else other, 1.0, self.k == 5, False, {}


class Raising(Chatty):
    def __init__(self, slot):
        self.slot = slot

    def step(self, action):
        if self.slot == 1 and self.k == 1:
            raise RuntimeError("broken on purpose")
        return super().step(action)


def pool_of(make, num_envs=3, seed=0, **pool):
    return as_base_env(make, num_envs, seed=seed, backend="process", pool={"start_method": "fork", **pool})


@pytest.mark.parametrize(("ordered", "workers", "rules"), [(True, 2, None), (False, 3, [1, 2, 3, 6, 8, 9])])
def test_conformance_of_the_pool(ordered, workers, rules):
    pool = {"num_workers": workers, "ordered": ordered}
    found = check_base_env(
        lambda seed: pool_of(lambda ctx: Chatty(), seed=seed, **pool),
        rules,
        reference=lambda slot: Chatty(),
        make_other=lambda seed: as_base_env(lambda ctx: Chatty(), 3, seed=seed),
        make_faulty=lambda seed: pool_of(lambda ctx: Raising(ctx.slot_index), seed=seed, **pool),
        rounds=12,
    )
    assert set(found.values()) == {"ok"}


def test_conformance_of_the_inline_loop():
    found = check_base_env(
        lambda seed: as_base_env(lambda ctx: Chatty(), 3, seed=seed),
        reference=lambda slot: Chatty(),
        make_faulty=lambda seed: as_base_env(lambda ctx: Raising(ctx.slot_index), 3, seed=seed),
        rounds=12,
    )
    assert set(found.values()) == {"ok"}


@pytest.mark.parametrize("start_method", ["fork", "forkserver", "spawn"])
def test_the_pool_plays_as_the_inline_loop(start_method):
    games = []
    for backend in ("inline", "process"):
        pool = {"start_method": start_method, "num_workers": 2} if backend == "process" else {}
        with as_base_env(lambda ctx: Chatty(), 5, seed=3, backend=backend, pool=pool) as env:
            player = Player(env, 3).play(40 if start_method == "fork" else 8)
        games.append([([keys_of(column) for column in was], dict(batch.infos)) for batch, was in player.batches])
    assert len(games[0]) > 8
    assert games[0] == games[1]


def test_what_the_columns_look_like():
    for env in (as_base_env(lambda ctx: Chatty(), 2, seed=1), pool_of(lambda ctx: Chatty(), 2, seed=1)):
        with env:
            batch = env.poll()
            obs = batch.obs
            assert {key: obs[key].dtype for key in ("text", "graph", "pos")} == {
                "text": np.dtype(object), "graph": np.dtype(object), "pos": np.dtype(np.float32),
            }  # fmt: skip
            assert obs["text"].shape == obs["graph"].shape == obs["parts"][0].shape == (2,)
            assert obs["text"].tolist() == ["reset", "reset"]
            assert all(GRAPH.contains(graph) for graph in obs["graph"])
            assert num_rows(obs) == 2
            words = object_column([(1, "hello"), (0, np.int64(2))])
            env.send_actions(env.all_ids, (words, [(np.int64(3), np.int64(2)), ()], np.array([0, 1])))
            batch = env.poll()
            assert batch.obs["text"].tolist() == ["hellox", "n2x"]
            assert batch.rewards.tolist() == [5, 1]


class Anything(gymnasium.Space):
    """A space of somebody's own."""

    def contains(self, x):
        return True

    def sample(self, mask=None, probability=None):
        return 0

    def __eq__(self, other):
        return isinstance(other, Anything)


class Echo(Wordy):
    """Says what it is told, backwards."""

    observation_space = action_space = Anything()

    def step(self, action):
        self.k += 1
        return action[::-1], 1.0, self.k == 3, False, {}


@pytest.mark.parametrize("ordered", [True, False])
def test_long_values_cross_both_ways_and_fill_no_pipe(ordered):
    """A slot's 300,000 letters are more than a pipe takes, and there are two slots a worker."""
    words = [letter * 299_999 + "a" for letter in "abca"]
    with pool_of(lambda ctx: Echo(), 4, num_workers=2, ordered=ordered) as env:
        seen = {slot: [] for slot in range(4)}
        while min(map(len, seen.values())) < 7:
            batch = env.poll(20)
            for row, slot in enumerate(batch.env_ids.tolist()):
                seen[slot].append(batch.obs[row])
            live, ended = batch.env_ids[~batch.terminated].tolist(), batch.env_ids[batch.terminated]
            if len(ended):
                first = env.try_reset(ended)
                for row, slot in enumerate([] if first is None else first.env_ids.tolist()):
                    seen[slot].append(first.obs[row])
                    live.append(slot)
            if live:
                env.send_actions(np.array(live), object_column([words[slot] for slot in live]))
    for slot, word in enumerate(words):
        assert seen[slot][:7] == ["a", *[word[::-1]] * 3, "a", *[word[::-1]] * 2]


@pytest.mark.parametrize("backend", ["inline", "process"])
@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ("B", r"slot 0, episode step 2: observation is 'B' \(str\), expected a value in Text"),
        (7, r"slot 0, episode step 2: observation is 7 \(int\), expected a value in Text"),
    ],
)
def test_an_observation_outside_its_space_is_a_failure(backend, bad, said):
    pool = {"start_method": "fork"} if backend == "process" else {}
    with as_base_env(lambda ctx: Wordy(lambda k: bad if k == 2 else None), 1, backend=backend, pool=pool) as env:
        env.poll()
        env.send_actions(env.all_ids, [()])
        assert env.poll().obs.tolist() == ["b"]
        env.send_actions(env.all_ids, [()])
        batch = env.poll()
    assert len(batch.env_ids) == 0
    with pytest.raises(EnvFailedError, match=said):
        raise batch.failures[0]


@pytest.mark.parametrize("backend", ["inline", "process"])
def test_nan_within_an_object_is_a_failure_unless_allowed(backend):
    class Lists(Wordy):
        observation_space = Anything()

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            return {"x": [np.zeros(2)]}, {}

    def make(ctx):
        return Lists(lambda k: {"x": [1.0, (np.array([0.0, np.nan]),)]})

    pool = {"start_method": "fork"} if backend == "process" else {}
    for allow in (False, True):
        with as_base_env(make, 1, backend=backend, pool=pool, allow_nonfinite=allow) as env:
            env.poll()
            env.send_actions(env.all_ids, [()])
            batch = env.poll()
        if allow:
            assert np.isnan(batch.obs[0]["x"][1][0][1])
        else:
            assert "slot 0, episode step 1: observation holds nan" in str(batch.failures[0])


def test_what_cannot_be_pickled_is_said():
    class Odd(Wordy):
        observation_space = action_space = Anything()

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            return 0, {}

    with pool_of(lambda ctx: Odd(lambda k: UNKNOWN if k == 2 else k), 2, num_workers=1) as env:
        env.poll()
        with pytest.raises(SpaceError, match=r"slot 1: its action cannot be sent to another process"):
            env.send_actions(env.all_ids, object_column([(), (lambda: 0,)]))
        env.send_actions(env.all_ids, object_column([(), ()]))
        assert env.poll().obs.tolist() == [1, 1]
        env.send_actions(env.all_ids, object_column([(), ()]))
        failures = env.poll().failures
    said = "slot 1: its observation cannot be sent to another process"
    assert str(failures[1]).startswith(said)
    assert failures[1].episode_step == 2


UNKNOWN = (lambda: lambda: 0)()  # pickle does not find it under its name


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ([(), (9,)], r"slot 1 was given \(9,\), which is outside the space"),
        (["a", ()], r"slot 0 was given 'a', which is outside the space"),
        ([()], r"expected shape \(2,\), got \(1,\)"),
        (np.zeros((2, 1), object), r"expected shape \(2,\), got \(2, 1\)"),
        ({"a": 1}, "expected an array of 2 objects, got dict"),
    ],
)
def test_bad_actions_are_refused_before_anything_is_stepped(bad, said):
    for env in (as_base_env(lambda ctx: Wordy(), 2), pool_of(lambda ctx: Wordy(), 2)):
        with env:
            env.poll()
            with pytest.raises(SpaceError, match=said):
                env.send_actions(env.all_ids, bad)
            env.send_actions(env.all_ids, [(), (1,)])
            assert env.poll().obs.tolist() == ["b", "bb"]


def test_a_killed_worker_costs_its_rows_and_no_other():
    with as_base_env(
        lambda ctx: Wordy(lambda k: os.kill(os.getpid(), signal.SIGKILL) if ctx.slot_index + k == 3 == k else None),
        2, backend="process", pool={"start_method": "fork", "num_workers": 2}, max_restarts=1, restart_backoff_s=0.0,
    ) as env:  # fmt: skip
        env.poll()
        for k in (1, 2):
            env.send_actions(env.all_ids, [(k,), (k,)])
            assert env.poll().obs.tolist() == ["b" * (1 + k)] * 2
        env.send_actions(env.all_ids, [(3,), (3,)])
        batch = env.poll(20)
        assert batch.env_ids.tolist() == [1]
        assert batch.obs.tolist() == ["bbbb"]
        assert "worker 0 was killed by SIGKILL" in str(batch.failures[0])
        env.try_restart(np.array([0]))
        first = env.poll(20)
        assert (first.env_ids.tolist(), first.obs.tolist(), first.is_first.tolist()) == ([0], ["a"], [True])
        env.send_actions(env.all_ids, [(1,), (4,)])
        assert env.poll(20).obs.tolist() == ["bb", "bbbbb"]


@pytest.mark.parametrize("ordered", [True, False])
def test_envpool_interface(ordered):
    with pool_of(lambda ctx: Wordy(), 3, num_workers=2, ordered=ordered, batch_size=None if ordered else 2) as env:
        env.async_reset()
        steps = dict.fromkeys(range(3), 0)
        for _ in range(40):
            obs, rewards, terminated, _, info = env.recv()
            ids = info["env_id"]
            for row, slot in enumerate(ids.tolist()):
                steps[slot] = 0 if info["is_first"][row] else steps[slot] + 1
                assert obs[row] == ("a" if info["is_first"][row] else "b" * (slot + 2))
                assert rewards[row] == (not info["is_first"][row])
                assert terminated[row] == (steps[slot] == 5)
            env.send(object_column([(1,) * (slot + 1) for slot in ids.tolist()]), ids)


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_gymnasium_vector_env(mode):
    mine = PoolVectorEnv(lambda ctx: Chatty(), 3, autoreset_mode=mode, pool={"start_method": "fork"})
    theirs = SyncVectorEnv([Chatty] * 3, autoreset_mode=mode, copy=True)
    assert mine.observation_space == theirs.observation_space
    mine.action_space.seed(5)
    with_tuples = 0
    try:
        a, b = mine.reset(seed=4), theirs.reset(seed=4)
        for _ in range(30):
            assert plain(a) == plain(b)
            assert isinstance(a[0]["text"], tuple)
            assert mine.observation_space.contains(a[0]) or not with_tuples
            actions = mine.action_space.sample()
            a, b = mine.step(actions), theirs.step(actions)
            over = a[2] | a[3]
            if mode is AutoresetMode.DISABLED and over.any():
                assert plain(a) == plain(b)
                a, b = (envs.reset(options={"reset_mask": over}) for envs in (mine, theirs))
            with_tuples += 1
    finally:
        mine.close()
        theirs.close()


def plain(value):
    """What can be compared, whatever dtype info columns have."""
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items()}
    if isinstance(value, (tuple, list)) or (isinstance(value, np.ndarray) and value.dtype.hasobject):
        return [plain(part) for part in value]
    return value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value


def test_samplers_and_policies_refuse_them_and_name_the_fix():
    for options in ({}, {"backend": "process", "pool": {"start_method": "fork"}}):
        with pytest.raises(SpaceError, match=r"action space is Sequence.* no fixed size.*TransformAction"):
            CommonPolicyEvaluator(lambda ctx: Wordy(), RandomPolicy, 2, **options)
        with pytest.raises(SpaceError, match=r"observation space is Text.* no fixed size.*TransformObservation"):
            CommonPolicyEvaluator(lambda ctx: Said(), RandomPolicy, 2, **options)


class Said(Wordy):
    action_space = spaces.Discrete(2)
