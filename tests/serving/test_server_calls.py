"""Each call of the HTTP server against a policy whose answers are known, and the rows that come of it."""

import json

import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete, Tuple

from rlsample.env.serving import ServingSettings
from rlsample.policy.policy import ActOutput
from rlsample.serving.wire import JSON, MSGPACK, array_to_json
from rlsample.testing.scripted_policy import ScriptedPolicy
from tests.env.serving.conftest import answer, at
from tests.serving.client_rig import Rig, Unsampled
from tests.serving.http_rig import Background, await_true, callers


def played(form, prefix=""):
    """Rows of two short episodes, one with rewards in calls of their own, one with rewards in the next call."""
    with Rig() as rig, callers(rig.server, form=form) as call:
        first, second = call.start(), call.start("own-name")
        assert first != second == "own-name"
        for step in range(3):
            found = call("action", first, obs=at(1, step).tolist(), t=step).value
            assert found == {"action": answer(1, step), "policy_version": 0, "t": step + 1}
            assert call("returns", first, reward=step + 0.5).value == {}
        assert call("end", first, obs=at(1, 3).tolist()).value == {}
        assert call("action", second, obs=at(5, 0).tolist(), reward=99.0).value["action"] == answer(5, 0)
        logged = call("log_action", second, obs=at(5, 1).tolist(), action=2, action_logp=-0.25, reward=7.0)
        assert logged.status == 200, logged.raw
        assert call("end", second, obs=at(5, 2).tolist(), truncated=True, reward=8.0).status == 200
        assert call("end", second, obs=at(5, 2).tolist()).code == "unknown_episode"
        return rig.episodes(5)


@pytest.mark.parametrize("form", [JSON, MSGPACK])
def test_rows_are_what_the_client_did(form):
    one, two = played(form)
    assert one == [
        ((1.0, 0.0), (1.0, 1.0), 1, 0.5, False, False, 0),
        ((1.0, 1.0), (1.0, 2.0), 2, 1.5, False, False, 1),
        ((1.0, 2.0), (1.0, 3.0), 0, 2.5, True, False, 2),
    ]
    assert two == [
        ((5.0, 0.0), (5.0, 1.0), 2, 7.0, False, False, 0),
        ((5.0, 1.0), (5.0, 2.0), 2, 8.0, False, True, 1),
    ]


def test_answers_have_the_form_that_is_asked_for():
    with Rig() as rig, callers(rig.server, form=MSGPACK) as call:
        episode = call.start()
        as_asked = call.send("POST", f"/v1/episodes/{episode}/action", b"\x81\xa3obs\x92\x01\x00", Accept=JSON)
        assert json.loads(as_asked.raw)["action"] == 1
        anything = call.send("POST", f"/v1/episodes/{episode}/action", b"\x81\xa3obs\x92\x02\x00", Accept="*/*")
        assert anything.headers["content-type"] == MSGPACK
        assert anything.value["action"] == 2


def test_several_episodes_in_one_call_are_one_batch():
    with Rig() as rig, callers(rig.server) as call:
        ids = [call.start() for _ in range(4)]
        obs = [at(k, 0).tolist() for k in range(4)]
        found = call("actions", episode_ids=ids, obs=obs).value
        assert found == {"actions": [0, 1, 2, 0], "policy_version": 0}
        found = call("actions", episode_ids=ids, obs=obs, rewards=[1.0, 2.0, 3.0, 4.0]).value
        assert found["actions"] == [0, 1, 2, 0]
        for k, episode in enumerate(ids):
            call("end", episode, obs=at(k, 2).tolist(), reward=10.0 + k)
        rewards = [[row[3] for row in rows] for rows in rig.episodes(8)]
        assert rewards == [[1.0, 10.0], [2.0, 11.0], [3.0, 12.0], [4.0, 13.0]]


