"""The polled interface of Atari envs, on games that follow a script: every value is known."""

import concurrent.futures
import threading
import time

import numpy as np
import pytest

from rlsample.env.slot_states import WAITING
from rlsample.errors import ConfigError, EnvClosedError, EnvFailedError, EnvProtocolError, SpaceError
from rlsample.testing import check_base_env

LIVES = {"episodic_life": True}


def told(batch):
    """Rows as (slot, game, step, last action, reward, terminated, truncated, is_first), read off the observations."""
    rows = []
    for k, slot in enumerate(batch.env_ids.tolist()):
        obs = batch.obs[k, 0, 0].tolist()
        assert obs[0] == slot
        flags = [bool(column[k]) for column in (batch.terminated, batch.truncated, batch.is_first)]
        rows.append((slot, *obs[1:], float(batch.rewards[k]), *flags))
    return rows


def send(env, slots, actions):
    env.send_actions(np.array(slots), np.array(actions))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"groups": 2},
        {"batch_size": 2},
        {"batch_size": 3},
        {"episodic_life": True},
        {"episodic_life": True, "groups": 2},
    ],
)
def test_conformance(scripted, plan_of, options):
    """All ten rules; slot 1 of the faulty env's group fails with its group."""

    def plan(slot, game):
        return plan_of(lives=3, lost_at=(2, 5), over_at=4 + slot + game % 3)

    def make_faulty(seed):
        env = scripted(4, plan, seeds=np.arange(4) + seed, **options)
        env.poll = first_poll(env, env.poll)
        return env

    def first_poll(env, poll):
        def wrapped(timeout_s=None):
            batch = poll(timeout_s)
            scripted.vectors[0].error = ValueError("broken")
            return batch

        return wrapped

    several = "groups" in options or "batch_size" in options
    told = check_base_env(
        lambda seed: scripted(4, plan, seeds=np.arange(4) + seed, **options),
        rounds=25,
        make_faulty=make_faulty if several else None,
        make_other=lambda seed: scripted(4, plan, seeds=np.arange(4) + seed, **options),
    )
    assert {rule: said for rule, said in told.items() if said != "ok"} == {
        3: "without a reference, only copies of the next first one are noticed",
        **({} if several else {8: "no make_faulty was given"}),
    }


def test_rows_of_steps(scripted, plan_of):
    with scripted(2, lambda slot, game: plan_of()) as env:
        batch = env.poll()
        assert batch.env_ids is env.all_ids
        assert told(batch) == [(0, 0, 0, 0, 0.0, False, False, True), (1, 0, 0, 0, 0.0, False, False, True)]
        send(env, [0, 1], [2, 3])
        batch = env.poll()
        assert told(batch) == [(0, 0, 1, 2, -1.0, False, False, False), (1, 0, 1, 3, -1.0, False, False, False)]
        send(env, [1, 0], [0, 1])
        assert told(env.poll()) == [(0, 0, 2, 1, 2.0, False, False, False), (1, 0, 2, 0, 2.0, False, False, False)]
        assert batch.infos == {}
        assert scripted.vectors[0].actions == [[2, 3], [1, 0]]


def test_actions_sent_in_parts_step_once_all_are_there(scripted, plan_of):
    with scripted(3, lambda slot, game: plan_of()) as env:
        env.poll()
        send(env, [2], [3])
        send(env, [0], [1])
        with pytest.raises(EnvProtocolError, match=r"all slots step together.*slot 1: waiting for an action"):
            env.poll()
        assert scripted.vectors[0].actions == []
        send(env, [1], [2])
        assert scripted.vectors[0].actions == [[1, 2, 3]]
        assert [row[3] for row in told(env.poll())] == [1, 2, 3]
        with pytest.raises(EnvProtocolError, match="nothing to wait for: slots 0, 1, 2: waiting for an action"):
            env.poll()


