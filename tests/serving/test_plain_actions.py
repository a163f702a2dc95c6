"""Calls for an action as they usually come are answered without a task; others go the long way to the same end."""

import socket
from types import SimpleNamespace

import pytest

from rlsample.serving import episode_calls
from rlsample.serving.app import ServingApp
from tests.env.serving.conftest import Picky
from tests.serving.client_rig import Rig, Unsampled
from tests.serving.http_rig import LIMIT_S, Background, await_true, callers, raw_exchange


@pytest.fixture
def long_way(monkeypatch):
    """Paths of the requests that came to the app's ``__call__``."""
    taken, call = [], ServingApp.__call__

    async def noted(app, scope, receive, send):
        taken.append(scope["path"])
        await call(app, scope, receive, send)

    monkeypatch.setattr(ServingApp, "__call__", noted)
    return taken


def waiting(rig):
    return rig.server.stats()["waiting_requests"]


def head(episode, *fields, version=b"1.1"):
    lines = [b"POST /v1/episodes/%s/action HTTP/%s" % (episode.encode(), version), b"host: localhost", *fields]
    return b"\r\n".join([*lines, b"content-type: application/json", b"", b""])


def plain(episode, body=b'{"obs":[1,0]}', *fields, **options):
    return head(episode, b"content-length: %d" % len(body), *fields, **options) + body


def chunked(body, size):
    parts = [body[k : k + size] for k in range(0, len(body), size)]
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


def test_a_plain_action_and_its_refusals_take_no_task(long_way):
    with Rig() as rig, callers(rig.server) as call:
        episode = call.start()
        del long_way[:]
        assert call("action", episode, obs=[1, 0]).value == {"action": 1, "policy_version": 0, "t": 1}
        assert call("action", episode, key="a", obs=[1, 1]).value == {"action": 2, "policy_version": 0, "t": 2}
        assert call("action", episode, key="a", obs=[1, 1]).value == {"action": 2, "policy_version": 0, "t": 2}
        assert call("action", episode, obs=[1, 0], t=7).code == "conflict"
        assert call("action", episode, obs=[1]).code == "bad_value"
        assert call("action", "nobody", obs=[1, 0]).code == "unknown_episode"
        assert call.send("POST", f"/v1/episodes/{episode}/action", b"{", Content_Type="text/plain").code == "media_type"
        assert not long_way
        stats = call.get("/v1/stats").value
        assert stats["actions"] == 2
        assert stats["rejected"] == {"conflict": 1, "bad_value": 1, "unknown_episode": 1, "media_type": 1}


def test_unusual_requests_get_the_same_answer(long_way):
    body = b'{"obs":[1,0]}'
    with Rig() as rig, callers(rig.server) as call:
        episode = call.start()
        last = b"connection: close"
        for count, sent in enumerate(
            [
                plain(episode, body, last),
                plain(episode, version=b"1.0"),
                head(episode, last, b"transfer-encoding: chunked") + chunked(body, 3),
                plain(episode, body, last, b"upgrade: websocket"),
            ]
        ):
            got = raw_exchange(rig.server.address, sent, False)
            assert got.startswith(b"HTTP/1.1 200 OK\r\n")
            assert got.endswith(b'{"action":1,"policy_version":0,"t":%d}' % (count + 1))
        assert len(long_way) == 1 + 4  # with the start


def test_a_body_in_chunks_takes_no_task_unless_it_is_too_long(long_way):
    with Rig(http={"max_body_bytes": 2000}) as rig, callers(rig.server) as call:
        episode = call.start()
        del long_way[:]
        with socket.create_connection(rig.server.address, LIMIT_S) as connection:
            connection.sendall(head(episode, b"transfer-encoding: chunked") + chunked(b'{"obs":[1,0]}', 2))
            assert b'{"action":1,' in connection.recv(1000)
            assert not long_way
            connection.sendall(head(episode, b"transfer-encoding: chunked") + chunked(b" " * 2100, 50))
            assert connection.recv(1000).startswith(b"HTTP/1.1 413")
            assert len(long_way) == 1
        assert call("action", episode, obs=[1, 0], t=1).value["t"] == 2


