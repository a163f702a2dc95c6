"""What one `act` costs beside a hand-written numpy forward pass and draw, and what one PPO update costs, on one core.

    taskset -c 1 python benchmarks/policy_act.py [rounds]

Each round times both sides of each width in turn, so that what else runs on the machine hits both; the medians count.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np

WIDTHS = (1, 8, 64)
BLOCK_S = 0.02


def hand_written(num_rows: int, rng: np.random.Generator) -> Callable[[np.ndarray], Any]:
    """Two 64x64 tanh nets with fused layers, Gumbel argmax and log-prob: no checks, no names, no obs spaces."""

    def weights(a: int, b: int) -> np.ndarray:
        return (rng.standard_normal((a, b)) / np.sqrt(a)).astype(np.float32)

    w1, b1, b2 = weights(4, 128), np.zeros(128, np.float32), np.zeros(128, np.float32)
    w2a, w2b = weights(64, 64), weights(64, 64)
    w3, b3 = weights(128, 3), np.zeros(3, np.float32)
    h1, h2 = np.empty((2, num_rows, 128), np.float32)
    out = np.empty((num_rows, 3), np.float32)
    rows = np.arange(num_rows)
    block = max(1, 2048 // num_rows)
    noise, at = np.empty((0, num_rows, 2), np.float32), 0

    def act(obs: np.ndarray) -> Any:
        nonlocal noise, at
        np.dot(obs, w1, out=h1)
        np.add(h1, b1, out=h1)
        np.tanh(h1, out=h1)
        np.matmul(h1[:, :64], w2a, out=h2[:, :64])
        np.matmul(h1[:, 64:], w2b, out=h2[:, 64:])
        np.add(h2, b2, out=h2)
        np.tanh(h2, out=h2)
        np.dot(h2, w3, out=out)
        np.add(out, b3, out=out)
        if at == len(noise):
            noise, at = rng.gumbel(size=(block, num_rows, 2)).astype(np.float32), 0
        logits = out[:, :2]
        actions = (logits + noise[at]).argmax(1)
        at += 1
        top = logits.max(1)
        total = top + np.log(np.exp(logits - top[:, None]).sum(1))
        return actions, logits[rows, actions] - total, out[:, 2]

    return act


def seconds_per_call(call: Callable[[], Any]) -> float:
    """Mean over one block of calls."""
    calls, start = 0, time.perf_counter()
    while time.perf_counter() - start < BLOCK_S:
        for _ in range(20):
            call()
        calls += 20
    return (time.perf_counter() - start) / calls


def compare(rounds: int) -> None:
    from rlsample.policy import PPOPolicy

    rng = np.random.default_rng(0)
    space = gymnasium.spaces.Box(-5, 5, (4,), np.float32)
    policy = PPOPolicy(space, gymnasium.spaces.Discrete(2))
    sides: dict[tuple[int, str], Callable[[], Any]] = {}
    for k in WIDTHS:
        obs = rng.normal(size=(k, 4)).astype(np.float32)
        by_hand = hand_written(k, rng)
        sides[k, "hand-written"] = lambda f=by_hand, o=obs: f(o)
        sides[k, "act"] = lambda o=obs: policy.act(o)
    times: dict[tuple[int, str], list[float]] = {key: [] for key in sides}
    for _ in range(rounds):
        for key, call in sides.items():
            times[key].append(seconds_per_call(call))
    for k in WIDTHS:
        hand, act = (float(np.median(times[k, side])) * 1e6 for side in ("hand-written", "act"))
        print(f"K={k:<3} hand-written {hand:6.1f} us   act {act:6.1f} us   ratio {act / hand:.2f}")


def time_update(rounds: int) -> None:
    import torch

    from rlsample.policy import PPOPolicy
    from rlsample.sample_batch import SampleBatch

    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    policy = PPOPolicy(gymnasium.spaces.Box(-5, 5, (4,), np.float32), gymnasium.spaces.Discrete(2))
    obs = rng.normal(size=(256, 4)).astype(np.float32)
    actions, extras = policy.act(obs)
    noise = rng.normal(size=(2, 256)).astype(np.float32)
    columns = {"obs": obs, "actions": actions, "advantages": noise[0], "value_targets": noise[1]}
    batch = SampleBatch({**columns, **{name: column.copy() for name, column in extras.items()}})
    times = [seconds_per_call(lambda: policy.learn(batch)) for _ in range(rounds)]
    print(f"learn, 256 rows: median {np.median(times) * 1e3:.2f} ms, best {min(times) * 1e3:.2f} ms")


if __name__ == "__main__":
    num_rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 25
    compare(num_rounds)
    time_update(num_rounds)