def test_an_end_takes_nothing_from_a_group_that_is_still_starting(scripted, plan_of):
    may_start = threading.Event()

    def plan(slot, game):
        assert slot == 0 or may_start.wait(30)
        return plan_of(over_at=1)

    with scripted(2, plan, batch_size=1) as env:
        assert told(env.poll()) == [(0, 0, 0, 0, 0.0, False, False, True)]
        send(env, [0], [2])
        assert told(env.poll()) == [(0, 0, 1, 2, -1.0, True, False, False)]
        opener = threading.Timer(0.5, may_start.set)  # a try_reset that waits for slot 1 ends then, and fails below
        opener.start()
        assert told(env.try_reset(np.array([0]))) == [(0, 1, 0, 0, 0.0, False, False, True)]
        may_start.set()
        assert told(env.poll()) == [(1, 0, 0, 0, 0.0, False, False, True)]
        opener.cancel()
        opener.join()


def test_ends_have_their_own_last_observations(scripted, plan_of):
    """Slot 0's game is over at step 2, slot 1's is truncated at 3; the rest of final_obs is no observation."""
    with scripted(2, lambda slot, game: plan_of(over_at=2 if slot == 0 else None), max_episode_steps=3) as env:
        env.poll()
        send(env, [0, 1], [1, 1])
        env.poll()
        send(env, [0, 1], [2, 3])
        batch = env.poll()
        assert told(batch) == [(0, 0, 2, 2, 2.0, True, False, False), (1, 0, 2, 3, 2.0, False, False, False)]
        assert batch.infos == {0: {"game_over": True, "game_return": 1.0, "game_length": 2}}
        first = env.try_reset(np.array([0]))
        assert told(first) == [(0, 1, 0, 0, 0.0, False, False, True)]
        send(env, [0, 1], [1, 2])
        batch = env.poll()
        assert told(batch) == [(0, 1, 1, 1, -1.0, False, False, False), (1, 0, 3, 2, -3.0, False, True, False)]
        assert batch.infos == {1: {"game_over": False, "game_return": -2.0, "game_length": 3}}
        assert told(env.try_reset(np.array([1]))) == [(1, 1, 0, 0, 0.0, False, False, True)]
        assert scripted.vectors[0].opened["same_step"]


def test_a_lost_life_is_told_but_ends_nothing(scripted, plan_of):
    with scripted(2, lambda slot, game: plan_of(lives=3, lost_at=(1, 2) if slot else (2,), over_at=3)) as env:
        env.poll()
        infos = []
        for _ in range(3):
            send(env, [0, 1], [0, 0])
            batch = env.poll()
            infos.append(dict(batch.infos))
        assert infos == [
            {1: {"life_lost": True, "lives": 2}},
            {0: {"life_lost": True, "lives": 2}, 1: {"life_lost": True, "lives": 1}},
            {k: {"game_over": True, "game_return": -2.0, "game_length": 3} for k in (0, 1)},
        ]
        env.try_reset(np.array([0, 1]))
        send(env, [0, 1], [0, 0])  # a new game, with all its lives: none was lost
        assert env.poll().infos == {1: {"life_lost": True, "lives": 2}}


def test_episodic_life_goes_on_with_the_game(scripted, plan_of):
    """A life at step 2, the game over at 5. FIRE (action 1) is pressed in between; its row is the first one."""
    with scripted(1, lambda slot, game: plan_of(lives=3, lost_at=(2,), over_at=5), episodic_life=True) as env:
        rows, batch = told(env.poll()), None
        infos = []
        for _ in range(7):
            if batch is not None and (batch.terminated | batch.truncated).any():
                assert env.try_reset(np.array([0])) is None
            else:
                send(env, [0], [3])
            batch = env.poll()
            rows += told(batch)
            infos.append(batch.infos.get(0))
        assert rows == [
            (0, 0, 0, 0, 0.0, False, False, True),
            (0, 0, 1, 3, -1.0, False, False, False),
            (0, 0, 2, 3, 2.0, True, False, False),
            (0, 0, 3, 1, 0.0, False, False, True),  # pressed FIRE
            (0, 0, 4, 3, 4.0, False, False, False),
            (0, 0, 5, 3, -5.0, True, False, False),
            (0, 1, 0, 0, 0.0, False, False, True),  # a new game
            (0, 1, 1, 3, -1.0, False, False, False),
        ]
        assert infos[1] == {"life_lost": True, "lives": 2}
        assert infos[4] == {"game_over": True, "game_return": -3.0, "game_length": 5}  # the pressed step's too
        assert [i for k, i in enumerate(infos) if k not in (1, 4)] == [None] * 5


