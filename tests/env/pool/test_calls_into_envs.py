"""``call``, ``set_attr`` and ``reset_with``: what comes of workers that die, hang or are busy with them."""

from __future__ import annotations

import os
import signal
import threading
import time

import numpy as np
import pytest

from rlsample.errors import EnvClosedError, EnvFailedError, EnvProtocolError
from rlsample.testing import CountEnv

BIG = 3_000_000  # bytes: far more than a pipe holds


class Talkative(CountEnv):
    """Does what a call asks for; ``blob``: bytes of the info of each step; ``note``: a file made when it sleeps."""

    def __init__(self, slot=0, blob=0, note=None):
        super().__init__(50)
        self.slot, self.blob, self.note = slot, blob, note

    def die(self, slot):
        if slot == self.slot:
            os._exit(3)

    def sleep(self, seconds):
        if self.note:
            self.note.touch()
        time.sleep(seconds)

    def size_of(self, data):
        return len(data)

    def reset(self, *, seed=None, options=None):
        if options:
            self.die(options.get("die"))
        return super().reset(seed=seed, options=options)

    def step(self, action):
        *row, info = super().step(action)
        return *row, {"blob": np.zeros(self.blob, np.uint8)} if self.blob else info

    @property
    def slow(self):
        return self._slow

    @slow.setter
    def slow(self, seconds):
        self._slow = seconds
        self.sleep(seconds)


def make_talkative(ctx):
    return Talkative(ctx.slot_index)


def zeros(count):
    return np.zeros(count, np.int64)


def in_thread(work):
    """Runs ``work`` in a thread; returns the thread and a list that gets what came of it."""
    found = []

    def run():
        try:
            found.append(work())
        except Exception as e:
            found.append(e)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, found


@pytest.mark.parametrize("ordered", [True, False])
def test_a_worker_that_dies_in_a_call_is_known_to_be_dead(make_pool, ordered):
    env = make_pool(4, make=make_talkative, num_workers=2, ordered=ordered, batch_size=4, max_restarts=1)
    assert len(env.poll(20).env_ids) == 4
    with pytest.raises(EnvFailedError, match="slot 2: worker 1 exited with code 3 in this env"):
        env.call("die", 2)
    env.send_actions(np.arange(4), zeros(4))
    thread, found = in_thread(env.poll)
    thread.join(20)
    assert not thread.is_alive(), "poll waits for a worker that is dead"
    assert sorted(found[0].failures) == [2, 3]
    env.try_restart(np.array([2, 3]))
    ids = []
    while sorted(ids) != [0, 1, 2, 3]:
        batch = found.pop(0) if found else env.poll(20)
        assert len(batch.env_ids) or batch.failures, "the poll timed out"
        ids += batch.env_ids.tolist()
    assert env.call("slot") == [0, 1, 2, 3]


def test_a_worker_that_dies_in_a_reset_with_options_fails_its_slots_only(make_pool):
    env = make_pool(4, make=make_talkative, num_workers=2)
    env.poll()
    thread, found = in_thread(lambda: env.reset_with(np.array([3, 0, 2, 1]), None, {"die": 2}))
    thread.join(20)
    (batch,) = found
    assert batch.env_ids.tolist() == [0, 1]
    assert sorted(batch.failures) == [2, 3]
    assert "worker 1 exited with code 3" in str(batch.failures[3])
    env.send_actions(np.array([0, 1]), zeros(2))
    assert env.poll(20).obs.ravel().tolist() == [1, 1]
    with pytest.raises(EnvProtocolError, match="slot 2 takes no action: it is failed"):
        env.send_actions(np.array([2]), zeros(1))


def test_arguments_of_any_size_reach_the_envs(make_pool):
    env = make_pool(2, make=make_talkative, num_workers=1)
    env.poll()
    thread, found = in_thread(lambda: env.call("size_of", b"x" * BIG))
    thread.join(20)
    assert found == [[BIG, BIG]]
    env.set_attr("blob_of_words", [b"y" * BIG] * 2)
    assert [len(words) for words in env.call("blob_of_words")] == [BIG, BIG]


