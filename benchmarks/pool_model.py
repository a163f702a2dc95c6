"""The pool on machines larger than this one: constants measured here, a formula, and a simulation that checks it.

    python benchmarks/pool_model.py                 # measures first (about a minute), then prints the table
    python benchmarks/pool_model.py --constants 25 3.5 0.6 3 30 8

The pool is one serial process (it takes rows, copies them, checks actions, wakes workers) in front of W workers. A step
takes a worker ``step_us`` (gamma distributed, ``spread`` its coefficient of variation). Per poll the pool spends

    poll_us + worker_us x (workers woken) + row_us x (rows)

and a sleeping worker starts ``wake_us`` later. EnvPool's published rates (its README, version 0.6.1.post1) are printed
beside; the env's own time is taken from the same table (one worker, sync), so that both start from the same step.
"""

from __future__ import annotations

import argparse
import heapq
import math
import mmap
import statistics
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import gymnasium
import numpy as np

from rlsample.bench.pool import bench_pool
from rlsample.env import as_base_env


@dataclass(frozen=True)
class Constants:
    """Microseconds."""

    poll_us: float
    worker_us: float
    row_us: float
    overhead_us: float  # a worker's own work per step
    wake_us: float
    copy_gb_s: float  # out of shared memory

    def per_row(self, row_bytes: int) -> float:
        """What a row costs the pool: bookkeeping, and the copy of its observation."""
        return self.row_us + row_bytes / self.copy_gb_s / 1000