def test_episodic_life_presses_nothing_where_fire_reset_is_off(scripted, plan_of):
    plan = plan_of(lives=3, lost_at=(1,), over_at=9)
    with scripted(1, lambda slot, game: plan, episodic_life=True, use_fire_reset=False) as env:
        env.poll()
        send(env, [0], [3])
        env.poll()
        env.try_reset(np.array([0]))
        assert told(env.poll()) == [(0, 0, 2, 0, 0.0, False, False, True)]


def test_a_life_and_the_time_limit_at_once(scripted, plan_of):
    """Both flags; the game is truncated, so the next episode is a new game."""
    plan = plan_of(lives=3, lost_at=(2,))
    with scripted(1, lambda slot, game: plan, episodic_life=True, max_episode_steps=2) as env:
        env.poll()
        for _ in range(2):
            send(env, [0], [3])
            batch = env.poll()
        assert told(batch) == [(0, 0, 2, 3, 2.0, True, True, False)]
        assert batch.infos[0] == {
            "life_lost": True, "lives": 2, "game_over": False, "game_return": 1.0, "game_length": 2,
        }  # fmt: skip
        env.try_reset(np.array([0]))
        assert told(env.poll()) == [(0, 1, 0, 0, 0.0, False, False, True)]


def test_a_game_that_ends_while_fire_is_pressed_begins_anew_at_once(scripted, plan_of):
    """A first row cannot be an end: it is of the next game."""

    def plan(slot, game):
        return plan_of(lives=3, lost_at=(1,), over_at=2) if slot == 0 else plan_of()

    with scripted(2, plan, episodic_life=True) as env:
        env.poll()
        send(env, [0, 1], [3, 3])
        assert [row[5] for row in told(env.poll())] == [True, False]
        assert env.try_reset(np.array([0])) is None
        send(env, [1], [2])
        batch = env.poll()
        assert told(batch) == [(0, 1, 0, 0, 0.0, False, False, True), (1, 0, 2, 2, 2.0, False, False, False)]
        assert batch.infos == {0: {"game_over": True, "game_return": 1.0, "game_length": 2}}
        send(env, [0, 1], [1, 2])
        assert told(env.poll()) == [(0, 1, 1, 1, -1.0, True, False, False), (1, 0, 3, 2, -3.0, False, False, False)]


@pytest.mark.parametrize("episodic_life", [False, True])
def test_a_reset_in_mid_episode_starts_a_new_game_there_alone(scripted, plan_of, episodic_life):
    with scripted(3, lambda slot, game: plan_of(), episodic_life=episodic_life) as env:
        env.poll()
        send(env, [0, 1, 2], [1, 1, 1])
        env.poll()
        first = env.try_reset(np.array([2, 0]))
        if episodic_life:
            assert first is None
            assert told(env.poll()) == [(s, 1, 0, 0, 0.0, False, False, True) for s in (0, 2)]
        else:
            assert told(first) == [(s, 1, 0, 0, 0.0, False, False, True) for s in (2, 0)]
        assert scripted.vectors[0].resets == [[0, 1, 2], [0, 2]]
        send(env, [0, 1, 2], [1, 2, 3])
        assert [row[:4] for row in told(env.poll())] == [(0, 1, 1, 1), (1, 0, 2, 2), (2, 1, 1, 3)]


