"""Sixteen envs that take uneven time to step: waiting for all of them, against taking whichever is ready.

    python examples/pool_first_come.py

Each step sleeps 5 ms on average, at random. A barrier waits for the slowest of the sixteen each time, 17 ms on
average; first come, first served keeps every env busy.
"""

from __future__ import annotations

import time

import gymnasium
import numpy as np

from rlsample.env import as_base_env


class Uneven(gymnasium.Env):
    """A simulator whose steps take as long as they take."""

    observation_space = gymnasium.spaces.Box(-1, 1, (4,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(4, np.float32), {}

    def step(self, action):
        time.sleep(self.np_random.exponential(0.005))
        return np.zeros(4, np.float32), 1.0, False, self.np_random.random() < 0.01, {}


def steps_per_second(seconds: float, **pool) -> float:
    """Acts at random for a while; a slot that ended is reset, the others go on."""
    rng, steps = np.random.default_rng(0), 0
    with as_base_env(Uneven, num_envs=16, backend="process", pool={"num_workers": 16, **pool}, seed=0) as env:
        started = time.perf_counter()
        while time.perf_counter() - started < seconds:
            batch = env.poll()  # rows as columns: env_ids, obs, rewards, terminated, truncated, is_first
            steps += int((~batch.is_first).sum())
            ended = batch.terminated | batch.truncated
            waiting = batch.env_ids[~ended]
            if ended.any():
                first = env.try_reset(batch.env_ids[ended])  # first come: it arrives with a later poll
                if first is not None:
                    waiting = np.concatenate([waiting, first.env_ids])
            if len(waiting):
                env.send_actions(waiting, rng.integers(0, 2, len(waiting)))
        return steps / (time.perf_counter() - started)


if __name__ == "__main__":
    print(f"waiting for all:         {steps_per_second(2.0):5.0f} steps/s")
    print(f"first come, first served: {steps_per_second(2.0, batch_size=1):4.0f} steps/s of 3200 possible")
