"""How a server starts and ends, and what clients hear when something fails: field case 20 and its neighbours."""

import threading

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

from rlsample.env import ServingEnv
from rlsample.env.serving import ServingSettings
from rlsample.errors import ConfigError, ServingError
from rlsample.evaluation import CommonPolicyEvaluator, EvaluatorSet
from rlsample.optimizers import SyncSamplesOptimizer
from rlsample.serving import HttpSettings, PolicyServer
from tests.env.serving.conftest import ACTION_SPACE, OBS_SPACE, RuledPolicy
from tests.serving.client_rig import Rig
from tests.serving.http_rig import LIMIT_S, Background, await_true, callers


class Idle(Rig):
    """A rig whose evaluator nobody samples."""

    def __enter__(self):
        self.server.start()
        return self

    def __exit__(self, *exc):
        self.server.close()
        self.evaluator.close()


class Thirteen(RuledPolicy):
    """Raises on an observation that begins with 13."""

    def act(self, obs, explore=True):
        if (obs[:, 0] == 13).any():
            raise ValueError("thirteen is not for me")
        return super().act(obs, explore)


def test_case_20_a_blocked_client_is_told_when_the_server_closes():
    with Idle() as rig, callers(rig.server, 2) as (blocked, other):
        episode = blocked.start()
        waiting = Background(lambda: blocked("action", episode, obs=[1, 0]))
        await_true(lambda: other.get("/v1/stats").value["waiting_requests"] == 1)
        address = rig.server.address
        rig.server.close()
        told = waiting.result()
        assert (told.status, told.code) == (503, "closed")
        assert told.headers["retry-after"]
        with Rig(http={"port": address[1]}) as again, callers(again.server) as call:  # at once, on the same port
            assert call("action", call.start(), obs=[2, 0]).value["action"] == 2


def test_case_20_a_policy_that_raises_while_learning_reaches_both_sides():
    with Rig(Thirteen, sample_async=None) as rig, callers(rig.server) as call:
        episode, other = call.start(), call.start()
        assert call("action", episode, obs=[1, 0]).value["action"] == 1
        failed = call("action", episode, obs=[13, 0], reward=1.0)
        assert (failed.status, failed.code) == (500, "policy_failed")
        assert "thirteen is not for me" in failed.message
        rig.await_error()
        assert "thirteen is not for me" in str(rig.error)
        for refused in (call("action", other, obs=[1, 0]), call("episodes"), call.get("/healthz")):
            assert refused.status == 503
            assert "thirteen is not for me" in refused.message


def test_case_20_a_server_that_only_serves_goes_on_after_the_policy_raised():
    evaluator = CommonPolicyEvaluator(ServingEnv(OBS_SPACE, ACTION_SPACE), Thirteen)
    with PolicyServer(evaluator, HttpSettings(port=0)) as server, callers(server) as call:
        episode, other = call.start(), call.start()
        assert call("action", other, obs=[2, 0]).value["action"] == 2
        failed = call("action", episode, obs=[13, 0])
        assert (failed.status, failed.code) == (500, "policy_failed")
        assert "thirteen is not for me" in failed.message
        assert call("action", episode, obs=[1, 0]).code == "unknown_episode"  # it is closed
        assert call("action", other, obs=[1, 0]).value["action"] == 1
        assert call("action", call.start(), obs=[1, 0]).value["action"] == 1
        assert call.get("/healthz").status == 200


def test_case_20_rows_on_the_server_are_the_steps_of_the_client():
    steps = 37
    with Rig() as rig, callers(rig.server) as call:
        episode = call.start()
        for step in range(steps):
            call("action", episode, obs=[1, step], reward=0.25)
        call("end", episode, obs=[1, steps], reward=0.25)
        (rows,) = rig.episodes(steps)
        assert [row[0] for row in rows] == [(1.0, float(step)) for step in range(steps)]
        assert sum(row[3] for row in rows) == steps * 0.25


def test_episodes_that_were_open_break_off_when_the_server_closes():
    with Rig() as rig, callers(rig.server) as call:
        episode = call.start()
        for step in range(3):
            call("action", episode, obs=[1, step], reward=1.0)
        rig.server.close()
        rig.await_rows(2)  # the last action's outcome never came: it is no row
        assert rig.env.open_episodes == []
        (rows,) = rig.episodes(2)
        assert [row[0] for row in rows] == [(1.0, 0.0), (1.0, 1.0)]


