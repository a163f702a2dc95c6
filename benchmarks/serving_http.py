"""Actions of rlsample over HTTP beside FastAPI + torch by hand, interleaved: medians of the rounds, and of the ratios.

python benchmarks/serving_http.py --peer-python /tmp/peer/bin/python [--rounds 5] [--seconds 5] [clients ...]

The peer's python needs fastapi, pydantic, uvicorn, numpy and torch; with httptools and uvloop it is faster. Both have
their server in one process and the same kind of clients, threads with http.client, in another. The peer records
nothing; here every row is kept for training.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
from pathlib import Path

PEER = "/work/shared/bench/peer_fastapi.py"
BATCH = 64


def ours(clients: int, seconds: float, batch: int = 1) -> dict[str, float]:
    options = ["--clients", str(clients), "--seconds", str(seconds), "--batch", str(batch)]
    command = [sys.executable, "-m", "rlsample.cli", "bench", "serving", "--http", "--json", *options]
    return json.loads(output_of(command).splitlines()[-1])


def output_of(command: list[str]) -> str:
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"failed: {' '.join(command)}")
    return done.stdout


def peer(python: str, script: str, clients: int, seconds: float) -> dict[str, float]:
    out = output_of([python, script, str(clients), str(seconds)])
    found = re.search(r"req/s (\S+) p50 ms (\S+) p99 ms (\S+)", out)
    assert found, out
    rate, p50, p99 = map(float, found.groups())
    return {"actions_per_s": rate, "p50_ms": p50, "p99_ms": p99}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--peer-python", required=True, help="a python with fastapi, pydantic, uvicorn, numpy, torch")
    parser.add_argument("--peer", default=PEER, help="the peer's script")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("clients", type=int, nargs="*", default=[1, 16, 64])
    given = parser.parse_args()
    if not Path(given.peer).exists():
        sys.exit(f"{given.peer} is not there; name the peer's script with --peer")
    for clients in given.clients:
        pairs = [
            (peer(given.peer_python, given.peer, clients, given.seconds), ours(clients, given.seconds))
            for _ in range(given.rounds)
        ]
        parts = [f"K={clients}:"]
        for name, side in (("fastapi", 0), ("rlsample", 1)):
            of = {key: statistics.median(pair[side][key] for pair in pairs) for key in pairs[0][0]}
            parts.append(f"{name} {of['actions_per_s']:,.0f}/s p50 {of['p50_ms']:.2f} ms p99 {of['p99_ms']:.2f} ms,")
        faster = statistics.median(mine["actions_per_s"] / theirs["actions_per_s"] for theirs, mine in pairs)
        tail = statistics.median(mine["p99_ms"] / theirs["p99_ms"] for theirs, mine in pairs)
        print(*parts, f"rate ratio {faster:.2f}, p99 ratio {tail:.2f}", flush=True)
    batched = [ours(2, given.seconds, BATCH) for _ in range(given.rounds)]
    rate = statistics.median(found["actions_per_s"] for found in batched)
    print(f"batched, {BATCH} observations a call, 2 clients: {rate:,.0f} actions/s", flush=True)


if __name__ == "__main__":
    main()
