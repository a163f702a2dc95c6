"""Ctrl-C inside the pool's calls: waiting loses nothing, anything else makes the pool new, closing goes on."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import time

import gymnasium
import numpy as np
import pytest

from rlsample.env import as_base_env
from rlsample.env.pool.gymnasium_view import PoolVectorEnv
from rlsample.env.pool.shared_block import NEED
from rlsample.env.slot_states import WAITING
from rlsample.errors import EnvClosedError, EnvError, EnvProtocolError
from rlsample.testing.faulty_env import Fault, faulty_factory
from rlsample.testing.interrupts import interrupted_at
from rlsample.testing.scripted import CountEnv

# An interrupt in a finalizer is swallowed there, and told.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


class Seeded(CountEnv):
    """Its first observation is drawn from its generator."""

    def __init__(self, incarnation: int) -> None:
        super().__init__(5)
        self.incarnation = incarnation

    def reset(self, **options):
        super().reset(**options)
        return self.np_random.integers(1, 1_000_000, 1).astype(np.float32), {}


def make(ctx):
    return Seeded(ctx.incarnation)


def break_off(monkeypatch, env, call):
    """Ctrl-C after the actions were written down, before the workers were woken."""

    def interrupted(workers):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(env._team, "wake", interrupted)
        with pytest.raises(KeyboardInterrupt):
            call()


def until(ready):
    deadline = time.monotonic() + 20
    while not ready():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.fixture(params=[{}, {"batch_size": 2}], ids=["ordered", "first come"])
def env(request):
    pool = {"num_workers": 2, "start_method": "fork", **request.param}
    with as_base_env(make, 3, backend="process", pool=pool, seed=7, max_restarts=1) as made:
        yield made


def first_obs(env):
    env.reset()
    while (env._states.code != WAITING).any():
        env.recv()
    return env._team.block.step.obs.ravel().tolist()


def test_an_interrupted_wait_loses_nothing(env, monkeypatch):
    first_obs(env)
    env.send(np.zeros(3, int))
    pids, wait = env.worker_pids, env._team.waiter.wait

    def interrupted(timeout_s):
        wait(timeout_s)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(env._team.waiter, "wait", interrupted)
        patch.setattr(env._requests, "num_published", lambda: 0)
        with pytest.raises(KeyboardInterrupt):
            env.recv()
    rows = {}
    while len(rows) < 3:
        obs, _, _, _, info = env.recv()
        rows.update(zip(info["env_id"].tolist(), obs.ravel().tolist(), strict=True))
    assert rows == {0: 1.0, 1: 1.0, 2: 1.0}
    assert env.worker_pids == pids


def test_a_call_that_broke_off_makes_every_slot_new_with_other_episodes(env, monkeypatch):
    before, pids = first_obs(env), env.worker_pids
    env.send(np.zeros(3, int))
    env.recv(3)
    break_off(monkeypatch, env, lambda: env.send(np.zeros(3, int)))
    assert not env.begun().any()
    with pytest.raises(EnvProtocolError, match="slot 0 takes no action: it is not yet started"):
        env.send(np.zeros(3, int))
    after = first_obs(env)
    assert env.begun().all()
    assert not set(before) & set(after)
    assert not set(pids) & set(env.worker_pids)
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)
    assert env.call("incarnation") == [1, 1, 1]
    env.send(np.zeros(3, int))
    assert env.recv(3)[0].ravel().tolist() == [1, 1, 1]


def test_restarts_that_were_used_up_stay_so(env, monkeypatch):
    env._lives.restarts[1], env._lives.incarnation[1] = 1, 1
    first_obs(env)
    break_off(monkeypatch, env, lambda: env.send(np.zeros(3, int)))
    first_obs(env)
    assert env._lives == ([1, 2, 1], [0, 1, 0])


def test_a_thread_that_waited_beside_the_interrupted_call_is_told(monkeypatch):
    pool = {"num_workers": 2, "ordered": False, "close_timeout_s": 0.3}
    with as_base_env(faulty_factory({1: Fault("hang", at=1)}), 2, backend="process", pool=pool) as env:
        while (env._states.code != WAITING).any():
            env.poll()
        env.send_actions(np.array([1]), np.zeros(1, int))
        with concurrent.futures.ThreadPoolExecutor(1) as thread:
            poll = thread.submit(env.poll)
            until(lambda: env._team.common[NEED] > 0)  # it sleeps
            break_off(monkeypatch, env, lambda: env.send_actions(np.array([0]), np.zeros(1, int)))
            assert not env.begun().any()
            with pytest.raises(EnvError, match="another thread's call into this pool was broken off"):
                poll.result(20)
        assert env.poll().is_first.all()


def test_a_reset_that_was_waited_for_makes_every_slot_new(env, monkeypatch):
    """Else nobody would know which envs had been reset."""
    first_obs(env)

    def interrupted(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(env._team, "has_message", lambda w: False)
        patch.setattr(env._team, "is_dead", lambda w: False)
        patch.setattr(env._team._channels[0], "send_some", lambda data, wait_s: len(data) or interrupted())
        with pytest.raises(KeyboardInterrupt):
            env.reset_with(env.all_ids)
    assert not env.begun().any()


@pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])
@pytest.mark.parametrize("step", [2, 5])  # in mid-episode; the last one, in which episodes end
def test_the_gymnasium_form_whose_step_waited_goes_on_with_a_reset(monkeypatch, mode, step):
    with contextlib.closing(PoolVectorEnv(make, 2, autoreset_mode=mode, pool={"start_method": "fork"})) as envs:
        envs.reset(seed=3)
        for _ in range(step - 1):
            envs.step(np.zeros(2, int))
        pids, wait = envs.pool.worker_pids, envs.pool._team.waiter.wait

        def interrupted(timeout_s):
            wait(timeout_s)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(envs.pool._team.waiter, "wait", interrupted)
            patch.setattr(envs.pool._requests, "num_published", lambda: 0)
            patch.setattr(envs.pool._requests, "all_published", lambda: False)
            with pytest.raises(KeyboardInterrupt):
                envs.step(np.zeros(2, int))
        with pytest.raises(EnvClosedError, match="reset the envs"):
            envs.step(np.zeros(2, int))
        assert (envs.reset(seed=4)[0] > 0).all()
        for k in range(1, 6):
            obs, _, terminated, _, _ = envs.step(np.zeros(2, int))
            assert terminated.tolist() == [k == 5] * 2
            assert mode == "SameStep" or obs.ravel().tolist() == [k, k]
        assert envs.pool.worker_pids == pids


@pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])
def test_the_gymnasium_form_goes_on_with_a_reset(monkeypatch, mode):
    envs = PoolVectorEnv(make, 2, autoreset_mode=mode, pool={"start_method": "fork"})
    with contextlib.closing(gymnasium.wrappers.vector.RecordEpisodeStatistics(envs)) as wrapped:
        wrapped.reset(seed=3)
        for _ in range(5):
            *_, terminated, _, _ = wrapped.step(np.zeros(2, int))
        assert terminated.all()
        break_off(monkeypatch, envs.pool, lambda: envs.pool.call("k"))
        obs, _ = wrapped.reset(seed=3)
        assert obs.shape == (2, 1)
        assert (obs > 0).all()
        assert wrapped.step(np.zeros(2, int))[0].ravel().tolist() == [1, 1]


@pytest.mark.parametrize("step", [13, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_close(method, step):
    place, goes_on, pool = 0, True, {"num_workers": 2, "start_method": method, "close_timeout_s": 0.5}
    step *= 1 if method == "fork" else 5
    while goes_on:
        env = as_base_env(make, 3, backend="process", pool=pool)
        env.poll()
        pids = env.worker_pids
        goes_on = interrupted_at(place, env.close)
        started = time.monotonic()
        env.close()
        assert time.monotonic() - started < 5
        for pid in pids:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)
        place += step
    assert place > 50
