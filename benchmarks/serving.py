"""Served actions of rlsample beside the bare limit, interleaved: median of the rounds, and the ratio.

python benchmarks/serving.py [limit_serving.py] [rounds] [seconds] [clients ...]
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from pathlib import Path

OURS = (
    "import sys; from rlsample.bench.serving import bench_serving as b; print(b(int(sys.argv[1]), float(sys.argv[2])))"
)


def limit(script: str, clients: int, seconds: float) -> float:
    out = subprocess.run(
        [sys.executable, script, str(clients), str(seconds)], capture_output=True, text=True, check=True
    )
    return float(out.stdout.split()[-1])


def ours(clients: int, seconds: float) -> dict[str, float]:
    command = [sys.executable, "-c", OURS, str(clients), str(seconds)]
    return eval(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def main() -> None:
    script = sys.argv[1] if len(sys.argv) > 1 else "/work/shared/bench/limit_serving.py"
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 5
    seconds = float(sys.argv[3]) if len(sys.argv) > 3 else 4.0
    widths = [int(k) for k in sys.argv[4:]] or [1, 16, 64]
    if not Path(script).exists():
        sys.exit(f"{script} is not there; name the limit's script")
    for clients in widths:
        pairs = [(limit(script, clients, seconds), ours(clients, seconds)) for _ in range(rounds)]
        bar = statistics.median(bare for bare, _ in pairs)
        rate = statistics.median(result["actions_per_s"] for _, result in pairs)
        ratio = statistics.median(result["actions_per_s"] / bare for bare, result in pairs)
        p50, p99 = (statistics.median(result[name] for _, result in pairs) for name in ("p50_ms", "p99_ms"))
        rates = f"K={clients}: limit {bar:,.0f}/s, rlsample {rate:,.0f}/s, ratio {ratio:.2f}"
        print(f"{rates}, p50 {p50:.2f} ms, p99 {p99:.2f} ms", flush=True)


if __name__ == "__main__":
    main()
