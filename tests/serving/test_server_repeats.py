"""Calls that come twice, under keys that others use too, and episodes that end while an answer is on its way."""

import pytest

from rlsample.errors import ServingError
from rlsample.policy.ppo import PPOPolicy
from rlsample.serving.answers import Answer, AnswerBook
from tests.serving.client_rig import LIMIT_S, LosingProxy, Rig, client_of
from tests.serving.http_rig import Background, await_true, callers
from tests.serving.test_server_calls import Unsampled, fragment


def test_other_calls_do_not_push_out_the_key_of_a_batched_call(monkeypatch):
    """However busy the server is, what an episode was told is kept by the episode."""
    monkeypatch.setattr("rlsample.serving.app._KEPT_STARTS", 2)
    with Rig() as rig, callers(rig.server) as call:
        one, two = call.start(), call.start()
        asked = {"episode_ids": [one, two], "obs": [[1, 0], [2, 0]]}
        first = call("actions", key="k", **asked)
        rows = call("fragments", key="f", episode_id=one, **fragment())
        for _ in range(4):
            call.send("POST", "/v1/episodes", b'{"training_enabled": false}', Idempotency_Key=f"other-{_}")
        assert call("actions", key="k", **asked).raw == first.raw
        assert call("fragments", key="f", episode_id=one, **fragment()).raw == rows.raw
        assert call("action", one, obs=[1, 1]).value["t"] == 4
        assert call("action", two, obs=[2, 1]).value["t"] == 2


def test_acting_without_an_episode_keeps_no_answer():
    with Rig(sample_async=True) as rig, callers(rig.server) as call:
        for _ in range(3):
            assert call("act", key="k", obs=[[1, 0]]).status == 200
        assert not rig.server._app._answers.knows("k")


def test_refused_calls_push_out_no_answers(monkeypatch):
    """Neither those that an episode keeps, nor those of starts, which all clients share."""
    monkeypatch.setattr("rlsample.serving.app._KEPT_STARTS", 2)
    with Rig() as rig, callers(rig.server) as call:
        started = [call("episodes", key=f"start-{name}", episode_id=name).raw for name in "ef"]
        told = [call("action", "e", key=f"k{t}", obs=[1, t], t=t).raw for t in range(16)]
        for number in range(20):
            assert call("action", "e", key=f"refused-{number}", obs=[1, 1], t=7).code == "conflict"
            assert call("episodes", key=f"refused-{number}", episode_id="e").code == "conflict"
        assert [call("action", "e", key=f"k{t}", obs=[1, t], t=t).raw for t in range(16)] == told
        assert [call("episodes", key=f"start-{name}", episode_id=name).raw for name in "ef"] == started


def test_a_call_in_progress_stays_in_the_book_however_many_others_are_answered():
    book, answer = AnswerBook(2), Answer(200, b"", b"")
    waiting = book.begin("slow", 1)
    for key in "abc":
        book.finish(key, book.begin(key, 1), answer)
    assert [book.knows(key) for key in ("slow", "a", "b", "c")] == [True, False, True, True]
    book.finish("slow", waiting, answer)
    assert [book.knows(key) for key in ("slow", "b", "c")] == [True, False, True]  # the latest is the one just given
    book.fail("d", book.begin("d", 1), ValueError())
    assert [book.knows(key) for key in ("slow", "c", "d")] == [True, True, False]


def test_the_latest_answers_of_an_episode_are_kept():
    with Rig() as rig, callers(rig.server) as call:
        episode = call.start()
        told = [call("action", episode, key=f"k{t}", obs=[1, t], t=t).raw for t in range(20)]
        for t in range(4, 20):
            assert call("action", episode, key=f"k{t}", obs=[1, t], t=t).raw == told[t]
        assert call("action", episode, key="k3", obs=[1, 3], t=3).code == "conflict"


@pytest.mark.parametrize("batched", [False, True])
def test_a_client_may_use_an_id_again(batched):
    """The same first observation, twice: two rows, not one and a repeated answer."""
    with Rig() as rig, client_of(rig) as client:
        for reward in (1.0, 2.0):
            client.start_episode("table")
            assert (client.get_actions([[1, 0]], ["table"])[0] if batched else client.get_action([1, 0])) == 1
            client.log_returns(reward)
            client.end_episode([2, 0])
        rows = [row for episode in rig.episodes(2) for row in episode]
        assert [row[3] for row in rows] == [1.0, 2.0]


def test_a_count_is_the_one_of_its_own_answer():
    with Rig() as rig, callers(rig.server) as call:
        episode = call.start()
        path = f"/v1/episodes/{episode}/action"
        assert [call.send("POST", path, b'{"obs": [1, 0]}').value["t"] for _ in range(3)] == [1, 2, 3]


