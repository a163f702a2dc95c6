"""EnvPool objects as input, on a stand-in everywhere and on the real one where it is installed."""

import importlib
import importlib.util
import time
from pathlib import Path

import numpy as np
import pytest

from rlsample.env import as_base_env
from rlsample.env.envpool_env import ColumnInfos, EnvPoolAdapter, EnvPoolLike
from rlsample.errors import ConfigError, EnvError, EnvFailedError, EnvProtocolError, SpaceError
from rlsample.testing import check_base_env

_spec = importlib.util.spec_from_file_location("fake_envpool", Path(__file__).with_name("fake_envpool.py"))
_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)
FakeEnvPool = _module.FakeEnvPool


def told(batch):
    """Rows as (slot, step, reward, terminated, truncated, is_first), in the order of the slots."""
    assert batch.obs[:, 0].tolist() == batch.env_ids.tolist()
    columns = (batch.env_ids, batch.obs[:, 1], batch.rewards, batch.terminated, batch.truncated, batch.is_first)
    return sorted(zip(*(c.tolist() for c in columns), strict=True))


def first(slot):
    return (slot, 0.0, 0.0, False, False, True)


def step(slot, k):
    return (slot, float(k), 10.0 * slot + k, False, False, False)


def test_known_by_its_shape():
    assert isinstance(FakeEnvPool(2), EnvPoolLike)
    with as_base_env(FakeEnvPool(2)) as env:
        assert isinstance(env, EnvPoolAdapter)
        assert not isinstance(env, EnvPoolLike)
    assert not isinstance(as_base_env, EnvPoolLike)


@pytest.mark.parametrize("batch_size", [4, 2, 1])
def test_conformance(batch_size):
    told = check_base_env(lambda seed: as_base_env(FakeEnvPool(4, batch_size), seed=seed), rounds=20)
    assert {rule: said for rule, said in told.items() if said != "ok"} == {
        3: "without a reference, only copies of the next first one are noticed",
        8: "no make_faulty was given",
    }


def test_sync_rows_and_immediate_resets():
    fake = FakeEnvPool(2)
    with as_base_env(fake) as env:
        assert (env.lockstep, env.steps_ahead) == (False, False)
        batch = env.poll()
        assert batch.env_ids is env.all_ids
        assert told(batch) == [first(0), first(1)]
        for k in (1, 2):
            env.send_actions(env.all_ids, np.array([k, 0]))
            assert told(env.poll()) == [step(0, k), step(1, k)]
        env.send_actions(env.all_ids, np.array([0, 0]))
        assert told(env.poll()) == [step(0, 3), (1, 3.0, 13.0, False, True, False)]
        assert told(env.try_reset(np.array([1]))) == [first(1)]
        env.send_actions(env.all_ids, np.array([1, 2]))
        batch = env.poll()
        assert told(batch) == [(0, 4.0, 4.0, True, False, False), step(1, 1)]
        assert batch.infos[0] == {"elapsed_step": 4}
        assert told(env.try_reset(np.array([1, 0]))) == [first(0), first(1)]  # slot 1 in mid-episode
        assert fake.resets == [[0, 1], [1], [1, 0]]
        env.send_actions(env.all_ids, np.array([1, 2]))
        assert told(env.poll()) == [step(0, 1), step(1, 1)]
    assert fake.closes == 1


def test_sync_sends_in_parts_reach_envpool_as_one():
    """Of two sends before a recv, a sync EnvPool loses rows."""
    fake = FakeEnvPool(3)
    with as_base_env(fake) as env:
        env.poll()
        env.send_actions(np.array([2]), np.array([2]))
        env.send_actions(np.array([0]), np.array([1]))
        assert fake.sends == []
        assert told(env.poll()) == [step(0, 1), step(2, 1)]
        assert fake.sends == [{0: 1, 2: 2}]
        with pytest.raises(EnvProtocolError, match="nothing to wait for"):
            env.poll()


