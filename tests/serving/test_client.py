"""PolicyClient and its async twin against a real server: the rows that land there are the steps that were made."""

import asyncio
import socket
import threading
import time
import urllib.request

import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple

from rlsample.env import ServingEnv, ServingSettings
from rlsample.errors import EpisodeLostError, ServingError, SpaceError
from rlsample.evaluation import CommonPolicyEvaluator
from rlsample.serving.async_policy_client import AsyncPolicyClient
from rlsample.serving.http_settings import HttpSettings
from rlsample.serving.policy_server import PolicyServer
from rlsample.testing.scripted_policy import ScriptedPolicy
from tests.env.serving.conftest import ACTION_SPACE, OBS_SPACE, Picky, RuledPolicy, answer, at
from tests.serving.client_rig import LIMIT_S, LosingProxy, Rig, client_of, quick


class AsyncFace:
    """The async client with the sync one's face."""

    def __init__(self, url, **options):
        self._loop = asyncio.new_event_loop()
        self._client = AsyncPolicyClient(url, settings=quick(**options))

    def __getattr__(self, name):
        return lambda *args, **kwargs: self._loop.run_until_complete(getattr(self._client, name)(*args, **kwargs))

    @property
    def open_episodes(self):
        return self._client.open_episodes

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self._loop.run_until_complete(self._client.aclose())
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()


def sync_client(url, **options):
    from rlsample.serving.policy_client import PolicyClient

    return PolicyClient(url, settings=quick(**options))


CLIENTS = {
    "sync": sync_client,
    "sync-json": lambda url, **options: sync_client(url, form="json", **options),
    "async": AsyncFace,
}


@pytest.fixture(params=CLIENTS)
def connect(request):
    return CLIENTS[request.param]


def row(episode, step, action, reward, ends="", next_step=None):
    """What the server shall have of a step; see rows_of."""
    after = step + 1 if next_step is None else next_step
    return ((episode, step), (episode, after), action, reward, ends == "term", ends == "trunc", step)


def play_everything(client):
    """Three interleaved episodes with every verb; returns the rows they make, by episode."""
    a, b = client.start_episode(), client.start_episode("b")
    assert client.get_action(at(1, 0), a) == answer(1, 0)
    client.log_returns(9.0, episode_id=b)  # before any action: nothing to credit
    client.log_returns(0.5, episode_id=a)
    client.log_action(at(2, 0), 2, b, action_logp=-0.25)
    client.log_returns(0.25, episode_id=a)
    client.log_returns(-2.0, {"note": "x"}, b)
    client.log_returns(1.0, episode_id=b)
    assert client.get_action([1, 1], a) == answer(1, 1)
    client.log_action([2, 1], np.int64(0), b)
    client.end_episode(at(1, 2), a, truncated=True)
    c = client.start_episode()
    assert client.get_actions(np.stack([at(3, 0), at(2, 2)]), [c, b]) == [answer(3, 0), answer(2, 2)]
    client.log_returns(30.0, episode_id=c)
    client.log_returns(20.0, episode_id=b)
    assert client.get_actions([[2, 3], [3, 1]], [b, c]) == [answer(2, 3), answer(3, 1)]
    client.log_returns(7.0, episode_id=c)
    client.end_episode(at(3, 2), c)
    assert client.open_episodes == [b]
    client.end_episode(at(2, 4))  # the only open one
    return [
        [row(1, 0, answer(1, 0), 0.75), row(1, 1, answer(1, 1), 0.0, "trunc")],
        [row(2, 0, 2, -1.0), row(2, 1, 0, 0.0), row(2, 2, answer(2, 2), 20.0), row(2, 3, answer(2, 3), 0.0, "term")],
        [row(3, 0, answer(3, 0), 30.0), row(3, 1, answer(3, 1), 7.0, "term")],
    ]