def test_a_large_argument_passes_a_large_info_that_nobody_has_read(make_pool):
    env = make_pool(2, make=lambda ctx: Talkative(ctx.slot_index, BIG), num_workers=1, ordered=False, batch_size=1)
    ids = []
    while len(ids) < 2:
        ids += env.poll(20).env_ids.tolist()
    env.send_actions(np.arange(2), zeros(2))
    thread, found = in_thread(lambda: env.call("size_of", b"x" * BIG))
    thread.join(20)
    assert found == [[BIG, BIG]]
    got = []
    while len(got) < 2:
        batch = env.poll(20)
        got += [len(batch.infos[row]["blob"]) for row in range(len(batch.env_ids))]
    assert got == [BIG, BIG]


@pytest.mark.parametrize("call", [("call", "sleep", 60), ("set_attr", "slow", [60, 60])])
def test_close_ends_a_call_that_takes_long(make_pool, tmp_path, call):
    note = tmp_path / "it sleeps"
    env = make_pool(2, make=lambda ctx: Talkative(note=note), num_workers=1, close_timeout_s=0.3)
    env.poll()
    method, *arguments = call
    thread, found = in_thread(lambda: getattr(env, method)(*arguments))
    deadline = time.monotonic() + 20
    while not note.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    closer, _ = in_thread(env.close)
    closer.join(5)
    assert not closer.is_alive(), "close waits for the call"
    thread.join(5)
    assert isinstance(found[0], EnvClosedError)


@pytest.mark.parametrize("call", [("call", "sleep", 60), ("set_attr", "slow", [60, 60])])
def test_a_call_that_hangs_fails_after_the_time_limit(make_pool, call):
    env = make_pool(2, make=make_talkative, num_workers=1, step_timeout_s=0.5)
    env.poll()
    method, *arguments = call
    thread, found = in_thread(lambda: getattr(env, method)(*arguments))
    thread.join(20)
    assert isinstance(found[0], EnvFailedError), found
    assert "worker 0 took more than step_timeout_s=0.5 and was killed" in str(found[0])


def test_a_worker_that_refused_a_call_and_has_nothing_to_do_is_left_alone(make_pool):
    env = make_pool(2, make=make_talkative, num_workers=2, ordered=False, batch_size=1, step_timeout_s=0.5)
    ids = []
    while len(ids) < 2:
        ids += env.poll(20).env_ids.tolist()
    with pytest.raises(EnvFailedError, match="no_such_thing"):
        env.call("no_such_thing")
    pids = env.worker_pids
    until = time.monotonic() + 1.5  # three times the limit
    while time.monotonic() < until:
        env.send_actions(np.array([1]), zeros(1))
        batch = env.poll(20)
        if batch.terminated.any():
            env.try_reset(np.array([1]))
            env.poll(20)
    env.send_actions(np.array([0]), zeros(1))
    batch = env.poll(20)
    assert not batch.failures
    assert env.worker_pids == pids


def test_a_first_reset_of_some_slots_leaves_the_others_to_be_started(make_pool):
    env = make_pool(3, make=make_talkative, num_workers=2)
    batch = env.reset_with(np.array([1]), [5])
    assert batch.env_ids.tolist() == [1]
    with pytest.raises(EnvProtocolError, match="slot 0 takes no action: it is not yet started"):
        env.send_actions(np.array([0, 1]), zeros(2))
    batch = env.poll(20)
    assert batch.env_ids.tolist() == [0, 2]
    assert batch.is_first.all()
    env.send_actions(np.arange(3), zeros(3))
    assert env.poll(20).obs.ravel().tolist() == [1, 1, 1]


def test_the_answer_to_an_interrupted_call_is_not_taken_for_another_ones(make_pool, tmp_path):
    note = tmp_path / "it sleeps"
    env = make_pool(2, make=lambda ctx: Talkative(ctx.slot_index, note=note), num_workers=1)
    env.poll()
    (pid,) = env.worker_pids

    def interrupt():
        deadline = time.monotonic() + 20
        while not note.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    thread, _ = in_thread(interrupt)
    with pytest.raises(KeyboardInterrupt):
        env.call("sleep", 0.3)
    thread.join()
    assert env.call("slot") == [0, 1]
    assert env.worker_pids == [pid]
