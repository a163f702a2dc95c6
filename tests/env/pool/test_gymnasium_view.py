"""The pool as a gymnasium VectorEnv, against SyncVectorEnv: rows, flags, infos, attributes, in each autoreset mode."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from rlsample.env.pool.gymnasium_view import PoolVectorEnv
from rlsample.errors import ConfigError, EnvFailedError, EnvProtocolError
from rlsample.testing.faulty_env import Fault, faulty_factory

FORK = {"start_method": "fork", "num_workers": 2}


class Varied(gymnasium.Env):
    """A Dict of numbers from its own generator; infos on some steps; an end by luck or by time."""

    observation_space = gymnasium.spaces.Dict(
        a=gymnasium.spaces.Box(-9, 9, (2,), np.float32), b=gymnasium.spaces.Discrete(100)
    )
    action_space = gymnasium.spaces.Discrete(3)
    metadata = {"render_modes": ["rgb_array"], "mine": 1}  # noqa: RUF012
    render_mode = "rgb_array"

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.k, self.end = 0, int(self.np_random.integers(2, 6))
        return self.observe(), {"end": self.end, **({"asked": 1} if options else {})}

    def observe(self):
        return {"a": self.np_random.normal(size=2).clip(-9, 9).astype(np.float32), "b": self.k}

    def step(self, action):
        self.k += 1
        info = {"k": self.k, "deep": {"word": "w"}} if self.k % 2 else {}
        return self.observe(), float(self.k), self.k == self.end, self.k == 4, info

    def render(self):
        return np.full((2, 2, 3), self.k, np.uint8)


def same(a, b):
    if isinstance(a, dict):
        assert set(a) == set(b)
        for key in a:
            same(a[key], b[key])
    elif isinstance(a, tuple):
        for x, y in zip(a, b, strict=True):
            same(x, y)
    else:
        a, b = np.asarray(a), np.asarray(b)
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        if a.dtype == object:
            for x, y in zip(a.ravel(), b.ravel(), strict=True):
                assert (x is None) == (y is None)
                if x is not None:
                    same(x, y)
        else:
            assert np.array_equal(a, b)


@pytest.mark.parametrize("mode", AutoresetMode)
def test_every_mode_equals_gymnasiums_own(mode):
    sync = SyncVectorEnv([Varied] * 3, autoreset_mode=mode)
    pool = PoolVectorEnv(Varied, 3, autoreset_mode=mode, pool=FORK)
    with_ends = 0
    assert pool.metadata == sync.metadata
    assert (pool.render_mode, pool.num_envs) == ("rgb_array", 3)
    for name in ("observation_space", "action_space", "single_observation_space", "single_action_space"):
        assert getattr(pool, name) == getattr(sync, name)
    same(sync.reset(seed=3), pool.reset(seed=3))
    rng, kept = np.random.default_rng(0), []
    for t in range(80):
        actions = rng.integers(0, 3, 3)
        want, got = sync.step(actions), pool.step(actions)
        same(want, got)
        kept.append((got[0]["a"], got[0]["a"].copy()))
        same(sync.render(), pool.render())
        assert sync.get_attr("k") == pool.get_attr("k")
        ended = want[2] | want[3]
        with_ends += ended.any()
        if mode is AutoresetMode.DISABLED and ended.any():
            options = {"reset_mask": ended.copy()}
            if t % 2:
                options["x"] = 1
            same(sync.reset(options=dict(options)), pool.reset(options=options))
            assert "reset_mask" in options  # the caller's dict is left alone
        if t == 40:
            same(sync.reset(), pool.reset())
        if t == 60:
            same(sync.reset(seed=[5, None, 7]), pool.reset(seed=[5, None, 7]))
    assert with_ends > 10
    assert all(np.array_equal(a, b) for a, b in kept)
    sync.close()
    pool.close()
    pool.close()


def test_gymnasiums_wrappers_accept_it():
    pool = PoolVectorEnv("CartPole-v1", 4, pool=FORK)
    envs = gymnasium.wrappers.vector.RecordEpisodeStatistics(pool)
    envs = gymnasium.wrappers.vector.NormalizeObservation(envs)
    envs.reset(seed=1)
    returns = []
    for _ in range(200):
        *_, infos = envs.step(envs.action_space.sample())
        if "episode" in infos:
            returns += infos["episode"]["r"][infos["_episode"]].tolist()
    assert returns
    assert min(returns) > 4
    envs.close()


def test_cartpole_equals_sync():
    sync = SyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * 5)
    pool = PoolVectorEnv("CartPole-v1", 5, pool=FORK)
    same(sync.reset(seed=11), pool.reset(seed=11))
    rng = np.random.default_rng(2)
    for _ in range(300):
        actions = rng.integers(0, 2, 5)
        same(sync.step(actions), pool.step(actions))
    sync.close()
    pool.close()


def test_attributes():
    pool = PoolVectorEnv(Varied, 3, pool=FORK)
    pool.reset(seed=0)
    pool.set_attr("k", 7)
    assert pool.get_attr("k") == (7, 7, 7)
    pool.set_attr("k", [1, 2, 3])
    assert pool.call("k") == (1, 2, 3)
    with pytest.raises(ValueError, match="2 values were given for 3 envs"):
        pool.set_attr("k", [1, 2])
    pool.close()


def test_wrong_use():
    pool = PoolVectorEnv(Varied, 2, pool=FORK, autoreset_mode="Disabled")
    with pytest.raises(Exception, match="reset the envs before"):
        pool.step(np.zeros(2, int))
    with pytest.raises(ValueError, match="3 seeds were given for 2 envs"):
        pool.reset(seed=[1, 2, 3])
    pool.reset(seed=0)
    for mask in (np.zeros(2, bool), np.zeros(2), [True, False], np.ones(3, bool)):
        with pytest.raises(ValueError, match="reset_mask"):
            pool.reset(options={"reset_mask": mask})
    while not np.logical_or(*pool.step(np.zeros(2, int))[2:4]).any():
        pass
    with pytest.raises(ValueError, match=r"envs \[.*\] have ended"):
        pool.step(np.zeros(2, int))
    pool.close()
    with pytest.raises(ConfigError, match="lock-step"):
        PoolVectorEnv(Varied, 2, pool={**FORK, "batch_size": 1})


def test_a_failing_env_raises():
    pool = PoolVectorEnv(faulty_factory({1: Fault("exit", at=2)}), 2, pool=FORK)
    pool.reset()
    pool.step(np.zeros(2, int))
    with pytest.raises(EnvFailedError, match=r"slot 1, episode step 2: worker 1 exited with code 3"):
        pool.step(np.zeros(2, int))
    pool.close()


def test_each_env_has_its_own_generator_as_in_gymnasium():
    mine, theirs = PoolVectorEnv(Varied, 2, pool=FORK), SyncVectorEnv([Varied] * 2)
    mine.reset(seed=[3, 5])
    theirs.reset(seed=[3, 5])
    assert mine.np_random_seed == theirs.np_random_seed == (3, 5)
    assert [g.random() for g in mine.np_random] == [g.random() for g in theirs.np_random]
    mine.close()
    theirs.close()


def test_a_first_reset_of_some_envs_is_no_start_of_the_others():
    envs = PoolVectorEnv(Varied, 2, pool=FORK)
    envs.reset(options={"reset_mask": np.array([True, False])})
    with pytest.raises(EnvProtocolError, match="slot 1 takes no action: it is not yet started"):
        envs.step(np.zeros(2, np.int64))
    envs.close()


def test_a_pool_of_the_users_own_that_cannot_serve_stays_open(make_pool):
    pool = make_pool(2, batch_size=1)
    with pytest.raises(ConfigError, match="lock-step"):
        PoolVectorEnv(pool)
    assert len(pool.poll().env_ids)