def test_rows_on_the_server_are_the_steps_of_the_client(connect):
    with Rig() as rig, connect(rig.server.url) as client:
        expected = play_everything(client)
        assert rig.episodes(8) == expected


VERBS = ("episodes", "action", "log_action", "returns", "end", "actions", "spaces")


@pytest.mark.parametrize(("kind", "lost"), [*(("sync", (verb,)) for verb in VERBS), ("sync", VERBS), ("async", VERBS)])
def test_a_call_whose_answer_is_lost_is_counted_once(kind, lost):
    with Rig() as rig, LosingProxy(rig.server.address) as proxy, CLIENTS[kind](proxy.url) as client:
        for verb in lost:
            proxy.lose[verb] = 3
        expected = play_everything(client)
        assert not +proxy.lose  # all were lost that should be
        assert rig.episodes(8) == expected
        assert rig.server.stats()["open_episodes"] == 0


def test_a_call_that_gave_up_may_be_made_again_and_counts_once():
    with Rig() as rig, LosingProxy(rig.server.address) as proxy, client_of(proxy, timeout_s=0.3) as client:
        client.start_episode(timeout_s=LIMIT_S)
        proxy.lose["action"] = proxy.lose["end"] = 1000
        with pytest.raises(ServingError, match="counted once"):
            client.get_action(at(1, 0))
        with pytest.raises(ServingError, match="counted once"):
            client.get_action(at(1, 0))
        proxy.lose["action"] = 0
        assert client.get_action(at(1, 0), timeout_s=LIMIT_S) == answer(1, 0)
        client.log_returns(0.5)
        with pytest.raises(ServingError, match="counted once"):
            client.end_episode(at(1, 1))
        proxy.lose.clear()
        client.end_episode(at(1, 1))
        assert rig.episodes(1) == [[row(1, 0, answer(1, 0), 0.5, "term")]]


def test_another_call_in_place_of_one_that_was_counted_is_refused():
    with Rig() as rig, LosingProxy(rig.server.address) as proxy, client_of(proxy, timeout_s=0.3) as client:
        client.start_episode(timeout_s=LIMIT_S)
        proxy.lose["log_action"] = 1000
        with pytest.raises(ServingError, match="counted once"):
            client.log_action(at(1, 0), 2)
        proxy.lose.clear()
        with pytest.raises(ServingError, match="Idempotency-Key"):
            client.log_action(at(1, 7), 2)
        client.end_episode(at(1, 1))
        assert rig.episodes(1) == [[row(1, 0, 2, 0.0, "term")]]


# ---------------------------------------------------------------------- values


SPACES = {
    "Discrete": (Box(-1, 1, (), np.float64), Discrete(3, start=5), 6),
    "Box": (Box(0, 255, (2, 3), np.uint8), Box(-1, 1, (2,), np.float32), np.array([0.5, -0.25], np.float32)),
    "Box0": (Discrete(4), Box(-9, 9, (), np.int16), np.array(-7, np.int16)),
    "MultiDiscrete": (MultiBinary(3), MultiDiscrete([3, 4]), np.array([2, 3])),
    "Dict": (
        Dict(a=Box(-1, 1, (1,), np.float32), b=Tuple([Discrete(2), MultiDiscrete([2, 2])])),
        Dict(x=MultiBinary(2), y=Tuple([Discrete(2), Box(0, 1, (1,), np.float64)])),
        {"x": np.array([1, 0], np.int8), "y": (1, np.array([0.125]))},
    ),
}


def same(a, b):
    if isinstance(b, dict):
        return set(a) == set(b) and all(same(a[k], b[k]) for k in b)
    if isinstance(b, tuple):
        return isinstance(a, tuple) and len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return type(a) is type(b) and np.array_equal(a, b) and np.asarray(a).dtype == np.asarray(b).dtype


