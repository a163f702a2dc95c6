"""Replay buffers in one run, interleaved: ours, torchrl's prioritised one and Stable-Baselines3's uniform one.

    python -m venv /tmp/rivals && /tmp/rivals/bin/pip install torch torchrl stable-baselines3
    python benchmarks/replay.py --rival-python /tmp/rivals/bin/python

Rows per second into a full buffer, in pieces of ``--add-rows``, and out of it: a draw, and for prioritised buffers new
priorities for the drawn rows. Every buffer gives observation, action, reward, end and next observation of each row.
Neither Stable-Baselines3 nor its contrib package has a prioritised buffer: that comparison is of uniform draws. Each
measurement is a process of its own with one thread; medians, and the smallest and largest ratio of a round.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from time import perf_counter
from typing import Any

import numpy as np

ROWS = {  # shape and dtype of an observation, capacity
    "vector": ((4,), np.float32, 100_000),
    "image": ((4, 84, 84), np.uint8, 5_000),
}
RIVALS = {"torchrl": "prioritized", "sb3": "uniform"}


class Rows:
    """Pieces of one long episode after the other, so that most next observations are the next row's own."""

    def __init__(self, kind: str, num_rows: int) -> None:
        shape, dtype, self.capacity = ROWS[kind]
        rng = np.random.default_rng(0)
        self.num_rows = num_rows
        self.all_obs = rng.integers(0, 200, (num_rows + 1, *shape)).astype(dtype)
        self.obs, self.next_obs = self.all_obs[:-1], self.all_obs[1:]
        self.actions = rng.integers(0, 2, num_rows)
        self.rewards = rng.normal(size=num_rows).astype(np.float32)
        self.terminated = np.zeros(num_rows, bool)


def ours(rows: Rows, prioritized: bool) -> tuple[Callable[[], Any], Callable[[int], Any]]:
    from rlsample.optimizers.replay_buffer import PrioritizedReplayBuffer, ReplayBuffer
    from rlsample.sample_batch import NextObs, SampleBatch

    columns = {name: getattr(rows, name) for name in ("obs", "actions", "rewards", "terminated")}
    index = np.append(np.arange(1, rows.num_rows), -1)
    batch = SampleBatch(columns, NextObs(index, rows.all_obs[-1:]))
    buffer: Any = PrioritizedReplayBuffer(rows.capacity) if prioritized else ReplayBuffer(rows.capacity)
    rng = np.random.default_rng(1)

    def draw(num_rows: int) -> Any:
        drawn = buffer.sample(num_rows)
        if prioritized:
            buffer.update_priorities(drawn["replay_id"], rng.random(num_rows))
        return drawn["obs"], drawn["next_obs"]

    return lambda: buffer.add(batch), draw


def torchrl(rows: Rows, prioritized: bool) -> tuple[Callable[[], Any], Callable[[int], Any]]:
    # Its compiled sum tree may have been built for another release of torch, of which the tree uses nothing: symbols
    # are looked up when they are called.
    sys.setdlopenflags(os.RTLD_LAZY)
    import torch
    from tensordict import TensorDict
    from torchrl.data import LazyTensorStorage, TensorDictPrioritizedReplayBuffer

    assert prioritized
    columns = {name: torch.from_numpy(getattr(rows, name)) for name in ("obs", "actions", "rewards", "terminated")}
    columns["next_obs"] = torch.from_numpy(rows.next_obs)
    batch = TensorDict(columns, batch_size=[rows.num_rows])
    buffer = TensorDictPrioritizedReplayBuffer(alpha=0.6, beta=0.4, storage=LazyTensorStorage(rows.capacity))

    def draw(num_rows: int) -> Any:
        drawn = buffer.sample(num_rows)
        buffer.update_priority(drawn["index"], torch.rand(num_rows))
        return drawn["obs"], drawn["next_obs"]

    return lambda: buffer.extend(batch), draw


