"""A random worker is killed every second for a minute: every row is accounted for, and nothing is left.

Stretches with and without kills alternate in one run, so that what is lost by the kills is measured side by side.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import statistics
import threading
import time
from pathlib import Path

import gymnasium
import numpy as np
import pytest

from rlsample.evaluation import CommonPolicyEvaluator
from rlsample.policy import RandomPolicy

SECONDS = float(os.environ.get("KILL_STORM_S", "60"))  # of storm; half as much calm besides
STRETCHES = 3


class Numbered(gymnasium.Env):
    """Observes (slot, incarnation, number of the reset, steps since): no two observations are alike."""

    observation_space = gymnasium.spaces.Box(0, 1e9, (4,), np.float64)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, slot, incarnation):
        self.slot, self.incarnation, self.resets, self.k = slot, incarnation, 0, 0

    def observe(self):
        return np.array([self.slot, self.incarnation, self.resets, self.k], np.float64)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.resets, self.k, self.n = self.resets + 1, 0, int(self.np_random.integers(1, 60))
        return self.observe(), {}

    def step(self, action):
        self.k += 1
        until = time.perf_counter() + 20e-6
        while time.perf_counter() < until:
            pass
        return self.observe(), float(self.k), self.k == self.n, False, {}


class Counting(RandomPolicy):
    """Counts the actions it gives out."""

    given = 0

    def act(self, obs, explore=True):
        self.given += len(obs)
        return super().act(obs, explore)


def make(ctx):
    return Numbered(ctx.slot_index, ctx.incarnation)


def evaluator(ordered):
    pool = {"num_workers": 4, "ordered": ordered, "start_method": "forkserver"}
    return CommonPolicyEvaluator(
        make, Counting, 32, rollout_fragment_length=50, seed=0,
        backend="process", pool=pool, max_restarts=10**6, restart_backoff_s=0.0,
    )  # fmt: skip


def resources():
    maps = Path("/proc/self/maps").read_text().count("rlsample-pool")
    return len(os.listdir("/proc/self/fd")), maps


class Storm(threading.Thread):
    """Kills a random worker every second while ``raging`` is set."""

    def __init__(self, env):
        super().__init__()
        self.env, self.kills = env, 0
        self.raging, self.over = threading.Event(), threading.Event()

    def run(self):
        rng = random.Random(1)
        while not self.over.is_set():
            if self.raging.wait(0.05) and not self.over.wait(1.0) and self.raging.is_set():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rng.choice(self.env.worker_pids), signal.SIGKILL)
                self.kills += 1


def sampled_for(ev, seconds, batches):
    """Samples for so long; returns rows per second."""
    started, rows = time.monotonic(), 0
    while time.monotonic() - started < seconds:
        batches.append(ev.sample())
        rows += batches[-1].count
    return rows / (time.monotonic() - started)


def run(ordered):
    """Three stretches of calm and storm in turn; returns batches, the evaluator's account, kills, and both rates."""
    batches, calm, raging = [], [], []
    with evaluator(ordered) as ev:
        batches.append(ev.sample())
        held = resources()
        storm = Storm(ev.env)
        storm.start()
        try:
            for _ in range(STRETCHES):
                calm.append(sampled_for(ev, SECONDS / STRETCHES / 2, batches))
                storm.raging.set()
                raging.append(sampled_for(ev, SECONDS / STRETCHES, batches))
                storm.raging.clear()
                batches.append(ev.sample())  # the last killed worker is replaced before the next calm is measured
        finally:
            storm.over.set()
            storm.join()
        sampler = ev.sampler
        in_flight = ev.env._requests.owing(range(32))
        # rows that are finished and wait to be handed out, and actions under way
        kept = sum(p.count for p in sampler._pieces) + int(sampler._buffer.lengths().sum())
        account = {"given": ev.policy.given, "lost": sampler.rows_lost, "kept": kept, "in_flight": len(in_flight)}
        after = resources()
        assert after[1] == held[1]
        assert after[0] <= held[0] + 1
    return batches, account, storm.kills, calm, raging


@pytest.mark.slow
@pytest.mark.parametrize("ordered", [True, False])
def test_kill_storm(ordered, capsys):
    batches, account, kills, calm, raging = run(ordered)
    assert kills >= (SECONDS - STRETCHES) * 0.8
    delivered = sum(b.count for b in batches)
    # an action under way is a slot that owes a step; one that owes a first observation took none
    missing = account["given"] - delivered - account["lost"] - account["kept"]
    assert 0 <= missing <= account["in_flight"], (account, delivered)
    assert account["lost"] > 0
    obs = np.concatenate([b["obs"] for b in batches])
    next_obs = np.concatenate([b["next_obs"] for b in batches])
    assert len(np.unique(obs, axis=0)) == delivered, "a row came twice"
    assert (obs[:, :3] == next_obs[:, :3]).all()
    assert (next_obs[:, 3] == obs[:, 3] + 1).all()
    assert (obs[:, 3] == np.concatenate([b["t"] for b in batches])).all()
    assert (obs[:, 0] == np.concatenate([b["env_id"] for b in batches])).all()
    losses = [1 - storm / quiet for quiet, storm in zip(calm, raging, strict=True)]
    with capsys.disabled():
        print(
            f"\nkill storm, ordered={ordered}: {kills} kills, {delivered} rows, {account['lost']} declared lost; "
            f"rows/s {[round(rate) for rate in calm]} calm, {[round(rate) for rate in raging]} in the storm: "
            f"{statistics.median(losses):.1%} lost (median of {STRETCHES})"
        )