@pytest.mark.parametrize("form", ["json", "msgpack"])
@pytest.mark.parametrize("kind", SPACES)
def test_actions_come_as_env_step_takes_them(kind, form):
    observation_space, action_space, action = SPACES[kind]

    class Fixed(ScriptedPolicy):
        def __init__(self, *spaces, seed=0):
            super().__init__(*spaces, actions=[action])

    with Rig(Fixed, (observation_space, action_space)) as rig, client_of(rig, form=form) as client:
        observation_space.seed(0)
        obs = [observation_space.sample() for _ in range(4)]
        client.start_episode("e")
        assert same(client.get_action(obs[0]), action)
        client.log_action(obs[1], action)
        (got,) = client.get_actions(stacked(observation_space, obs[2:3]), ["e"])
        assert same(got, action)
        client.end_episode(obs[3])
        rig.await_rows(3)
        seen = [leaf for batch in rig.batches for leaf in flat(batch["obs"])]
        expected = [leaf for one in obs[:3] for leaf in flat(stacked(observation_space, [one]))]
        assert len(seen) == len(expected)
        assert all(np.array_equal(a, b) and a.dtype == b.dtype for a, b in zip(seen, expected, strict=True))


def stacked(space, values):
    if isinstance(space, Dict):
        return {k: stacked(s, [v[k] for v in values]) for k, s in space.spaces.items()}
    if isinstance(space, Tuple):
        return tuple(stacked(s, [v[i] for v in values]) for i, s in enumerate(space.spaces))
    return np.array(values, space.dtype)


def flat(tree):
    if isinstance(tree, dict):
        return [leaf for part in tree.values() for leaf in flat(part)]
    if isinstance(tree, tuple):
        return [leaf for part in tree for leaf in flat(part)]
    return [tree]


# ---------------------------------------------------------------------- wrong use


def test_wrong_values_raise_in_the_caller_and_the_episode_goes_on(connect):
    with Rig() as rig, connect(rig.server.url) as client:
        client.start_episode()
        for bad in (np.zeros(3, np.float32), [1, float("nan")], ["a", "b"], {"a": 1}, None):
            with pytest.raises(SpaceError):
                client.get_action(bad)
            with pytest.raises(SpaceError):
                client.log_action(bad, 0)
        with pytest.raises(SpaceError, match="outside the space"):
            client.log_action(at(1, 0), 3)
        assert client.get_action(at(1, 0)) == answer(1, 0)
        for bad in (float("inf"), "x", [1.0, 2.0], 1e39):
            with pytest.raises(ServingError):
                client.log_returns(bad)
        client.log_returns(3e38)
        with pytest.raises(ServingError, match="no finite float32"):
            client.log_returns(3e38)
        client.log_returns(-3e38 + 2.0)
        with pytest.raises(SpaceError):
            client.end_episode(np.zeros(3, np.float32))
        client.log_returns(4.0)  # the refused end has taken nothing along
        client.end_episode(at(1, 1))
        ((got,),) = rig.episodes(1)
        assert got == row(1, 0, answer(1, 0), np.float32(3e38 + (-3e38 + 2.0) + 4.0).item(), "term")


def test_episodes_that_are_not_there():
    with Rig() as rig, client_of(rig) as client:
        with pytest.raises(ServingError, match="no open episode: call start_episode"):
            client.get_action(at(1, 0))
        with pytest.raises(ServingError, match="no open episode 'x'"):
            client.get_action(at(1, 0), "x")
        client.start_episode("a")
        with pytest.raises(ServingError, match="open already"):
            client.start_episode("a")
        client.start_episode("b")
        with pytest.raises(ServingError, match=r"2 open episodes \('a', 'b'\)"):
            client.end_episode(at(1, 0))
        with pytest.raises(ServingError, match=r"the episode_id comes last: get_action\(obs, episode_id\)"):
            client.get_action("a", at(1, 0))
        with pytest.raises(ServingError, match="'a' came first; the episode_id comes last"):
            client.get_action("a")
        with pytest.raises(ServingError, match="distinct"):
            client.get_actions([[1, 0], [1, 0]], ["a", "a"])
        with pytest.raises(ServingError, match="distinct"):
            client.get_actions([], [])
        client.end_episode(at(1, 0), "a")
        with pytest.raises(ServingError, match="no open episode 'a'"):
            client.end_episode(at(1, 0), "a")
        assert client.open_episodes == ["b"]


