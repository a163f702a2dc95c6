"""A policy learns CartPole only through HTTP, from four client processes; clients and server are killed on the way.

`pytest -m slow -rP tests/slow/test_http_learning.py` prints how long it took.
"""

import contextlib
import json
import signal
import subprocess
import sys
import time
import urllib.request
import warnings
from pathlib import Path

import numpy as np
import pytest

from rlsample.offline import LogReader
from tests.serving.client_rig import free_port

pytestmark = pytest.mark.slow

GOAL = 475.0  # mean of the last 100 episodes that the clients played
LIMIT_S = 1800.0
ROOT = Path(__file__).parents[2]


class Processes:
    """What was started; all of it is killed in the end."""

    def __init__(self, folder, port):
        self.folder, self.url = folder, f"http://127.0.0.1:{port}"
        self._port, self._seed, self.players, self.server = port, 0, [], None

    def _start(self, *command):
        nothing = subprocess.DEVNULL
        return subprocess.Popen([sys.executable, "-m", *command], cwd=ROOT, stdout=nothing, stderr=nothing)

    def start_player(self):
        self._seed += 1
        self.players.append(self._start("tests.slow.http_player", self.url, str(self.folder), str(self._seed)))

    def start_server(self, *run):
        options = ("--port", str(self._port), "--train", "--checkpoint-interval-s", "5")
        self.server = self._start("rlsample.cli", "serve", *run, *options)
        until(lambda: self.stats() is not None, "the server", 120)

    def kill(self, process):
        process.kill()
        process.wait(30)

    def stats(self):
        """What /v1/stats answers, or None."""
        assert self.server.poll() is None, f"the server ended with {self.server.returncode}"
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/v1/stats", timeout=30) as answer:
            return json.load(answer)
        return None

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        for process in [*self.players, self.server]:
            if process is not None:
                self.kill(process)


def until(condition, what, limit_s=LIMIT_S):
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"no sign of {what} in {limit_s} s"
        time.sleep(0.25)


def test_four_clients_teach_a_policy_over_http_though_they_and_the_server_are_killed(tmp_path):
    run, logs = tmp_path / "run", tmp_path / "logs"
    new_run = ("--algo", "ppo", "--env-spaces", "CartPole-v1", "--seed", "0", "--out", str(run), "--output", str(logs))
    started = time.monotonic()
    with Processes(tmp_path, free_port()) as processes:
        processes.start_server(*new_run)
        for _ in range(4):
            processes.start_player()
        for sampled in (4_000, 8_000, 12_000, 16_000):  # each client dies once
            until(lambda sampled=sampled: processes.stats()["sampled_steps"] >= sampled, f"{sampled} steps")
            processes.kill(processes.players.pop(0))
            processes.start_player()
        learnt = []
        for sampled in (20_000, 26_000):  # the server dies twice, in the middle of everything
            until(lambda sampled=sampled: processes.stats()["sampled_steps"] >= sampled, f"{sampled} steps")
            learnt.append(processes.stats()["sampled_steps"])
            processes.kill(processes.server)
            processes.start_server(str(run))
            resumed = processes.stats()["sampled_steps"]
            assert learnt[-1] - 12_000 < resumed <= learnt[-1] + 4_000  # from its newest checkpoint
        until(lambda: processes.stats() is not None and mean_return(tmp_path) >= GOAL, f"a mean return of {GOAL}")
        seconds, stats = time.monotonic() - started, processes.stats()
        processes.server.send_signal(signal.SIGINT)
        assert processes.server.wait(60) == 130
        for player in processes.players:
            assert player.poll() is None  # it waits for the next server
            processes.kill(player)
    asked = observations_asked(tmp_path)
    recorded = observations_recorded(logs)
    print(
        f"mean of 100 episodes {mean_return(tmp_path):.0f} after {seconds:.0f} s; {len(asked):,} steps played, "
        f"{len(recorded):,} recorded, {stats['sampled_steps']:,} learnt from; p50 {stats['p50_ms']:.1f} ms"
    )
    assert len(set(asked)) == len(asked)  # each step of the clients has an observation of its own
    assert len(set(recorded)) == len(recorded)  # none doubled
    assert set(recorded) <= set(asked)  # none invented
    assert len(recorded) > 0.8 * len(asked)  # lost: what a killed server had not sampled, what no batch was full with
    assert any((run / "checkpoints").iterdir())


def mean_return(folder):
    """Mean of the last 100 returns, 0 where there are fewer."""
    returns = (folder / "returns").read_text().split()[-100:]
    return float(np.mean([int(one) for one in returns])) if len(returns) == 100 else 0.0


def observations_asked(folder):
    """Bytes of each observation that a client asked an action for."""
    found = []
    for path in sorted(folder.glob("asked-*")):
        content = path.read_bytes()
        found += [content[k : k + 16] for k in range(0, len(content) // 16 * 16, 16)]
    return found


def observations_recorded(logs):
    """Bytes of the observation of each row that a run of the server sampled."""
    with warnings.catch_warnings(), LogReader(logs) as reader:
        warnings.simplefilter("ignore")  # the last line of a killed server may be cut
        return [obs.tobytes() for batch in reader for obs in batch["obs"]]
