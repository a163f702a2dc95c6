"""CartPole sampling on one core against hand-written loops, interleaved; medians of ratios.

    python benchmarks/sampling.py [--limits ../shared/bench] [--rounds 5] [--seconds 2]

The limit scripts (a loop written by hand: env steps, forward pass, a draw, rows kept; numpy or torch) are run as
subprocesses, one of theirs, one of ours, and so on, all pinned to the same core. Then the sampler's own cost: a policy
and an env that do nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from rlsample.env.gym_envs import GymEnvs
from rlsample.evaluation.sampler import Sampler
from rlsample.evaluation.sampler_settings import SamplerSettings
from rlsample.policy.policy import ActOutput

CASES = [  # limit script and arguments, our options, the ratio aimed at
    ("limit_cartpole_numpy.py", 1, "loop", 0.70),
    ("limit_cartpole_numpy.py", 8, "loop", 0.85),
    ("limit_cartpole_numpy.py", 64, "loop", 0.95),
    ("limit_cartpole_numpy.py", 64, "native", 0.75),
    ("limit_cartpole.py", 1, "loop", 2.5),
    ("limit_cartpole.py", 8, "loop", 1.6),
    ("limit_cartpole.py", 64, "loop", 1.0),
]


def pinned(command: list[str], core: int) -> str:
    return subprocess.run(
        command, capture_output=True, text=True, check=True, preexec_fn=lambda: os.sched_setaffinity(0, {core})
    ).stdout


def limit(path: Path, width: int, mode: str, seconds: float, core: int) -> float:
    arguments = [str(width), str(seconds)] + ([mode] if "numpy" in path.name else [])
    found = re.search(r"actions/s (\d+)", pinned([sys.executable, str(path), *arguments], core))
    assert found
    return float(found[1])


def ours(width: int, mode: str, seconds: float, core: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "rlsample.cli", "bench", "sampling", "--env", "CartPole-v1", "--json"]
    command += ["--num-envs", str(width), "--vectorize", mode, "--seconds", str(seconds)]
    return json.loads(pinned(command, core).splitlines()[-1])


def compare(limits: Path, rounds: int, seconds: float, core: int) -> None:
    print(f"{'limit':26} width mode    limit/s    ours/s  ratio  (min..max)   aim")
    for script, width, mode, aim in CASES:
        theirs, mine = [], []
        for _ in range(rounds):
            theirs.append(limit(limits / script, width, mode, seconds, core))
            mine.append(ours(width, mode, seconds, core)["actions_per_s"])
        ratios = [m / t for m, t in zip(mine, theirs, strict=True)]
        print(
            f"{script:26} {width:5} {mode:6} {statistics.median(theirs):9.0f} {statistics.median(mine):9.0f}"
            f"  {statistics.median(ratios):5.2f}  ({min(ratios):.2f}..{max(ratios):.2f})  {aim:.2f}",
            flush=True,
        )


class Still(gymnasium.Env[Any, Any]):
    """Returns the same step for ever."""

    observation_space = gymnasium.spaces.Box(-1, 1, (4,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    result = (np.zeros(4, np.float32), 1.0, False, False, {})

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return self.result[0], {}

    def step(self, action: Any) -> Any:
        return self.result


class Blank:
    """Answers with the same arrays for ever."""

    version = 0
    extra_columns = {"action_logp": ((), np.float32), "values": ((), np.float32)}  # noqa: RUF012

    def __init__(self, rows: int) -> None:
        column = np.zeros(rows, np.float32)
        self.out = ActOutput(np.zeros(rows, np.int64), {"action_logp": column, "values": column})

    def act(self, obs: Any, explore: bool = True) -> ActOutput:
        return self.out


def own_cost(core: int) -> None:
    os.sched_setaffinity(0, {core})
    costs = {}
    for width in (1, 8, 64, 256):
        with GymEnvs(lambda ctx: Still(), width, seed=0) as env:
            sampler = Sampler(env, Blank(width), SamplerSettings(rollout_fragment_length=8192 // width))  # type: ignore[arg-type]
            sampler.sample()
            times = []
            for _ in range(15):
                started = time.process_time()
                sampler.sample()
                times.append((time.process_time() - started) / (8192 // width) * 1e6)
            costs[width] = statistics.median(times)
            print(f"width {width:3}: {costs[width]:6.1f} us a poll, {costs[width] / width:5.2f} us a row")
    per_row = (costs[256] - costs[8]) / 248
    print(f"about {costs[8] - 8 * per_row:.1f} us a poll + {per_row:.2f} us a row (env and policy that do nothing)")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--limits", type=Path, default=Path("../shared/bench"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--core", type=int, default=max(os.sched_getaffinity(0)))
    options = parser.parse_args()
    if options.limits.exists():
        compare(options.limits, options.rounds, options.seconds, options.core)
    else:
        print(f"no limit scripts in {options.limits}: only the sampler's own cost is measured")
    own_cost(options.core)


if __name__ == "__main__":
    main()
