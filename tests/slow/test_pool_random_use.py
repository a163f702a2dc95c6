"""The pool used at random, by every call it has, while its workers are killed: each row is the one that is due."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time

import numpy as np
import pytest

from rlsample.env import AsyncVectorEnv, EnvSettings
from rlsample.errors import EnvFailedError
from rlsample.testing import CountEnv

SECONDS = 4.0


class Numbered(CountEnv):
    """Ends after 3 to 6 steps, by its slot; an info at every third step."""

    def __init__(self, slot):
        super().__init__(3 + slot % 4)
        self.slot = slot

    def step(self, action):
        *row, _ = super().step(action)
        return *row, {} if self.k % 3 else {"k": self.k}

    def hello(self, word):
        return self.slot, word


class RandomUser:
    """Does what it may do next, and knows for each slot what has to come of it.

    Attributes:
        due: slot -> the step that its next row has to be (0: a first one).
        state: slot -> waiting, ended, failed; or asked, while a row is due.
    """

    def __init__(self, env, rng):
        self.env, self.rng = env, rng
        self.due = dict.fromkeys(range(env.num_envs), 0)
        self.state = dict.fromkeys(range(env.num_envs), "asked")
        self.rows = self.kills = self.failures = 0

    def some(self, *states):
        slots = [slot for slot, state in self.state.items() if state in states]
        return self.rng.sample(slots, self.rng.randint(1, len(slots))) if slots else []

    def ask(self, slots, due=None):
        for slot in slots:
            self.state[slot] = "asked"
            self.due[slot] = self.due[slot] if due is None else due
        return np.array(slots)

    def take(self, batch):
        for row, slot in enumerate(batch.env_ids.tolist()):
            k = self.due[slot]
            got = batch.obs[row].item(), batch.rewards[row], batch.is_first[row], batch.terminated[row]
            assert self.state[slot] == "asked"
            assert got == (k, k, k == 0, k == 3 + slot % 4), slot
            assert batch.infos.get(row) == (None if k % 3 or not k else {"k": k})
            self.state[slot], self.due[slot] = "ended" if got[3] else "waiting", k + 1
            self.rows += 1
        for slot, failure in batch.failures.items():
            assert self.state[slot] == "asked"
            assert "SIGKILL" in str(failure)
            self.state[slot] = "failed"
            self.failures += 1

    def turn(self):
        env, chance = self.env, self.rng.random()
        if chance < 0.02:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.rng.choice(env.worker_pids), signal.SIGKILL)
                self.kills += 1
        elif chance < 0.05:
            with contextlib.suppress(EnvFailedError):
                assert env.call("hello", 5) == [(slot, 5) for slot in self.state]
        elif chance < 0.07 and (slots := self.some("waiting", "ended")):
            self.take(env.reset_with(self.ask(slots, 0), [self.rng.randrange(99) for _ in slots]))
        if slots := self.some("waiting"):
            env.send_actions(self.ask(slots), np.zeros(len(slots), np.int64))
        if (slots := self.some("ended")) and (first := env.try_reset(self.ask(slots, 0))) is not None:
            self.take(first)
        if slots := self.some("failed"):
            env.try_restart(self.ask(slots, 0))
        if "asked" in self.state.values():
            batch = env.poll(30)
            assert len(batch.env_ids) or batch.failures, f"lost: {self.state}"
            self.take(batch)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_every_row_is_the_one_that_is_due(seed):
    rng = random.Random(seed)
    num_envs, ordered = rng.choice([1, 3, 8, 13]), seed % 2 == 0
    pool = {
        "num_workers": rng.randint(1, 4),
        "batch_size": None if ordered else rng.randint(1, num_envs),
        "ordered": ordered,
        "reset_ahead": rng.random() < 0.7,
    }
    settings = EnvSettings(max_restarts=10**6, restart_backoff_s=rng.choice([0, 0.005]))
    with AsyncVectorEnv(lambda ctx: Numbered(ctx.slot_index), num_envs, settings=settings, pool=pool) as env:
        user = RandomUser(env, rng)
        until = time.monotonic() + SECONDS
        while time.monotonic() < until or not user.failures:
            user.turn()
    assert user.rows
    assert user.kills
