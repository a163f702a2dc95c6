"""How many fragments per second one driver takes from process workers: `python benchmarks/driver_rate.py --json`.

The evaluators are fakes that make their rows in microseconds, so that the driver and the way between are what is
measured. ``driver_us_per_fragment`` is the driver's own CPU time: its inverse is the most that it can take, with any
number of workers. Rows have ten columns, about 60 bytes.

"""

from __future__ import annotations

import argparse
import functools
import json
import time

from rlsample.evaluation import EvaluatorSet
from rlsample.evaluation.requests import Requests
from rlsample.testing import RowEvaluator


def measure(num_workers: int, rows: int, seconds: float) -> dict[str, float]:
    with EvaluatorSet.create(functools.partial(RowEvaluator, sizes=(rows,)), num_workers) as evaluators:
        evaluators.sync_weights()
        requests = Requests(evaluators)
        requests.ask_all(2)
        _take_for(requests, 0.5)
        started, cpu = time.perf_counter(), time.process_time()
        fragments, num_bytes = _take_for(requests, seconds)
        took, cpu = time.perf_counter() - started, time.process_time() - cpu
        requests.take(requests.in_flight())
    return {
        "num_workers": num_workers,
        "rows": rows,
        "fragments_per_s": fragments / took,
        "rows_per_s": fragments * rows / took,
        "mb_per_s": num_bytes / took / 1e6,
        "driver_us_per_fragment": cpu / fragments * 1e6,
        "driver_limit_fragments_per_s": fragments / cpu,
    }


def _take_for(requests: Requests, seconds: float) -> tuple[int, int]:
    fragments = num_bytes = 0
    deadline = time.perf_counter() + seconds
    while time.perf_counter() < deadline:
        for answer in requests.take():
            fragments, num_bytes = fragments + 1, num_bytes + answer.value.nbytes
            requests.ask(answer.worker)
    return fragments, num_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--rows", type=int, nargs="+", default=[50, 500, 20_000], help="rows of a fragment")
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    for rows in given.rows:
        result = measure(given.num_workers, rows, given.seconds)
        if given.json:
            print(json.dumps(result))
        else:
            print("  ".join(f"{name} {value:,.0f}" for name, value in result.items()))


if __name__ == "__main__":
    main()
