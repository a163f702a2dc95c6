"""First come, first served: field cases 6, 15 and 22, batch sizes, time limits and turns; and groups."""

from __future__ import annotations

import time

import numpy as np
import pytest

from rlsample.env import as_base_env
from rlsample.errors import ConfigError, EnvProtocolError, SpaceError
from rlsample.testing import CountEnv
from rlsample.testing.faulty_env import faulty_factory


def zeros(ids):
    return np.zeros(len(ids), np.int64)


def test_case_6_25_slots_whose_resets_come_later(make_pool, tally):
    env = make_pool(25, env={"n": 2}, ordered=False, num_workers=3, reset_ahead=False)
    game = tally(env).until(lambda g: all(len(g.episodes(slot)) >= 3 for slot in range(25)))
    for rows in game.rows.values():
        assert rows[:9] == [("first", 0, 0, False), ("row", 1, 1, False), ("row", 2, 2, True)] * 3


def test_case_15_wrong_use_is_refused_and_steps_nothing(make_pool, tmp_path):
    log = tmp_path / "calls"
    env = make_pool(3, env={"n": 3, "log": log}, ordered=False, batch_size=3)
    with pytest.raises(EnvProtocolError, match=r"slot 0 takes no action: it is not yet started"):
        env.send_actions(np.array([0]), zeros([0]))
    assert env.poll().env_ids.tolist() == [0, 1, 2]
    env.send_actions(np.array([0]), zeros([0]))
    batch = env.poll()
    assert (batch.env_ids.tolist(), batch.obs.ravel().tolist(), batch.rewards.tolist()) == ([0], [1], [1])
    started = time.monotonic()
    with pytest.raises(EnvProtocolError, match=r"slots 0, 1, 2: waiting for an action"):
        env.poll()
    assert time.monotonic() - started < 2
    with pytest.raises(EnvProtocolError, match="slot 7 does not exist"):
        env.send_actions(np.array([7]), zeros([7]))
    env.send_actions(np.array([0]), zeros([0]))
    with pytest.raises(EnvProtocolError, match="slot 0 takes no action: it is busy"):
        env.send_actions(np.array([1, 0]), zeros([1, 0]))
    assert env.poll().obs.ravel().tolist() == [2]
    with pytest.raises(SpaceError, match=r"Discrete\(2\)"):
        env.send_actions(np.array([1]), np.array([0.5]))
    with pytest.raises(SpaceError, match=r"Discrete\(2\)"):
        env.send_actions(np.array([1]), np.array([[0, 0]]))
    env.send_actions(np.array([0]), zeros([0]))
    assert env.poll().terminated.tolist() == [True]
    with pytest.raises(EnvProtocolError, match="slot 0 takes no action: it is at its episode's end"):
        env.send_actions(np.array([0]), zeros([0]))
    calls = log.read_text()
    assert [calls.count(f"step {slot}") for slot in range(3)] == [3, 0, 0]
    env.send_actions(np.array([1, 2]), zeros([1, 2]))
    env.try_reset(np.array([0]))
    rows = {}
    while len(rows) < 3:
        batch = env.poll()
        rows.update(zip(batch.env_ids.tolist(), batch.obs.ravel().tolist(), strict=True))
    assert rows == {0: 0, 1: 1, 2: 1}


class Slow(CountEnv):
    """Observes ``1000 * slot + k``; slot 0 sleeps."""

    def __init__(self, slot, step_s, reset_s):
        super().__init__(20, "term")
        self.slot, self.step_s, self.reset_s = slot, step_s, reset_s

    def observe(self):
        return np.array([self.slot * 1000 + self.k], np.float32)

    def step(self, action):
        if self.slot == 0:
            time.sleep(self.step_s)
        return super().step(action)

    def reset(self, *, seed=None, options=None):
        if self.slot == 0:
            time.sleep(self.reset_s)
        return super().reset(seed=seed, options=options)


