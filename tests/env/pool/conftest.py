"""What the pool's tests share: a pool of counting envs, forked so that it starts at once."""

from __future__ import annotations

import time

import numpy as np
import pytest

from rlsample.env import AsyncVectorEnv, EnvSettings
from rlsample.testing.faulty_env import faulty_factory


class Tally:
    """Plays a pool: acts in every slot that waits, resets those that ended, and keeps all rows by slot.

    Attributes:
        rows: slot -> list of ("first" or "row", obs, reward, terminated).
        failures: slot -> list of exceptions.
    """

    def __init__(self, env, restart=True):
        self.env, self.restart = env, restart
        self.rows = {slot: [] for slot in range(env.num_envs)}
        self.failures = {slot: [] for slot in range(env.num_envs)}
        self.sent = [0] * env.num_envs
        self.acted = 0

    def turn(self, timeout_s=20.0):
        """One poll and the answers to it; returns the batch."""
        batch = self.env.poll(timeout_s)
        assert len(batch.env_ids) or batch.failures, "the poll timed out"
        self.note(batch.failures)
        self.take(batch)
        return batch

    def note(self, failures):
        for slot, failure in failures.items():
            self.failures[slot].append(failure)
        if failures and self.restart:
            self.env.try_restart(np.array(list(failures)))

    def take(self, batch):
        ended, waiting = [], []
        for row, slot in enumerate(batch.env_ids.tolist()):
            kind = "first" if batch.is_first[row] else "row"
            reward, terminated = float(batch.rewards[row]), bool(batch.terminated[row])
            self.rows[slot].append((kind, batch.obs[row].item(), reward, terminated))
            (ended if batch.terminated[row] or batch.truncated[row] else waiting).append(slot)
        if ended:
            first = self.env.try_reset(np.array(ended))
            if first is not None:
                assert first.env_ids.tolist() == [slot for slot in ended if slot not in first.failures]
                assert set(first.failures) <= set(ended)
                self.note(first.failures)  # a worker that died between the end and the reset
                self.take(first)
        if waiting:
            self.env.send_actions(np.array(waiting), np.zeros(len(waiting), np.int64))
            for slot in waiting:
                self.sent[slot] += 1

    def until(self, done, limit_s=20.0):
        deadline = time.monotonic() + limit_s
        while not done(self):
            assert time.monotonic() < deadline, "not done in time"
            self.turn()
        return self

    def episodes(self, slot):
        """Steps of each finished episode."""
        found, steps = [], 0
        for kind, _, _, terminated in self.rows[slot]:
            steps = 0 if kind == "first" else steps + 1
            if terminated:
                found.append(steps)
        return found


@pytest.fixture
def tally():
    return Tally


@pytest.fixture
def make_pool():
    """``make_pool(num_envs, faults, max_restarts=..., pool options)``: closed after the test."""
    made = []

    def make(num_envs=3, faults=None, *, max_restarts=0, backoff_s=0.0, env=None, seed=0, make=None, **pool):
        pool = {"start_method": "fork", "num_workers": num_envs, **pool}
        settings = EnvSettings(max_restarts=max_restarts, restart_backoff_s=backoff_s)
        factory = make or faulty_factory(faults, **(env or {}))
        made.append(AsyncVectorEnv(factory, num_envs, settings=settings, pool=pool, seed=seed))
        return made[-1]

    yield make
    for env in made:
        env.close()