@pytest.mark.parametrize(
    ("ids", "obs", "rewards", "code"),
    [
        (["a", "b", "nobody"], [[0, 0]] * 3, None, "unknown_episode"),
        (["a", "a"], [[0, 0]] * 2, None, "bad_value"),
        ([], [], None, "bad_value"),
        (["a", "b"], [[0, 0]] * 3, None, "bad_value"),
        (["a", "b"], [[0, 0], [0, 0]], [1.0], "bad_value"),
        (["a", "b"], [[0, 0], [0, 0]], [1.0, 1e39], "bad_value"),
        (["a", "b"], [[0, 0], [0, 1e39]], [1.0, 2.0], "bad_value"),
    ],
)
def test_a_batched_call_is_done_for_all_or_for_none(ids, obs, rewards, code):
    with Rig() as rig, callers(rig.server) as call:
        for name in ("a", "b"):
            call.start(name)
            call("action", name, obs=[1, 0])
        refused = call("actions", episode_ids=ids, obs=obs, **({"rewards": rewards} if rewards else {}))
        assert refused.code == code
        for name in ("a", "b"):
            assert call("action", name, obs=[2, 0], t=1, reward=5.0).value["t"] == 2
            call("end", name, obs=[3, 0], reward=6.0)
        assert [[row[3] for row in rows] for rows in rig.episodes(4)] == [[5.0, 6.0], [5.0, 6.0]]


@pytest.mark.parametrize(
    "values",
    [
        {"obs": [0, "x"], "reward": 5.0},
        {"obs": [0, 0, 0], "reward": 5.0},
        {"obs": [0, 0], "reward": 5.0, "t": 7},
        {"obs": [0, 0], "reward": 1e39},
        {"obs": [0, 0], "reward": 5.0, "surplus": 1},
        {"reward": 5.0},
    ],
)
def test_a_refused_action_books_nothing(values):
    with Rig() as rig, callers(rig.server) as call:
        episode = call.start()
        call("action", episode, obs=[1, 0])
        assert call("action", episode, **values).status in (400, 409)
        call("end", episode, obs=[2, 0], reward=3.0)
        (rows,) = rig.episodes(1)
        assert rows == [((1.0, 0.0), (2.0, 0.0), 1, 3.0, True, False, 0)]


def test_a_count_that_differs_is_named():
    with Rig() as rig, callers(rig.server) as call:
        episode = call.start()
        call("action", episode, obs=[0, 0], t=0)
        refused = call("action", episode, obs=[0, 0], t=0)
        assert (refused.status, refused.code) == (409, "conflict")
        assert "t is 0" in refused.message
        assert "at 1" in refused.message


def test_episode_ids():
    with Rig() as rig, callers(rig.server) as call:
        call.start("a")
        again = call("episodes", episode_id="a")
        assert (again.status, again.code) == (409, "conflict")
        for wrong in ("", "a/b", "..", ".", "ä", "a b", "x" * 129):
            assert call("episodes", episode_id=wrong).code == "bad_value"
        assert call.get("/v1/stats").value["open_episodes"] == 1


class Answering(ScriptedPolicy):
    """The action is 10 times the observation's number, in each leaf."""

    def act(self, obs, explore=True):
        base = obs["a"][:, 0].astype(np.int64)
        actions = {"m": np.stack([base % 3, base % 2], 1), "t": (base % 4 + 1, obs["a"].astype(np.float32) / 100)}
        zeros = np.zeros(len(base), np.float32)
        return ActOutput(actions, {"action_logp": zeros, "values": zeros})


NESTED = (
    Dict({"a": Box(0, 255, (2,), np.uint8), "b": Tuple([Discrete(3), Box(-1, 1, (1, 2))])}),
    Dict({"m": MultiDiscrete([3, 2]), "t": Tuple([Discrete(4, start=1), Box(-9, 9, (2,))])}),
)