@pytest.mark.parametrize("batch_size", [1, 2, 4])
def test_case_22_a_slow_slot_holds_up_nobody_who_need_not_wait(make_pool, batch_size):
    env = make_pool(4, make=lambda ctx: Slow(ctx.slot_index, 0.25, 0.5), ordered=False, batch_size=batch_size)
    steps, waiting = [0] * 4, set()
    until = time.monotonic() + 1.5
    while time.monotonic() < until or (batch_size == 4 and min(steps) < 3):
        batch = env.poll(10)
        ids = batch.env_ids.tolist()
        assert ids
        assert len(set(ids)) == len(ids)
        assert not waiting & set(ids), "a slot came twice without an action in between"
        assert (batch.obs.ravel() // 1000).tolist() == ids
        for row, slot in enumerate(ids):
            steps[slot] += not batch.is_first[row]
        ended = batch.env_ids[batch.terminated]
        if len(ended):
            env.try_reset(ended)
        live = batch.env_ids[~batch.terminated]
        if len(live):
            env.send_actions(live, zeros(live))
    if batch_size == 4:
        assert max(steps) - min(steps) <= 1
    else:
        assert steps[0] <= 6
        assert min(steps[1:]) >= 30


def test_several_slow_slots_of_one_worker_come_one_by_one(make_pool):
    env = make_pool(4, env={"step_s": 0.05, "n": 99}, num_workers=1, ordered=False)
    seen = []
    while len(seen) < 4:
        seen += env.poll().env_ids.tolist()
    env.send_actions(env.all_ids, zeros(env.all_ids))
    sizes = []
    while sum(sizes) < 4:
        sizes.append(len(env.poll().env_ids))
    assert sizes == [1, 1, 1, 1]


def test_polls_bring_a_batch_at_least_and_recv_exactly_that(make_pool):
    env = make_pool(6, env={"n": 10**6}, batch_size=4, num_workers=2)
    assert not env.ordered
    assert env.steps_ahead
    env.async_reset()
    for _ in range(50):
        *_, info = env.recv()
        assert len(info["env_id"]) == 4
        env.send(zeros(range(4)), info["env_id"])
    ids = info["env_id"]
    assert len(env.recv(max_envs=2)[4]["env_id"]) == 2
    left = 4 - 2 + 2
    got = len(env.recv(min_envs=1, max_envs=99)[4]["env_id"])
    while got < left:
        got += len(env.recv(min_envs=1, max_envs=99)[4]["env_id"])
    assert got == left
    with pytest.raises(EnvProtocolError):
        env.recv()
    assert ids.dtype == np.int32


def test_each_slot_has_its_turn_however_many_are_ready(make_pool):
    env = make_pool(6, env={"n": 10**6}, batch_size=2, num_workers=1)
    env.async_reset()
    counts = np.zeros(6, int)
    for _ in range(60):
        while env._requests.num_published() < 6:
            time.sleep(0.001)
        ids = env.recv()[4]["env_id"]
        counts[ids] += 1
        env.send(zeros(ids), ids)
    assert counts.tolist() == [20] * 6


def test_a_time_limit_gives_what_there_is(make_pool):
    env = make_pool(2, make=lambda ctx: Slow(ctx.slot_index, 1.0, 0.0), batch_size=2, ordered=False)
    env.poll()
    env.send_actions(env.all_ids, zeros(env.all_ids))
    started = time.monotonic()
    assert env.poll(timeout_s=0.3).env_ids.tolist() == [1]
    assert env.poll(timeout_s=0.1).env_ids.tolist() == []
    assert time.monotonic() - started < 0.9
    assert env.poll(timeout_s=5).env_ids.tolist() == [0]


def test_an_ordered_poll_gives_all_or_nothing_in_time(make_pool):
    env = make_pool(2, make=lambda ctx: Slow(ctx.slot_index, 0.5, 0.0))
    env.poll()
    env.send_actions(env.all_ids, zeros(env.all_ids))
    assert len(env.poll(timeout_s=0.1).env_ids) == 0
    assert env.poll(timeout_s=5).env_ids.tolist() == [0, 1]


def test_groups_take_turns_and_share_the_workers(make_pool):
    env = make_pool(6, env={"n": 10**6}, num_workers=2, groups=2)
    assert env.ordered
    assert env.steps_ahead
    polls = []
    for _ in range(6):
        batch = env.poll()
        polls.append(batch.env_ids.tolist())
        env.send_actions(batch.env_ids, zeros(batch.env_ids))
    assert polls == [[0, 2, 4], [1, 3, 5]] * 3


LAYOUTS = [
    {"num_workers": 2},
    {"num_workers": 3, "ordered": False},
    {"num_workers": 3, "batch_size": 5},
    {"num_workers": 3, "groups": 2},
    {"num_workers": 2, "batch_size": 3, "spin_us": 20.0},
    {"num_workers": 4, "ordered": False, "reset_ahead": False},
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_no_wake_up_is_lost(make_pool, tally, layout):
    """The pool looks around four times a second anyway, which would hide a wake-up that never came."""
    env = make_pool(9, env={"n": 3}, **layout)
    waiter, lost = env._team.waiter, []
    wait = waiter.wait

    def timed(timeout_s):
        started = time.monotonic()
        heard = wait(timeout_s)
        enough = env._team.common[0]
        if time.monotonic() - started > 0.2 and env._requests.num_published() >= enough > 0:
            lost.append(enough)
        return heard

    waiter.wait = timed
    game = tally(env)
    for _ in range(1500):
        game.turn()
    assert not lost
    assert not any(game.failures.values())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"batch_size": 5}, "batch_size=5 is more than num_envs=4"),
        ({"batch_size": 2, "ordered": True}, "waits for all 4 envs"),
        ({"groups": 2, "ordered": False}, "groups"),
        ({"groups": 5}, "groups=5"),
        ({"num_worker": 2}, "did you mean 'num_workers'"),
        ({"start_method": "forkserve"}, "did you mean 'forkserver'"),
        ({"num_workers": 0}, "num_workers"),
        ({"num_workers": True}, "num_workers"),
        ({"step_timeout_s": 0}, "step_timeout_s"),
        ({"close_timeout_s": 0}, "close_timeout_s"),
        ({"spin_us": -1}, "spin_us"),
        ({"info_keys": "lives"}, "info_keys"),
        ({"numa": "both"}, "numa"),
        ({"thread_affinity_offset": -2}, "thread_affinity_offset"),
        ({"numa": "977"}, "no such node"),
    ],
)
def test_settings_that_cannot_work(options, said):
    with pytest.raises(ConfigError, match=said):
        as_base_env(faulty_factory(), 4, backend="process", pool=options)


def test_pool_options_need_the_backend_and_kinds_that_can_move():
    with pytest.raises(ConfigError, match="need backend='process'"):
        as_base_env(faulty_factory(), 4, pool={"num_workers": 2})
    with pytest.raises(ConfigError, match="built already"):
        as_base_env(CountEnv(), 1, backend="process")
    with pytest.raises(ConfigError, match="vectorize='native'"):
        as_base_env("CartPole-v1", 8, backend="process", vectorize="native")
    with pytest.raises(ConfigError, match="did you mean 'process'"):
        as_base_env("CartPole-v1", 8, backend="proces")
