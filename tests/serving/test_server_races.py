"""What happens in the middle of a call: an episode that is about to expire, a policy that fails for a part of it."""

import socket
import threading
import time

import numpy as np
import pytest

from rlsample.env import MultiAgentServingEnv, ServingEnv, ServingSettings
from rlsample.errors import ConfigError
from rlsample.evaluation import CommonPolicyEvaluator
from rlsample.policy import ModelSettings, PPOPolicy, PPOSettings
from rlsample.serving import HttpSettings, PolicyServer, episode_calls
from tests.env.serving.conftest import ACTION_SPACE, OBS_SPACE, Picky, RuledPolicy, answer
from tests.serving.client_rig import LIMIT_S, Rig
from tests.serving.http_rig import Background, await_true, callers


def expire_within(rig, episode_id, where):
    """Makes the episode idle for long, and has the sampling thread's look for idle ones fall into ``rig``'s codec."""
    adapter, served = rig.evaluator.env, rig.env.desk.registry.open[episode_id]
    as_ever = getattr(rig.server._codec, where)

    def check(*values):
        adapter._next_check = -np.inf
        adapter._expire_idle()
        return as_ever(*values)

    setattr(rig.server._codec, where, check)
    adapter._idle_timeout_s = 10.0
    served.touched, served.idle_since = False, time.monotonic() - 1000.0


def test_an_episode_does_not_expire_in_the_middle_of_a_batched_call():
    """Else the others would have their actions chosen, and nobody would hear of them."""
    with Rig() as rig, callers(rig.server) as call:
        one, two = call.start(), call.start()
        expire_within(rig, two, "obs_batch")
        found = call("actions", episode_ids=[one, two], obs=[[1, 0], [2, 0]])
        assert found.value.get("actions") == [answer(1, 0), answer(2, 0)], found.raw
        assert call("end", one, obs=[1, 1], t=1).status == 200
        assert call("end", two, obs=[2, 1], t=1).status == 200
        assert [[row[0] for row in rows] for rows in rig.episodes(2)] == [[(1.0, 0.0)], [(2.0, 0.0)]]


def test_an_episode_that_has_expired_is_refused_as_such():
    with Rig() as rig, callers(rig.server) as call:
        one, two = call.start(), call.start()
        expire_within(rig, two, "obs")
        assert call("action", one, obs=[1, 0]).status == 200
        found = call("action", two, obs=[2, 0])
        assert found.code == "unknown_episode"
        assert "expired: it had no call for 10.0 s" in found.message


@pytest.mark.parametrize("max_batch", [None, 1])
def test_a_policy_that_fails_for_a_part_of_a_batched_call_closes_all_of_its_episodes(max_batch):
    """With small micro-batches the others were answered: an action that no client knows of must not become a row."""
    env = ServingEnv(OBS_SPACE, ACTION_SPACE, settings=ServingSettings(max_batch=max_batch))
    with PolicyServer(CommonPolicyEvaluator(env, Picky), HttpSettings(port=0)) as server, callers(server) as call:
        names = [call.start() for _ in range(3)]
        found = call("actions", episode_ids=names, obs=[[1, 0], [1, 13], [2, 0]])
        assert (found.status, found.code) == (500, "policy_failed")
        assert "cannot bear 13" in found.message
        for name in names:
            again = call("action", name, obs=[1, 0])
            assert again.code == "unknown_episode"
            assert "cannot bear 13" in again.message
        assert env.open_episodes == []
        assert call("action", call.start(), obs=[2, 1]).value["action"] == answer(2, 1)


# ---------------------------------------------------------------------- who keeps others waiting


