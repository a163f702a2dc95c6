"""EnvPool's recv with a batch_size: rows of any games, those that were ready first."""

import threading

import numpy as np
import pytest

from rlsample.env.atari import make_atari
from rlsample.errors import EnvClosedError, EnvFailedError, EnvProtocolError, SpaceError
from tests.env.atari.test_atari_surface import column, told


def ids_of(received):
    return received[-1]["env_id"].tolist()


def test_rows_of_any_games_come_as_they_are_ready(scripted, plan_of):
    """5 games, 2 rows a batch; slot 1 is late twice and holds up nobody."""
    with scripted(5, lambda slot, game: plan_of(), batch_size=2) as env:
        env.async_reset()
        (vector,) = scripted.vectors
        vector.late = {1}
        rows = [env.recv()]
        for actions in ([1, 2], [3, 1], [2, 3]):
            env.send(np.array(actions), rows[-1][-1]["env_id"])
            rows.append(env.recv())
        assert [ids_of(r) for r in rows] == [[0, 2], [3, 4], [0, 2], [3, 4]]
        assert [column(r, "is_first") for r in rows] == [[True] * 2, [True] * 2, [False] * 2, [False] * 2]
        assert told(rows[2]) == [(0, 0, 1, 1, -1.0, False, False), (2, 0, 1, 2, -1.0, False, False)]
        assert told(rows[3]) == [(3, 0, 1, 3, -1.0, False, False), (4, 0, 1, 1, -1.0, False, False)]
        vector.late = set()
        env.send(np.array([0, 0]), rows[-1][-1]["env_id"])
        rows.append(env.recv())
        assert told(rows[4]) == [(1, 0, 0, 0, 0.0, False, False), (0, 0, 2, 2, 2.0, False, False)]
        assert column(rows[4], "is_first") == [True, False]
        assert column(rows[4], "elapsed_step") == [0, 2]


def test_actions_may_be_sent_in_parts_and_in_any_order(scripted, plan_of):
    with scripted(5, lambda slot, game: plan_of(), batch_size=3) as env:
        env.async_reset()
        assert ids_of(env.recv()) == [0, 1, 2]
        env.send(np.array([3]), np.array([2]))
        assert scripted.vectors[0].actions == []
        env.send(np.array([1, 2]), np.array([1, 0]))
        assert scripted.vectors[0].actions == [[2, 1, 3]]
        assert ids_of(env.recv()) == [3, 4, 0]
        env.send(np.array([0, 1, 2]), np.array([0, 3, 4]))
        assert told(env.recv())[:2] == [(1, 0, 1, 1, -1.0, False, False), (2, 0, 1, 3, -1.0, False, False)]


def test_ends_lives_and_lengths_follow_each_game(scripted, plan_of):
    """4 games with ends at different steps, batches of 3: batches mix rows of many games' ages."""

    def plan(slot, game):
        return plan_of(lives=2 + slot, lost_at=(2,), over_at=3 + slot if game == 0 else None)

    with scripted(4, plan, batch_size=3, max_episode_steps=5) as env:
        env.async_reset()
        seen = {slot: [] for slot in range(4)}
        for _ in range(16):
            received = env.recv()
            info = received[-1]
            for k, slot in enumerate(ids_of(received)):
                row = told(received)[k]
                assert row[2] == info["elapsed_step"][k]
                seen[slot].append((*row[1:3], row[4], bool(info["is_first"][k]), *row[5:], int(info["lives"][k])))
                told_end = info["infos"].get(k, {})
                assert ("game_over" in told_end) == (row[5] or row[6])
                if row[5] or row[6]:
                    assert told_end["game_length"] == row[2]
                    assert told_end["game_return"] == sum((-1) ** s * s for s in range(1, row[2] + 1))
            env.send(np.ones(3, np.int64), info["env_id"])
    assert seen[0][:7] == [
        (0, 0, 0.0, True, False, False, 2),
        (0, 1, -1.0, False, False, False, 2),
        (0, 2, 2.0, False, False, False, 1),
        (0, 3, -3.0, False, True, False, 0),
        (1, 0, 0.0, True, False, False, 2),
        (1, 1, -1.0, False, False, False, 2),
        (1, 2, 2.0, False, False, False, 1),
    ]
    assert [row[4:6] for row in seen[1][3:6]] == [(False, False), (True, False), (False, False)]
    assert [row[4:6] for row in seen[2][4:7]] == [(False, False), (True, False), (False, False)]
    assert [row[4:6] for row in seen[3][4:7]] == [(False, False), (False, True), (False, False)]
    assert seen[3][6][:4] == (1, 0, 0.0, True)


