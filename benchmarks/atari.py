"""Atari stepping beside EnvPool and Gymnasium's AsyncVectorEnv, interleaved: medians and ratios.

    python -m venv /tmp/envpool_venv && /tmp/envpool_venv/bin/pip install envpool     # EnvPool is no dependency
    python benchmarks/atari.py --envpool-python /tmp/envpool_venv/bin/python [--game Pong] [--rounds 5] [--seconds 4]

Each measurement is a process of its own, all with the same cores. Aims: 0.97 of EnvPool, 1.9 times AsyncVectorEnv
(which needs opencv-python). EnvPool's rows of resets count as steps, ours do not.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import textwrap
from typing import Any

CASES = [(8, 8), (8, 4), (64, 64), (64, 16)]  # games, rows of a receive

ENVPOOL = """
    import sys, time, numpy as np, envpool
    task, num, batch, seconds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
    env = envpool.make_gymnasium(task, num_envs=num, batch_size=batch, num_threads=0)
    env.async_reset()
    actions, count = np.ones(batch, np.int32), 0
    for limit in (0.5, seconds):
        count, started = 0, time.perf_counter()
        while time.perf_counter() - started < limit:
            info = env.recv()[-1]
            env.send(actions, info["env_id"])
            count += batch
        rate = count / (time.perf_counter() - started)
    print("steps/s", rate)
"""

GYMNASIUM = """
    import sys, time, numpy as np, gymnasium, ale_py
    from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation
    game, num, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[4])
    gymnasium.register_envs(ale_py)
    def make():
        env = gymnasium.make(f"ALE/{game}-v5", frameskip=1, repeat_action_probability=0.0)
        return FrameStackObservation(AtariPreprocessing(env), 4)
    if __name__ == "__main__":
        env = gymnasium.vector.AsyncVectorEnv([make] * num)
        env.reset(seed=0)
        actions = np.ones(num, np.int64)
        for limit in (0.5, seconds):
            count, started = 0, time.perf_counter()
            while time.perf_counter() - started < limit:
                env.step(actions)
                count += num
            rate = count / (time.perf_counter() - started)
        env.close()
        print("steps/s", rate)
"""


def run(command: list[str]) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment)
    if done.returncode:
        raise RuntimeError(f"{command[:3]} ended with {done.returncode}: {done.stderr[-2000:]}")
    return done.stdout


def rival(python: str, code: str, game: str, num_envs: int, batch_size: int, seconds: float) -> float:
    arguments = [game, str(num_envs), str(batch_size), str(seconds)]
    found = re.search(r"steps/s ([\d.]+)", run([python, "-c", textwrap.dedent(code), *arguments]))
    assert found
    return float(found[1])


def ours(game: str, num_envs: int, batch_size: int, seconds: float) -> float:
    code = "import sys, json; from rlsample.bench.atari import bench_atari; game, n, b, s = sys.argv[1:]; "
    code += "print(json.dumps(bench_atari(game, int(n), int(b), float(s))))"
    text = run([sys.executable, "-c", code, game, str(num_envs), str(batch_size), str(seconds)])
    return float(json.loads(text.splitlines()[-1])["steps_per_s"])


def compare(case: tuple[int, int], given: argparse.Namespace) -> dict[str, Any]:
    num_envs, batch_size = case
    runners: dict[str, Any] = {"rlsample": lambda: ours(given.game, num_envs, batch_size, given.seconds)}
    if given.envpool_python:
        runners["EnvPool"] = lambda: rival(
            given.envpool_python, ENVPOOL, f"{given.game}-v5", num_envs, batch_size, given.seconds
        )
    if not given.no_gymnasium:
        runners["Gymnasium AsyncVectorEnv"] = lambda: rival(
            sys.executable, GYMNASIUM, given.game, num_envs, batch_size, given.seconds
        )
    rates: dict[str, list[float]] = {name: [] for name in runners}
    for k in range(given.rounds):
        for name, runner in runners.items():
            rates[name].append(runner())
            print(f"  round {k + 1}, {num_envs}/{batch_size}: {name:26} {rates[name][-1]:8,.0f} steps/s", flush=True)
    mine = rates["rlsample"]
    return {
        "num_envs": num_envs,
        "batch_size": batch_size,
        "medians": {name: statistics.median(r) for name, r in rates.items()},
        "ratios": {
            name: statistics.median(a / b for a, b in zip(mine, r, strict=True))
            for name, r in rates.items()
            if name != "rlsample"
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--game", default="Pong", help="as in EnvPool's task names, without -v5")
    parser.add_argument("--envpool-python", default="", help="the Python of a venv that has envpool; none: left out")
    parser.add_argument("--no-gymnasium", action="store_true", help="leave AsyncVectorEnv out")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--cases", default=",".join(f"{n}/{b}" for n, b in CASES), help="games/rows of a receive")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    given = parser.parse_args()
    print(f"{len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}")
    results = []
    for text in given.cases.split(","):
        num_envs, batch_size = (int(part) for part in text.split("/"))
        results.append(compare((num_envs, batch_size), given))
    for result in results:
        how = "sync" if result["batch_size"] == result["num_envs"] else f"async, {result['batch_size']} at a time"
        print(f"{given.game}, {result['num_envs']} games, {how}")
        for name, median in result["medians"].items():
            ratio = result["ratios"].get(name)
            print(f"  {name:26} {median:8,.0f} steps/s" + (f"   we make {ratio:.2f} of it" if ratio else ""))
    if given.json:
        print(json.dumps({"game": given.game, "cases": results}))


if __name__ == "__main__":
    main()