def test_a_token_is_asked_for_and_not_shown():
    with Rig(http={"token": "tell-nobody"}) as rig:
        for wrong in (None, "wrong"):
            with client_of(rig, wrong) as client, pytest.raises(ServingError, match="oken") as error:
                client.start_episode()
            assert "tell-nobody" not in str(error.value)
        with client_of(rig, "tell-nobody") as client:
            assert client.get_action(at(1, 1), client.start_episode()) == answer(1, 1)


# ---------------------------------------------------------------------- ends


class Waiting:
    """A server nobody samples, and a client that waits there for an action in a thread."""

    def __init__(self, kind):
        self.evaluator = CommonPolicyEvaluator(ServingEnv(OBS_SPACE, ACTION_SPACE), RuledPolicy, sample_async=False)
        self.server = PolicyServer(self.evaluator, HttpSettings(port=0), sample=False)
        self.kind, self.outcome = kind, None

    def __enter__(self):
        self.server.start()
        self.client = CLIENTS[self.kind](self.server.url, timeout_s=600.0, try_timeout_s=600.0)
        self.client.start_episode()
        self.thread = threading.Thread(target=self._ask)
        self.thread.start()
        deadline = time.monotonic() + LIMIT_S
        while not self.server.stats()["waiting_requests"]:
            assert time.monotonic() < deadline
            time.sleep(0.002)
        return self

    def _ask(self):
        try:
            self.outcome = self.client.get_action(at(1, 0))
        except Exception as e:
            self.outcome = e

    def __exit__(self, *exc):
        self.client.__exit__()
        self.server.close()
        self.evaluator.close()
        self.thread.join(LIMIT_S)


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_server_that_closes_ends_a_call_that_waits(kind):
    with Waiting(kind) as waiting:
        waiting.server.close()
        waiting.thread.join(3.0)
        assert not waiting.thread.is_alive()
        assert isinstance(waiting.outcome, EpisodeLostError), waiting.outcome
        assert "shutting down" in str(waiting.outcome)
        assert "start a new episode" in str(waiting.outcome)
        assert waiting.client.open_episodes == []


def test_a_client_that_closes_ends_its_calls():
    with Waiting("sync") as waiting:
        waiting.client.close()
        waiting.thread.join(LIMIT_S)
        assert isinstance(waiting.outcome, ServingError)
        assert "closed" in str(waiting.outcome)
        with pytest.raises(ServingError, match="closed"):
            waiting.client.start_episode()


def test_one_call_at_a_time_on_an_episode():
    with Waiting("sync") as waiting, pytest.raises(ServingError, match="in use by another call"):
        waiting.client.get_action(at(1, 0))


def test_a_policy_that_fails_tells_the_client_why():
    class Superstitious(RuledPolicy):
        def act(self, obs, explore=True):
            if (obs[:, 1] == 13).any():
                raise ValueError("no-thirteen")
            return super().act(obs, explore)

    with Rig(Superstitious) as rig, client_of(rig) as client:
        client.start_episode()
        with pytest.raises(ServingError, match="no-thirteen"):
            client.get_action(at(1, 13))
        assert client.open_episodes == []
        rig.await_error()
        assert "no-thirteen" in str(rig.error)  # here sample() raises; field case 20 asks for this or a next answer


