"""The worker pool beside Gymnasium's vector envs, stepping only, interleaved: medians and ratios.

python benchmarks/pool.py                    # 64 CartPoles, then 16 sleeping envs
python benchmarks/pool.py --env Pong --num-envs 8 --rounds 5 --seconds 4
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import warnings
from time import perf_counter
from typing import Any

import gymnasium
import numpy as np

from rlsample.bench.pool import bench_pool
from rlsample.bench.straggler import SleepyEnv, bench_straggler


def make(env_id: str) -> Any:
    """What a user of Gymnasium would write."""
    return gymnasium.make(env_id)


def gymnasium_steps(kind: str, makers: list[Any], seconds: float) -> float:
    """Steps per second of Gymnasium's own vector env, driven as in shared/bench/peer_vec_transport.py."""
    cls = gymnasium.vector.SyncVectorEnv if kind == "sync" else gymnasium.vector.AsyncVectorEnv
    envs = cls(makers)
    envs.reset(seed=0)
    actions = np.array(envs.action_space.sample())
    count = 0
    for _ in range(5):
        envs.step(actions)
    started = perf_counter()
    while perf_counter() - started < seconds:
        envs.step(actions)
        count += len(makers)
    rate = count / (perf_counter() - started)
    envs.close()
    return rate


def compare(cases: dict[str, Any], rounds: int) -> dict[str, list[float]]:
    """Each case once per round, so that noise falls on all of them."""
    found: dict[str, list[float]] = {name: [] for name in cases}
    for k in range(rounds):
        for name, case in cases.items():
            found[name].append(case())
            print(f"  round {k + 1}: {name:28} {found[name][-1]:10,.0f} steps/s", flush=True)
    return found


def report(title: str, found: dict[str, list[float]], ours: str) -> dict[str, Any]:
    """Prints and returns medians, and ratios of our median and of each round's pair to each rival."""
    medians = {name: statistics.median(rates) for name, rates in found.items()}
    print(title)
    result: dict[str, Any] = {"medians": medians, "ratios": {}}
    for name, median in medians.items():
        ratio = statistics.median(a / b for a, b in zip(found[ours], found[name], strict=True))
        result["ratios"][name] = ratio
        print(f"  {name:28} {median:10,.0f} steps/s   {ours} is {ratio:.2f} x")
    return result


def main() -> None:
    warnings.filterwarnings("ignore")
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--env", default="CartPole-v1")
    parser.add_argument("--num-envs", type=int, default=64)
    parser.add_argument("--num-workers", type=int, default=None)
    parser.add_argument("--start-method", default="forkserver")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    given = parser.parse_args()
    env_id, count, seconds = given.env, given.num_envs, given.seconds
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")

    def pool(**options: Any) -> float:
        options["start_method"] = given.start_method
        return bench_pool(env_id, count, given.num_workers, seconds=seconds, **options)["steps_per_s"]

    makers = [lambda: make(env_id)] * count
    stepping = compare(
        {
            "pool": lambda: pool(),
            "pool, half at a time": lambda: pool(batch_size=count // 2),
            "SyncVectorEnv": lambda: gymnasium_steps("sync", makers, seconds),
            "AsyncVectorEnv": lambda: gymnasium_steps("async", makers, seconds),
        },
        given.rounds,
    )
    sleeping = compare(
        {
            "pool": lambda: bench_straggler(16, 5.0, seconds, start_method=given.start_method)["steps_per_s"],
            "AsyncVectorEnv": lambda: gymnasium_steps("async", [SleepyEnv] * 16, seconds),
        },
        given.rounds,
    )
    document = {
        "stepping": report(f"{count} x {env_id}", stepping, "pool"),
        "sleeping": report("16 sleeping envs, 5 ms; 3,200 steps/s possible", sleeping, "pool"),
    }
    if given.json:
        print(json.dumps(document))


if __name__ == "__main__":
    main()