def test_episodic_life_presses_fire_for_the_right_game(scripted, plan_of):
    """Only slot 1 loses a life, at its first step; FIRE is action 1 and replaces what was sent for it."""

    def plan(slot, game):
        return plan_of(lives=3, lost_at=(1,) if slot == 1 else ())

    with scripted(3, plan, batch_size=2, episodic_life=True) as env:
        env.async_reset()
        rows = []
        for _ in range(6):
            rows.append(env.recv())
            env.send(np.array([3, 2]), rows[-1][-1]["env_id"])
        assert [ids_of(r) for r in rows] == [[0, 1], [2, 0], [1, 2], [0, 1], [2, 0], [1, 2]]
        assert told(rows[2])[0] == (1, 0, 1, 2, -1.0, True, False)
        assert told(rows[3])[1] == (1, 0, 2, 1, 0.0, False, False)
        assert column(rows[3], "is_first") == [False, True]
        assert column(rows[2], "terminated") == [False, False]
        assert told(rows[5])[0] == (1, 0, 3, 2, -3.0, False, False)


@pytest.mark.parametrize("batch_size", [1, 2])
def test_a_game_that_ends_while_fire_is_pressed_has_no_row_until_it_began_anew(scripted, plan_of, batch_size):
    def plan(slot, game):
        return plan_of(lives=3, lost_at=(1,), over_at=2) if slot == 0 and game == 0 else plan_of()

    with scripted(3, plan, batch_size=batch_size, episodic_life=True) as env:
        env.async_reset()
        mine = []
        for _ in range(15):
            received = env.recv()
            ids = ids_of(received)
            assert 1 <= len(ids) <= batch_size
            if 0 in ids:
                mine.append((*told(received)[ids.index(0)][1:], column(received, "is_first")[ids.index(0)]))
            env.send(np.full(len(ids), 3), received[-1]["env_id"])
    assert mine[:4] == [
        (0, 0, 0, 0.0, False, False, True),
        (0, 1, 3, -1.0, True, False, False),
        (1, 0, 0, 0.0, False, False, True),
        (1, 1, 3, -1.0, False, False, False),
    ]


def test_recv_waits_for_no_action_that_was_not_sent(scripted, plan_of):
    """Nothing is lost: the rows that were received can still be answered."""
    with scripted(4, lambda slot, game: plan_of(), batch_size=2) as env:
        env.async_reset()
        env.recv()
        with pytest.raises(EnvProtocolError, match=r"slots 0, 1 of the last recv.*recv_ahead=True"):
            env.recv()
        env.send(np.array([1]), np.array([1]))
        with pytest.raises(EnvProtocolError, match=r"slot 0 of the last recv"):
            env.recv(timeout_s=0.01)
        with pytest.raises(EnvProtocolError, match="slot 2 cannot be reset: it is resetting"):
            env.async_reset()
        env.send(np.array([2]), np.array([0]))
        assert ids_of(env.recv()) == [2, 3]
        env.send(np.array([3, 0]), np.array([2, 3]))
        assert [row[:4] for row in told(env.recv())] == [(0, 0, 1, 2), (1, 0, 1, 1)]


def test_recv_between_two_bounds(scripted, plan_of):
    """What is more than max_envs is kept; more than a batch cannot come before it is answered."""
    with scripted(6, lambda slot, game: plan_of(), batch_size=3) as env:
        env.async_reset()
        assert ids_of(env.recv(max_envs=2, min_envs=1)) == [0, 1]
        assert ids_of(env.recv(min_envs=6, max_envs=6)) == [2]
        env.send(np.zeros(3, np.int64), np.array([0, 1, 2]))
        scripted.vectors[0].gate.clear()
        assert env.recv(timeout_s=0.01)[0].shape == (0, 1, 1, 4)
        scripted.vectors[0].gate.set()
        assert ids_of(env.recv()) == [3, 4, 5]