@pytest.mark.parametrize("form", [JSON, MSGPACK])
@pytest.mark.parametrize("arrays", [False, True])
def test_nested_spaces(form, arrays):
    def shaped(values, dtype):
        array = np.array(values, dtype)
        if not arrays:
            return array.tolist()
        return array_to_json(array) if form == JSON else array

    obs = {"a": shaped([7, 8], np.uint8), "b": [2, shaped([[0.5, -0.5]], np.float32)]}
    many = {"a": shaped([[7, 8]], np.uint8), "b": [shaped([2], np.int64), shaped([[[0.5, -0.5]]], np.float32)]}
    with Rig(Answering, NESTED) as rig, callers(rig.server, form=form) as call:
        episode = call.start()
        action = call("action", episode, obs=obs).value["action"]
        assert np.asarray(action["m"]).tolist() == [1, 1]
        assert action["t"][0] == 4
        assert np.asarray(action["t"][1], np.float32).tolist() == [np.float32(0.07), np.float32(0.08)]
        stacked = call("actions", episode_ids=[episode], obs=many, rewards=[1.0]).value["actions"]
        assert np.asarray(stacked["m"]).tolist() == [[1, 1]]
        assert np.asarray(stacked["t"][0]).tolist() == [4]
        own = {"m": [2, 0], "t": [1, shaped([-9, 9], np.float32)]}
        assert call("log_action", episode, obs=obs, action=own, reward=2.0).status == 200
        wrong = {"m": [2, 2], "t": [1, shaped([-9, 9], np.float32)]}
        assert call("log_action", episode, obs=obs, action=wrong).code == "bad_value"
        assert call("end", episode, obs=obs, reward=3.0).status == 200
        rig.await_rows(3)
        assert [batch["rewards"].item() for batch in rig.batches] == [1.0, 2.0, 3.0]
        assert {batch["obs"]["a"].dtype for batch in rig.batches} == {np.dtype(np.uint8)}
        assert rig.batches[2]["actions"]["m"].tolist() == [[2, 0]]


def test_acting_without_an_episode_records_nothing():
    with Rig(sample_async=None) as rig, callers(rig.server) as call:
        found = call("act", obs=[[0, 0], [1, 0], [2, 0]])
        assert found.value == {"actions": [0, 1, 2], "policy_version": 0}
        assert call("act", obs=[]).code == "bad_value"
        assert call("act", obs=[[0, 0, 0]]).code == "bad_value"
        assert call.get("/v1/stats").value["actions"] == 0


def fragment(**changes):
    rows = {"obs": [[1, 0], [1, 1]], "actions": [2, 0], "rewards": [0.5, 1.5], "action_logp": [-0.5, -1.0]}
    return {"rows": {**rows, **changes}, "policy_version": 0}


def test_a_fragment_is_so_many_logged_actions():
    with Rig() as rig, callers(rig.server) as call:
        episode = call.start()
        assert call("fragments", episode_id=episode, t=0, **fragment()).value == {"t": 2, "policy_version": 0}
        last = fragment(obs=[[1, 2]], actions=[1], rewards=[9.0], action_logp=None)
        done = call("fragments", episode_id=episode, t=2, final_obs=[1, 3], truncated=True, **last)
        assert done.value["t"] == 3, done.raw
        assert call("returns", episode, reward=1.0).code == "unknown_episode"
        (rows,) = rig.episodes(3)
        assert rows == [
            ((1.0, 0.0), (1.0, 1.0), 2, 0.5, False, False, 0),
            ((1.0, 1.0), (1.0, 2.0), 0, 1.5, False, False, 1),
            ((1.0, 2.0), (1.0, 3.0), 1, 9.0, False, True, 2),
        ]


@pytest.mark.parametrize(
    "changes",
    [
        {"obs": [[1, 0]]},
        {"obs": [[1, 0], [1, None]]},
        {"actions": [2, 3]},
        {"actions": [2]},
        {"rewards": [0.5, 1e39]},
        {"rewards": [0.5, "1"]},
        {"rewards": []},
        {"action_logp": [0.5]},
        {"values": [1.0, 2.0]},
    ],
)
def test_a_fragment_with_a_wrong_column_is_no_row(changes):
    with Rig() as rig, callers(rig.server) as call:
        episode = call.start()
        refused = call("fragments", episode_id=episode, **fragment(**changes))
        assert (refused.status, refused.code) == (400, "bad_value")
        assert call("fragments", episode_id=episode, t=1, **fragment()).code == "conflict"
        call("fragments", episode_id=episode, t=0, final_obs=[1, 2], **fragment())
        (rows,) = rig.episodes(2)
        assert [row[3] for row in rows] == [0.5, 1.5]