def test_a_reset_of_ended_and_running_slots_at_once(scripted, plan_of):
    with scripted(3, lambda slot, game: plan_of(over_at=1 if slot == 1 else None)) as env:
        env.poll()
        send(env, [0, 1, 2], [0, 0, 0])
        env.poll()
        first = env.try_reset(np.array([1, 2]))
        assert told(first) == [(1, 1, 0, 0, 0.0, False, False, True), (2, 1, 0, 0, 0.0, False, False, True)]
        assert scripted.vectors[0].resets[1:] == [[2]]  # slot 1 has begun anew already
        send(env, [0, 1, 2], [0, 0, 0])
        assert [row[1:3] for row in told(env.poll())] == [(0, 2), (1, 1), (1, 1)]


def test_groups_come_in_the_order_they_were_sent(scripted, plan_of):
    with scripted(5, lambda slot, game: plan_of(), groups=2) as env:
        assert env.steps_ahead
        assert env.poll().env_ids.tolist() == [0, 1, 2]
        assert env.poll().env_ids.tolist() == [3, 4]
        with pytest.raises(EnvProtocolError, match="nothing to wait for"):
            env.poll()
        send(env, [3, 4], [1, 1])
        send(env, [0, 1, 2], [1, 1, 1])
        assert env.poll().env_ids.tolist() == [3, 4]
        send(env, [3, 4], [1, 2])
        scripted.vectors[0].gate.clear()  # group 0 is late: its turn is waited for
        late = threading.Timer(0.05, scripted.vectors[0].gate.set)
        late.start()
        assert env.poll().env_ids.tolist() == [0, 1, 2]
        late.join()
        assert told(env.poll()) == [(3, 0, 2, 1, 2.0, False, False, False), (4, 0, 2, 2, 2.0, False, False, False)]


def test_one_group_steps_while_another_waits(scripted, plan_of):
    with scripted(4, lambda slot, game: plan_of(), groups=2) as env:
        env.poll()
        env.poll()
        send(env, [0, 1, 2], [1, 1, 1])  # group 0 is off, group 1 waits for slot 3
        assert env.poll().env_ids.tolist() == [0, 1]
        with pytest.raises(EnvProtocolError, match=r"the 2 slots of a group step together.*slot 2: busy"):
            env.poll()
        send(env, [3], [1])
        assert env.poll().env_ids.tolist() == [2, 3]


def test_batches_are_first_come_first_served(scripted, plan_of):
    with scripted(4, lambda slot, game: plan_of(), batch_size=2) as env:
        seen = [env.poll().env_ids.tolist() for _ in range(2)]
        assert sorted(seen) == [[0, 1], [2, 3]]
        scripted.vectors[0].gate.clear()
        send(env, [0, 1, 2, 3], [1, 1, 2, 2])
        for step in (1, 2, 3):
            assert [row[:3] for row in told(env.poll())] == [(2, 0, step), (3, 0, step)]
            send(env, [2, 3], [2, 2])
        scripted.vectors[0].gate.set()
        assert sorted(env.poll().env_ids.tolist() + env.poll().env_ids.tolist()) == [0, 1, 2, 3]


def test_a_batch_may_be_made_of_several_groups(scripted, plan_of):
    """5 slots, batches of 4: groups of one."""
    with scripted(5, lambda slot, game: plan_of(), batch_size=4) as env:
        first = env.poll()
        assert len(first.env_ids) == 4
        rest = env.poll()
        assert sorted(first.env_ids.tolist() + rest.env_ids.tolist()) == [0, 1, 2, 3, 4]
        env.send_actions(first.env_ids, np.ones(4, np.int64))
        assert sorted(row[:4] for row in told(env.poll())) == [(s, 0, 1, 1) for s in sorted(first.env_ids.tolist())]