def test_a_request_that_waits_too_long_is_told_and_its_episode_closed():
    with Idle(http={"action_timeout_s": 0.2}) as rig, callers(rig.server) as call:
        episode = call.start()
        late = call("action", episode, obs=[1, 0])
        assert (late.status, late.code) == (503, "busy")
        assert "0.2 s" in late.message
        gone = call("action", episode, obs=[1, 0])
        assert gone.code == "unknown_episode"
        assert "no action came" in gone.message


def test_an_expired_episode_is_unknown_and_says_why():
    with Rig(settings=ServingSettings(idle_timeout_s=0.2)) as rig, callers(rig.server) as call:
        episode = call.start()
        call("action", episode, obs=[1, 0])
        await_true(lambda: call.get("/v1/stats").value["open_episodes"] == 0)
        gone = call("action", episode, obs=[1, 0])
        assert (gone.status, gone.code) == (404, "unknown_episode")
        assert "expired" in gone.message


def test_health_says_when_sampling_has_ended():
    with Rig() as rig, callers(rig.server) as call:
        assert call.get("/healthz").value == {"status": "ok"}
        rig.evaluator.close()
        ill = call.get("/healthz")
        assert (ill.status, ill.value["status"]) == (503, "failed")
        assert "closed" in ill.message
        refused = call("episodes")
        assert (refused.status, refused.code) == (503, "closed")


def test_a_taken_port_is_named():
    with Rig() as rig:
        port = rig.server.address[1]
        evaluator = CommonPolicyEvaluator(ServingEnv(OBS_SPACE, ACTION_SPACE), RuledPolicy)
        with evaluator, pytest.raises(ConfigError, match=f"127.0.0.1:{port}"):
            PolicyServer(evaluator, HttpSettings(port=port)).start()


def test_a_server_starts_once_and_closes_twice():
    rig = Rig()
    with pytest.raises(ServingError, match="not started"):
        _ = rig.server.url
    with rig:
        with pytest.raises(ConfigError, match="once"):
            rig.server.start()
        rig.server.close()
        rig.server.close()


def test_only_a_serving_env_is_served():
    with (
        CommonPolicyEvaluator("CartPole-v1", RuledPolicy) as evaluator,
        pytest.raises(ConfigError, match="ServingEnv"),
    ):
        PolicyServer(evaluator)


class Stuck(RuledPolicy):
    """Its learning goes on until it is let go."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.learning, self.let_go = threading.Event(), threading.Event()

    def learn(self, batch):
        self.learning.set()
        assert self.let_go.wait(LIMIT_S)
        self.version += 1
        return {"loss": 0.0}

    acts_while_learning = True


def test_actions_are_answered_while_the_learner_is_busy():
    env = ServingEnv(OBS_SPACE, ACTION_SPACE, max_concurrent=4)
    evaluator = CommonPolicyEvaluator(env, Stuck, num_envs=1, rollout_fragment_length=4)
    policy = evaluator.policy
    with evaluator, PolicyServer(evaluator, HttpSettings(port=0), sample=False) as server, callers(server) as call:
        optimizer = SyncSamplesOptimizer(EvaluatorSet(evaluator))
        step = Background(optimizer.step)
        episode, steps = call.start(), 0
        while not policy.learning.is_set():
            assert call("action", episode, obs=[1, steps], reward=1.0).value["policy_version"] == 0
            steps += 1
        for more in range(50):  # more than a fragment: what is left over is dropped, and nobody waits
            found = call("action", episode, obs=[1, steps + more], reward=1.0)
            assert found.value["action"] == (1 + steps + more) % 3
            assert found.value["policy_version"] == 0
        assert not policy.let_go.is_set()
        policy.let_go.set()
        step.result()
        assert optimizer.num_steps_trained >= 4
        assert call("action", episode, obs=[0, 0], reward=1.0).value["policy_version"] == 1


def test_progress_shows_in_the_statistics():
    env = ServingEnv(Box(-1, 1, (1,), np.float32), Discrete(2))
    evaluator = CommonPolicyEvaluator(env, RuledPolicy)
    counts = {"sampled_steps": 17, "trained_steps": 16}
    with evaluator, PolicyServer(evaluator, HttpSettings(port=0), sample=False, progress=lambda: counts) as server:
        found = server.stats()
        assert (found["sampled_steps"], found["trained_steps"], found["training"]) == (17, 16, True)
