"""Calls of a client that went without an answer: made again, or given up, and what the server has of them then."""

import asyncio
import contextlib
import dataclasses
import threading

import pytest

from rlsample.errors import EpisodeLostError, ServingError, SpaceError
from rlsample.policy.ppo import PPOPolicy
from rlsample.serving.async_policy_client import AsyncPolicyClient
from tests.env.serving.conftest import RuledPolicy, answer, at
from tests.serving.client_rig import LIMIT_S, LosingProxy, Rig, client_of, free_port, quick
from tests.serving.http_rig import await_true


@contextlib.contextmanager
def rig_and_client(policy=RuledPolicy, sample_async=False, **options):
    """Whole episodes, and a client behind a proxy that loses answers."""
    with (
        Rig(policy, batch_mode="complete_episodes", sample_async=sample_async) as rig,
        LosingProxy(rig.server.address) as proxy,
        client_of(proxy, **options) as client,
    ):
        client.proxy = proxy
        yield rig, client


@contextlib.contextmanager
def unanswered(client, verb, arrives=True):
    """Within it, answers of a verb are lost, or the calls themselves, and the client gives up soon."""
    lost, patient = client.proxy.lose if arrives else client.proxy.drop, client._exchange.settings
    lost[verb], before = 1000, len(client.proxy.seen)
    client._exchange.settings = dataclasses.replace(patient, timeout_s=0.3)
    with pytest.raises(ServingError, match="counted once"):
        yield
    client._exchange.settings = patient
    if arrives:
        await_true(lambda: (verb, 200) in client.proxy.seen[before:], f"that {verb} arrives")
    lost.clear()


def begin(client, steps=2):
    """An episode of so many steps, each with the reward 10 + step."""
    client.start_episode("e")
    for step in range(steps):
        assert client.get_action(at(1, step)) == answer(1, step)
        client.log_returns(10.0 + step)


def rows(steps, ends):
    """What the server shall have of it, with the last row's end."""
    return [
        (
            (1, s),
            (1, s + 1),
            answer(1, s),
            10.0 + s,
            s == steps - 1 and ends == "term",
            s == steps - 1 and ends == "trunc",
            s,
        )
        for s in range(steps)
    ]


@pytest.mark.parametrize("truncated", [True, False])
@pytest.mark.parametrize("batched", [True, False])
def test_an_episode_ends_at_a_question_that_went_without_an_answer(truncated, batched):
    """The action was chosen, and never carried out: no row, and the reward before it counts once."""
    with rig_and_client() as (rig, client):
        begin(client)
        with unanswered(client, "actions" if batched else "action"):
            client.get_actions([[1, 2]], ["e"]) if batched else client.get_action(at(1, 2))
        client.end_episode(at(1, 2), truncated=truncated)
        assert client.open_episodes == rig.env.open_episodes == []
        assert rig.episodes(2) == [rows(2, "trunc")]


def test_an_episode_ends_at_a_question_that_never_arrived():
    with rig_and_client() as (rig, client):
        begin(client)
        with unanswered(client, "action", arrives=False):
            client.get_action(at(1, 2))
        client.end_episode(at(1, 2))
        assert rig.episodes(2) == [rows(2, "trunc")]


def test_an_episode_ends_at_its_first_question():
    with rig_and_client() as (rig, client):
        begin(client, 0)
        with unanswered(client, "action"):
            client.get_action(at(1, 0))
        client.end_episode(at(1, 0), truncated=True)
        begin(client, 1)
        client.end_episode(at(1, 1))
        assert rig.episodes(1) == [rows(1, "term")]


def test_an_end_at_a_question_may_be_made_again_and_is_refused_for_its_values_only():
    with rig_and_client() as (rig, client):
        begin(client)
        with unanswered(client, "action"):
            client.get_action(at(1, 2))
        with pytest.raises(SpaceError):
            client.end_episode([1, 2, 3])
        with unanswered(client, "end"):
            client.end_episode(at(1, 2))
        client.end_episode(at(1, 2))
        assert rig.episodes(2) == [rows(2, "trunc")]


def test_while_a_question_stands_nothing_else_is_taken():
    """As in a ServingEnv: a reward would belong to an action nobody has, another question would be a second row."""
    with rig_and_client() as (rig, client):
        begin(client)
        with unanswered(client, "action"):
            client.get_action(at(1, 2))
        words = "its last get_action went without an answer; make the same call again, or end the episode"
        for call in (
            lambda: client.get_action(at(9, 9)),
            lambda: client.get_actions([[1, 2]], ["e"]),
            lambda: client.log_action(at(1, 2), 0),
            lambda: client.log_returns(1.0),
            lambda: client.log_returns(1.0, {"a": 1}),
        ):
            with pytest.raises(ServingError, match=words):
                call()
        with pytest.raises(SpaceError, match="cannot be sent"):
            client.get_action(object())
        assert client.get_action(at(1, 2)) == answer(1, 2)
        client.log_returns(12.0)
        client.end_episode(at(1, 3), truncated=True)
        assert rig.episodes(3) == [rows(3, "trunc")]