def test_an_end_while_an_action_is_awaited_leaves_that_action_out():
    """As a tab does that closes: it knows of two actions, the server was asked for a third."""
    with Unsampled(batch_mode="complete_episodes") as rig, callers(rig.server, 2) as (one, two):
        episode, other = one.start(), one.start()
        for step in range(2):
            assert one("log_action", episode, obs=[1, step], action=1, reward=step * 1.0).status == 200
        asking = Background(lambda: one("action", episode, obs=[1, 2], reward=5.0))
        await_true(lambda: two.get("/v1/stats").value["waiting_requests"] == 1)
        assert two("end", episode, obs=[1, 2], t=2).code == "conflict"  # terminated: it would know the outcome
        assert two("end", episode, obs=[1, 2], t=1, truncated=True).code == "conflict"
        assert two("end", episode, obs=[1], t=2, truncated=True).code == "bad_value"
        assert two("end", episode, key="e", obs=[1, 2], t=2, reward=5.0, truncated=True).value == {}
        assert asking.result().code == "unknown_episode"
        assert two("end", episode, key="e", obs=[1, 2], t=2, reward=5.0, truncated=True).value == {}
        assert two("end", other, obs=[0, 0]).status == 200
        rig.sample()
        assert rig.episodes(2) == [
            [
                ((1.0, 0.0), (1.0, 1.0), 1, 1.0, False, False, 0),
                ((1.0, 1.0), (1.0, 2.0), 1, 5.0, False, True, 1),
            ]
        ]


def test_an_end_without_the_last_answer_leaves_that_action_out():
    """The answer was sent, and never read."""
    with Rig(batch_mode="complete_episodes") as rig, callers(rig.server) as call:
        episode = call.start()
        assert call("action", episode, obs=[1, 0]).value["t"] == 1
        assert call("action", episode, obs=[1, 1], reward=3.0).value["t"] == 2
        assert call("end", episode, obs=[1, 1], t=1, truncated=True, reward=3.0).value == {}
        assert call("end", episode, obs=[1, 1]).code == "unknown_episode"
        assert rig.episodes(1) == [[((1.0, 0.0), (1.0, 1.0), 1, 3.0, False, True, 0)]]


def test_an_end_that_does_not_know_of_a_logged_action_is_refused():
    """It was carried out, so it is no action to leave out: the client has lost count."""
    with Rig(batch_mode="complete_episodes") as rig, callers(rig.server) as call:
        episode = call.start()
        assert call("action", episode, obs=[1, 0]).value["t"] == 1
        assert call("log_action", episode, obs=[1, 1], action=2).status == 200
        assert call("end", episode, obs=[1, 1], t=1, truncated=True).code == "conflict"
        assert call("end", episode, obs=[1, 2], t=2, truncated=True).status == 200
        assert [row[2] for row in rig.episodes(2)[0]] == [1, 2]


def test_an_end_before_the_first_action_was_carried_out_leaves_no_row():
    with Rig() as rig, callers(rig.server) as call:
        episode = call.start()
        assert call("action", episode, obs=[1, 0]).value["t"] == 1
        assert call("end", episode, obs=[1, 0], t=0, truncated=True).value == {}
        last = call.start()
        call("action", last, obs=[2, 0])
        call("end", last, obs=[2, 1], reward=1.0)
        assert rig.episodes(1) == [[((2.0, 0.0), (2.0, 1.0), 2, 1.0, True, False, 0)]]


@pytest.mark.parametrize("inference", ["remote", "local"])
def test_a_start_that_gave_up_may_be_made_again(inference):
    """With an id of its own, the episode would else be open and in nobody's hands."""
    options = {"timeout_s": 0.3, "inference": inference}
    with Served(inference) as rig, LosingProxy(rig.server.address) as proxy, client_of(proxy, **options) as client:
        client.start_episode("first", timeout_s=LIMIT_S)
        for wanted in ("table", None):
            proxy.lose["episodes"] = 1000
            for _ in range(2):
                with pytest.raises(ServingError, match="counted once"):
                    client.start_episode(wanted)
            proxy.lose.clear()
            started = client.start_episode(wanted, timeout_s=LIMIT_S)
            assert wanted in (started, None)
        assert sorted(client.open_episodes) == sorted(rig.env.open_episodes)
        assert len(rig.env.open_episodes) == 3


class Served(Rig):
    """With a policy that local clients may copy."""

    def __init__(self, inference):
        super().__init__(PPOPolicy, sample_async=True) if inference == "local" else super().__init__()
