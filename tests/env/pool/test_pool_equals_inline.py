"""The ordered pool against the inline loop: every column of every poll, bit for bit, over long random games."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest

from rlsample.bench.pool import fixed_actions
from rlsample.env import as_base_env
from rlsample.env.pool.row_reader import reorder
from rlsample.testing import CountEnv
from rlsample.tree import flatten, gather, map_tree
from tests.env.pool.test_pool_conformance import Seeded


def columns(batch):
    """A batch, by rising slot, as values that compare exactly."""
    batch = reorder(batch, np.argsort(batch.env_ids))
    found = {}
    for name, column in zip(batch._fields[:6], batch[:6], strict=True):
        for path, leaf in flatten(column):
            found[name, path] = (leaf.dtype.str, leaf.shape, leaf.tobytes())
    found["infos"] = {row: repr(info) for row, info in dict(batch.infos).items()}
    found["failures"] = {s: (str(f), f.slot) for s, f in batch.failures.items()}
    return found


def same_games(make, num_envs, num_steps, partly=False, **options):
    """Plays both backends with the same random actions; returns how many steps and episodes that were."""
    pool = {"start_method": "fork", "num_workers": 3, **options.pop("pool", {})}
    a = as_base_env(make, num_envs, seed=7, vectorize="loop", **options)
    b = as_base_env(make, num_envs, seed=7, backend="process", pool=pool, **options)
    rng, steps, episodes = np.random.default_rng(1), 0, 0
    space = a.action_space
    space.seed(3)
    with a, b:
        table = fixed_actions(a)
        waiting = np.zeros(num_envs, bool)
        batch, other = a.poll(), b.poll()
        while True:
            assert columns(batch) == columns(other)
            waiting[batch.env_ids] = True
            steps += int((~batch.is_first).sum())
            ended = batch.env_ids[batch.terminated | batch.truncated]
            episodes += len(ended)
            if len(ended):
                assert columns(a.try_reset(ended)) == columns(b.try_reset(ended))
            if steps >= num_steps:
                return steps, episodes
            if batch.failures:
                a.try_restart(np.array(list(batch.failures)))
                b.try_restart(np.array(list(batch.failures)))
                waiting[list(batch.failures)] = False
            ids = np.flatnonzero(waiting & ((rng.random(num_envs) < 0.7) if partly else True))
            if partly and rng.random() < 0.1 and waiting.any():  # a reset in the middle of an episode
                slot = rng.choice(np.flatnonzero(waiting))
                assert columns(a.try_reset(np.array([slot]))) == columns(b.try_reset(np.array([slot])))
            if not len(ids):
                ids = np.flatnonzero(waiting)
            if len(ids) or not batch.failures:
                actions = gather(table, rng.integers(0, num_envs, len(ids)))
                if isinstance(space, gymnasium.spaces.Discrete):
                    actions = rng.integers(space.start, space.start + space.n, len(ids))
                for part in np.array_split(np.arange(len(ids)), 2 if partly and len(ids) > 1 else 1):
                    for env in (a, b):
                        env.send_actions(ids[part], map_tree(np.copy, gather(actions, part)))
                waiting[ids] = False
            batch, other = a.poll(), b.poll()


def test_cartpole_10_000_steps():
    steps, episodes = same_games("CartPole-v1", 25, 10_000)
    assert steps == 10_000
    assert episodes > 300


@pytest.mark.parametrize("num_steps", [3000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_trees(num_steps):
    steps, episodes = same_games(Seeded, 25, num_steps)
    assert steps == num_steps
    assert episodes > num_steps / 10


@pytest.mark.parametrize("pool", [{}, {"reset_ahead": False}, {"num_workers": 1}, {"num_workers": 7}])
def test_partial_sends_and_resets_in_mid_episode(pool):
    same_games(Seeded, 7, 800, partly=True, pool=pool)


@pytest.mark.parametrize("num_envs", [1, 2, 5])
def test_time_limits(num_envs):
    _, episodes = same_games("Pendulum-v1", num_envs, 450 * num_envs, pool={"num_workers": 1})
    assert episodes == 2 * num_envs


class Faulty(Seeded):
    """Some steps raise, some return nonsense: exceptions, shapes, numbers."""

    def step(self, action):
        obs, reward, terminated, truncated, info = super().step(action)
        luck = self.np_random.integers(0, 60)
        if luck == 0:
            raise RuntimeError(f"luck {self.k}")
        if luck == 1:
            reward = np.array([1.0, 2.0])
        if luck == 2:
            reward = np.nan
        if luck == 3:
            obs["pos"] = np.full(2, np.inf, np.float32)
        if luck == 4:
            obs["pos"] = np.zeros(3, np.float32)
        if luck == 5:
            reward = np.array([reward])
        if luck == 6:
            return obs, reward, terminated, info
        return obs, reward, terminated, truncated, info


def test_failures_read_alike():
    same_games(Faulty, 5, 800, max_restarts=1000, restart_backoff_s=0.0)


def test_field_case_4_dtypes_and_structure(make_pool):
    class Mixed(gymnasium.Env):
        observation_space = gymnasium.spaces.Dict(
            img=gymnasium.spaces.Box(0, 255, (4, 4), np.uint8),
            pos=gymnasium.spaces.Box(-1, 1, (), np.float64),
            n=gymnasium.spaces.Discrete(5),
            pair=gymnasium.spaces.Tuple(
                (gymnasium.spaces.Box(0, 1, (2,), np.float32), gymnasium.spaces.MultiBinary(3))
            ),
        )
        action_space = gymnasium.spaces.Discrete(2)

        def observe(self):
            k = self.k
            pair = (np.full(2, 0.01 * k, np.float32), np.array([k % 2, 0, 1], np.int8))
            return {"img": np.full((4, 4), k, np.uint8), "pos": np.float64(0.1 * k), "n": k % 5, "pair": pair}

        def reset(self, *, seed=None, options=None):
            self.k = 0
            return self.observe(), {}

        def step(self, action):
            self.k += 1
            return self.observe(), 0.0, False, False, {}

    env = make_pool(2, make=lambda ctx: Mixed())
    batch = env.poll()
    for k in range(1, 4):
        env.send_actions(env.all_ids, np.zeros(2, np.int64))
        batch = env.poll()
        obs = batch.obs
        assert (obs["img"].dtype, obs["img"].shape) == (np.uint8, (2, 4, 4))
        assert (obs["img"] == k).all()
        assert obs["pos"].dtype == np.float64
        assert obs["pos"].tolist() == [0.1 * k] * 2
        assert (obs["n"].dtype, obs["n"].tolist()) == (np.int64, [k % 5] * 2)
        assert isinstance(obs["pair"], tuple)
        assert obs["pair"][1].tolist() == [[k % 2, 0, 1]] * 2


@pytest.mark.parametrize("form", [int, float, np.float64, np.float32, lambda r: np.array([r]), np.array, np.int64])
def test_field_case_3_reward_forms(make_pool, tally, form):
    class Rewarding(CountEnv):
        def reward(self):
            return form(self.k)

    env = make_pool(2, make=lambda ctx: Rewarding(2 + ctx.slot_index))
    game = tally(env).until(lambda g: min(len(rows) for rows in g.rows.values()) > 9)
    assert [row[2] for row in game.rows[0] if row[0] == "row"][:6] == [1, 2, 1, 2, 1, 2]
    assert [row[2] for row in game.rows[1] if row[0] == "row"][:6] == [1, 2, 3, 1, 2, 3]


def test_field_case_2_an_env_that_reuses_its_buffer(make_pool):
    class Reusing(CountEnv):
        def __init__(self):
            super().__init__(4)
            self.buffer = np.zeros(1, np.float32)

        def observe(self):
            self.buffer[0] = self.k
            return self.buffer

    env = make_pool(3, make=lambda ctx: Reusing(), num_workers=2)
    kept = [env.poll()]
    for _ in range(3):
        env.send_actions(env.all_ids, np.zeros(3, np.int64))
        kept.append(env.poll())
    assert [batch.obs.ravel().tolist() for batch in kept] == [[k] * 3 for k in range(4)]


def test_discrete_actions_arrive_as_python_ints_from_their_start(make_pool):
    class Lettered(CountEnv):
        action_space = gymnasium.spaces.Discrete(3, start=5)

        def step(self, action):
            assert type(action) is int
            obs, *rest, _ = super().step(action)
            return obs, *rest, {"letter": {5: "l", 6: "m", 7: "r"}[action]}

    env = make_pool(3, make=lambda ctx: Lettered(99), num_workers=2)
    env.poll()
    seen = []
    for action in (5, 6, 7, 5, 6, 7):
        env.send_actions(env.all_ids, np.full(3, action))
        seen.append({info["letter"] for info in env.poll().infos.values()})
    assert seen == [{"l"}, {"m"}, {"r"}] * 2


@pytest.mark.parametrize(("num_steps", "least_games"), [(800, 0), pytest.param(10_000, 4, marks=pytest.mark.slow)])
def test_pong_equals_inline(num_steps, least_games):
    """With sticky actions, so that the emulator's own generator is in play."""
    pytest.importorskip("ale_py")
    pytest.importorskip("cv2")
    steps, games = same_games(_pong, 4, num_steps, pool={"num_workers": 2})
    assert steps == num_steps
    assert games >= least_games


def _pong(ctx):
    import ale_py

    gymnasium.register_envs(ale_py)
    env = gymnasium.make("ALE/Pong-v5", frameskip=1)
    return gymnasium.wrappers.AtariPreprocessing(env, noop_max=30)