def test_unrecorded_episodes_are_answered_and_leave_no_rows():
    with Rig() as rig, callers(rig.server) as call:
        silent, loud = call.start(training_enabled=False), call.start()
        for step in range(3):
            assert call("action", silent, obs=at(2, step).tolist()).value["action"] == answer(2, step)
            assert call("action", loud, obs=at(1, step).tolist(), reward=1.0).value["action"] == answer(1, step)
        for episode in (silent, loud):
            call("end", episode, obs=at(1, 3).tolist(), reward=1.0)
        assert call.get("/v1/stats").value["sampled_steps"] == 3
        assert len(rig.episodes(3)) == 1


# ---------------------------------------------------------------------- repeated calls, order, room


def test_a_repeated_call_is_answered_as_before_and_done_once():
    with Rig() as rig, callers(rig.server) as call:
        started = call("episodes", key="s")
        assert call("episodes", key="s").raw == started.raw
        episode = started.value["episode_id"]
        first = call("action", episode, key="1", obs=[1, 0])
        for _ in range(3):
            assert call("action", episode, key="1", obs=[1, 0]).raw == first.raw
        for _ in range(2):
            assert call("returns", episode, key="2", reward=2.5).status == 200
        for _ in range(2):
            assert call("fragments", episode_id=episode, key="f", **fragment()).value["t"] == 3
        for _ in range(2):
            assert call("end", episode, key="3", obs=[9, 9], reward=4.0).value == {}
        (rows,) = rig.episodes(3)
        assert [row[3] for row in rows] == [2.5, 0.5, 5.5]


def test_a_key_belongs_to_one_call():
    with Rig() as rig, callers(rig.server) as call:
        episode, other = call.start(), call.start()
        call("action", episode, key="1", obs=[1, 0])
        for refused in (
            call("action", episode, key="1", obs=[1, 1]),
            call("end", episode, key="1", obs=[1, 0]),
        ):
            assert (refused.status, refused.code) == (422, "key_reused")
        assert call("action", other, key="1", obs=[2, 0]).value["action"] == 2


def test_a_refused_call_leaves_its_key_free():
    with Rig() as rig, callers(rig.server) as call:
        episode = call.start()
        assert call("action", episode, key="1", obs=[1, 0], t=5).status == 409
        assert call("action", episode, key="1", obs=[1, 0]).value["t"] == 1


def test_a_retry_that_overtakes_shares_the_answer():
    with Unsampled() as rig, callers(rig.server, 3) as (one, two, three):
        episode = one.start()
        first = Background(lambda: one("action", episode, key="k", obs=[1, 0]))
        await_true(lambda: three.get("/v1/stats").value["waiting_requests"] == 1)
        second = Background(lambda: two("action", episode, key="k", obs=[1, 0]))
        assert three("action", episode, obs=[1, 0]).code == "conflict"
        assert three("returns", episode, reward=1.0).code == "conflict"
        assert three("end", episode, obs=[1, 0]).code == "conflict"
        rig.sample()
        assert first.result().raw == second.result().raw
        assert three("end", episode, obs=[2, 0], reward=1.0).status == 200
        assert len(rig.episodes(1)) == 1


def test_too_many_waiting_requests_are_told_to_come_back():
    with Unsampled(http={"max_pending": 2}) as rig, callers(rig.server, 4) as every:
        ids = [every[0].start() for _ in range(3)]
        waiting = [Background(lambda k=k: every[k]("action", ids[k], obs=[k, 0])) for k in range(2)]
        await_true(lambda: every[3].get("/v1/stats").value["waiting_requests"] == 2)
        refused = every[2]("action", ids[2], obs=[2, 0])
        assert (refused.status, refused.code, refused.headers["retry-after"]) == (503, "busy", "1")
        rig.sample()
        assert [w.result().value["action"] for w in waiting] == [0, 1]
        assert every[2]("action", ids[2], obs=[2, 0]).value == {"action": 2, "policy_version": 0, "t": 1}


