"""Served actions per second over HTTP: keep-alive clients in this process, the server in another, every row kept."""

from __future__ import annotations

import contextlib
import http.client
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlsample.errors import ConfigError, SamplerError, ServingError

__all__ = ["bench_serving_http"]

_EPISODE_STEPS = 200
_FRAGMENT_ROWS, _BATCH_ROWS = 128, 2048  # at least
_END_S = 20.0
_WARM_UP_S = 1.0
_JSON, _MSGPACK = "application/json", "application/msgpack"


@dataclass
class _Clock:
    """Shared by the client threads. ``waits`` has a list for each, in seconds, filled while ``measuring``."""

    waits: list[list[float]]
    measuring: bool = False
    over: bool = False
    errors: list[BaseException] = field(default_factory=list)


def bench_serving_http(clients: int, seconds: float, batch: int = 1) -> dict[str, float]:
    """Measures served actions over HTTP: two 64x64 nets that act by numpy, on CartPole's spaces.

    Each client is a thread with one connection (``http.client``, kept alive) that plays episodes of 200 steps as fast
    as it is answered: one observation a call, in JSON, with the reward of the step before; or ``batch`` of them, in
    msgpack.

    Args:
        clients: threads; with ``batch``, each plays so many episodes side by side.
        seconds: to measure, after a second to warm up.
        batch: observations a call.

    Returns:
        ``actions_per_s``; ``p50_ms`` and ``p99_ms`` of a call; ``rows``, sampled meanwhile.

    Raises:
        ConfigError: fewer than one client or observation.
        ServingError: the server or a client failed, or rows were dropped: this is no measurement.
    """
    if clients < 1 or batch < 1:
        raise ConfigError(f"clients and batch must be at least 1, got {clients} and {batch}")
    clock = _Clock([[] for _ in range(clients)])
    play = _play_batches if batch > 1 else _play_singly
    with _server(clients * batch) as (port, ask), _threads(clients, play, port, batch, clock):
        time.sleep(_WARM_UP_S)
        before = ask("rows")
        clock.measuring = True
        started = time.perf_counter()
        time.sleep(seconds)
        clock.measuring = False
        elapsed = time.perf_counter() - started
        rows, dropped = ask("rows") - before, ask("dropped")
    waits = np.concatenate([np.array(mine) for mine in clock.waits])
    if dropped or clock.errors or not len(waits):
        raise ServingError(
            f"{dropped} rows were dropped, {len(waits)} calls answered, {len(clock.errors)} clients failed "
            f"({clock.errors[:1]}): this is no measurement"
        )
    p50, p99 = np.percentile(waits, [50, 99]) * 1e3
    rate = len(waits) * batch / elapsed
    return {"actions_per_s": rate, "p50_ms": float(p50), "p99_ms": float(p99), "rows": float(rows)}


# ---------------------------------------------------------------------- clients


@contextlib.contextmanager
def _threads(clients: int, play: Any, port: int, batch: int, clock: _Clock) -> Iterator[None]:
    def run(waits: list[float]) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port)  # a timeout would cost a poll() per send and recv
        try:
            while not clock.over:
                play(connection, batch, clock, waits)
        except Exception as e:
            clock.errors.append(e)
        finally:
            connection.close()

    threads = [threading.Thread(target=run, args=(waits,), daemon=True) for waits in clock.waits]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        clock.over = True
        until = time.monotonic() + _END_S  # a client that waits longer gets its end when the server is killed
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))


def _post(connection: http.client.HTTPConnection, path: str, body: Any, media_type: str = _JSON) -> bytes:
    connection.request("POST", path, body, {"Content-Type": media_type})
    response = connection.getresponse()
    answer = response.read()
    if response.status >= 300:
        raise ServingError(f"{path}: {response.status} {answer[:200]!r}")
    return answer


def _start(connection: http.client.HTTPConnection) -> str:
    return str(json.loads(_post(connection, "/v1/episodes", "{}"))["episode_id"])


