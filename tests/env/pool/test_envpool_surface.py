"""EnvPool's send and recv on the pool: resets in place of steps, infos, failures."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest

from rlsample.errors import EnvFailedError, EnvProtocolError, SpaceError
from rlsample.testing import CountEnv
from rlsample.testing.faulty_env import Fault


def zeros(count):
    return np.zeros(count, np.int64)


def test_the_row_after_an_end_is_the_first_of_the_next_episode(make_pool):
    env = make_pool(2, make=lambda ctx: CountEnv(2 + ctx.slot_index), num_workers=2)
    obs, info = env.reset()
    assert obs.ravel().tolist() == [0, 0]
    assert info["env_id"].tolist() == [0, 1]
    seen = []
    for _ in range(4):
        obs, rewards, terminated, truncated, info = env.step(zeros(2))
        seen.append((obs.ravel().tolist(), rewards.tolist(), terminated.tolist(), info["is_first"].tolist()))
        assert info["elapsed_step"].tolist() == [int(k) for k in obs.ravel()]
        assert not truncated.any()
    assert seen == [
        ([1, 1], [1, 1], [False, False], [False, False]),
        ([2, 2], [2, 2], [True, False], [False, False]),
        ([0, 3], [0, 3], [False, True], [True, False]),
        ([1, 0], [1, 0], [False, False], [False, True]),
    ]


@pytest.mark.parametrize("ordered", [True, False])
def test_any_subset_may_be_sent_and_resets_go_along(make_pool, ordered):
    env = make_pool(3, env={"n": 1}, num_workers=2, ordered=ordered)
    env.async_reset()
    env.recv(3)
    env.send(zeros(2), np.array([2, 0], np.int32))
    *_, terminated, _, info = env.recv(2, 2)
    assert sorted(info["env_id"].tolist()) == [0, 2]
    assert terminated.all()
    env.send(zeros(3), np.array([0, 1, 2]))  # slots 0 and 2 have ended, 1 has not begun
    got = {}
    while len(got) < 3:
        _, _, _, _, info = env.recv(1, 3)
        got.update(zip(info["env_id"].tolist(), info["is_first"].tolist(), strict=True))
    assert got == {0: True, 1: False, 2: True}


def test_wrong_slots_are_refused_before_anything_is_sent(make_pool):
    env = make_pool(3, env={"n": 1}, num_workers=1)
    env.reset()
    env.step(zeros(3))
    for wrong in ([0, 0], [3], [-1]):
        with pytest.raises(EnvProtocolError, match=f"slot {wrong[-1]}"):
            env.send(zeros(len(wrong)), np.array(wrong))
    with pytest.raises(EnvProtocolError):
        env.recv()
    *_, info = env.step(zeros(3))
    assert info["is_first"].all()


@pytest.mark.parametrize("wrong", [[0.0, 1.0], [True, False], [0.7, 1.2]])
def test_slots_are_whole_numbers_and_no_mask(make_pool, wrong):
    env = make_pool(2, env={"n": 5}, num_workers=1)
    env.reset()
    with pytest.raises(EnvProtocolError, match="env_ids must be integers"):
        env.send(zeros(2), np.array(wrong))
    assert env.step(zeros(2))[0].ravel().tolist() == [1, 1]


def test_a_list_of_actions_will_do_also_where_a_slot_has_ended(make_pool):
    env = make_pool(3, make=lambda ctx: CountEnv(1 + ctx.slot_index), num_workers=1)
    env.reset()
    assert env.step([0, 1, 1])[2].tolist() == [True, False, False]
    obs, *_, info = env.step([0, 1, 1])
    assert (obs.ravel().tolist(), info["is_first"].tolist()) == ([0, 2, 2], [True, False, False])
    with pytest.raises(SpaceError, match="expected one for each of 3 slots, got 2 actions"):
        env.send([0, 1])
    assert env.step([0, 0, 0])[0].ravel().tolist() == [1, 0, 3]


def test_async_reset_starts_every_slot_anew(make_pool):
    env = make_pool(3, env={"n": 5}, num_workers=2)
    env.reset()
    env.step(zeros(3))
    env.async_reset()
    obs, rewards, _, _, info = env.recv()
    assert obs.ravel().tolist() == rewards.tolist() == [0, 0, 0]
    assert info["is_first"].all()
    env.send(zeros(3))
    with pytest.raises(EnvProtocolError, match="busy"):
        env.async_reset()


class Informed(CountEnv):
    def step(self, action):
        obs, reward, terminated, truncated, _ = super().step(action)
        info = {"lives": 3 - self.k, "where": "here"}
        if self.k == 2:
            info = {"bonus": 0.5}
        return obs, reward, terminated, truncated, info

    def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed, options=options)[0], {"lives": 3}


def test_info_keys_travel_as_columns(make_pool):
    env = make_pool(2, make=lambda ctx: Informed(3), num_workers=2, info_keys=("lives", "bonus"))
    _, info = env.reset()
    assert info["lives"].tolist() == [3, 3]
    assert np.isnan(info["bonus"]).all()
    assert "infos" not in info
    *_, info = env.step(zeros(2))
    assert info["lives"].tolist() == [2, 2]
    *_, info = env.step(zeros(2))
    assert np.isnan(info["lives"]).all()
    assert info["bonus"].tolist() == [0.5, 0.5]
    env.send_actions(env.all_ids, zeros(2))
    batch = env.poll()
    assert dict(batch.infos) == {0: {"lives": 0.0}, 1: {"lives": 0.0}}
    with pytest.raises(KeyError):
        batch.infos[2]


def test_whole_infos_travel_only_when_there_are_any(make_pool):
    env = make_pool(2, make=lambda ctx: Informed(9) if ctx.slot_index else CountEnv(9), num_workers=1)
    env.reset()
    *_, info = env.step(zeros(2))
    assert info["infos"] == {1: {"lives": 2, "where": "here"}}


@pytest.mark.parametrize(("keys", "said"), [((), "cannot be sent"), (("f",), "hold only numbers")])
def test_an_info_that_cannot_travel_is_named(make_pool, keys, said):
    class Odd(CountEnv):
        def step(self, action):
            return (*super().step(action)[:4], {"f": lambda: 0})

    env = make_pool(1, make=lambda ctx: Odd(9), info_keys=keys)
    env.poll()
    env.send_actions(env.all_ids, zeros(1))
    failure = env.poll().failures[0]
    assert said in str(failure)
    assert failure.episode_step == 1


def test_a_failed_slot_is_restarted_and_told(make_pool):
    env = make_pool(2, {1: Fault("exit", at=2)}, max_restarts=1, num_workers=2)
    env.reset()
    env.step(zeros(2))
    _, _, _, _, info = env.step(zeros(2))
    assert info["env_id"].tolist() == [0]
    assert list(info["failures"]) == [1]
    obs, _, _, _, info = env.step(zeros(1), np.array([0]))
    while 1 not in info["env_id"]:
        obs, _, _, _, info = env.recv()
    assert obs[info["env_id"] == 1].ravel().tolist() == [0]
    assert info["is_first"][info["env_id"] == 1].tolist() == [True]


LEFT = "no restart left: max_restarts=0"


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("raise", f"slot 1, episode step 2: step raised RuntimeError: broken on purpose (in worker 1; {LEFT})"),
        ("exit", f"slot 1, episode step 2: worker 1 exited with code 3 in this env ({LEFT})"),
        ("kill", f"slot 1, episode step 2: worker 1 was killed by SIGKILL in this env ({LEFT})"),
    ],
)
def test_a_failed_slot_without_restarts_raises_and_the_other_rows_are_the_next_recvs(make_pool, kind, said, ordered):
    env = make_pool(3, {1: Fault(kind, at=2)}, num_workers=3, ordered=ordered, batch_size=3)
    env.reset()
    env.step(zeros(3))
    env.send(zeros(3))
    failures = []
    got = {}
    while len(got) < 2:
        try:
            obs, _, _, _, info = env.recv()
        except EnvFailedError as e:
            failures.append(e)
        else:
            got.update(zip(info["env_id"].tolist(), obs.ravel().tolist(), strict=True))
    assert got == {0: 2, 2: 2}
    if not failures:  # first come, first served: the two rows may have been there before it
        with pytest.raises(EnvFailedError) as caught:
            env.recv()
        failures.append(caught.value)
    (failure,) = failures
    assert str(failure) == said
    assert (failure.slot, failure.episode_step) == (1, 2)
    assert ("broken on purpose" if kind == "raise" else "worker 1") in failure.remote_traceback
    assert env.step(zeros(2), np.array([0, 2]))[0].ravel().tolist() == [3, 3]
    with pytest.raises(EnvProtocolError, match="slot 1 takes no action: it is failed"):
        env.send(zeros(3))


def test_slots_that_have_no_restart_left_at_once_are_one_error(make_pool):
    env = make_pool(4, {1: Fault("exit", at=1)}, num_workers=2)
    env.reset()
    env.send(zeros(4))
    with pytest.raises(EnvFailedError) as caught:
        env.recv()
    died = "episode step 1: worker 0 exited with code 3 in"
    assert str(caught.value) == f"slot 0, {died} the env of slot 1 ({LEFT}); and 1 more: slot 1, {died} this env"
    assert caught.value.slot == 0
    obs, _, _, _, info = env.recv()
    assert (info["env_id"].tolist(), obs.ravel().tolist()) == ([2, 3], [1, 1])
    assert "failures" not in info


def test_one_that_may_be_restarted_is_not_lost_when_another_may_not(make_pool):
    faults = {0: Fault("raise", at=1, incarnations=1), 1: Fault("raise", at=1, incarnations=2)}
    env = make_pool(3, faults, max_restarts=1, num_workers=3)
    env.reset()
    assert sorted(env.step(zeros(3))[4]["failures"]) == [0, 1]
    assert env.recv()[4]["env_id"].tolist() == [0, 1]  # both restarted
    env.send(zeros(3))
    with pytest.raises(EnvFailedError, match=r"slot 1, episode step 1: .*max_restarts=1"):
        env.recv()
    obs, _, _, _, info = env.recv()
    assert (info["env_id"].tolist(), obs.ravel().tolist()) == ([0, 2], [1, 2])


def test_a_first_observation_that_cannot_be_had_leaves_the_other_rows(make_pool):
    env = make_pool(2, {0: Fault("raise", at=2, call="reset")}, env={"n": 1}, num_workers=2)
    env.reset()
    assert env.step(zeros(2))[2].tolist() == [True, True]
    env.send(zeros(2))
    with pytest.raises(EnvFailedError, match="slot 0: reset raised RuntimeError: broken on purpose"):
        env.recv()
    obs, _, _, _, info = env.recv()
    assert (info["env_id"].tolist(), info["is_first"].tolist(), obs.ravel().tolist()) == ([1], [True], [0])


def test_a_failure_that_came_while_rows_were_taken_is_the_next_recvs(make_pool, monkeypatch):
    env = make_pool(2, {1: Fault("raise", at=1)}, num_workers=2)
    env.reset()
    env.send(zeros(2))
    monkeypatch.setattr(env._requests, "raise_final_failures", lambda: None)  # it saw none yet
    obs, _, _, _, info = env.recv()
    assert (info["env_id"].tolist(), obs.ravel().tolist()) == ([0], [1])
    assert "failures" not in info
    monkeypatch.undo()
    with pytest.raises(EnvFailedError, match=r"slot 1.*no restart left"):
        env.recv()
    assert env.step(zeros(1), np.array([0]))[4]["env_id"].tolist() == [0]


def test_dict_actions_and_sleeping_envs(make_pool):
    class Trees(gymnasium.Env):
        observation_space = gymnasium.spaces.Dict(a=gymnasium.spaces.Discrete(99))
        action_space = gymnasium.spaces.Dict(x=gymnasium.spaces.Discrete(9), y=gymnasium.spaces.Box(0, 9, (2,)))

        def reset(self, *, seed=None, options=None):
            return {"a": 0}, {}

        def step(self, action):
            return {"a": action["x"] * 10 + int(action["y"][1])}, 0.0, False, False, {}

    env = make_pool(3, make=lambda ctx: Trees(), num_workers=2)
    env.reset()
    actions = {"x": np.array([1, 2, 3]), "y": np.array([[0, 4], [0, 5], [0, 6]], np.float32)}
    assert env.step(actions)[0]["a"].tolist() == [14, 25, 36]
