"""The learner on one device: how fast copies are, and whether they run beside the computing.

    python benchmarks/gpu_loader.py                 # on cuda:0 if there is one; under five minutes
    python benchmarks/gpu_loader.py --quick         # a few seconds, any machine
    python benchmarks/gpu_loader.py --json

Measured on 84 x 84 x 4 uint8 observations with IMPALA's convolutional policy:

* ``copy_gb_per_s``: one slot, pinned host memory to device, nothing else running; ``fill_gb_per_s``: fragments to host.
* per number of slots (0: no loaders; the learner joins, copies and computes in turn): rows per second, the learner's
  busy share, and seconds of filling, copying and computing.
* ``overlap``: how much of the copying is hidden behind the computing, from the time of an update alone, of a load
  alone, and of both together: 1 is all of it, 0 is none.
"""

from __future__ import annotations

import argparse
import json
import time

import numpy as np
import torch

from rlsample.bench.learner import ReadyMadeEvaluator, bench_learner
from rlsample.optimizers import DeviceGroup, DeviceSettings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=15.0, help="per measurement; there are eight")
    parser.add_argument("--rows", type=int, default=2000, help="rows of a train batch")
    parser.add_argument("--quick", action="store_true", help="tiny: shows that it runs, says nothing about speed")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    given = parser.parse_args()
    seconds, rows = (0.05, 8) if given.quick else (given.seconds, given.rows)
    if given.quick:
        torch.set_num_threads(1)
    result = {"device": describe(given.device), "rows_per_batch": rows, **copies(given.device, rows, seconds)}
    result["learner"] = [
        {"slots": slots, "precision": precision, **learner(given.device, rows, seconds, slots, precision)}
        for precision in (("float32",) if given.quick else ("float32", "bfloat16"))
        for slots in (0, 1, 2, 3)
        if slots or precision == "float32"
    ]
    print(json.dumps(result) if given.json else table(result))


def describe(device: str) -> str:
    return (
        torch.cuda.get_device_name(device) if device.startswith("cuda") else f"cpu, {torch.get_num_threads()} threads"
    )


def wait_for(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def mean_s(work, seconds: float) -> float:
    """Seconds per call, after two calls to warm up."""
    work()
    work()
    started, calls = time.perf_counter(), 0
    while calls < 3 or time.perf_counter() - started < seconds:
        work()
        calls += 1
    return (time.perf_counter() - started) / calls


def copies(device: str, rows: int, seconds: float) -> dict[str, float]:
    batches = [ReadyMadeEvaluator(1, "image", rows // 4).sample() for _ in range(4)]
    local = ReadyMadeEvaluator(0, "image", 0, device)
    with DeviceGroup(local.policy.multi_device_support(), DeviceSettings((device,)), num_slots=2) as group:
        group.load(0, batches)
        host, copy = group._hosts[0][0], group._copies[0]
        num_bytes = host.layout.num_bytes

        def fill() -> None:
            copy.wait_for_copy()
            host.fill(batches)

        def upload() -> None:
            copy.upload(host.memory.tensor, host.layout)
            copy.wait_for_copy()

        def update() -> None:
            group.train_pass(0)
            group.release(0)
            wait_for(device)

        def load() -> None:
            group.load(1, batches)
            wait_for(device)

        def both() -> None:  # the load is begun first and runs beside the update
            group.load(1, batches)
            group.train_pass(0)
            wait_for(device)

        fill_s, upload_s = mean_s(fill, seconds / 4), mean_s(upload, seconds / 4)
        update_s, load_s, both_s = (mean_s(work, seconds / 4) for work in (update, load, both))
    on_device_s = upload_s if device.startswith("cuda") else 0.0
    return {
        "megabytes_per_batch": num_bytes / 1e6,
        "fill_gb_per_s": num_bytes / fill_s / 1e9,
        "copy_gb_per_s": num_bytes / upload_s / 1e9 if on_device_s else 0.0,
        "update_ms": update_s * 1e3,
        "load_ms": load_s * 1e3,
        "both_ms": both_s * 1e3,
        "overlap": float(np.clip((update_s + load_s - both_s) / on_device_s, 0, 1)) if on_device_s else 0.0,
    }


def learner(device: str, rows: int, seconds: float, slots: int, precision: str) -> dict[str, float]:
    return bench_learner(seconds, "image", rows, slots, device, precision)


def table(result: dict) -> str:
    lines = [f"{result['device']}, {result['rows_per_batch']} rows of 4x84x84 uint8 per batch"]
    lines += [f"  {name:<22}{value:>12.3f}" for name, value in result.items() if isinstance(value, float)]
    lines.append("  slots precision      rows/s   busy   copies/row   fill s   copy s  compute s")
    for one in result["learner"]:
        lines.append(
            f"  {one['slots']:>5} {one['precision']:<9} {one['rows_per_s']:>11,.0f} {one['busy_share']:>6.1%}"
            f" {one['copies_per_row']:>12.2f} {one['fill_s']:>8.2f} {one['copy_s']:>8.2f} {one['compute_s']:>10.2f}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