def test_a_reward_goes_once_whichever_call_takes_it_along():
    """The server has the logged action and its reward; the client learns that from the next call, which is refused."""
    with rig_and_client() as (rig, client):
        begin(client, 1)
        with unanswered(client, "log_action"):
            client.log_action(at(1, 1), answer(1, 1))
        client.log_returns(11.0)
        with pytest.raises(ServingError, match="its last call went without an answer; make it again"):
            client.get_actions([[1, 2]], ["e"])
        with pytest.raises(ServingError, match="Idempotency-Key"):
            client.get_action(at(1, 2))
        assert client.get_action(at(1, 2)) == answer(1, 2)
        client.log_returns(12.0)
        client.end_episode(at(1, 3))
        assert rig.episodes(3) == [rows(3, "term")]


def test_returns_with_an_info_may_be_made_again():
    with rig_and_client() as (rig, client):
        begin(client, 1)
        with unanswered(client, "returns"):
            client.log_returns(0.25, {"why": "x"})
        client.log_returns(0.25, {"why": "x"})
        client.log_returns(0.5)
        client.end_episode(at(1, 1))
        ((row,),) = rig.episodes(1)
        assert row[3] == 10.75


def test_a_value_that_cannot_be_sent_takes_no_reward_along():
    with rig_and_client() as (rig, client):
        begin(client, 1)
        with pytest.raises(SpaceError, match="cannot be sent"):
            client.get_action(object())
        with pytest.raises(SpaceError, match="action_logp must be a number"):
            client.log_action(at(1, 1), 0, action_logp="x")
        with pytest.raises(SpaceError, match="action_logp is inf"):
            client.log_action(at(1, 1), 0, action_logp=float("inf"))
        client.log_returns(0.5)
        client.end_episode(at(1, 1))
        ((row,),) = rig.episodes(1)
        assert row[3] == 10.5


# ---------------------------------------------------------------------- local inference


@contextlib.contextmanager
def local_rig_and_client(fragment_rows=2):
    options = {"inference": "local", "fragment_rows": fragment_rows, "seed": 1}
    with rig_and_client(PPOPolicy, True, **options) as (rig, client):
        client.start_episode("e")
        yield rig, client


def seen(found):
    return [[(row[0], row[1], row[3], row[4], row[5]) for row in episode] for episode in found]


@pytest.mark.parametrize("goes_on", [True, False])
def test_an_upload_without_an_answer_comes_again_before_anything_else(goes_on):
    with local_rig_and_client() as (rig, client):
        for step in range(2):
            client.get_action(at(1, step))
            client.log_returns(10.0 + step)
        with unanswered(client, "fragments"):
            client.get_action(at(1, 2))  # the two rows before it have to go first
        with pytest.raises(ServingError, match="its rows were sent and no answer came"):
            client.log_returns(5.0)
        if goes_on:
            client.get_action(at(1, 2))
            client.log_returns(12.0)
        count = 3 if goes_on else 2
        client.end_episode(at(1, count))
        expected = [((1, s), (1, s + 1), 10.0 + s, s == count - 1, False) for s in range(count)]
        assert seen(rig.episodes(count)) == [expected]


def test_an_end_without_an_answer_comes_again():
    with local_rig_and_client(fragment_rows=50) as (rig, client):
        client.get_action(at(1, 0))
        client.log_returns(10.0)
        with unanswered(client, "fragments"):
            client.end_episode(at(1, 1), truncated=True)
        assert client.open_episodes == ["e"]
        client.end_episode(at(1, 1), truncated=True)
        assert client.open_episodes == []
        assert seen(rig.episodes(1)) == [[((1, 0), (1, 1), 10.0, False, True)]]


def test_a_step_after_an_end_without_an_answer_is_refused():
    with local_rig_and_client(fragment_rows=50) as (rig, client):
        client.get_action(at(1, 0))
        with unanswered(client, "fragments"):
            client.end_episode(at(1, 1))
        with pytest.raises(ServingError, match="'e' has ended: the end_episode that went without an answer was done"):
            client.get_action(at(1, 1))
        assert client.open_episodes == []
        assert len(rig.episodes(1)) == 1


# ---------------------------------------------------------------------- closing


def test_closing_ends_the_pause_before_the_next_try():
    """Nobody listens: the client is between two tries, a quarter of an hour apart."""
    url = f"http://127.0.0.1:{free_port()}"

    async def play():
        pausing = asyncio.Event()
        client = AsyncPolicyClient(url, settings=quick(timeout_s=3600.0))
        client._exchange._pause_s = lambda *_: pausing.set() or 900.0
        call = asyncio.create_task(client.start_episode())
        await asyncio.wait_for(pausing.wait(), LIMIT_S)
        await asyncio.sleep(0)
        await client.aclose()
        with pytest.raises(ServingError, match="the policy client is closed"):
            await asyncio.wait_for(call, LIMIT_S)

    asyncio.run(play())


def test_closing_a_sync_client_ends_the_pause_before_the_next_try():
    from rlsample.serving.policy_client import PolicyClient

    client = PolicyClient(f"http://127.0.0.1:{free_port()}", settings=quick(timeout_s=3600.0))
    pausing, errors = threading.Event(), []
    client._exchange._pause_s = lambda *_: pausing.set() or 900.0

    def start():
        try:
            client.start_episode()
        except ServingError as e:
            errors.append(e)

    thread = threading.Thread(target=start)
    thread.start()
    assert pausing.wait(LIMIT_S)
    client.close()
    thread.join(LIMIT_S)
    assert not thread.is_alive()
    assert "the policy client is closed" in str(errors[0])
    assert not isinstance(errors[0], EpisodeLostError)