class Instant(gymnasium.Env[np.ndarray, int]):
    """Costs nothing."""

    observation_space: gymnasium.Space[Any] = gymnasium.spaces.Box(-1, 1, (4,), np.float32)
    action_space: gymnasium.Space[Any] = gymnasium.spaces.Discrete(2)
    obs = np.zeros(4, np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return self.obs, {}

    def step(self, action: Any) -> Any:
        return self.obs, 0.0, False, False, {}


gymnasium.register("rlsample-bench/Instant-v0", entry_point=Instant)


def measure(seconds: float) -> Constants:
    """Fits the pool's CPU time per poll over several layouts: other work on the machine does not count then."""
    rows, times, overheads = [], [], []
    for workers in (1, 2, 4, 8):
        for count in (8, 32, 128, 512):
            found = bench_pool("rlsample-bench/Instant-v0", count, workers, seconds=seconds)
            rows.append([1.0, workers, count])
            times.append(found["pool_us_per_poll"])
            overheads.append((found["worker_us_per_step"], count / workers))
    poll_us, worker_us, row_us = np.linalg.lstsq(np.array(rows) / np.array(times)[:, None], np.ones(len(times)))[0]
    overhead = statistics.median(o for o, per_worker in overheads if per_worker >= 16)
    return Constants(float(poll_us), float(worker_us), float(row_us), overhead, wake_latency(), copy_speed())


def copy_speed() -> float:
    """GB/s of copying 64 Atari stacks out of shared memory; the best of several."""
    shared = np.frombuffer(mmap.mmap(-1, 64 * 28_224), np.uint8)
    best = math.inf
    for _ in range(200):
        started = perf_counter()
        shared.copy()
        best = min(best, perf_counter() - started)
    return shared.nbytes / best / 1e9


def wake_latency() -> float:
    """From a request to its answer with one instant env, less what both processes compute: half of it per way."""
    with as_base_env("rlsample-bench/Instant-v0", 1, backend="process", pool={"num_workers": 1}) as env:
        action, times = np.zeros(1, np.int64), []
        env.poll()
        for _ in range(3000):
            started = perf_counter()
            env.send_actions(env.all_ids, action)
            env.poll()
            times.append(perf_counter() - started)
    return max(1.0, float(np.percentile(times, 20)) * 1e6 / 3)


# ---------------------------------------------------------------------- the formula


def ordered_rate(c: Constants, workers: int, count: int, step_us: float, spread: float, row_bytes: int) -> float:
    """Steps per second where a poll waits for all: the slowest worker of each round, then the pool."""
    per_worker = count / workers
    slowest = per_worker * step_us + spread * step_us * math.sqrt(per_worker) * _expected_maximum(workers)
    serial = c.poll_us + c.worker_us * workers + c.per_row(row_bytes) * count
    return count / (slowest + c.wake_us + serial) * 1e6


def first_come_rate(c: Constants, workers: int, count: int, step_us: float, row_bytes: int) -> float:
    """Steps per second first come, with more envs than workers: full workers, or the pool at its largest batches.

    A pool that cannot keep up finds more rows at each poll, up to all that are not being stepped.
    """
    batch = count - workers
    pool = batch / (c.poll_us + c.worker_us * workers + c.per_row(row_bytes) * batch)
    return min(workers / step_us, pool) * 1e6


def _expected_maximum(n: int) -> float:
    """Of n standard normal values, roughly (Blom 1958): the quantile at (n - 0.375) / (n + 0.25)."""
    return statistics.NormalDist().inv_cdf((n - 0.375) / (n + 0.25)) if n > 1 else 0.0


# ---------------------------------------------------------------------- the simulation


def simulate(
    c: Constants, workers: int, count: int, batch: int, step_us: float, spread: float, row_bytes: int
) -> float:
    """Steps per second of the pool as it works: an event for each finished step; ``batch == count`` is ordered."""
    rng = np.random.default_rng(0)
    rounds, shape, row_us = 300, 1 / spread**2, c.per_row(row_bytes)
    draws = iter(rng.gamma(shape, step_us / shape, size=count * rounds * 2).tolist())
    owner = [slot * workers // count for slot in range(count)]
    queues: list[list[int]] = [[] for _ in range(workers)]
    events: list[tuple[float, int, int]] = []  # when, worker, slot: a step is done
    busy = [False] * workers
    now, ready, steps = 0.0, list(range(count)), 0
    while steps < count * rounds:
        while len(ready) < batch:
            now_done, w, slot = heapq.heappop(events)
            now = max(now, now_done)
            ready.append(slot)
            if queues[w]:
                heapq.heappush(events, (now_done + next(draws), w, queues[w].pop(0)))
            else:
                busy[w] = False
        while events and events[0][0] <= now:  # what came while the pool was at work
            when, w, slot = heapq.heappop(events)
            ready.append(slot)
            if queues[w]:
                heapq.heappush(events, (when + next(draws), w, queues[w].pop(0)))
            else:
                busy[w] = False
        taken, ready = ready, []
        woken = {owner[slot] for slot in taken}
        now += c.poll_us + c.worker_us * len(woken) + row_us * len(taken)
        steps += len(taken)
        for slot in taken:
            queues[owner[slot]].append(slot)
        for w in woken:
            if not busy[w]:
                busy[w] = True
                heapq.heappush(events, (now + c.wake_us + next(draws), w, queues[w].pop(0)))
    return steps / now * 1e6


# ---------------------------------------------------------------------- the table

# EnvPool README: machine -> threads, and for each env its step with one worker (sync) in microseconds, frame skip,
# and the highest published frames per second, sync and async (numa + async at 96 and 256)
PUBLISHED = {
    "laptop, 12 threads": (12, {"Atari": (507, 4, 37_396, 49_439), "Ant": (320, 5, 66_622, 105_126)}),
    "TPU-VM, 96 threads": (96, {"Atari": (555, 4, 170_380, 373_169), "Ant": (365, 5, 296_681, 896_830)}),
    "DGX-A100, 256 threads": (256, {"Atari": (518, 4, 427_851, 1_069_922), "Ant": (312, 5, 949_787, 3_134_287)}),
}


ROW_BYTES = {"Atari": 4 * 84 * 84, "Ant": 111 * 8}


def table(c: Constants, spread: float) -> list[str]:
    """Rows of the table in docs/performance.md: steps per second, all cores equal and none shared."""
    lines = [
        "| machine | env | step | workers full | ordered: formula | simulated | first come: formula | simulated "
        "| EnvPool sync | async |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for machine, (cores, envs) in PUBLISHED.items():
        for name, (step, skip, sync, fast) in envs.items():
            workers = cores - 1
            step_us = step + c.overhead_us
            count = 3 * workers
            batch = max(1, count // 3)
            size = ROW_BYTES[name]
            numbers = [
                workers / step_us * 1e6,
                ordered_rate(c, workers, count, step_us, spread, size),
                simulate(c, workers, count, count, step_us, spread, size),
                first_come_rate(c, workers, count, step_us, size),
                simulate(c, workers, count, batch, step_us, spread, size),
                sync / skip,
                fast / skip,
            ]
            cells = " | ".join(f"{number / 1000:,.1f} k" for number in numbers)
            lines.append(f"| {machine} | {name} | {step} µs | {cells} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument(
        "--constants", type=float, nargs=6, metavar=("POLL", "WORKER", "ROW", "OVERHEAD", "WAKE", "COPY")
    )
    parser.add_argument("--seconds", type=float, default=1.0, help="per layout measured")
    parser.add_argument("--spread", type=float, default=0.3, help="coefficient of variation of a step's time")
    given = parser.parse_args()
    c = Constants(*given.constants) if given.constants else measure(given.seconds)
    print(
        f"per poll {c.poll_us:.1f} µs + {c.worker_us:.2f} µs a worker + {c.row_us:.3f} µs a row; a worker spends "
        f"{c.overhead_us:.2f} µs a step of its own; a wake-up takes {c.wake_us:.0f} µs; copies run at "
        f"{c.copy_gb_s:.1f} GB/s"
    )
    print("\n".join(table(c, given.spread)))


if __name__ == "__main__":
    main()
