"""What happens in the middle of a call: an episode that is about to expire, a policy that fails for a part of it."""

import time

import numpy as np
import pytest

from rlsample.env import ServingEnv, ServingSettings
from rlsample.evaluation import CommonPolicyEvaluator
from rlsample.serving import HttpSettings, PolicyServer
from tests.env.serving.conftest import ACTION_SPACE, OBS_SPACE, Picky, answer
from tests.serving.client_rig import Rig
from tests.serving.http_rig import callers


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