def test_no_place_for_an_episode_is_busy():
    with Rig() as rig, callers(rig.server) as call:
        ids = [call.start() for _ in range(8)]
        refused = call("episodes")
        assert (refused.status, refused.code, refused.headers["retry-after"]) == (503, "busy", "1")
        call("end", ids[0], obs=[0, 0])
        assert call("episodes").status == 201


def test_a_full_queue_is_busy():
    with Unsampled(settings=ServingSettings(max_queued_rows=3)) as rig, callers(rig.server) as call:
        episode = call.start()
        for step in range(3):
            assert call("log_action", episode, obs=[1, step], action=1, reward=1.0).status == 200
        assert call("log_action", episode, obs=[1, 3], action=1, reward=1.0).code == "busy"
        assert call("fragments", episode_id=episode, **fragment()).code == "busy"
        rig.sample()
        await_true(lambda: call("log_action", episode, obs=[1, 3], action=1, reward=1.0).status == 200)


def test_requests_of_one_address_are_limited():
    with Rig(http={"rate_limit": 3.0}) as rig, callers(rig.server) as call:
        statuses = [call.get("/healthz").status for _ in range(12)]
        assert statuses[:3] == [200] * 3
        assert 429 in statuses
        refused = next(a for a in iter(lambda: call.get("/healthz"), None) if a.status == 429)
        assert (refused.code, refused.headers["retry-after"]) == ("rate_limited", "1")
        await_true(lambda: call.get("/healthz").status == 200)


# ---------------------------------------------------------------------- what is shown


def test_spaces_and_weights():
    with Rig() as rig, callers(rig.server) as call:
        found = call.get("/v1/spaces").value
        assert found["observation_space"]["shape"] == [2]
        assert found["action_space"] == {"type": "Discrete", "shape": [], "dtype": "int64", "n": 3, "start": 0}
        assert call.get("/v1/weights?have=0").status == 304
        assert call.get("/v1/weights?have=x").code == "bad_value"
        assert call.get("/v1/weights").code == "not_found"  # no client has a copy of this policy


def test_statistics_and_metrics():
    with Rig() as rig, callers(rig.server) as call:
        episode = call.start()
        for step in range(2):
            call("action", episode, obs=at(1, step).tolist(), reward=1.5)
        call("end", episode, obs=[0, 0], reward=2.0)
        call("end", episode, obs=[0, 0])
        found = call.get("/v1/stats").value
        assert (found["actions"], found["episodes"], found["returns"], found["open_episodes"]) == (2, 1, [3.5], 0)
        assert (found["return_mean"], found["sampled_steps"], found["rejected"]) == (3.5, 2, {"unknown_episode": 1})
        assert 0 < found["p50_ms"] <= found["p99_ms"]
        text = call.get("/metrics").raw.decode()
        lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        assert float(lines["rlsample_actions_total"]) == 2
        assert float(lines["rlsample_episodes_total"]) == 1
        assert float(lines['rlsample_rejected_total{code="unknown_episode"}']) == 1
        assert float(lines['rlsample_action_latency_seconds_bucket{le="+Inf"}']) == 2
        assert float(lines["rlsample_open_episodes"]) == 0


def test_openapi_lists_every_route():
    from rlsample.serving.app import EPISODE_VERBS, FLAT_CALLS
    from rlsample.serving.other_routes import OtherRoutes

    with Rig() as rig, callers(rig.server) as call:
        document = call.get("/openapi.json").value
        none = [lambda *_: None] * 5
        routes = {route.path for route in OtherRoutes({}, {}, *none).app().routes}
        routes |= set(FLAT_CALLS) | {f"/v1/episodes/{{id}}/{verb}" for verb in EPISODE_VERBS}
        assert set(document["paths"]) == routes
        for path, operations in document["paths"].items():
            for method, operation in operations.items():
                assert call.send(method.upper(), path.replace("{id}", "x"), b"").status != 405, path
                wrong = "DELETE" if method == "get" else "GET"
                assert call.send(wrong, path.replace("{id}", "x")).status == 405, path
                assert operation["responses"]
        assert b"openapi.json" in call.get("/docs").raw
