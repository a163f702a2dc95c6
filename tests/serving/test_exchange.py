"""One call until it is answered for good, without any network: what is sent, tried again, returned and raised."""

import json

import numpy as np
import pytest

from rlsample.errors import ConfigError, EpisodeLostError, ServingError, SpaceError
from rlsample.serving.client_settings import ClientSettings
from rlsample.serving.exchange import Address, Exchange, NoAnswer, Pause, RefusedCall, Reply, Unanswered
from rlsample.serving.wire import MSGPACK, encode

JSON_TYPE = {"content-type": "application/json; charset=utf-8"}


def exchange(token=None, **options):
    return Exchange(Address.parse("http://h:9/base/"), token, ClientSettings(**{"form": "json", **options}))


def ok(**values):
    return Reply(200, JSON_TYPE, json.dumps(values).encode())


def refusal(status, code, message="why", **headers):
    return Reply(status, {**JSON_TYPE, **headers}, json.dumps({"error": {"code": code, "message": message}}).encode())


def answer_to(reply, of_episode=False):
    """What a call does with its first reply: the next event, or its value."""
    steps = exchange().call("POST", "/v1/x", {"a": 1}, "k", of_episode=of_episode)
    next(steps)
    try:
        return steps.send(reply)
    except StopIteration as end:
        return end.value


def test_what_is_sent():
    steps = exchange("secret", form="msgpack").call("POST", "/v1/x", {"a": np.zeros(2, np.float32)}, "key-1")
    request = next(steps)
    assert (request.method, request.path) == ("POST", "/base/v1/x")
    assert request.headers == {
        "Content-Type": MSGPACK,
        "Accept": MSGPACK,
        "Authorization": "Bearer secret",
        "Idempotency-Key": "key-1",
    }
    assert request.body == encode({"a": np.zeros(2, np.float32)}, MSGPACK)
    assert 0 < request.timeout_s <= ClientSettings().try_timeout_s
    plain = next(exchange().call("GET", "/v1/spaces"))
    assert plain.body == b""
    assert set(plain.headers) == {"Content-Type", "Accept"}


def test_what_cannot_be_sent_is_refused_at_once():
    with pytest.raises(SpaceError, match="object"):
        next(exchange().call("POST", "/v1/x", {"obs": object()}))


def test_an_answer_is_its_values():
    assert answer_to(ok(action=3)) == {"action": 3}
    assert answer_to(Reply(304, {}, b"")) is None


def test_a_failed_connection_is_tried_again_with_the_same_request_after_longer_and_longer_pauses():
    steps = exchange(backoff_s=0.1).call("POST", "/v1/x", {"a": 1}, "k")
    first = next(steps)
    for longest in (0.1, 0.2, 0.4, 0.8):
        pause = steps.throw(NoAnswer("refused"))
        assert isinstance(pause, Pause)
        assert longest / 2 <= pause.seconds <= longest
        again = next(steps)
        assert again[:4] == first[:4]
    with pytest.raises(StopIteration) as end:
        steps.send(ok(action=1))
    assert end.value.value == {"action": 1}


@pytest.mark.parametrize(("status", "code"), [(429, "rate_limited"), (503, "busy"), (502, ""), (504, "")])
def test_retry_after_is_honoured(status, code):
    pause = answer_to(refusal(status, code, **{"retry-after": "7"}))
    assert 7 <= pause.seconds < 8
    assert answer_to(refusal(status, code)).seconds <= ClientSettings().backoff_s
    assert answer_to(refusal(status, code, **{"retry-after": "soon"})).seconds <= ClientSettings().backoff_s


def test_pauses_that_do_not_fit_the_time_end_the_call():
    steps = exchange(timeout_s=5.0).call("POST", "/v1/x", {"a": 1}, "k")
    next(steps)
    with pytest.raises(Unanswered, match=r"http://h:9/base in 5.0 s, 1 tries; the last: 503 all seats taken"):
        steps.send(refusal(503, "busy", "all seats taken", **{"retry-after": "30"}))


@pytest.mark.parametrize(
    ("reply", "error", "words"),
    [
        (refusal(400, "bad_value", "obs: shape"), SpaceError, "obs: shape"),
        (refusal(401, "unauthorized", "no token"), RefusedCall, "no token"),
        (refusal(404, "unknown_episode", "episode 'a' expired"), EpisodeLostError, "expired.*start a new episode"),
        (refusal(409, "conflict", "one at a time"), RefusedCall, "one at a time"),
        (refusal(422, "key_reused", "another body"), RefusedCall, "another body"),
        (refusal(500, "policy_failed", "obs 13"), RefusedCall, "obs 13"),
        (refusal(503, "closed", "shutting down"), EpisodeLostError, "shutting down.*start a new episode"),
        (Reply(403, {"content-type": "text/html"}, b"<h1>proxy</h1>"), RefusedCall, "403: <h1>proxy</h1>"),
        (Reply(404, {}, b""), RefusedCall, "404: nothing"),
        (Reply(200, {"content-type": "text/html"}, b"<h1>"), ServingError, "no answer of a policy server"),
        (Reply(200, JSON_TYPE, b"{"), ServingError, "no answer of a policy server"),
    ],
)
def test_what_a_refusal_raises(reply, error, words):
    with pytest.raises(error, match=words):
        answer_to(reply, of_episode=True)


def test_calls_that_do_not_hang_on_an_episode_wait_for_the_next_server():
    assert isinstance(answer_to(refusal(503, "closed"), of_episode=False), Pause)


def test_a_closed_client_sends_nothing():
    made = exchange()
    made.closed = True
    with pytest.raises(ServingError, match="closed"):
        next(made.call("GET", "/v1/spaces"))


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("http://127.0.0.1:8080", ("http", "127.0.0.1", 8080, "")),
        ("localhost:81", ("http", "localhost", 81, "")),
        ("https://host/a/b/", ("https", "host", 443, "/a/b")),
        ("http://[::1]:9", ("http", "::1", 9, "")),
    ],
)
def test_addresses(text, parts):
    assert tuple(Address.parse(text)) == parts
    assert Address.parse(str(Address.parse(text))) == Address.parse(text)


@pytest.mark.parametrize("text", ["ftp://host", "http://", "http://host:nan", "http://u@host", "http://h?q", 7, ""])
def test_no_addresses(text):
    with pytest.raises(ConfigError, match="no address of a policy server"):
        Address.parse(text)


@pytest.mark.parametrize(
    "options",
    [
        {"form": "pickle"},
        {"inference": "both"},
        {"timeout_s": 0},
        {"try_timeout_s": float("inf")},
        {"backoff_s": -1},
        {"update_interval_s": -1},
        {"fragment_rows": 0},
        {"fragment_rows": True},
    ],
)
def test_settings_that_cannot_work(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        ClientSettings(**options)


@pytest.mark.parametrize("token", ["", "ü", "a\nb"])
def test_tokens_that_cannot_be_sent(token):
    with pytest.raises(ConfigError, match="token"):
        exchange(token)
