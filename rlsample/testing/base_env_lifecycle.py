"""Rules 8 to 10 of a polled env: failures, the same game again, and closing."""

from __future__ import annotations

import gc
import pickle
import random
import threading
import time

import numpy as np

from rlsample.env.base_env import BaseEnv
from rlsample.errors import EnvClosedError, EnvFailedError, EnvProtocolError
from rlsample.testing.base_env_player import AT_ONCE_S, Conditions, ConformanceError, Player, outcome_of
from rlsample.testing.held_resources import held_resources

__all__ = ["rule_8_failures", "rule_9_same_again", "rule_10_close"]

_CLOSE_S = 1.5  # a second, and something for a busy machine


def rule_8_failures(given: Conditions) -> str:
    """A failing slot shows in ``failures`` and has no row; the others go on; only a failed slot can be restarted."""
    with given.make(given.seed) as env:
        Player(env, given.seed).play(1)
        try:
            env.try_restart(np.array([0]))
            raise ConformanceError(8, "a restart of slot 0, which has not failed", "no error", "an EnvProtocolError")
        except EnvProtocolError:
            pass
    if given.make_faulty is None:
        return "no make_faulty was given"
    with given.make_faulty(given.seed) as env:
        player = Player(env, given.seed)
        try:
            player.play(given.rounds)
        except Exception as e:
            raise ConformanceError(8, "a failing slot", f"{type(e).__name__} out of a call", "failures in poll") from e
        failed = set(player.failures)
        if not failed or len(failed) == env.num_envs:
            raise ConformanceError(8, "slots in failures", sorted(failed), "the failing ones, and not all")
        for batch, _ in player.batches:
            both = set(batch.failures) & set(batch.env_ids.tolist())
            if both:
                raise ConformanceError(8, "slots with a failure and a row in one batch", sorted(both), "none")
        for slot, failure in player.failures.items():
            if not isinstance(failure, EnvFailedError) or failure.slot != slot:
                raise ConformanceError(8, f"failure of slot {slot}", repr(failure), "an EnvFailedError with its slot")
        counts = {slot: len(rows) for slot, rows in player.rows.items() if slot not in failed}
        if min(counts.values()) < given.rounds - 1:
            raise ConformanceError(8, "rows of the slots that go on", counts, f"{given.rounds} each")
    return ""


def rule_9_same_again(given: Conditions) -> str:
    """One seed and the same actions give the same rows, bit for bit, on every backend; global RNGs are left alone."""
    before = pickle.dumps((random.getstate(), np.random.get_state()))
    first = given.played()
    if pickle.dumps((random.getstate(), np.random.get_state())) != before:
        raise ConformanceError(9, "state of the global RNGs of random and numpy", "changed", "as it was")
    others = [("a second env", given.make)]
    if given.make_other is not None:
        others.append(("the other backend", given.make_other))
    for name, make in others:
        second = given.played(make)
        for slot, rows in first.rows.items():
            if name == "a second env" and len(rows) != len(second.rows[slot]):
                raise ConformanceError(9, f"rows of slot {slot} on {name}", len(second.rows[slot]), len(rows))
            for k, (a, b) in enumerate(zip(rows, second.rows[slot], strict=False)):  # resets may take a round or none
                if a.key() != b.key():
                    raise ConformanceError(9, f"row {k} of slot {slot} on {name} with the same seed", b, a)
    return ""


def rule_10_close(given: Conditions) -> str:
    """close ends another thread's poll within a second, may be called twice, and leaves nothing behind."""
    before = held_resources()
    env = given.make(given.seed)
    playing = threading.Event()
    ended: list[BaseException] = []

    def play(env: BaseEnv) -> None:
        try:
            Player(env, given.seed).play(10**9, lambda player: playing.set())
        except BaseException as e:
            ended.append(e)

    thread = threading.Thread(target=play, args=(env,), daemon=True)
    thread.start()
    if not playing.wait(60):
        raise ConformanceError(10, "the first poll", ended or "no answer in 60 s", "first rows")
    started = time.monotonic()
    env.close()
    thread.join(max(0.0, _CLOSE_S - (time.monotonic() - started)))
    alive, closed = thread.is_alive(), bool(ended) and isinstance(ended[0], EnvClosedError)
    if alive or not closed:
        got = "still playing after a second" if alive else repr(ended[0])
        raise ConformanceError(10, "a thread that plays while another closes", got, "EnvClosedError")
    for name, call, want in (("a second close", env.close, None), ("a poll after close", env.poll, EnvClosedError)):
        outcome = outcome_of(call, AT_ONCE_S)
        if not (outcome is None if want is None else isinstance(outcome, want)):
            raise ConformanceError(10, name, repr(outcome), "nothing" if want is None else want.__name__)
    ended.clear()  # its traceback holds the env
    del env, thread, call, outcome
    deadline = time.monotonic() + 2.0
    while left := held_resources() - before:
        if time.monotonic() > deadline:
            raise ConformanceError(10, "left behind after close", sorted(left), "nothing")
        gc.collect()
        time.sleep(0.01)
    return ""
