"""Ten minutes of made-up input: hypothesis on the decoders and on a live server, schemathesis on its OpenAPI.

    python -m pytest tests/slow/test_serving_fuzz.py -m slow                      # ten minutes
    RLSAMPLE_FUZZ_S=30 python -m pytest tests/slow/test_serving_fuzz.py -m slow   # half a minute

Each part takes a third of the time. Whatever comes, answers are below 500, nothing is stored that was refused, and the
server works afterwards.
"""

import contextlib
import json
import os
import time

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlsample.serving.call_bodies import DECODERS
from rlsample.serving.http_protocol import MAX_HEAD_BYTES
from rlsample.serving.wire import ARRAY_EXT, ARRAY_KEY, JSON, MSGPACK, WireError, array_of_json, decoder, encode
from tests.serving.client_rig import Rig
from tests.serving.http_rig import Caller, callers, raw_exchange

SECONDS = float(os.environ.get("RLSAMPLE_FUZZ_S", "600"))
CALLS = {
    "start": "/v1/episodes",
    "action": "/v1/episodes/a/action",
    "log_action": "/v1/episodes/a/log_action",
    "returns": "/v1/episodes/a/returns",
    "end": "/v1/episodes/nobody/end",
    "actions": "/v1/actions",
    "act": "/v1/act",
    "fragments": "/v1/fragments",
}
FIELDS = ["obs", "t", "reward", "action", "action_logp", "info", "truncated", "episode_ids", "rewards", "episode_id"]
FIELDS += ["training_enabled", "rows", "final_obs", "policy_version", "actions", ARRAY_KEY, "dtype", "shape"]
numbers = st.integers(-(2**70), 2**70) | st.floats() | st.sampled_from([0, 1, 2, -1, 0.5, 1e39, 2**31, 2**63])
words = st.sampled_from([*FIELDS, "a", "<f4", "|O8", "", "AAAAAA=="]) | st.text(max_size=8)
leaf = st.none() | st.booleans() | numbers | words
values = st.recursive(
    leaf, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(words, inner, max_size=4), max_leaves=12
)
bodies = st.dictionaries(st.sampled_from(FIELDS), values, max_size=5)


