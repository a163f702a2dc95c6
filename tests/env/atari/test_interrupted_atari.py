"""Ctrl-C inside an Atari env's calls: the next call goes on, with new games unless it only waited."""

from __future__ import annotations

import numpy as np
import pytest

from rlsample.env.atari import make_atari
from rlsample.evaluation import CommonPolicyEvaluator
from rlsample.testing.interrupts import interrupted_at
from rlsample.testing.scripted_policy import ScriptedPolicy

# An interrupt in a finalizer is swallowed there, and told.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def check(batch):
    """Rows of one episode follow each other."""
    for episode in np.unique(batch["eps_id"]):
        rows = batch["eps_id"] == episode
        assert (np.diff(batch["t"][rows]) == 1).all()
        assert (batch["obs"][rows][1:] == batch["next_obs"][rows][:-1]).all()


@pytest.mark.parametrize("step", [97, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("options", [{}, {"groups": 2}, {"batch_size": 1}], ids=str)
def test_calls_that_break_off_at_every_place_are_followed_by_rows_that_fit(options, step):
    env, place = make_atari("Pong-v5", num_envs=2, num_threads=1, seed=0, **options), 0
    with CommonPolicyEvaluator(env, ScriptedPolicy, 2, rollout_fragment_length=4) as evaluator:
        check(evaluator.sample())
        while interrupted_at(place, evaluator.sample):
            place += step
            check(evaluator.sample())
        assert place > 200


@pytest.mark.parametrize("arrived", [False, True])
def test_an_interrupted_wait_loses_nothing(monkeypatch, arrived):
    with make_atari("Pong-v5", num_envs=2, num_threads=1, groups=2, seed=0) as env:
        env.reset()
        ids = env.recv()[4]["env_id"]
        assert ids.tolist() == [1]
        env.send(np.array([0]), ids)
        fleet, wait = env._fleet, env._fleet._wait

        def interrupted(deadline):
            if arrived:
                wait(deadline)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(fleet, "_wait", interrupted)
            with pytest.raises(KeyboardInterrupt):
                env.recv()
        info = env.recv()[4]
        assert (info["env_id"].tolist(), info["elapsed_step"].tolist()) == ([1], [1])
        assert env._fleet is fleet


def test_rows_that_were_here_before_an_interrupted_wait_come_with_the_next_call(monkeypatch):
    with make_atari("Pong-v5", num_envs=2, num_threads=1, groups=2, seed=0) as env:
        env.reset()
        env.recv()
        env.send(np.array([0, 0]))
        waits, wait = [], env._fleet._wait

        def interrupted(deadline):
            waits.append(1)
            if len(waits) > 1:
                raise KeyboardInterrupt
            while not env._fleet.groups[0].outcome:
                wait(deadline)
                env._fleet._collect()
            env._fleet.groups[1].outcome = None  # as if it were under way
            return True

        with monkeypatch.context() as patch:
            patch.setattr(env._fleet, "_wait", interrupted)
            with pytest.raises(KeyboardInterrupt):
                env.recv(min_envs=2)
        assert env.recv()[4]["env_id"].tolist() == [0]


def test_a_call_that_broke_off_opens_other_games(monkeypatch):
    with make_atari("Breakout-v5", num_envs=2, num_threads=1, seed=0) as env:
        env.reset()
        for _ in range(20):
            env.step(np.array([1, 3]))

        def interrupted(group):
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(env._fleet, "launch", interrupted)
            with pytest.raises(KeyboardInterrupt):
                env.send(np.array([0, 0]))
        seeds = env._seeds.tolist()
        _, info = env.reset()
        assert info["elapsed_step"].tolist() == [0, 0]
        assert info["lives"].tolist() == [5, 5]
        assert not set(seeds) & set(env._seeds.tolist())
        assert env.step(np.array([1, 3]))[4]["elapsed_step"].tolist() == [1, 1]
