"""ServingEnvAdapter: the polled contract as far as it applies, micro-batches, and slots that come and go."""

import threading
import time

import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, Tuple

from rlsample.env import ServingSettings, as_base_env
from rlsample.env.serving import ServingEnvAdapter
from rlsample.env.serving.served_episode import EpisodeCutError, ServingEnded
from rlsample.errors import ConfigError, EnvClosedError, EnvProtocolError, ServingError
from rlsample.testing import check_base_env
from rlsample.testing.scripted import CountEnv
from tests.env.serving.conftest import LIMIT_S, Player, at, outcome

PATIENT = ServingSettings(max_wait_us=LIMIT_S * 1e6)


def served(settings=None, max_concurrent=4, **options):
    env = Player(settings=settings, max_concurrent=max_concurrent)
    return env, ServingEnvAdapter(env, **options)


# ---------------------------------------------------------------------- the contract


class GymPlayer(Player):
    """As many threads as slots, each playing a counting env over and over: all alike, as any may play in any slot."""

    def __init__(self, slots=3):
        super().__init__(max_concurrent=slots, spaces=(CountEnv.observation_space, CountEnv.action_space))
        self.slots = slots

    def run(self):
        threads = [threading.Thread(target=self.play_one, daemon=True) for _ in range(self.slots)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def play_one(self):
        game = CountEnv(3)
        try:
            while True:
                obs, _ = game.reset()
                self.start_episode()
                terminated = truncated = False
                while not (terminated or truncated):
                    obs, reward, terminated, truncated, _ = game.step(self.get_action(obs))
                    self.log_returns(reward)
                self.end_episode(obs, truncated=truncated)
        except ServingError:
            pass


def test_the_rules_that_apply_to_served_slots():
    checked = check_base_env(lambda seed: ServingEnvAdapter(GymPlayer()), rounds=20, reference=lambda slot: CountEnv(3))
    assert checked == dict.fromkeys(range(1, 11), "ok") | {8: "no make_faulty was given"}


def test_as_base_env_takes_a_serving_env_and_a_factory_of_one():
    env = Player(max_concurrent=7)
    with as_base_env(env, 3) as base:
        assert isinstance(base, ServingEnvAdapter)
        assert (base.env, base.num_envs, base.sample_lanes) == (env, 7, 3)
    with as_base_env(lambda: Player(max_concurrent=2)) as base:
        assert (base.num_envs, base.sample_lanes) == (2, 1)
    with pytest.raises(ConfigError, match="env_config cannot reach Player"):
        as_base_env(Player(), env_config={"a": 1})
    with pytest.raises(ConfigError, match="give an object of it, or a factory"):
        as_base_env(Player)


def test_the_thread_starts_with_the_first_poll_and_ends_with_close():
    started = threading.Event()

    def play(env):
        started.set()
        while not env.over:
            time.sleep(0.001)

    env = Player(play)
    with ServingEnvAdapter(env) as adapter:
        assert not env.is_alive()
        assert len(adapter.poll(timeout_s=0.0).env_ids) == 0
        assert started.wait(LIMIT_S)
    assert not env.is_alive()
    adapter.close()
    with pytest.raises(EnvClosedError):
        adapter.poll()
    with pytest.raises(EnvClosedError):
        adapter.send_actions(np.array([0]), np.array([0]))
    with pytest.raises(ServingError, match="was closed"):
        env.start_episode()


def test_close_ends_the_calls_that_wait_and_a_run_that_waits_for_something_else(workers):
    gate = threading.Event()

    class Waits(Player):
        def interrupt(self):
            gate.set()

    env = Waits(lambda env: gate.wait())
    adapter = ServingEnvAdapter(env)
    asker, starter, poller, logger = workers(4)
    asker.do(lambda: [env.start_episode() for _ in range(4)])
    polled = poller.do(lambda: adapter.poll(timeout_s=0.0))
    assert len(polled.env_ids) == 0
    ids = env.open_episodes
    calls = [
        asker.begin(lambda: env.get_action(at(0, 0), ids[0])),
        starter.begin(env.start_episode),
    ]
    poll = poller.begin(lambda: [adapter.poll() for _ in range(2)])
    while not (env.desk.asking or poll["done"].is_set()):
        time.sleep(0.001)
    adapter.close()
    for call in calls:
        with pytest.raises(ServingError, match="was closed"):
            outcome(call)
    with pytest.raises(EnvClosedError):
        outcome(poll)
    with pytest.raises(ServingError, match="was closed"):
        logger.do(lambda: env.log_action(at(0, 0), 1, ids[1]))


def test_poll_raises_only_if_every_slot_waits_for_the_poller(workers):
    env, adapter = served(max_concurrent=2)
    with adapter:
        assert len(adapter.poll(timeout_s=0.0).env_ids) == 0, "free slots: somebody may come"
        for _ in range(2):
            episode = env.start_episode()
            env.request_action(at(0, 0), episode, print)
        ids = np.concatenate([adapter.poll().env_ids for _ in range(1)])
        assert sorted(ids.tolist()) == [0, 1]
        with pytest.raises(EnvProtocolError, match="slots 0, 1: waiting for an action"):
            adapter.poll()
        adapter.send_actions(np.array([1]), np.array([2]))
        assert len(adapter.poll(timeout_s=0.0).env_ids) == 0


def test_a_slot_that_has_not_ended_cannot_be_reset():
    env, adapter = served()
    with adapter:
        episode = env.start_episode()
        env.request_action(at(0, 0), episode, print)
        ids = adapter.poll().env_ids
        with pytest.raises(EnvProtocolError, match="only its client can end"):
            adapter.try_reset(ids)
        with pytest.raises(EnvProtocolError, match="cannot be restarted"):
            adapter.try_restart(ids)
        adapter.send_actions(ids, np.array([0]))
        env.end_episode(at(0, 1), episode)
        batch = adapter.poll()
        assert batch.terminated.tolist() == [True]
        assert env.desk.registry.by_lane[ids[0]] is not None, "taken until its end was seen"
        assert adapter.try_reset(ids) is None
        assert env.desk.registry.by_lane[ids[0]] is None


# ---------------------------------------------------------------------- rows


def test_the_columns_of_one_episode():
    env, adapter = served()
    got = []
    with adapter:
        episode = env.start_episode()
        env.log_returns(9, {"too": "early"})
        env.request_action(at(3, 0), episode, got.append)
        batch = adapter.poll()
        assert batch.env_ids.tolist() == [0]
        assert batch.obs.tolist() == [[3, 0]]
        assert (batch.rewards.tolist(), batch.is_first.tolist()) == ([0], [True])
        assert (batch.infos, batch.off_policy_actions) == ({}, None)
        adapter.send_actions(batch.env_ids, np.array([2]))
        assert got == [2]
        env.log_returns(1.5, {"a": 1})
        env.log_returns(2)
        env.log_returns(0.25, {"b": 2})
        env.log_action(at(3, 1), 1, action_logp=-0.5)
        batch = adapter.poll()
        assert (batch.rewards.tolist(), batch.is_first.tolist()) == ([3.75], [False])
        assert batch.infos == {0: {"b": 2}}
        mask, actions, logp = batch.off_policy_actions
        assert (mask.tolist(), actions.tolist(), logp.tolist()) == ([True], [1], [-0.5])
        adapter.send_actions(batch.env_ids, np.array([0]))
        assert got == [2]
        env.end_episode(at(3, 2), truncated=True)
        batch = adapter.poll()
        assert (batch.obs.tolist(), batch.rewards.tolist(), batch.infos) == ([[3, 2]], [0], {})
        assert (batch.terminated.tolist(), batch.truncated.tolist()) == ([False], [True])


def test_logged_and_asked_rows_come_together():
    env, adapter = served(PATIENT)
    with adapter:
        asks, logs = env.start_episode("asks"), env.start_episode("logs")
        env.request_action(at(1, 0), asks, print)
        env.log_action(at(2, 0), 1, logs)
        batch = adapter.poll()
        logged = dict(zip(batch.env_ids.tolist(), batch.off_policy_actions.mask.tolist(), strict=True))
        assert logged == {0: False, 1: True}
        assert np.isnan(batch.off_policy_actions.logp[batch.off_policy_actions.mask]).all()


def test_the_answer_is_that_of_the_question_and_not_of_a_row_logged_before():
    env, adapter = served()
    got = []
    with adapter:
        episode = env.start_episode()
        env.log_action(at(1, 0), 0)
        env.log_action(at(1, 1), 0)
        env.request_action(at(1, 2), episode, got.append)
        for k in range(3):
            batch = adapter.poll()
            assert batch.obs.tolist() == [[1, k]]
            assert got == []
            adapter.send_actions(batch.env_ids, np.array([k]))
        assert got == [2]


def test_rows_that_queue_up_come_one_a_poll_and_in_order():
    env, adapter = served()
    with adapter:
        episode = env.start_episode()
        for k in range(5):
            env.log_action(at(1, k), k % 3, action_logp=-float(k))
            env.log_returns(10 * k, {"k": k})
        env.end_episode(at(1, 5))
        assert episode not in env.open_episodes
        for k in range(6):
            batch = adapter.poll()
            assert batch.obs.tolist() == [[1, k]]
            assert batch.rewards.tolist() == [0 if k == 0 else 10 * (k - 1)]
            assert batch.infos == ({} if k == 0 else {0: {"k": k - 1}})
            assert batch.terminated.tolist() == [k == 5]
            if k < 5:
                assert batch.off_policy_actions.actions.tolist() == [k % 3]
                assert batch.off_policy_actions.logp.tolist() == [-k]
                other = env.start_episode(f"other {k}")
                env.log_action(at(2, k), 0, other)
                extra = adapter.poll()
                assert extra.obs.tolist() == [[2, k]], "a slot that waits for its action brings no second row"
                adapter.send_actions(extra.env_ids, np.array([0]))
                env.end_episode(at(2, 9), other)
                adapter.try_reset(adapter.poll().env_ids)
                adapter.send_actions(batch.env_ids, np.array([0]))
        with pytest.raises(EnvProtocolError, match="takes no action"):
            adapter.send_actions(batch.env_ids, np.array([0]))


def test_arrays_of_a_poll_stay_as_they_were():
    env, adapter = served()
    with adapter:
        obs = at(1, 0)
        episode = env.start_episode()
        env.request_action(obs, episode, print)
        obs[:] = -1
        batch = adapter.poll()
        assert batch.obs.tolist() == [[1, 0]]
        adapter.send_actions(batch.env_ids, np.array([0]))
        env.log_returns(3)
        env.request_action(at(1, 1), episode, print)
        assert (batch.obs.tolist(), batch.rewards.tolist()) == ([[1, 0]], [0])
        adapter.poll()
        assert (batch.obs.tolist(), batch.rewards.tolist(), batch.is_first.tolist()) == ([[1, 0]], [0], [True])


def test_dict_and_tuple_spaces():
    spaces = (Dict({"x": Box(0, 9, (2,), np.float32), "n": Discrete(9)}), Tuple((Discrete(3), Box(-1, 1, (2,)))))
    env = Player(spaces=spaces)
    got = []
    with ServingEnvAdapter(env) as adapter:
        episode = env.start_episode()
        env.request_action({"x": np.array([1, 2], np.float32), "n": 4}, episode, got.append)
        batch = adapter.poll()
        assert {k: v.tolist() for k, v in batch.obs.items()} == {"x": [[1, 2]], "n": [4]}
        adapter.send_actions(batch.env_ids, (np.array([2]), np.array([[0.5, -0.5]], np.float32)))
        assert got[0][0] == 2
        assert got[0][1].tolist() == [0.5, -0.5]
        for k in range(2):
            env.log_action({"x": np.array([3, k], np.float32), "n": k}, (1, np.array([0.25, 1], np.float32)))
        for k in range(2):
            batch = adapter.poll()
            assert {k: v.tolist() for k, v in batch.obs.items()} == {"x": [[3, k]], "n": [k]}
            first, second = batch.off_policy_actions.actions
            assert (first.tolist(), second.tolist()) == ([1], [[0.25, 1]])
            adapter.send_actions(batch.env_ids, (np.array([0]), np.zeros((1, 2), np.float32)))


# ---------------------------------------------------------------------- micro-batches


def test_a_batch_waits_for_the_episodes_that_asked_before(workers):
    env, adapter = served(PATIENT)
    with adapter:
        ids = [env.start_episode(f"{k}") for k in range(3)]
        for episode in ids:
            env.request_action(at(0, 0), episode, print)
        batch = adapter.poll()
        assert len(batch.env_ids) == 3
        adapter.send_actions(batch.env_ids, np.zeros(3, np.int64))
        (poller,) = workers(1)
        poll = poller.begin(adapter.poll)
        env.request_action(at(0, 1), ids[0], print)
        env.request_action(at(0, 1), ids[1], print)
        assert not poll["done"].wait(0.05)
        env.request_action(at(0, 1), ids[2], print)
        batch = outcome(poll)
        assert len(batch.env_ids) == 3
        adapter.send_actions(batch.env_ids, np.zeros(3, np.int64))
        poll = poller.begin(adapter.poll)
        env.request_action(at(0, 2), ids[0], print)
        env.request_action(at(0, 2), ids[1], print)
        env.end_episode(at(0, 2), ids[2])  # counts as having come, and is not waited for again
        batch = outcome(poll)
        assert len(batch.env_ids) == 3
        adapter.send_actions(batch.env_ids[:2], np.zeros(2, np.int64))
        adapter.try_reset(batch.env_ids[2:])
        poll = poller.begin(adapter.poll)
        env.request_action(at(0, 3), ids[0], print)
        env.request_action(at(0, 3), ids[1], print)
        assert len(outcome(poll).env_ids) == 2


def test_a_late_episode_is_waited_for_no_longer_than_max_wait_us_and_only_once(workers):
    env, adapter = served(ServingSettings(max_wait_us=20_000))
    with adapter:
        ids = [env.start_episode(f"{k}") for k in range(2)]
        for episode in ids:
            env.request_action(at(0, 0), episode, print)
        adapter.send_actions(adapter.poll().env_ids, np.zeros(2, np.int64))
        env.request_action(at(0, 1), ids[0], print)
        started = time.perf_counter()
        batch = adapter.poll()
        waited = time.perf_counter() - started
        assert len(batch.env_ids) == 1
        assert waited >= 0.02
        adapter.send_actions(batch.env_ids, np.zeros(1, np.int64))
        adapter._gate._max_wait_s = LIMIT_S
        env.request_action(at(0, 2), ids[0], print)
        started = time.perf_counter()
        assert len(adapter.poll().env_ids) == 1
        assert time.perf_counter() - started < LIMIT_S / 2


def test_waits_in_vain_become_rarer():
    env, adapter = served(ServingSettings(max_wait_us=1000))
    with adapter:
        ids = [env.start_episode(f"{k}") for k in range(2)]
        step = iter(range(100))

        def ask(*episodes):
            for k in episodes:
                env.request_action(at(k, next(step)), ids[k], print)
            batch = adapter.poll()
            adapter.send_actions(batch.env_ids, np.zeros(len(batch.env_ids), np.int64))
            return len(batch.env_ids)

        assert ask(0, 1) == 2
        vain = []
        for _ in range(3):
            assert ask(0) == 1  # waits for the other one
            vain.append(adapter._gate._num_hasty)
            for _ in range(vain[-1]):
                assert ask(0, 1) == 2
        assert vain == [1, 3, 7]
        assert ask(0) == 1
        adapter._gate._max_wait_s = LIMIT_S
        started = time.perf_counter()
        assert ask(0, 1) == 2
        assert ask(0) == 1  # of 15 that do without a wait
        assert time.perf_counter() - started < LIMIT_S / 2


def test_max_batch_splits_what_is_there():
    env, adapter = served(ServingSettings(max_batch=2))
    with adapter:
        for k in range(4):
            env.request_action(at(k, 0), env.start_episode(f"{k}"), print)
        sizes = [len(adapter.poll().env_ids) for _ in range(2)]
        assert sizes == [2, 2]


def test_clients_wake_each_other(workers):
    """A batch that waits for all of them for ever shows that none is left asleep with its answer."""
    env, adapter = served(ServingSettings(max_wait_us=1e9), max_concurrent=9)
    with adapter:
        clients = workers(9)

        def play(k):
            env.start_episode(f"{k}")
            return [env.get_action(at(k, step), f"{k}", timeout_s=LIMIT_S) for step in range(5)]

        games = [client.begin(lambda k=k: play(k)) for k, client in enumerate(clients)]
        while len(env.desk.asking) < 9:
            time.sleep(0.001)
        for step in range(5):
            batch = adapter.poll(timeout_s=LIMIT_S)
            assert sorted(batch.env_ids.tolist()) == list(range(9))
            adapter.send_actions(batch.env_ids, np.full(9, step % 3))
        assert [outcome(game) for game in games] == [[0, 1, 2, 0, 1]] * 9


def test_a_client_that_gave_up_wakes_nobody_and_nobody_sleeps_on_for_it(workers):
    env, adapter = served(ServingSettings(max_wait_us=1e9), max_concurrent=9)
    with adapter:
        for k in range(4):
            env.start_episode(f"gone {k}")
            with pytest.raises(ServingError, match="no answer"):
                env.get_action(at(0, 0), f"gone {k}", timeout_s=0.01)
        clients = workers(5)

        def play(k):
            env.start_episode(f"{k}")
            return env.get_action(at(k, 0), f"{k}", timeout_s=LIMIT_S)

        games = [client.begin(lambda k=k: play(k)) for k, client in enumerate(clients)]
        while len(env.desk.asking) < 9:
            time.sleep(0.001)
        adapter.send_actions(adapter.poll().env_ids, np.full(9, 2))
        assert [outcome(game) for game in games] == [2] * 5


# ---------------------------------------------------------------------- ends that were not planned


def test_idle_episodes_expire(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr("rlsample.env.serving.serving_env_adapter.time.monotonic", lambda: clock[0])
    env, adapter = served(ServingSettings(idle_timeout_s=40))

    def wait(seconds):
        clock[0] += seconds
        return adapter.poll(timeout_s=0.0)

    with adapter:
        acted, logs, _ = (env.start_episode(x) for x in ("acted", "logs", "new"))
        env.request_action(at(1, 0), acted, print)
        env.log_action(at(2, 0), 1, logs)
        batch = wait(0)
        adapter.send_actions(batch.env_ids, np.zeros(2, np.int64))
        for _ in range(3):
            assert not wait(11).failures
            env.log_returns(1, episode_id=logs)  # a sign of life
        assert env.open_episodes == ["acted", "logs", "new"]
        failures = wait(11).failures
        assert list(failures) == [0]
        assert isinstance(failures[0], EpisodeCutError)
        assert "'acted' had no call for 40 s" in str(failures[0])
        assert env.open_episodes == ["logs"], "the one without a row just went"
        with pytest.raises(ServingError, match=r"'acted' expired: it had no call for 40 s"):
            env.get_action(at(1, 1), "acted")
        with pytest.raises(ServingError, match="'new' expired"):
            env.get_action(at(1, 1), "new")
        adapter.try_restart(np.array([0]))
        assert adapter.stats["expired"] == 2
        assert env.desk.registry.by_lane[0] is None
        assert env.desk.registry.by_lane[2] is None
        assert env.start_episode("acted") == "acted"


def test_a_question_that_stands_does_not_expire(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr("rlsample.env.serving.serving_env_adapter.time.monotonic", lambda: clock[0])
    env, adapter = served(ServingSettings(idle_timeout_s=40))
    with adapter:
        episode = env.start_episode()
        env.request_action(at(1, 0), episode, print)
        adapter.poll()
        for _ in range(9):
            clock[0] += 30
            assert not adapter.poll(timeout_s=0.0).failures
        assert env.open_episodes == [episode]


def test_refused_clients_are_told_why_and_their_slots_fail(workers):
    env, adapter = served()
    with adapter:
        (client,) = workers(1)
        client.do(lambda: env.start_episode("asks"))
        env.start_episode("logs")
        asking = client.begin(lambda: env.get_action(at(0, 0)))
        env.log_action(at(1, 0), 1)
        env.log_action(at(1, 1), 1)
        ids = set()
        while len(ids) < 2:
            ids |= set(adapter.poll().env_ids.tolist())
        adapter.refuse(np.array([0, 1]), ValueError("no net"))
        with pytest.raises(ServingError, match="'asks': no net") as e:
            outcome(asking)
        assert isinstance(e.value.__cause__, ValueError)
        for name in ("asks", "logs"):
            with pytest.raises(ServingError, match=f"'{name}' was closed, as no action could be had: no net"):
                env.log_returns(1, episode_id=name)
        batch = adapter.poll()
        assert sorted(batch.failures) == [0, 1]
        assert len(batch.env_ids) == 0, "what was queued behind is dropped"
        adapter.try_restart(np.array([0, 1]))
        env.start_episode("next")
        env.log_action(at(5, 5), 2)
        batch = adapter.poll()
        assert (batch.obs.tolist(), batch.is_first.tolist()) == ([[5, 5]], [True])


def test_what_was_queued_is_polled_before_the_end_is_told():
    def play(env):
        env.start_episode()
        for k in range(3):
            env.log_action(at(1, k), 0)
        raise RuntimeError("after three")

    env = Player(play)
    with ServingEnvAdapter(env) as adapter:
        seen = []

        def poll_on():
            while True:
                batch = adapter.poll()
                seen.extend(batch.obs[:, 1].tolist())
                adapter.send_actions(batch.env_ids, np.zeros(len(batch.env_ids), np.int64))

        with pytest.raises(ServingEnded, match="after three") as e:
            poll_on()
        assert seen == [0, 1, 2]
        assert isinstance(e.value.__cause__, RuntimeError)


def test_a_full_queue_lets_log_action_wait(workers):
    env, adapter = served(ServingSettings(max_queued_rows=2, timeout_s=0.05))
    with adapter:
        (client,) = workers(1)
        client.do(lambda: env.start_episode("e"))
        for k in range(2):
            client.do(lambda k=k: env.log_action(at(0, k), 0))
        with pytest.raises(ServingError, match="2 rows of episode 'e' wait to be sampled"):
            client.do(lambda: env.log_action(at(0, 2), 0))
        env.desk.settings = ServingSettings(max_queued_rows=2, timeout_s=10 * LIMIT_S)
        waiting = client.begin(lambda: env.log_action(at(0, 2), 0))
        seen = []
        for _ in range(3):
            batch = adapter.poll()
            seen += batch.obs[:, 1].tolist()
            outcome(waiting)
            adapter.send_actions(batch.env_ids, np.zeros(1, np.int64))
        assert seen == [0, 1, 2]


def test_an_id_used_again_stays_open_when_rows_of_its_first_episode_are_refused():
    env, adapter = served()
    with adapter:
        env.start_episode("x")
        env.log_action(at(1, 0), 1, "x")
        env.end_episode(at(1, 1), "x")
        env.start_episode("x")
        batch = adapter.poll()
        adapter.refuse(batch.env_ids, ValueError("no"))
        assert env.open_episodes == ["x"]
        env.log_action(at(2, 0), 1, "x")


class Watched:
    """An episode's mutex. The thread that looks for idle episodes holds it until another one has found it taken."""

    def __init__(self, lock, looker, meanwhile):
        self.lock, self.looker, self.meanwhile = lock, looker, meanwhile
        self.held, self.tried = threading.Event(), threading.Event()

    def acquire(self, *args, **options):
        got = self.lock.acquire(*args, **options)
        if threading.current_thread() is self.looker:
            self.meanwhile()
            self.held.set()
            assert self.tried.wait(LIMIT_S)
        elif not got:
            self.tried.set()
        return got

    def release(self):
        self.lock.release()


@pytest.mark.parametrize("expires", [False, True])
@pytest.mark.parametrize("call", ["get_action", "log_action", "log_returns", "end_episode"])
def test_a_call_that_meets_the_look_for_idle_episodes_is_not_told_of_another_call(call, expires):
    """The episode either expires, and the call hears that; or it does not, and the call is done."""
    env = Player()
    adapter = ServingEnvAdapter(env)
    episode = env.desk.registry.open[env.start_episode("x")]

    def look():
        adapter._next_check, adapter._idle_timeout_s = -np.inf, 10.0
        adapter._expire_idle()

    looker = threading.Thread(target=look)
    episode.touched, episode.idle_since = False, time.monotonic() - 1000.0
    episode.mutex = Watched(episode.mutex, looker, lambda: setattr(episode, "touched", not expires))
    looker.start()
    assert episode.mutex.held.wait(LIMIT_S)
    arguments = {"log_action": (at(1, 0), 1, "x"), "log_returns": (1.0, None, "x")}.get(call, (at(1, 0), "x"))
    more = {"timeout_s": 0.01} if call == "get_action" else {}
    try:
        getattr(env, call)(*arguments, **more)
        heard = "done"
    except ServingError as e:
        heard = str(e)
    looker.join(LIMIT_S)
    if expires:
        assert "'x' expired: it had no call for 10.0 s" in heard
    elif call == "get_action":
        assert "no answer for episode 'x' in 0.01 s" in heard  # asked, and nobody samples
    else:
        assert heard == "done"
    assert env.desk.looked_at is None