@pytest.mark.parametrize("options", [{}, {"groups": 2}, {"batch_size": 2}])
def test_a_poll_with_a_time_limit_comes_back_empty(scripted, plan_of, options):
    with scripted(4, lambda slot, game: plan_of(), **options) as env:
        got = 0
        while got < 4:
            got += len(env.poll().env_ids)
        for vector in scripted.vectors:
            vector.gate.clear()
        send(env, [0, 1, 2, 3], [1, 2, 3, 0])
        batch = env.poll(timeout_s=0.01)
        assert (len(batch.env_ids), batch.obs.shape, batch.failures) == (0, (0, 1, 1, 4), {})
        for vector in scripted.vectors:
            vector.gate.set()
        rows = []
        while len(rows) < 4:
            rows += told(env.poll())
        assert sorted(row[:4] for row in rows) == [(0, 0, 1, 1), (1, 0, 1, 2), (2, 0, 1, 3), (3, 0, 1, 0)]


@pytest.mark.parametrize("bad", [[0, 4], [0, -1], [0.0, 1.0], [0], [[0], [1]]])
def test_no_bad_action_reaches_ale(scripted, plan_of, bad):
    with scripted(2, lambda slot, game: plan_of()) as env:
        env.poll()
        with pytest.raises(SpaceError):
            env.send_actions(env.all_ids, np.array(bad))
        assert scripted.vectors[0].actions == []
        send(env, [0, 1], [1, 2])
        assert [row[:4] for row in told(env.poll())] == [(0, 0, 1, 1), (1, 0, 1, 2)]


def test_refused_slots(scripted, plan_of):
    with scripted(2, lambda slot, game: plan_of(over_at=1)) as env:
        for slots, says in (([0], "slot 0 takes no action: it is not yet started"),):
            with pytest.raises(EnvProtocolError, match=says):
                send(env, slots, [0])
        env.poll()
        send(env, [0], [0])
        for slots, says in (([0], "slot 0 .*busy"), ([1, 1], "slot 1 is named twice"), ([2], "slot 2 does not exist")):
            with pytest.raises(EnvProtocolError, match=says):
                send(env, slots, [0] * len(slots))
        send(env, [1], [0])
        env.poll()
        with pytest.raises(EnvProtocolError, match=r"slot 0 .*end.*slot 1 .*end"):
            send(env, [0, 1], [0, 0])
        with pytest.raises(EnvProtocolError, match="slot 0 cannot be restarted"):
            env.try_restart(np.array([0]))


@pytest.mark.parametrize("options", [{}, {"groups": 2}])
def test_seeds_go_to_each_slot_once(scripted, plan_of, options):
    with scripted(4, lambda slot, game: plan_of(), seeds=np.array([11, 22, 33, 44]), **options) as env:
        while (env._states.code != WAITING).any():
            env.poll()
        env.try_reset(np.array([3]))
        seeds = [seeds for vector in scripted.vectors for seeds in vector.seeds]
        assert seeds == ([[11, 22, 33, 44], None] if not options else [[11, 22], [33, 44], None])


@pytest.mark.parametrize("options", [{}, {"groups": 2}])
def test_an_error_of_ale_fails_the_group_alone(scripted, plan_of, options):
    with scripted(4, lambda slot, game: plan_of(), **options) as env:
        while (env._states.code != WAITING).any():
            env.poll()
        scripted.vectors[0].error = ValueError("no such ROM")
        send(env, [0, 1, 2, 3], [0, 0, 0, 0])
        batch = env.poll()
        failed = [0, 1] if options else [0, 1, 2, 3]
        assert sorted(batch.failures) == failed
        assert len(batch.env_ids) == 0
        failure = batch.failures[1]
        assert isinstance(failure, EnvFailedError)
        assert (failure.slot, failure.episode_step) == (1, 1)
        assert "no such ROM" in str(failure)
        with pytest.raises(EnvFailedError, match=r"slot 1: ale-py raised .*cannot replace a game"):
            env.try_restart(np.array([1]))
        if options:
            assert [row[:3] for row in told(env.poll())] == [(2, 0, 1), (3, 0, 1)]