class Thinker(RuledPolicy):
    """Takes long from the first time on, and the second time until it is let go."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.calls, self.thinking, self.go_on = 0, threading.Event(), threading.Event()

    def act(self, obs, explore=True):
        self.calls += 1
        time.sleep(2 * episode_calls.LONG_TURN_S)
        if self.calls == 2:
            self.thinking.set()
            assert self.go_on.wait(LIMIT_S)
        return super().act(obs, explore)


def test_a_policy_that_takes_long_over_an_act_keeps_no_one_else_waiting():
    evaluator = CommonPolicyEvaluator(ServingEnv(OBS_SPACE, ACTION_SPACE), Thinker)
    with PolicyServer(evaluator, HttpSettings(port=0)) as server, callers(server, 2) as (one, two):
        assert one("act", obs=[[1, 0]]).value["actions"] == [1]
        long = Background(lambda: one("act", obs=[[1, 1], [2, 2]]))
        assert evaluator.policy.thinking.wait(LIMIT_S)
        assert two.get("/healthz").status == 200
        assert not evaluator.policy.go_on.is_set()
        evaluator.policy.go_on.set()
        assert long.result().value["actions"] == [2, 1]


class Thrifty(RuledPolicy):
    """Uses its arrays again and again, as a policy may."""

    def act(self, obs, explore=True):
        out = super().act(obs, explore)
        if not hasattr(self, "actions"):
            self.actions = np.zeros(64, np.int64)
        self.actions[: len(obs)] = out.actions
        return out._replace(actions=self.actions[: len(obs)])


@pytest.mark.parametrize("one", [True, False])
def test_actions_beside_sampling_are_not_overwritten_by_the_next_ones(one):
    """The sampling thread would act just when the arrays of this answer are still to be read."""
    env = ServingEnv(OBS_SPACE, ACTION_SPACE)
    with CommonPolicyEvaluator(env, Thrifty) as evaluator:
        as_ever, threads = evaluator.sampler.to_env, []

        def to_env(actions):
            threads.append(
                threading.Thread(target=evaluator.sampler.policy.act, args=(np.full((2, 2), 1, np.float32),))
            )
            threads[-1].start()
            threads[-1].join(0.2)  # it may have to wait for this one
            return as_ever(actions)

        evaluator.sampler.to_env = to_env
        obs = np.array([[0, 1], [0, 0]], np.float32)
        if one:
            assert evaluator.compute_action(obs[0]) == 1
        else:
            assert evaluator.compute_actions(obs).tolist() == [1, 0]
        threads[0].join(LIMIT_S)


def test_rows_are_not_overwritten_by_actions_beside_sampling():
    """The other way round: somebody asks for actions just when the sampling thread is to write down its own."""
    env = ServingEnv(OBS_SPACE, ACTION_SPACE)
    evaluator = CommonPolicyEvaluator(env, PPOPolicy, rollout_fragment_length=1, sample_queue_full="wait")
    with evaluator:
        as_ever = evaluator.sampler._write_choice

        def write_choice(ids, obs, actions, extras):
            evaluator.compute_actions(-obs)
            as_ever(ids, obs, actions, extras)

        evaluator.sampler._write_choice = write_choice
        obs = np.array([1, 2], np.float32)
        expected = evaluator.policy.values(obs[None])
        assert not np.array_equal(expected, evaluator.policy.values(-obs[None]))

        def play():
            env.start_episode()
            env.get_action(obs)
            env.end_episode(obs)

        playing = Background(play)
        assert evaluator.sample()["values"] == pytest.approx(expected)
        playing.result()


def test_one_act_has_a_limited_number_of_observations():
    with Rig(sample_async=True) as rig, callers(rig.server) as call:
        assert len(call("act", obs=[[1, 0]] * 4096).value["actions"]) == 4096
        refused = call("act", obs=[[1, 0]] * 4097)
        assert (refused.code, refused.message) == (
            "bad_value",
            "obs holds 1 to 4096 observations, stacked at the front of each array; got 4097",
        )
        assert call("act", obs=[]).code == "bad_value"


def test_a_client_that_takes_no_answer_is_cut_off():
    """It asks for weights of some megabytes and reads nothing: they would lie here as long as it likes."""

    def wide(*spaces, seed=0):
        return PPOPolicy(*spaces, PPOSettings(model=ModelSettings(hidden=(1024, 1024))), seed)

    with Rig(wide, http={"request_timeout_s": 0.2}, sample_async=True) as rig, socket.socket() as greedy:
        greedy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        greedy.settimeout(LIMIT_S)
        greedy.connect(rig.server.address)
        greedy.sendall(b"GET /v1/weights HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await_true(lambda: rig.server.metrics.requests == 1)
        await_true(lambda: not rig.server._server.server_state.connections, "the end of the connection")
        with callers(rig.server) as call:
            answer = call.get("/v1/weights")  # one that reads gets all of it
            assert len(answer.raw) > 4_000_000


def test_what_fails_in_the_look_for_slow_requests_does_not_end_it(monkeypatch):
    looks = threading.Semaphore(0)

    def fail(self, limit_s):
        looks.release()
        raise ValueError("a look that fails")

    monkeypatch.setattr("rlsample.serving.policy_server._TICK_S", 0.01)
    monkeypatch.setattr(episode_calls.EpisodeCalls, "tick", fail)
    with Rig() as rig, callers(rig.server) as call:
        for _ in range(3):
            assert looks.acquire(timeout=LIMIT_S)
        assert call.get("/healthz").status == 200


def test_a_start_that_waits_for_a_place_opens_nothing_once_the_server_closes():
    """The place is that of an episode whose end nobody has sampled yet."""
    env = ServingEnv(OBS_SPACE, ACTION_SPACE, max_concurrent=1)
    with CommonPolicyEvaluator(env, RuledPolicy, sample_async=False) as evaluator:
        with PolicyServer(evaluator, HttpSettings(port=0), sample=False) as server, callers(server, 2) as (one, two):
            first = one.start()
            one("log_action", first, obs=[1, 0], action=1)
            one("end", first, obs=[1, 1])
            waiting = threading.Event()
            as_ever = env.desk.registry.start

            def start(*values):
                waiting.set()
                return as_ever(*values)

            env.desk.registry.start = start
            asked = Background(lambda: two("episodes"))
            assert waiting.wait(LIMIT_S)

            def close():
                server._calls.close("the test is over")
                env.desk.registry.free_lane(0)  # now there is a place

            server._loop.call_soon_threadsafe(close)
            assert asked.result().code == "closed"
        assert env.open_episodes == []


def test_episodes_of_several_agents_are_refused_at_once():
    env = MultiAgentServingEnv(OBS_SPACE, ACTION_SPACE, ["a", "b"])
    with (
        CommonPolicyEvaluator(env, RuledPolicy) as evaluator,
        pytest.raises(ConfigError, match="not a MultiAgentServingEnv"),
    ):
        PolicyServer(evaluator)