@pytest.mark.parametrize("batch_size", [2, 1])
def test_after_a_call_that_broke_off_nothing_is_waited_for(monkeypatch, batch_size):
    fake = FakeEnvPool(2, batch_size)

    def interrupted():
        raise KeyboardInterrupt

    with as_base_env(fake) as env:
        env.poll()
        with monkeypatch.context() as patch:
            patch.setattr(fake, "recv", interrupted)
            env.send_actions(np.array([0]), np.array([1]))
            with pytest.raises(KeyboardInterrupt):
                env.poll()
        for call in (env.poll, lambda: env.try_reset(env.all_ids), lambda: env.send_actions([0], [0])):
            with pytest.raises(EnvError, match="was broken off, and the rows it still owes are not known"):
                call()
    assert fake.closes == 1


def test_async_first_come_and_resets_that_come_later():
    fake = FakeEnvPool(4, 2, seed=1)
    with as_base_env(fake) as env:
        assert (env.lockstep, env.steps_ahead) == (True, True)
        seen = [env.poll(), env.poll()]
        assert sorted(told(seen[0]) + told(seen[1])) == [first(s) for s in range(4)]
        env.send_actions(np.array([3]), np.array([0]))
        with pytest.raises(EnvProtocolError, match=r"2 rows at a time, and 1 are under way: .*slot 3: busy"):
            env.poll()
        env.send_actions(np.array([1]), np.array([2]))
        assert told(env.poll()) == [step(1, 1), step(3, 1)]
        for _ in range(2):
            env.send_actions(np.array([3, 1]), np.array([0, 0]))
            batch = env.poll()
        assert told(batch) == [(1, 3.0, 13.0, False, True, False), step(3, 3)]
        assert env.try_reset(np.array([1, 3])) is None  # slot 3 in mid-episode
        assert told(env.poll()) == [first(1), first(3)]
        assert fake.resets == [[0, 1, 2, 3], [1, 3]]


def test_rows_of_all_slots_are_rows_of_many_polls():
    """10 slots, 4 at a time, as EnvPool recommends; each slot's steps are counted without a gap."""
    with as_base_env(FakeEnvPool(10, 4, seed=3)) as env:
        last = dict.fromkeys(range(10), -1)
        for _ in range(200):
            batch = env.poll()
            assert len(batch.env_ids) == 4
            for slot, k, *_, is_first in told(batch):
                assert k == (0 if is_first else last[slot] + 1)
                last[slot] = k
            over = batch.terminated | batch.truncated
            if over.any():
                env.try_reset(batch.env_ids[over])
            env.send_actions(batch.env_ids[~over], np.zeros(int((~over).sum()), np.int64))
        assert all(k >= 0 for k in last.values())


def test_both_flags_where_an_atari_game_ends_at_the_time_limit():
    """EnvPool's terminated is done & ~trunc; info tells that the game is over."""
    with as_base_env(FakeEnvPool(2, atari=True)) as env:
        env.poll()
        for _ in range(3):
            env.send_actions(env.all_ids, np.zeros(2, np.int64))
            batch = env.poll()
        assert (batch.terminated.tolist(), batch.truncated.tolist()) == ([False, True], [False, True])


def test_observations_of_dict_spaces():
    with as_base_env(FakeEnvPool(2, dict_obs=True)) as env:
        env.poll()
        env.send_actions(env.all_ids, np.zeros(2, np.int64))
        obs = env.poll().obs
        assert obs["at"].tolist() == [[0.0, 1.0], [1.0, 1.0]]
        assert obs["on"].tolist() == [1, 1]
        assert obs["on"].dtype == np.int64