def sb3(rows: Rows, prioritized: bool) -> tuple[Callable[[], Any], Callable[[int], Any]]:
    import gymnasium
    from stable_baselines3.common.buffers import ReplayBuffer

    assert not prioritized
    space = gymnasium.spaces.Box(0, 255, rows.obs.shape[1:], rows.obs.dtype.type)
    actions = rows.actions[:, None]
    infos: list[dict[str, Any]] = [{} for _ in range(rows.num_rows)]
    buffer = ReplayBuffer(rows.capacity, space, gymnasium.spaces.Discrete(2), "cpu", n_envs=rows.num_rows)
    return (
        lambda: buffer.add(rows.obs, rows.next_obs, actions, rows.rewards, rows.terminated, infos),
        buffer.sample,
    )


MAKERS = {"ours": ours, "torchrl": torchrl, "sb3": sb3}


def measure(name: str, kind: str, prioritized: bool, add_rows: int, batches: list[int], seconds: float) -> Any:
    """``add`` and each batch size -> rows per second."""
    rows = Rows(kind, add_rows)
    add, draw = MAKERS[name](rows, prioritized)
    for _ in range(-(-rows.capacity // add_rows) + 1):
        add()
    found = {"add": add_rows * per_second(add, seconds)}
    for batch in batches:
        found[f"sample {batch}"] = batch * per_second(lambda batch=batch: draw(batch), seconds)
    return found


def per_second(work: Callable[[], Any], seconds: float) -> float:
    for _ in range(3):
        work()
    calls, began = 0, perf_counter()
    while (passed := perf_counter() - began) < seconds:
        work()
        calls += 1
    return calls / passed


def run(python: str, name: str, kind: str, how: str, options: argparse.Namespace) -> dict[str, float]:
    """:func:`measure` in a process of its own."""
    command = [python, __file__, "--only", name, "--kind", kind, "--how", how, "--add-rows", str(options.add_rows)]
    command += ["--seconds", str(options.seconds), "--batches", *map(str, options.batches)]
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **threads})
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def compare(options: argparse.Namespace) -> list[dict[str, Any]]:
    table = []
    for kind in ROWS:
        for rival, how in RIVALS.items():
            rounds = []
            for _ in range(options.rounds):
                mine = run(sys.executable, "ours", kind, how, options)
                rounds.append((mine, run(options.rival_python, rival, kind, how, options)))
            for what in rounds[0][0]:
                pairs = [(mine[what], theirs[what]) for mine, theirs in rounds]
                ratios = [mine / theirs for mine, theirs in pairs]
                row = {"rows": kind, "draws": how, "what": what, "rival": rival}
                row["ours_rows_per_s"] = statistics.median(mine for mine, _ in pairs)
                row["rival_rows_per_s"] = statistics.median(theirs for _, theirs in pairs)
                row["ratio"], row["min"], row["max"] = statistics.median(ratios), min(ratios), max(ratios)
                table.append(row)
                print(
                    f"{kind:7} {how:12} {what:11} ours {row['ours_rows_per_s']:12,.0f}  {rival:8}"
                    f" {row['rival_rows_per_s']:12,.0f} rows/s  ratio {row['ratio']:5.2f}"
                    f" ({row['min']:.2f}..{row['max']:.2f})",
                    flush=True,
                )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rival-python", help="of a venv with torchrl and stable-baselines3")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--add-rows", type=int, default=32)
    parser.add_argument("--batches", type=int, nargs="+", default=[32, 256])
    parser.add_argument("--json", action="store_true")
    for internal in ("--only", "--kind", "--how"):
        parser.add_argument(internal, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        measured = (options.only, options.kind, options.how == "prioritized", options.add_rows, options.batches)
        print(json.dumps(measure(*measured, options.seconds)))
        return
    if options.rival_python is None:
        parser.error("--rival-python is missing: a venv with torchrl and stable-baselines3")
    table = compare(options)
    if options.json:
        print(json.dumps(table))


if __name__ == "__main__":
    main()