def test_refused_sends_step_nothing(scripted, plan_of):
    with scripted(4, lambda slot, game: plan_of(over_at=1), batch_size=2) as env:
        env.async_reset()
        env.recv()
        for actions, ids, error, says in (
            ([0, 0], [0, 0], EnvProtocolError, "slot 0 is named twice"),
            ([0, 0], [0, 2], EnvProtocolError, "slot 2 takes no action: it is resetting"),
            ([0, 0], [0, 4], EnvProtocolError, "slot 4 does not exist"),
            ([0, 4], [0, 1], SpaceError, "slot 1 was given 4"),
            ([4, 0], [0, 1], SpaceError, "slot 0 was given 4"),
        ):
            with pytest.raises(error, match=says):
                env.send(np.array(actions), np.array(ids))
        assert scripted.vectors[0].actions == []
        env.send(np.array([3, 2]), np.array([0, 1]))
        assert scripted.vectors[0].actions == [[3, 2]]


def test_an_error_of_ale_fails_every_game(scripted, plan_of):
    with scripted(4, lambda slot, game: plan_of(), batch_size=2) as env:
        env.async_reset()
        ids = env.recv()[-1]["env_id"]
        env.send(np.zeros(2, np.int64), ids)
        scripted.vectors[0].error = ValueError("no such ROM")
        with pytest.raises(EnvFailedError, match="no such ROM"):
            env.recv()
        with pytest.raises(EnvProtocolError, match="slots 0, 1, 2, 3: failed"):
            env.recv()


def test_close_ends_a_wait_with_a_time_limit(scripted, plan_of):
    env = scripted(4, lambda slot, game: plan_of(), batch_size=2)
    env.async_reset()
    env.send(np.zeros(2, np.int64), env.recv()[-1]["env_id"])
    gate = scripted.vectors[0].gate
    gate.clear()
    waits, errors = threading.Event(), []

    def wait():
        waits.set()
        try:
            env.recv(timeout_s=60)
        except EnvClosedError as e:
            errors.append(e)

    thread = threading.Thread(target=wait)
    thread.start()
    waits.wait(10)
    env.close()
    thread.join(10)
    gate.set()
    assert not thread.is_alive()
    assert len(errors) == 1


def test_real_games_are_those_of_an_ordered_env():
    """Breakout, 5 games, 2 rows a batch: each slot's rows, bit for bit, however they were mixed; lives and ends too."""
    seeds, num_rows, limit = [11, 12, 13, 14, 15], 60, 25

    def action(slot, k):
        return int(np.random.default_rng([7, slot, k]).integers(4))

    def play(env):
        rows = {slot: [] for slot in range(env.num_envs)}
        env.async_reset()
        while min(map(len, rows.values())) < num_rows:
            obs, rewards, terminated, truncated, info = env.recv()
            ids = info["env_id"].tolist()
            for k, slot in enumerate(ids):
                told = [info[name][k].item() for name in ("elapsed_step", "is_first", "lives")]
                flags = (rewards[k].item(), bool(terminated[k]), bool(truncated[k]))
                rows[slot].append((obs[k].tobytes(), *flags, *told, info["infos"].get(k)))
            env.send(np.array([action(slot, len(rows[slot])) for slot in ids]), info["env_id"])
        return {slot: r[:num_rows] for slot, r in rows.items()}

    games = {}
    for name, options in (("ordered", {}), ("any", {"batch_size": 2})):
        with make_atari("Breakout-v5", 5, seed=seeds, max_episode_steps=limit, **options) as env:
            games[name] = play(env)
    wrong = [(s, k) for s in range(5) for k in range(num_rows) if games["any"][s][k] != games["ordered"][s][k]]
    assert not wrong
    assert [sum(row[3] for row in games["any"][slot]) for slot in range(5)] == [2] * 5
