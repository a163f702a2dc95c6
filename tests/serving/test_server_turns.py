"""The server's loop takes sampling turns itself: who answers, and that no row gets lost on the way between threads."""

import threading
import time

import pytest

from rlsample.env import ServingEnv
from rlsample.evaluation import CommonPolicyEvaluator
from rlsample.serving import HttpSettings, PolicyServer, episode_calls
from tests.env.serving.conftest import ACTION_SPACE, OBS_SPACE, RuledPolicy, answer, at
from tests.serving.client_rig import Rig
from tests.serving.http_rig import Background, await_true, callers


class Noting(RuledPolicy):
    """Notes which threads it acted in."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.threads = []

    def act(self, obs, explore=True):
        self.threads.append(threading.current_thread().name)
        return super().act(obs, explore)


def test_the_loop_answers_while_the_sampling_thread_is_parked():
    evaluator = CommonPolicyEvaluator(ServingEnv(OBS_SPACE, ACTION_SPACE), Noting)
    with PolicyServer(evaluator, HttpSettings(port=0)) as server, callers(server) as call:
        episode = call.start()
        for step in range(30):
            assert call("action", episode, obs=at(1, step).tolist()).value["action"] == answer(1, step)
        await_true(lambda: play_one(call, episode) and evaluator.policy.threads[-1] == "rlsample-http")


def play_one(call, episode):
    return call("action", episode, obs=[0, 0]).status == 200


class Slow(Noting):
    """Takes longer than the loop has time for."""

    def act(self, obs, explore=True):
        time.sleep(2 * episode_calls.LONG_TURN_S)
        return super().act(obs, explore)


def test_a_policy_that_takes_long_acts_in_the_sampling_thread():
    evaluator = CommonPolicyEvaluator(ServingEnv(OBS_SPACE, ACTION_SPACE), Slow)
    with PolicyServer(evaluator, HttpSettings(port=0)) as server, callers(server) as call:
        episode = call.start()
        for step in range(20):
            assert call("action", episode, obs=at(1, step).tolist()).value["action"] == answer(1, step)
        assert evaluator.policy.threads[-10:] == ["rlsample-serve"] * 10


@pytest.mark.parametrize("sample_async", [None, False])
def test_many_clients_and_small_batches(sample_async):
    """Batches of a few rows: the turn changes hands all the time, and every row comes out once, as it was played."""
    clients, episodes, steps = 8, 3, 12
    options = {"rollout_fragment_length": 3, "sample_async": sample_async, "sample_queue_full": "wait"}
    with Rig(**options) as rig, callers(rig.server, clients) as every:

        def play(k):
            for number in range(episodes):
                name = every[k].start()
                me = k * episodes + number
                reward = {}
                for step in range(steps):
                    found = every[k]("action", name, obs=at(me, step).tolist(), t=step, **reward)
                    assert found.value["action"] == answer(me, step), found.raw
                    reward = {"reward": me + step / 16}
                every[k]("end", name, obs=at(me, steps).tolist(), **reward)

        for playing in [Background(lambda k=k: play(k)) for k in range(clients)]:
            playing.result()
        rig.env.desk.stop("the test is over")  # what is left comes out as a smaller batch
        found = rig.episodes(clients * episodes * steps)
        assert found == [
            [((me, s), (me, s + 1), answer(me, s), me + s / 16, s == steps - 1, False, s) for s in range(steps)]
            for me in range(clients * episodes)
        ]