def test_requests_behind_one_that_waits():
    """They are answered in order, on one connection."""
    with Unsampled() as rig, callers(rig.server) as call:
        first, second = call.start(), call.start()
        with socket.create_connection(rig.server.address, LIMIT_S) as connection:
            health = b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n"
            last = plain(second, b'{"obs":[2,0]}', b"connection: close")
            connection.sendall(plain(first) + health + plain(first, b'{"obs":[1,1]}', b"x: y") + last)
            await_true(lambda: waiting(rig) == 1)
            rig.sample()
            got = b"".join(iter(lambda: connection.recv(10_000), b""))
        bodies = [b'{"action":1,', b'{"status":"ok"}', b'{"action":2,"policy_version":0,"t":2}', b'{"action":2,']
        places = [got.index(body) for body in bodies[:3]]
        assert places == sorted(places)
        assert got.count(b"HTTP/1.1 200 OK") == 4
        assert got.endswith(b'{"action":2,"policy_version":0,"t":1}')
        assert call("end", first, obs=[1, 2]).status == 200
        assert call("end", second, obs=[2, 1]).status == 200
        assert len(rig.episodes(3)) == 2


def test_a_client_that_leaves_while_it_waits_has_its_row():
    with Unsampled() as rig, callers(rig.server) as call:
        episode = call.start()
        with socket.create_connection(rig.server.address, LIMIT_S) as connection:
            connection.sendall(plain(episode))
            await_true(lambda: waiting(rig) == 1)
        rig.sample()
        await_true(lambda: waiting(rig) == 0)
        assert call("end", episode, obs=[1, 1], t=1, reward=2.0).status == 200
        assert len(rig.episodes(1)) == 1


def test_a_repeated_call_shares_a_failure_and_frees_its_key():
    class Failing(Unsampled):
        def __init__(self):
            super().__init__(Picky, sample_async=None)

    with Failing() as rig, callers(rig.server, 2) as (one, two):
        episode = one.start()
        first = Background(lambda: one("action", episode, key="k", obs=[13, 0]))
        await_true(lambda: waiting(rig) == 1)
        second = Background(lambda: two("action", episode, key="k", obs=[13, 0]))
        await_true(lambda: rig.server.metrics.requests == 3)
        rig.sample()
        assert first.result().code == second.result().code == "policy_failed"
        assert one("action", episode, key="k", obs=[13, 0]).code != "policy_failed"


def test_limits_hold_for_actions():
    with Rig(http={"token": "secret", "rate_limit": 2.0}) as rig, callers(rig.server, token="secret") as call:
        episode = call.start()
        asked = [call("action", episode, obs=[1, 0]) for _ in range(6)]
        assert asked[0].status == 200
        assert 429 in [answer.status for answer in asked]
        with callers(rig.server, token="wrong") as stranger:
            await_true(lambda: stranger("action", episode, obs=[1, 0]).status == 401)


def test_an_idle_connection_is_closed():
    with Rig(http={"keep_alive_s": 1.0}) as rig, callers(rig.server) as call:
        episode = call.start()
        with socket.create_connection(rig.server.address, LIMIT_S) as connection:
            for _ in range(2):
                connection.sendall(plain(episode))
                assert connection.recv(1000).startswith(b"HTTP/1.1 200")
            assert connection.recv(1000) == b""


def test_only_long_turns_in_a_row_move_to_the_sampling_thread_for_long(monkeypatch):
    now, turns = [0.0], []
    durations = iter([0.001, 0.02, 0.001, 0.02, 0.02, 0.001])

    def answer_now():
        turns.append("h")
        now[0] += next(durations)
        return True

    inbox = SimpleNamespace(ring=lambda: turns.append("e"))
    desk = SimpleNamespace(registry=None, inbox=inbox, answer_now=answer_now)
    monkeypatch.setattr(episode_calls, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    calls = episode_calls.EpisodeCalls(SimpleNamespace(desk=desk), None, None, None, False, 1)
    while turns.count("h") < 6:
        calls._turn()
    assert turns == [*"hh", *"eee", *"hh", *"eee", "h", *"e" * 15, "h"]