def test_a_policy_that_fails_for_one_episode_of_a_batch_ends_all_of_it():
    """Of the others nobody knows whether an action was chosen for them."""
    evaluator = CommonPolicyEvaluator(ServingEnv(OBS_SPACE, ACTION_SPACE), Picky)
    with PolicyServer(evaluator, HttpSettings(port=0)) as server, sync_client(server.url) as client:
        names = [client.start_episode() for _ in range(3)]
        with pytest.raises(ServingError, match="cannot bear 13"):
            client.get_actions([[1, 0], [1, 13]], names[:2])
        assert client.open_episodes == names[2:] == evaluator.env.env.open_episodes
        assert client.get_action(at(2, 0)) == answer(2, 0)


def test_an_expired_episode_is_lost_and_says_why():
    with Rig(settings=ServingSettings(idle_timeout_s=0.05)) as rig, client_of(rig) as client:
        client.start_episode("a")
        client.get_action(at(1, 0))
        deadline = time.monotonic() + LIMIT_S
        while rig.env.open_episodes:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        with pytest.raises(EpisodeLostError, match=r"'a' expired: it had no call for 0.05 s.*start a new episode"):
            client.get_action(at(1, 1))
        assert client.open_episodes == []


def test_a_lost_episode_of_a_batch_costs_the_others_nothing():
    with Rig() as rig, client_of(rig) as client:
        a, b = client.start_episode("a"), client.start_episode("b")
        end = urllib.request.Request(f"{rig.server.url}/v1/episodes/a/end", b'{"obs": [9, 9]}')
        end.add_header("Content-Type", "application/json")
        urllib.request.urlopen(end).close()  # behind the client's back
        with pytest.raises(EpisodeLostError, match="'a'"):
            client.get_actions([[1, 0], [2, 0]], [a, b])
        assert client.open_episodes == ["b"]
        assert client.get_actions([[2, 0]], [b]) == [answer(2, 0)]
        client.end_episode(at(2, 1))
        assert rig.episodes(1) == [[row(2, 0, answer(2, 0), 0.0, "term")]]


def test_what_a_client_that_is_gone_left_open_ends_truncated():
    with Rig(settings=ServingSettings(idle_timeout_s=0.05), batch_mode="complete_episodes") as rig:
        with client_of(rig) as client:
            client.start_episode()
            client.get_action(at(1, 0))
            client.log_returns(0.5)
            client.get_action(at(1, 1))
            client.log_returns(7.0)  # never sent: the action it belongs to has no outcome
        assert rig.episodes(1) == [[row(1, 0, answer(1, 0), 0.5, "trunc")]]


def test_an_async_client_that_closes_ends_its_calls():
    evaluator = CommonPolicyEvaluator(ServingEnv(OBS_SPACE, ACTION_SPACE), RuledPolicy, sample_async=False)

    async def play(server):
        client = AsyncPolicyClient(server.url, settings=quick(timeout_s=600.0, try_timeout_s=600.0))
        await client.start_episode()
        waiting = asyncio.create_task(client.get_action(at(1, 0)))  # nobody samples: no answer comes
        while not server.stats()["waiting_requests"]:
            await asyncio.sleep(0.002)
        await client.aclose()
        with pytest.raises(ServingError, match="closed"):
            await asyncio.wait_for(waiting, LIMIT_S)
        with pytest.raises(ServingError, match="closed"):
            await client.start_episode()

    with evaluator, PolicyServer(evaluator, HttpSettings(port=0), sample=False) as server:
        asyncio.run(play(server))


def test_connections_that_the_server_closed_while_they_were_idle_cost_no_pause():
    with Rig() as rig, client_of(rig, backoff_s=1000.0) as client:  # a second try would come too late
        client.start_episode()
        idle = client._connections._idle
        for connection in (*idle, *(idle[0].__class__(*rig.server.address) for _ in range(2))):
            if connection.sock is None:
                connection.connect()
                idle.append(connection)
            connection.sock.shutdown(socket.SHUT_RDWR)
        assert client.get_action(at(1, 0)) == answer(1, 0)
        assert len(idle) == 1
        client.end_episode(at(1, 1))
        assert rig.episodes(1) == [[row(1, 0, answer(1, 0), 0.0, "term")]]
