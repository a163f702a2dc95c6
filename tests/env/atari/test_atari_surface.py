"""EnvPool's interface of Atari envs, on games that follow a script."""

import numpy as np
import pytest

from rlsample.errors import EnvFailedError, EnvProtocolError, SpaceError


def told(received):
    """Rows as (slot, game, step, last action, reward, terminated, truncated)."""
    obs, rewards, terminated, truncated, info = received
    assert info["env_id"].dtype == np.int32
    assert obs[:, 0, 0, 0].tolist() == info["env_id"].tolist()
    columns = [obs[:, 0, 0, k].tolist() for k in range(4)]
    return list(zip(*columns, rewards.tolist(), terminated.tolist(), truncated.tolist(), strict=True))


def column(received, name):
    return received[-1][name].tolist()


def test_the_step_after_an_end_resets_and_drops_its_action(scripted, plan_of):
    with scripted(2, lambda slot, game: plan_of(over_at=2 if slot == 0 else None), max_episode_steps=3) as env:
        obs, info = env.reset()
        assert obs[:, 0, 0].tolist() == [[0, 0, 0, 0], [1, 0, 0, 0]]
        assert info["is_first"].all()
        assert info["elapsed_step"].tolist() == [0, 0]
        rows = [env.step(np.array([3, 2])) for _ in range(5)]
        assert [told(r) for r in rows] == [
            [(0, 0, 1, 3, -1.0, False, False), (1, 0, 1, 2, -1.0, False, False)],
            [(0, 0, 2, 3, 2.0, True, False), (1, 0, 2, 2, 2.0, False, False)],
            [(0, 1, 0, 0, 0.0, False, False), (1, 0, 3, 2, -3.0, False, True)],
            [(0, 1, 1, 3, -1.0, False, False), (1, 1, 0, 0, 0.0, False, False)],
            [(0, 1, 2, 3, 2.0, True, False), (1, 1, 1, 2, -1.0, False, False)],
        ]
        assert [column(r, "elapsed_step") for r in rows] == [[1, 1], [2, 2], [0, 3], [1, 0], [2, 1]]
        assert [column(r, "is_first") for r in rows] == [[False] * 2] * 2 + [[True, False], [False, True], [False] * 2]
        assert [column(r, "terminated") for r in rows][1:3] == [[True, False], [False, False]]
        assert not scripted.vectors[0].opened["same_step"]


def test_lives_are_a_column(scripted, plan_of):
    with scripted(2, lambda slot, game: plan_of(lives=3 + slot, lost_at=(2,), over_at=3)) as env:
        env.reset()
        rows = [env.step(np.array([0, 0])) for _ in range(4)]
        assert [column(r, "lives") for r in rows] == [[3, 4], [2, 3], [0, 0], [3, 4]]
        assert [r[-1]["infos"].get(1, {}).get("life_lost", False) for r in rows] == [False, True, False, False]
        assert [r[2].tolist() for r in rows] == [[False] * 2] * 2 + [[True] * 2, [False] * 2]


def test_episodic_life_ends_the_episode_but_not_the_game(scripted, plan_of):
    """terminated is the episode's end; info's is the game's, as in EnvPool."""
    with scripted(1, lambda slot, game: plan_of(lives=3, lost_at=(1,), over_at=4), episodic_life=True) as env:
        env.reset()
        rows = [env.step(np.array([3])) for _ in range(6)]
        assert [told(r)[0][1:] for r in rows] == [
            (0, 1, 3, -1.0, True, False),
            (0, 2, 1, 0.0, False, False),
            (0, 3, 3, -3.0, False, False),
            (0, 4, 3, 4.0, True, False),
            (1, 0, 0, 0.0, False, False),
            (1, 1, 3, -1.0, True, False),
        ]
        assert [column(r, "terminated") for r in rows] == [[False], [False], [False], [True], [False], [False]]
        assert [column(r, "elapsed_step") for r in rows] == [[1], [2], [3], [4], [0], [1]]


def test_a_game_that_ends_while_fire_is_pressed_begins_anew_at_once(scripted, plan_of):
    with scripted(1, lambda slot, game: plan_of(lives=3, lost_at=(1,), over_at=2), episodic_life=True) as env:
        env.reset()
        rows = [env.step(np.array([3])) for _ in range(3)]
        assert [told(r)[0][1:] for r in rows] == [
            (0, 1, 3, -1.0, True, False), (1, 0, 0, 0.0, False, False), (1, 1, 3, -1.0, True, False),
        ]  # fmt: skip
        assert [column(r, "terminated") for r in rows] == [[False], [False], [False]]
        assert [column(r, "elapsed_step") for r in rows] == [[1], [0], [1]]


def test_clipped_rewards_keep_the_raw_ones_in_info(scripted, plan_of):
    with scripted(1, lambda slot, game: plan_of(over_at=3), reward_clip=True) as env:
        env.reset()
        rows = [env.step(np.array([0])) for _ in range(3)]
        assert [r[1].tolist() for r in rows] == [[-1.0], [1.0], [-1.0]]
        assert [column(r, "reward") for r in rows] == [[-1.0], [2.0], [-3.0]]
        assert rows[2][-1]["infos"][0]["game_return"] == -2.0