def fuzzed(strategy, check, seconds):
    """Calls ``check`` with new examples until the time is up; returns how many."""
    deadline = time.monotonic() + seconds
    done = 0

    @settings(max_examples=200, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(strategy)
    def once(example):
        nonlocal done
        done += 1
        check(example)

    while time.monotonic() < deadline:
        once()
    return done


def to_msgpack(value):
    try:
        return msgspec.msgpack.encode(value)
    except (OverflowError, msgspec.MsgspecError):  # whole numbers of more than 64 bits
        return b"\xc1"


exts = st.builds(
    lambda code, dtype, shape, content: msgspec.msgpack.encode(
        {"obs": msgspec.msgpack.Ext(code, msgspec.msgpack.encode([dtype, shape, content]))}
    ),
    st.sampled_from([ARRAY_EXT, ARRAY_EXT, 0, 41]),
    st.sampled_from(["<f4", ">f8", "|u1", "|O8", "<U4", "|V3", "<c8", "|b1"]) | st.text(max_size=4),
    st.lists(st.integers(-2, 2**40), max_size=4),
    st.binary(max_size=32),
)
raw = st.binary(max_size=200) | bodies.map(to_msgpack) | exts | bodies.map(lambda b: json.dumps(b).encode())


@pytest.mark.slow
def test_decoders_refuse_or_decode():
    """No body makes them raise anything but WireError; what they decode, they encode again."""
    decoders = [(kind, decode) for kind, calls in DECODERS.items() for decode in calls.values()]
    decoders += [(kind, decoder(kind)) for kind in (JSON, MSGPACK)]

    def check(body):
        for kind, decode in decoders:
            try:
                value = decode(body)
            except WireError:
                continue
            encode(value, kind)
            if isinstance(value, dict) and ARRAY_KEY in value:
                with contextlib.suppress(WireError):
                    assert array_of_json(value).dtype.kind in "biuf"

    assert fuzzed(raw, check, SECONDS / 3) > 0


@pytest.mark.slow
def test_a_live_server_stays_alive():
    """Mutated bodies, heads and whole requests, in both forms; then one proper episode, and only its rows."""
    with Rig() as rig, callers(rig.server) as call:
        call.start("a", training_enabled=False)  # what is accepted by chance leaves no rows

        def check(example):
            verb, body, form, noise = example
            answer = call.send("POST", CALLS[verb], body, Content_Type=form)
            assert answer.status < 500 or answer.code == "busy", (verb, body, answer.raw)
            for name in list(rig.server._calls.open):
                if name != "a":
                    call("end", name, obs=[0, 0])
            if "a" not in rig.server._calls.open:
                call.start("a", training_enabled=False)
            if noise:
                got = raw_exchange(rig.server.address, noise)
                assert not got or got[:10] in (b"HTTP/1.1 4", b"HTTP/1.1 2"), got[:100]

        heads = st.binary(max_size=120) | st.builds(
            lambda head, rest: head + rest,
            st.sampled_from([b"GET / HTTP/1.1\r\n", b"POST /v1/act HTTP/1.1\r\n", b"GET " + b"a" * MAX_HEAD_BYTES]),
            st.binary(max_size=120),
        )
        noise = st.none() | st.none() | st.none() | heads
        examples = st.tuples(st.sampled_from(sorted(CALLS)), raw, st.sampled_from([JSON, MSGPACK]), noise)
        assert fuzzed(examples, check, SECONDS / 3) > 0
        proper = call.start("proper")
        assert call("action", proper, obs=[1, 0]).value["action"] == 1
        call("end", proper, obs=[2, 0], reward=1.0)
        recorded = [rows for rows in rig.episodes(1) if rows]
        assert recorded == [[((1.0, 0.0), (2.0, 0.0), 1, 1.0, True, False, 0)]]


@pytest.mark.slow
def test_what_the_openapi_says_holds():
    """schemathesis makes requests from the OpenAPI, right and wrong ones; statuses are the ones that are documented."""
    schemathesis = pytest.importorskip("schemathesis", reason="pip install schemathesis")
    deadline = time.monotonic() + SECONDS / 3
    with Rig(sample_async=None) as rig:
        with callers(rig.server) as call:
            schema = schemathesis.openapi.from_dict(call.get("/openapi.json").value)
        rounds = 0
        while not rounds or time.monotonic() < deadline:
            rounds += 1
            for operation in schema.get_all_operations():
                _fuzz_operation(operation.ok(), rig.server)
                if time.monotonic() > deadline and rounds > 1:
                    break
        with callers(rig.server) as call:  # the first one was idle for too long
            assert call.get("/healthz").status == 200
            assert call("action", call.start("last"), obs=[1, 0]).value["action"] == 1


def _fuzz_operation(operation, server):
    documented = {int(status) for status in operation.definition.raw["responses"]} | {400, 404, 405, 415}

    @settings(max_examples=20, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(operation.as_strategy())
    def once(case):
        path = case.formatted_path
        body = (
            None if not isinstance(case.body, (dict, list, str, int, float, bool)) else json.dumps(case.body).encode()
        )
        caller = Caller(server)
        try:
            headers = {k.replace("-", "_"): str(v) for k, v in (case.headers or {}).items() if str(v).isascii()}
            answer = caller.send(case.method, path if path.isascii() else "/v1/episodes", body, **headers)
        finally:
            caller.close()
        assert answer.status in documented, (case.method, path, body, answer.status, answer.raw[:300])
        assert answer.status < 500 or answer.code == "busy"
        for name in list(server._calls.open):
            with callers(server) as call:
                call("end", name, obs=np.zeros(2).tolist())

    once()