@pytest.mark.parametrize("batch_size", [3, 1])
def test_a_slot_with_nan_fails_and_the_others_go_on(batch_size):
    fake = FakeEnvPool(3, batch_size)
    fake.nan_at = (1, 2)
    with as_base_env(fake) as env:
        failures, rows, waiting = {}, [], []
        for _ in range(12):
            batch = env.poll()
            failures.update(batch.failures)
            rows += told(batch)
            waiting = batch.env_ids[~(batch.terminated | batch.truncated)]
            if len(waiting):
                env.send_actions(waiting, np.zeros(len(waiting), np.int64))
            if failures and len(rows) > 10:
                break
            if len(waiting) < len(batch.env_ids):
                env.try_reset(batch.env_ids[batch.terminated | batch.truncated])
        assert list(failures) == [1]
        assert isinstance(failures[1], EnvFailedError)
        assert (failures[1].slot, failures[1].episode_step) == (1, 2)
        assert "slot 1, episode step 2: observation holds nan" in str(failures[1])
        assert [row[:2] for row in rows if row[0] == 1] == [(1, 0.0), (1, 1.0)]
        assert (2, 3.0) in [row[:2] for row in rows] or batch_size == 1
        with pytest.raises(EnvFailedError, match="EnvPool cannot replace an env"):
            env.try_restart(np.array([1]))


def test_nan_may_be_let_through():
    fake = FakeEnvPool(2)
    fake.nan_at = (1, 1)
    with as_base_env(fake, allow_nonfinite=True) as env:
        env.poll()
        env.send_actions(env.all_ids, np.zeros(2, np.int64))
        assert np.isnan(env.poll().obs[1, 1])


@pytest.mark.parametrize("batch_size", [2, 1])
def test_a_poll_with_a_time_limit_and_close_from_another_thread(batch_size, poll_in_thread):
    fake = FakeEnvPool(2, batch_size)
    env = as_base_env(fake)
    got = 0
    while got < 2:
        got += len(env.poll().env_ids)
    env.send_actions(np.array([0, 1]), np.zeros(2, np.int64))
    fake._gate.clear()
    batch = env.poll(timeout_s=0.01)
    assert (len(batch.env_ids), batch.obs.shape) == (0, (0, 2))
    if batch_size == 2:
        with pytest.raises(EnvProtocolError, match="slot 0 cannot be reset: it is busy"):
            env.try_reset(np.array([0]))
    poll = poll_in_thread(env, timeout_s=60)
    while not env._waiting.locked():
        time.sleep(0.001)
    started = time.monotonic()
    env.close()
    assert poll.ended(1.0)
    assert time.monotonic() - started < 1.5
    assert fake.closes == 0  # EnvPool's recv still uses it
    fake._gate.set()


def test_rows_that_came_late_are_not_lost():
    fake = FakeEnvPool(2)
    with as_base_env(fake) as env:
        env.poll()
        env.send_actions(env.all_ids, np.zeros(2, np.int64))
        fake._gate.clear()
        env.poll(timeout_s=0.01)
        fake._gate.set()
        assert told(env.poll()) == [step(0, 1), step(1, 1)]
        env.send_actions(env.all_ids, np.zeros(2, np.int64))
        assert told(env.poll(timeout_s=30)) == [step(0, 2), step(1, 2)]


@pytest.mark.parametrize("batch_size", [2, 1])
def test_no_bad_action_reaches_envpool(batch_size):
    fake = FakeEnvPool(2, batch_size)
    with as_base_env(fake) as env:
        ids = env.poll().env_ids
        for bad in ([3], [-1], [0.5], [0, 0, 0]):
            with pytest.raises(SpaceError):
                env.send_actions(ids[:1], np.array(bad))
        assert fake.sends == []


def test_what_cannot_be_taken():
    with pytest.raises(ConfigError, match=r"several players \(max_num_players=2\) are not supported"):
        as_base_env(FakeEnvPool(2, config={"max_num_players": 2}))
    with pytest.raises(ConfigError, match="FakeEnvPool has 2 envs, so num_envs cannot be 3"):
        as_base_env(FakeEnvPool(2), num_envs=3)

    class SpeaksDmEnv(FakeEnvPool):
        observation_space = property(lambda self: (_ for _ in ()).throw(AttributeError("observation_space")))

        def __init__(self):
            self._config = {}

    with pytest.raises(ConfigError, match=r"speaks dm_env; make it with envpool\.make_gymnasium"):
        as_base_env(SpeaksDmEnv())