def _end(connection: http.client.HTTPConnection, episode_id: str) -> None:
    _post(connection, f"/v1/episodes/{episode_id}/end", json.dumps({"obs": [0.0] * 4, "reward": 1.0}))


def _play_singly(connection: http.client.HTTPConnection, batch: int, clock: _Clock, waits: list[float]) -> None:
    episode_id = _start(connection)
    path, body = f"/v1/episodes/{episode_id}/action", json.dumps({"obs": [0.0] * 4, "reward": 1.0})
    now = time.perf_counter
    for _ in range(_EPISODE_STEPS):
        asked = now()
        _post(connection, path, body)
        if clock.measuring:
            waits.append(now() - asked)
        if clock.over:
            return
    _end(connection, episode_id)


def _play_batches(connection: http.client.HTTPConnection, batch: int, clock: _Clock, waits: list[float]) -> None:
    from rlsample.serving.wire import encode

    ids = [_start(connection) for _ in range(batch)]
    values = {"episode_ids": ids, "obs": np.zeros((batch, 4), np.float32), "rewards": [1.0] * batch}
    now = time.perf_counter
    for _ in range(_EPISODE_STEPS):
        asked = now()
        _post(connection, "/v1/actions", encode(values, _MSGPACK), _MSGPACK)
        if clock.measuring:
            waits.append(now() - asked)
        if clock.over:
            return
    for episode_id in ids:
        _end(connection, episode_id)


# ---------------------------------------------------------------------- server


@contextlib.contextmanager
def _server(lanes: int) -> Iterator[tuple[int, Callable[[str], int]]]:
    """A server process for so many episodes: its port, and ``ask("rows" | "dropped")``."""
    process = subprocess.Popen(
        [sys.executable, "-m", __name__, str(lanes)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    questions, answers = process.stdin, process.stdout

    def answered() -> int:
        line = answers.readline()
        if not line:
            raise ServingError("the server's process has ended")
        return int(line)

    def ask(question: str) -> int:
        questions.write(f"{question}\n")
        questions.flush()
        return answered()

    try:
        yield answered(), ask
    finally:
        with contextlib.suppress(OSError):
            questions.close()  # tells it to end
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(_END_S)
        answers.close()


def _serve(lanes: int) -> None:
    import torch
    from gymnasium.spaces import Box, Discrete

    from rlsample.env.serving import ServingEnv
    from rlsample.evaluation import CommonPolicyEvaluator
    from rlsample.policy import PPOPolicy
    from rlsample.serving import HttpSettings, PolicyServer

    torch.set_num_threads(1)
    env = ServingEnv(Box(-np.inf, np.inf, (4,), np.float32), Discrete(2), max_concurrent=lanes + 1)
    options: dict[str, Any] = {
        "rollout_fragment_length": max(_FRAGMENT_ROWS, _BATCH_ROWS // lanes),
        "sample_queue_size": 64,
    }
    counts = {"rows": 0, "dropped": 0}
    evaluator = CommonPolicyEvaluator(env, PPOPolicy, num_envs=lanes, seed=0, **options)
    server = PolicyServer(evaluator, HttpSettings(port=0, max_pending=2 * lanes + 16), sample=False)
    nobody_asks = threading.Event()
    with evaluator, server:
        print(server.address[1], flush=True)
        threading.Thread(target=_answer, args=(counts, env, nobody_asks), daemon=True).start()
        try:
            while True:
                counts["rows"] += evaluator.sample().count
                counts["dropped"] += int(evaluator.get_timers()["sampler/rows_dropped"])
        except SamplerError:
            if not nobody_asks.is_set():
                raise


def _answer(counts: dict[str, int], env: Any, nobody_asks: threading.Event) -> None:
    """Answers questions on stdin, until it is closed; then serving is over."""
    try:
        for question in sys.stdin:
            print(counts[question.strip()], flush=True)
    finally:
        nobody_asks.set()
        env.desk.stop("the measurement is over")


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