def test_an_error_in_a_reset_is_in_failures(scripted, plan_of):
    with scripted(2, lambda slot, game: plan_of()) as env:
        env.poll()

        def broken(**options):
            raise OSError("the ROM is gone")

        scripted.vectors[0].reset = broken
        batch = env.try_reset(np.array([1]))
        assert (len(batch.env_ids), list(batch.failures)) == (0, [1])
        assert list(env.poll().failures) == [0]


def test_reward_clip_is_not_for_poll(scripted, plan_of):
    env = scripted(1, lambda slot, game: plan_of(), reward_clip=True)
    with env, pytest.raises(ConfigError, match="clip_rewards=True"):
        env.poll()


def test_one_env_has_one_interface(scripted, plan_of):
    with scripted(1, lambda slot, game: plan_of()) as env:
        env.poll()
        with pytest.raises(EnvProtocolError, match="used through poll, so recv cannot be called"):
            env.recv()
    with scripted(1, lambda slot, game: plan_of()) as env:
        env.async_reset()
        with pytest.raises(EnvProtocolError, match="used through recv, so poll cannot be called"):
            env.poll()


@pytest.mark.parametrize("options", [{"groups": 2}, {"batch_size": 1}, {}])
def test_close_ends_a_poll_that_waits_for_games_that_hang(scripted, plan_of, poll_in_thread, options, monkeypatch):
    """The games' own call comes back later, or never: nobody waits for it. One group: if it is large."""
    monkeypatch.setattr("rlsample.env.atari_fleet._DIRECT_MOST", 0)
    env = scripted(2, lambda slot, game: plan_of(), **options)
    while (env._states.code != WAITING).any():
        env.poll()
    for vector in scripted.vectors:
        vector.gate.clear()
    send(env, [0, 1], [0, 0])
    poll = poll_in_thread(env)
    while not env._waiting.locked():
        time.sleep(0.001)
    started = time.monotonic()
    env.close()
    assert poll.ended(1.0)
    assert time.monotonic() - started < 1.5
    with pytest.raises(EnvClosedError):
        env.poll()
    for vector in scripted.vectors:
        vector.gate.set()  # or the threads would be left behind


def test_close_waits_for_a_send_that_is_under_way(scripted, plan_of, monkeypatch):
    env = scripted(2, lambda slot, game: plan_of(), groups=2)
    env.poll()
    launch, inside, go_on = env._fleet.launch, threading.Event(), threading.Event()

    def slow_launch(group):
        inside.set()
        assert go_on.wait(20)
        launch(group)

    monkeypatch.setattr(env._fleet, "launch", slow_launch)
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        sent = threads.submit(env.send_actions, np.array([0]), np.array([1]))
        assert inside.wait(20)
        closed = threads.submit(env.close)
        with pytest.raises(concurrent.futures.TimeoutError):
            closed.result(0.5)
        go_on.set()
        assert sent.result(20) is None
        assert closed.result(20) is None
    with pytest.raises(EnvClosedError):
        env.poll()


def test_close_is_idempotent_and_ends_everything(scripted, plan_of):
    for polls in range(2):
        env = scripted(2, lambda slot, game: plan_of(), groups=2)
        for _ in range(polls):
            env.poll()
        env.close()
        env.close()
        for call in (env.poll, lambda env=env: send(env, [0], [0]), lambda env=env: env.try_reset(np.array([0]))):
            with pytest.raises(EnvClosedError):
                call()
        assert not [t for t in threading.enumerate() if t.name.startswith("atari")]


def test_an_env_that_nobody_closed_ends_its_threads(scripted, plan_of):
    env = scripted(2, lambda slot, game: plan_of(), groups=2)
    env.poll()
    threads = [t for t in threading.enumerate() if t.name.startswith("atari")]
    assert len(threads) == 2
    scripted.vectors = []
    del env
    for thread in threads:
        thread.join(2.0)
        assert not thread.is_alive()
