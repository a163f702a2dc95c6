"""Workers that raise, exit, are killed or hang: what the pool says, and what goes on. Field cases 21 and 23."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import time

import numpy as np
import pytest

from rlsample.env import as_base_env
from rlsample.errors import ConfigError, EnvError, EnvFailedError, EnvProtocolError, SpaceError
from rlsample.testing import CountEnv
from rlsample.testing.faulty_env import Fault, faulty_factory

HANG = {"step_timeout_s": 0.5}


def causes(error):
    found = []
    while error is not None:
        found.append(error)
        error = error.__cause__
    return found


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("raise", "slot 2, episode step 4: step raised RuntimeError: broken on purpose"),
        ("exit", "slot 2, episode step 4: worker 2 exited with code 3 in this env"),
        ("kill", "slot 2, episode step 4: worker 2 was killed by SIGKILL in this env"),
        ("hang", "slot 2, episode step 4: worker 2 took more than step_timeout_s=0.5 and was killed in this env"),
        ("stop", "slot 2, episode step 4: worker 2 took more than step_timeout_s=0.5 and was killed in this env"),
    ],
)
def test_case_23_a_failed_slot_is_named_and_others_go_on(make_pool, tally, kind, said, ordered):
    env = make_pool(3, {2: Fault(kind, at=4)}, ordered=ordered, **HANG)
    game = tally(env, restart=False)
    started = time.monotonic()
    game.until(lambda g: g.failures[2])
    assert time.monotonic() - started < 10
    (failure,) = game.failures[2]
    assert str(failure) == said
    assert (failure.slot, failure.episode_step) == (2, 4)
    assert failure.remote_traceback
    assert [row[:2] for row in game.rows[2]] == [("first", 0), ("row", 1), ("row", 2), ("row", 3)]
    game.until(lambda g: all(len(g.episodes(slot)) >= 2 for slot in (0, 1)))
    assert [game.episodes(slot)[:2] for slot in range(3)] == [[5, 5], [5, 5], []]
    assert len(game.failures[2]) == 1
    with pytest.raises(EnvFailedError, match=r"slot 2, episode step 4.*no restart left: max_restarts=0") as caught:
        env.try_restart(np.array([2]))
    assert caught.value.__cause__ is failure
    with pytest.raises(EnvProtocolError, match="slot 0"):
        env.try_restart(np.array([0]))


def test_case_23_an_exception_brings_its_cause_and_remote_traceback(make_pool, tally):
    env = make_pool(3, {2: Fault("raise", at=4)})
    (failure,) = tally(env, restart=False).until(lambda g: g.failures[2]).failures[2]
    assert "in strike" in failure.remote_traceback
    assert "broken on purpose" in failure.remote_traceback
    assert [type(e).__name__ for e in causes(failure)] == ["EnvFailedError", "RuntimeError", "RemoteTraceback"]
    assert "in strike" in str(causes(failure)[2])


@pytest.mark.parametrize("kind", ["raise", "exit", "kill", "hang"])
@pytest.mark.parametrize("ordered", [True, False])
def test_case_21_a_failed_slot_is_replaced_and_its_episode_starts_again(make_pool, tally, tmp_path, kind, ordered):
    log = tmp_path / "calls"
    env = make_pool(3, {1: Fault(kind, at=3)}, max_restarts=1, env={"log": log}, ordered=ordered, **HANG)
    game = tally(env).until(lambda g: all(len(g.episodes(slot)) >= 2 for slot in range(3)))
    env.close()
    assert [len(game.failures[slot]) for slot in range(3)] == [0, 1, 0]
    for slot in (0, 2):
        assert [row[1] for row in game.rows[slot]][:12] == [0, 1, 2, 3, 4, 5] * 2
    assert [row[:2] for row in game.rows[1]][:5] == [("first", 0), ("row", 1), ("row", 2), ("first", 0), ("row", 1)]
    assert game.episodes(1)[:2] == [5, 5]
    calls = log.read_text().split("\n")
    assert [calls.count(f"make {slot}") for slot in range(3)] == [1, 2, 1]
    mine = [call for call in calls if call.endswith(" 1") and not call.startswith("close")]
    assert mine[: mine.index("make 1", 1) + 3] == [
        "make 1", "reset 1", "step 1", "step 1", "step 1", "make 1", "reset 1", "step 1",
    ]  # fmt: skip


def test_a_worker_that_dies_takes_all_its_slots_and_no_other(make_pool, tally):
    env = make_pool(6, {1: Fault("exit", at=3)}, max_restarts=1, num_workers=2)
    game = tally(env).until(lambda g: all(len(g.episodes(slot)) >= 2 for slot in range(6)))
    assert [len(game.failures[slot]) for slot in range(6)] == [1, 1, 1, 0, 0, 0]
    said = [str(game.failures[slot][0]) for slot in range(3)]
    assert said == [
        "slot 0, episode step 3: worker 0 exited with code 3 in the env of slot 1",
        "slot 1, episode step 3: worker 0 exited with code 3 in this env",
        "slot 2, episode step 3: worker 0 exited with code 3 in the env of slot 1",
    ]
    assert all(game.episodes(slot)[:2] == [5, 5] for slot in range(6))


def test_a_kill_from_outside_while_all_slots_wait_fails_the_next_request(make_pool, tally):
    env = make_pool(4, max_restarts=1, num_workers=2, ordered=False, batch_size=4)
    game = tally(env)
    game.take(env.poll())
    env.poll()
    victim = env.worker_pids[0]
    os.kill(victim, signal.SIGKILL)
    with pytest.raises(EnvProtocolError):  # nothing is owed, so nobody has failed yet
        env.poll()
    env.send_actions(np.array([0, 1, 2, 3]), np.zeros(4, np.int64))
    rows, failures = [], {}
    while len(rows) + len(failures) < 4:
        batch = env.poll(20)
        rows += batch.env_ids.tolist()
        failures.update(batch.failures)
    assert sorted(rows) == [2, 3]
    assert {slot: failure.episode_step for slot, failure in failures.items()} == {0: 2, 1: 2}
    assert str(failures[0]) == "slot 0, episode step 2: worker 0 was killed by SIGKILL"
    env.try_restart(np.array([0, 1]))
    batch = env.poll(20)
    while len(batch.env_ids) < 2:
        batch = env.poll(20)
    assert env.worker_pids[0] != victim
    assert batch.is_first.all()
    assert batch.obs.ravel().tolist() == [0, 0]


def test_a_reset_that_is_asked_of_a_dead_worker_fails_without_an_episode_step(make_pool):
    env = make_pool(2, max_restarts=1, env={"n": 1})
    env.poll()
    env.send_actions(env.all_ids, np.zeros(2, np.int64))
    assert env.poll().terminated.all()
    os.kill(env.worker_pids[1], signal.SIGKILL)
    wait_until_dead(env.worker_pids[1])
    first = env.try_reset(env.all_ids)
    if 1 not in first.failures:  # the pool had not heard of it: the reset done ahead was still there to be had
        env.send_actions(env.all_ids, np.zeros(2, np.int64))
        assert env.poll(20).failures[1].episode_step == 1
    else:
        assert first.env_ids.tolist() == [0]
        assert first.failures[1].episode_step is None


@pytest.mark.parametrize("kind", ["raise", "exit", "hang"])
@pytest.mark.parametrize("reset_ahead", [True, False])
@pytest.mark.parametrize("ordered", [True, False])
def test_a_reset_that_fails(make_pool, tally, kind, reset_ahead, ordered):
    fault = {0: Fault(kind, at=2, call="reset")}
    env = make_pool(2, fault, max_restarts=1, env={"n": 2}, reset_ahead=reset_ahead, ordered=ordered, **HANG)
    game = tally(env)
    batch, failures = None, {}
    while not failures:
        batch = env.poll(20)
        failures = dict(batch.failures)
        ended = batch.env_ids[batch.terminated]
        waiting = batch.env_ids[~batch.terminated]
        if len(ended):
            first = env.try_reset(ended)
            if first is not None:
                failures.update(first.failures)
                waiting = np.concatenate([waiting, first.env_ids])
        if len(waiting):
            env.send_actions(waiting, np.zeros(len(waiting), np.int64))
    assert list(failures) == [0]
    # a process that dies in a quick reset ahead takes the end of the episode along, if that was to be shown with it
    lost_end = ordered and reset_ahead and kind != "raise"
    assert failures[0].episode_step in ((2, None) if lost_end else (None,))
    assert ("reset raised RuntimeError" if kind == "raise" else "worker 0") in str(failures[0])
    env.try_restart(np.array([0]))
    game.until(lambda g: len(g.episodes(0)) >= 2)


@pytest.mark.parametrize("reset_ahead", [True, False])
def test_a_first_observation_that_is_no_number_costs_no_row(make_pool, reset_ahead):
    class Bad(CountEnv):
        def observe(self):
            return np.array([np.nan if self.resets == 2 and self.k == 0 else self.k], np.float32)

    env = make_pool(2, make=lambda ctx: Bad(1) if ctx.slot_index else CountEnv(1), reset_ahead=reset_ahead)
    env.poll()
    env.send_actions(env.all_ids, np.zeros(2, int))
    assert env.poll().terminated.all()
    first = env.try_reset(env.all_ids)
    assert first.env_ids.tolist() == [0]
    assert str(first.failures[1]).startswith("slot 1: observation holds nan; mend the env")
    assert first.failures[1].episode_step is None


def test_the_budget_counts_each_slot_and_the_back_off_doubles(make_pool):
    env = make_pool(1, {0: Fault("exit", at=1, incarnations=3)}, max_restarts=2, backoff_s=0.1)
    env.poll()
    waits = []
    for _ in range(2):
        env.send_actions(env.all_ids, np.zeros(1, np.int64))
        assert list(env.poll(20).failures) == [0]
        env.try_restart(env.all_ids)
        assert len(env.poll(timeout_s=0.02).env_ids) == 0  # not yet
        started = time.monotonic()
        assert env.poll(20).is_first.tolist() == [True]
        waits.append(time.monotonic() - started)
    assert waits[0] > 0.05
    assert waits[1] > 0.15
    env.send_actions(env.all_ids, np.zeros(1, np.int64))
    failure = env.poll(20).failures[0]
    with pytest.raises(EnvFailedError, match="max_restarts=2") as caught:
        env.try_restart(env.all_ids)
    assert caught.value.__cause__ is failure
    with pytest.raises(EnvProtocolError, match="failed"):
        env.send_actions(env.all_ids, np.zeros(1, np.int64))


@pytest.mark.parametrize("kind", ["raise", "exit", "kill", "hang"])
def test_a_constructor_that_fails_is_named_and_nothing_is_left(make_pool, tmp_path, kind):
    log = tmp_path / "calls"
    with pytest.raises(EnvFailedError, match="slot 2") as caught:
        make_pool(4, {2: Fault(kind, call="init")}, num_workers=2, env={"log": log}, **HANG)
    assert caught.value.slot == 2
    if kind == "raise":
        assert str(caught.value) == "slot 2: __init__ raised RuntimeError: broken on purpose"
        assert "in strike" in caught.value.remote_traceback
    calls = log.read_text().split("\n")
    assert calls.count("close 0") == calls.count("close 1") == 1


def test_an_unpicklable_exception_still_brings_its_text(make_pool, tally):
    class Local(Exception):
        def __init__(self, a, b):
            super().__init__("local-7")

    def make(ctx):
        env = faulty_factory()(ctx)
        env.step = lambda action: (_ for _ in ()).throw(Local(1, 2))
        return env

    env = make_pool(1, make=make)
    (failure,) = tally(env, restart=False).until(lambda g: g.failures[0]).failures[0]
    assert "Local: local-7" in str(failure)
    assert "local-7" in failure.remote_traceback


def test_a_killed_nursery_takes_its_workers_and_is_replaced(make_pool, tally):
    env = make_pool(2, max_restarts=1, start_method="forkserver")
    nursery = env._team._launcher._process.pid
    game = tally(env).until(lambda g: all(len(rows) > 3 for rows in g.rows.values()))
    os.kill(nursery, signal.SIGKILL)
    game.until(lambda g: all(g.failures.values()))
    assert "is gone, with the process that started it" in str(game.failures[0][0])
    game.until(lambda g: all(len(g.episodes(slot)) >= 3 for slot in range(2)))


def test_a_worker_that_dies_between_an_end_and_its_reset_is_a_failure_of_the_reset(make_pool):
    env = make_pool(2, max_restarts=1, reset_ahead=False)
    batch = env.poll()
    while not batch.terminated[0]:
        env.send_actions(env.all_ids, np.zeros(2, np.int64))
        batch = env.poll()
    os.kill(env.worker_pids[0], signal.SIGKILL)
    first = env.try_reset(batch.env_ids[batch.terminated])
    assert list(first.failures) == [0]
    assert first.failures[0].episode_step is None
    assert 0 not in first.env_ids.tolist()
    env.try_restart(np.array([0]))
    env.send_actions(np.array([1]), np.zeros(1, np.int64)) if not batch.terminated[1] else None
    again = env.poll()
    assert again.is_first[again.env_ids.tolist().index(0)]


def test_spaces_must_be_alike(make_pool):
    import gymnasium

    class Sized(gymnasium.Env):
        def __init__(self, size):
            self.observation_space = gymnasium.spaces.Box(0, 1, (size,), np.float32)
            self.action_space = gymnasium.spaces.Discrete(2)

    with pytest.raises(SpaceError, match="slot 1 has space"):  # in one worker
        make_pool(2, make=lambda ctx: Sized(1 + ctx.slot_index), num_workers=1)
    with pytest.raises(SpaceError, match="slot 1 has space"):  # in two
        make_pool(2, make=lambda ctx: Sized(1 + ctx.slot_index), num_workers=2)


def test_spaces_without_columns_are_refused(make_pool):
    import gymnasium

    class Empty(gymnasium.Env):
        observation_space = gymnasium.spaces.Dict({"a": gymnasium.spaces.Tuple(())})
        action_space = gymnasium.spaces.Discrete(2)

    with pytest.raises(SpaceError, match="observation space at a is an empty Tuple"):
        make_pool(2, make=lambda ctx: Empty())


def test_a_factory_that_cannot_be_sent_is_refused():
    import threading

    lock = threading.Lock()
    with pytest.raises(ConfigError, match=r"cannot be sent to worker processes.*fork"):
        as_base_env(lambda ctx: lock, 2, backend="process")


def wait_until_dead(pid):
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        try:
            with open(f"/proc/{pid}/stat") as file:
                if file.read().rpartition(")")[2].split()[0] == "Z":
                    return
        except FileNotFoundError:
            return
        time.sleep(0.005)
    raise AssertionError("it lives")


def test_a_successor_never_sees_a_request_that_its_predecessors_death_answers(make_pool, tally):
    env = make_pool(4, {0: Fault("exit", at=1)}, max_restarts=1, num_workers=2, ordered=False, batch_size=1)
    game = tally(env, restart=False)
    ids = []
    while len(ids) < 4:
        ids += env.poll(20).env_ids.tolist()
    env.send_actions(np.array([0]), np.zeros(1, np.int64))
    failed = env.poll(20).failures
    assert sorted(failed) == [0]
    asked = env._team.block.request.copy()  # a successor that looks at the wrong moment would step an env it lacks
    env.send_actions(np.array([3, 1]), np.zeros(2, np.int64))
    assert (env._team.block.request - asked).tolist() == [0, 0, 0, 1]
    env.try_restart(np.array([0]))
    game.until(lambda g: g.failures[1])
    assert "worker 0 exited with code 3" in str(game.failures[1][0])
    env.try_restart(np.array([1]))
    game.until(lambda g: all(len(g.rows[slot]) > 3 for slot in (0, 1, 3)))
    assert [row[:2] for row in game.rows[1]][:3] == [("first", 0), ("row", 1), ("row", 2)]


NURSERY = "rlsample.env.pool.launchers"


@pytest.mark.parametrize("start_method", ["forkserver", "spawn"])
def test_a_worker_that_the_system_has_no_process_for_is_an_error_with_the_cause(
    make_pool, refuse_processes, start_method
):
    refuse_processes(NURSERY, {2}, errno.ENOMEM)
    with pytest.raises(EnvError, match=rf"no process: \[Errno {errno.ENOMEM}\] .*too little memory"):
        make_pool(3, start_method=start_method)


def test_a_successor_that_the_system_has_no_process_for_is_a_failure_that_a_restart_mends(
    make_pool, tally, refuse_processes
):
    refuse_processes(NURSERY, {3}, errno.EAGAIN)
    env = make_pool(2, {1: Fault("kill", at=2)}, max_restarts=2, start_method="forkserver")
    game = tally(env).until(lambda g: all(len(g.episodes(slot)) >= 2 for slot in range(2)))
    first, second = map(str, game.failures[1])
    assert first.startswith("slot 1, episode step 2: worker 1 was killed by SIGKILL")
    assert second.startswith(
        f"slot 1: worker 1 cannot be started again: the system gives no process: [Errno {errno.EAGAIN}]"
    )
    assert "ulimit -u" in second
    assert game.failures[0] == []


@pytest.mark.parametrize(("method", "what"), [("forkserver", (subprocess, "Popen")), ("fork", (os, "fork"))])
def test_the_first_process_that_cannot_be_had_is_an_error_with_the_cause(make_pool, monkeypatch, method, what):
    def refuse(*args, **kwargs):
        raise BlockingIOError(errno.EAGAIN, "not now")

    with monkeypatch.context() as patch:
        patch.setattr(*what, refuse)
        with pytest.raises(EnvError, match=r"no process.*not now.*ulimit -u") as caught:
            make_pool(2, start_method=method)
    assert isinstance(caught.value.__cause__, BlockingIOError)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()