def test_send_to_some_and_first_come(scripted, plan_of):
    with scripted(4, lambda slot, game: plan_of(over_at=2), batch_size=2, recv_ahead=True) as env:
        env.async_reset()
        first = [env.recv(), env.recv()]
        ids = np.concatenate([r[-1]["env_id"] for r in first])
        assert sorted(ids.tolist()) == [0, 1, 2, 3]
        scripted.vectors[1].gate.clear()  # slots 2 and 3 are late
        env.send(np.array([1, 2, 3, 0]), np.array([3, 0, 2, 1]))
        rows = []
        for _ in range(3):
            received = env.recv()
            rows.append(told(received))
            env.send(np.array([2, 2]), received[-1]["env_id"])
        assert rows == [
            [(0, 0, 1, 2, -1.0, False, False), (1, 0, 1, 0, -1.0, False, False)],
            [(0, 0, 2, 2, 2.0, True, False), (1, 0, 2, 2, 2.0, True, False)],
            [(0, 1, 0, 0, 0.0, False, False), (1, 1, 0, 0, 0.0, False, False)],
        ]
        scripted.vectors[1].gate.set()
        late = env.recv()
        while late[-1]["env_id"].tolist() == [0, 1]:
            late = env.recv()
        assert told(late) == [(2, 0, 1, 3, -1.0, False, False), (3, 0, 1, 1, -1.0, False, False)]


def test_recv_between_two_bounds(scripted, plan_of):
    """6 slots in groups of 2, received ahead; what is more than max_envs is kept for the next recv."""
    with scripted(6, lambda slot, game: plan_of(), batch_size=2, recv_ahead=True) as env:
        env.async_reset()
        everyone = env.recv(min_envs=6, max_envs=6)[-1]["env_id"]
        assert sorted(everyone.tolist()) == [0, 1, 2, 3, 4, 5]
        env.send(np.zeros(6, np.int64), everyone)
        seen = env.recv(min_envs=3, max_envs=3)[-1]["env_id"].tolist()
        assert len(seen) == 3
        seen += env.recv(min_envs=1)[-1]["env_id"].tolist()
        seen += env.recv(min_envs=6, max_envs=6)[-1]["env_id"].tolist()  # no more can come
        assert sorted(seen) == [0, 1, 2, 3, 4, 5]
        with pytest.raises(EnvProtocolError, match="nothing to wait for"):
            env.recv()
        scripted.vectors[0].gate.clear()
        env.send(np.zeros(2, np.int64), np.array([0, 1]))
        assert env.recv(timeout_s=0.01)[0].shape == (0, 1, 1, 4)
        scripted.vectors[0].gate.set()
        assert env.recv()[-1]["env_id"].tolist() == [0, 1]


def test_refused_sends_step_nothing(scripted, plan_of):
    with scripted(3, lambda slot, game: plan_of(over_at=1 if slot == 0 else None)) as env:
        with pytest.raises(EnvProtocolError, match="not yet started"):
            env.send(np.zeros(3, np.int64))
        env.reset()
        env.step(np.zeros(3, np.int64))  # slot 0 has ended
        for actions, ids, error, says in (
            ([0, 0], [0, 0], EnvProtocolError, "slot 0 is named twice"),
            ([0, 0], [0, 3], EnvProtocolError, "slot 3 does not exist"),
            ([0, 4], [0, 1], SpaceError, "slot 1 was given 4"),
            ([4, 0], [0, 1], SpaceError, "slot 0 was given 4"),
            ([0], [0, 1], SpaceError, r"expected shape \(2,\)"),
        ):
            with pytest.raises(error, match=says):
                env.send(np.array(actions), np.array(ids))
        assert scripted.vectors[0].actions == [[0, 0, 0]]
        assert [row[:3] for row in told(env.step(np.array([1, 2, 3])))] == [(0, 1, 0), (1, 0, 2), (2, 0, 2)]


def test_async_reset_starts_every_game_anew(scripted, plan_of):
    with scripted(2, lambda slot, game: plan_of(over_at=1 if slot == 0 else None)) as env:
        env.reset()
        env.step(np.zeros(2, np.int64))
        env.send(np.zeros(1, np.int64), np.array([1]))
        with pytest.raises(EnvProtocolError, match="slot 1 cannot be reset: it is busy"):
            env.async_reset()
        env.send(np.zeros(1, np.int64), np.array([0]))
        assert [row[:3] for row in told(env.recv())] == [(0, 1, 0), (1, 0, 2)]
        env.async_reset()
        assert [row[:3] for row in told(env.recv())] == [(0, 2, 0), (1, 1, 0)]


def test_an_error_of_ale_is_raised(scripted, plan_of):
    with scripted(2, lambda slot, game: plan_of()) as env:
        env.reset()
        scripted.vectors[0].error = ValueError("no such ROM")
        with pytest.raises(EnvFailedError, match="no such ROM"):
            env.step(np.zeros(2, np.int64))


def test_an_error_of_one_group_keeps_the_rows_of_the_others(scripted, plan_of):
    with scripted(4, lambda slot, game: plan_of(), batch_size=2, recv_ahead=True) as env:
        env.async_reset()
        ids = env.recv(min_envs=4, max_envs=4)[-1]["env_id"]
        scripted.vectors[1].error = ValueError("no such ROM")
        env.send(np.zeros(4, np.int64), ids)
        received = []

        def receive():
            while True:
                received.append(env.recv(min_envs=4, max_envs=4))

        with pytest.raises(EnvFailedError, match=r"slot 2: .*no such ROM"):
            receive()
        received += [env.recv()] if not received else []
        assert [r[-1]["env_id"].tolist() for r in received] == [[0, 1]]
