"""A policy acting on Atari games: the emulators' idle time with one group of games and with two, interleaved.

    python benchmarks/atari_two_groups.py [--game pong] [--num-envs 16] [--rounds 5] [--seconds 4] [--torch-threads 1]

The policy is the Nature CNN with random weights, on the CPU: it takes a core of its own while it acts. So that the
two are told apart where cores are few, ``--sleep-ms`` replaces it by a wait of so long per row (a GPU's, say).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from typing import Any

import numpy as np

from rlsample.bench.atari import bench_atari_acting


def waiting(ms_per_row: float) -> Any:
    def act(obs: np.ndarray) -> np.ndarray:
        time.sleep(ms_per_row * 1e-3 * len(obs))
        return np.ones(len(obs), np.int64)

    return act


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--game", default="pong")
    parser.add_argument("--num-envs", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--torch-threads", type=int, default=1)
    parser.add_argument("--sleep-ms", type=float, default=0.0, help="per row, instead of the policy")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    given = parser.parse_args()
    act = waiting(given.sleep_ms) if given.sleep_ms else None
    if act is None:
        import torch

        torch.set_num_threads(given.torch_threads)
    print(f"{len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}")
    found: dict[int, list[dict[str, Any]]] = {1: [], 2: []}
    for k in range(given.rounds):
        for groups, results in found.items():
            results.append(bench_atari_acting(given.game, given.num_envs, groups, given.seconds, act))
            last = results[-1]
            print(
                f"  round {k + 1}, {groups} group(s): {last['steps_per_s']:7,.0f} steps/s, emulators idle "
                f"{1 - last['emulators_busy']:.0%} of the time, policy {last['act_share']:.0%}",
                flush=True,
            )
    medians = {
        groups: {
            "steps_per_s": statistics.median(r["steps_per_s"] for r in results),
            "emulators_idle": statistics.median(1 - r["emulators_busy"] for r in results),
            "act_share": statistics.median(r["act_share"] for r in results),
        }
        for groups, results in found.items()
    }
    one, two = medians[1], medians[2]
    print(
        f"{given.game}, {given.num_envs} games: emulators idle {one['emulators_idle']:.0%} with one group, "
        f"{two['emulators_idle']:.0%} with two; {two['steps_per_s'] / one['steps_per_s']:.2f} times the steps"
    )
    if given.json:
        print(json.dumps({"game": given.game, "num_envs": given.num_envs, "one": one, "two": two}))


if __name__ == "__main__":
    main()