def test_column_infos_are_a_mapping_of_rows():
    infos = ColumnInfos({"a": np.array([1, 2]), "b": np.array([[3.5, 4.0], [5.0, 6.0]])}, 2)
    assert (len(infos), list(infos)) == (2, [0, 1])
    assert infos[1]["a"] == 2
    assert type(infos[1]["a"]) is int
    assert infos[1]["b"].tolist() == [5.0, 6.0]
    assert infos.get(2, "none") == "none"
    with pytest.raises(KeyError):
        infos[-1]


# ---------------------------------------------------------------------- the real one

envpool = importlib.import_module("envpool") if importlib.util.find_spec("envpool") else None
real = pytest.mark.skipif(envpool is None, reason="envpool is not installed")


@real
@pytest.mark.parametrize("options", [{}, {"batch_size": 2}, {"batch_size": 1}])
def test_conformance_of_the_real_one(options):
    told = check_base_env(
        lambda seed: as_base_env(envpool.make_gymnasium("CartPole-v1", num_envs=4, seed=seed, **options)), rounds=60
    )
    assert {rule: said for rule, said in told.items() if said != "ok"} == {
        3: "without a reference, only copies of the next first one are noticed",
        8: "no make_faulty was given",
    }


@real
def test_the_real_one_behaves_as_the_stand_in_does():
    """What the adapter relies on: partial sync sends, lost rows of two sends, resets by id, next-step autoreset."""
    for env in (FakeEnvPool(4), envpool.make_gymnasium("CartPole-v1", num_envs=4, seed=1)):
        env.async_reset()
        assert env.recv()[-1]["elapsed_step"].tolist() == [0] * 4
        info = env.step(np.array([1, 0]), np.array([2, 0], np.int32))[-1]
        assert (info["env_id"].tolist(), info["elapsed_step"].tolist()) == ([2, 0], [1, 1])
        _, info = env.reset(env_id=np.array([3, 1], np.int32))
        assert (info["env_id"].tolist(), info["elapsed_step"].tolist()) == ([3, 1], [0, 0])
        while True:
            *_, terminated, truncated, info = env.step(np.ones(4, np.int64))
            if (terminated | truncated).any():
                break
        ended = np.flatnonzero(terminated | truncated)
        _, rewards, *_, info = env.step(np.ones(4, np.int64))
        assert info["elapsed_step"][ended].tolist() == [0] * len(ended)
        assert rewards[ended].tolist() == [0.0] * len(ended)
        env.send(np.array([1]), np.array([2], np.int32))
        env.send(np.array([1]), np.array([3], np.int32))
        assert 2 not in env.recv()[-1]["env_id"].tolist()


@real
def test_the_games_of_the_real_one_are_its_own():
    """Rows beside those of an identical EnvPool stepped by hand; reset rows, which it gives in a step, left out."""
    count, seed = 3, 5
    mine, theirs = (envpool.make_gymnasium("CartPole-v1", num_envs=count, seed=seed) for _ in range(2))
    rows = {slot: [] for slot in range(count)}
    with as_base_env(mine) as env:
        batch = env.poll()
        while min(map(len, rows.values())) < 60:
            for k, slot in enumerate(batch.env_ids.tolist()):
                rows[slot].append((batch.obs[k].tolist(), float(batch.rewards[k]), bool(batch.terminated[k])))
            over = batch.terminated | batch.truncated
            if over.any():
                again = env.try_reset(batch.env_ids[over])
                for k, slot in enumerate(again.env_ids.tolist()):
                    rows[slot].append((again.obs[k].tolist(), 0.0, False))
            env.send_actions(env.all_ids, np.ones(count, np.int64))
            batch = env.poll()
    want = {slot: [] for slot in range(count)}
    obs, _ = theirs.reset()
    for slot in range(count):
        want[slot].append((obs[slot].tolist(), 0.0, False))
    while min(map(len, want.values())) < 60:
        obs, rewards, terminated, *_ = theirs.step(np.ones(count, np.int64))
        for slot in range(count):
            want[slot].append((obs[slot].tolist(), float(rewards[slot]), bool(terminated[slot])))
    assert {s: r[:60] for s, r in rows.items()} == {s: r[:60] for s, r in want.items()}
    assert sum(row[2] for row in want[0]) >= 2
