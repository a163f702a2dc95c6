"""What comes from the network is data, never code: field case 19, and inputs that are made to hurt."""

import http.client
import os
import pickle
import socket
import struct
import time

import msgspec
import numpy as np
import pytest

from rlsample.errors import ConfigError
from rlsample.serving import HttpSettings
from rlsample.serving.wire import JSON, MSGPACK, encode
from tests.serving.client_rig import Rig
from tests.serving.http_rig import as_json, await_true, callers, raw_exchange

CALLS = ("/v1/episodes", "/v1/episodes/a/action", "/v1/episodes/a/log_action", "/v1/episodes/a/returns")
CALLS += ("/v1/episodes/a/end", "/v1/actions", "/v1/act", "/v1/fragments")


class Marking:
    """Unpickled, it makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.fixture
def served():
    """A server with the open episode ``a``; after the test it still works, and holds the rows of this check only."""
    with Rig() as rig, callers(rig.server) as call:
        call.start("a")
        yield rig, call
        with callers(rig.server) as proper:
            assert proper("action", "a", obs=[1, 0], t=0).value == {"action": 1, "policy_version": 0, "t": 1}
            proper("end", "a", obs=[2, 0], reward=3.0)
        assert rig.episodes(1) == [[((1.0, 0.0), (2.0, 0.0), 1, 3.0, True, False, 0)]]


def refused(answer):
    assert 400 <= answer.status < 500, (answer.status, answer.raw)
    assert 0 < len(answer.message) < 400
    return answer.code


def test_case_19_nothing_is_unpickled(served, tmp_path):
    _, call = served
    marker = tmp_path / "marker"
    sent = pickle.dumps(Marking(marker))
    for path in (*CALLS, "/", "/command"):
        for form in (JSON, MSGPACK, "application/octet-stream", "application/python-pickle", None):
            refused(call.send("POST", path, sent, Content_Type=form))
    assert not marker.exists()
    pickle.loads(sent)
    assert marker.exists()  # it would have been made


def test_case_19_random_bytes_and_unknown_commands(served):
    _, call = served
    noise = np.random.default_rng(0).bytes(1_000_000)
    for path in CALLS:
        assert refused(call.send("POST", path, noise)) == "bad_value"
        assert refused(call.send("POST", path, noise, Content_Type=MSGPACK)) == "bad_value"
    for path in CALLS[1:]:
        assert refused(call.send("POST", path, b"{}")) == "bad_value"
    for path in ("/", "/v1", "/v1/nothing", "/v1/episodes/a/frobnicate", "/v1/episodes/a"):
        assert refused(call.send("POST", path, b"{}")) in ("not_found", "method")
    for name in ("START_EPISODE", "shutdown"):
        assert refused(call.send("POST", "/v1/episodes", as_json({"command": name}))) == "bad_value"


def test_case_19_the_default_address_is_loopback():
    assert HttpSettings().host == "127.0.0.1"
    for host in ("0.0.0.0", "192.168.0.7", "::", "example.org"):
        with pytest.raises(ConfigError, match="token"):
            HttpSettings(host=host)
        assert HttpSettings(host=host, token="t").host == host
        assert HttpSettings(host=host, insecure=True).host == host


@pytest.mark.parametrize("depth", [33, 1000, 100_000])
@pytest.mark.parametrize("opening", [b"[", b'{"a":'])
def test_deep_json(served, depth, opening):
    _, call = served
    body = b'{"obs":[0,0],"reward":1,"info":' + opening * depth
    assert refused(call.send("POST", "/v1/episodes/a/returns", body)) == "bad_value"
    closed = opening * depth + b"1" + (b"]" if opening == b"[" else b"}") * depth
    assert refused(call.send("POST", "/v1/episodes/a/returns", b'{"reward":1,"info":{"x":' + closed + b"}}")) == (
        "bad_value"
    )


def test_deep_msgpack(served):
    _, call = served
    for depth in (40, 100_000):
        body = b"\x82\xa6reward\x01\xa4info\x81\xa1x" + b"\x91" * depth + b"\x01"
        assert refused(call.send("POST", "/v1/episodes/a/returns", body, Content_Type=MSGPACK)) == "bad_value"


def test_brackets_in_text_are_no_depth(served):
    _, call = served
    info = {"text": "[" * 1000 + '"\\' + "{" * 1000}
    assert call("returns", "a", reward=0.0, info=info).status == 200


def test_promises_of_huge_arrays(served):
    """A few bytes that announce gigabytes are refused as such, and nothing is set aside for them."""
    _, call = served
    for announced in (
        b"\xdd\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc9\xff\xff\xff\xff\x2a",
    ):
        body = b"\x81\xa3obs" + announced
        assert refused(call.send("POST", "/v1/episodes/a/action", body, Content_Type=MSGPACK)) == "bad_value"
    for shape in ([2**40], [2**62, 2**62], [0, 2**63], [-1, -2], [2.0], ["2"], [2] * 40):
        array = {"__array__": "AAAAAAAAAAA=", "dtype": "<f4", "shape": shape}
        assert refused(call("action", "a", obs=array)) == "bad_value"


def test_bodies_that_are_too_long(served):
    rig, call = served
    for length in (2**20 + 1, 3 * 2**20):
        assert refused(call.send("POST", "/v1/episodes/a/action", b" " * length)) == "too_large"
    with callers(rig.server) as again:
        head = b"POST /v1/act HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n"
        announced = raw_exchange(rig.server.address, head + b"content-length: 99999999999\r\n\r\n", False)
        assert announced.startswith(b"HTTP/1.1 413")
        chunk = b"%x\r\n" % 65536 + b" " * 65536 + b"\r\n"
        chunked = raw_exchange(
            rig.server.address, head + b"transfer-encoding: chunked\r\n\r\n" + chunk * 40 + b"0\r\n\r\n", False
        )
        assert chunked.startswith(b"HTTP/1.1 413")
        assert again.send("POST", "/v1/episodes/a/returns", b" " * 1000 + b'{"reward":0}').status == 200


WRONG_VALUES = [
    [0],
    [0, 0, 0],
    [[0, 0]],
    [0, None],
    [0, "1"],
    "00",
    None,
    {},
    {"0": 0, "1": 0},
    [0, [1]],
    [1e300, 0],
    {"__array__": "AAAAAAAAAAA=", "dtype": "<f4"},
    {"__array__": "AAAA", "dtype": "<f4", "shape": [2]},
    {"__array__": "no base64!", "dtype": "<f4", "shape": [2]},
    {"__array__": "AAAAAAAAAAA=", "dtype": "O", "shape": [1]},
    {"__array__": "AAAAAAAAAAA=", "dtype": "|O8", "shape": [1]},
    {"__array__": "AAAAAAAAAAA=", "dtype": "<M8[s]", "shape": [1]},
    {"__array__": "AAAAAAAAAAA=", "dtype": "|V4", "shape": [2]},
    {"__array__": "AAAAAAAAAAA=", "dtype": "f4,f4", "shape": [1]},
    {"__array__": "AADAfwAAAAA=", "dtype": "<f4", "shape": [2]},  # NaN
    {"__array__": "AACAfwAAAAA=", "dtype": "<f4", "shape": [2]},  # infinity
    {"__array__": 7, "dtype": "<f4", "shape": [2]},
    {"__array__": "", "dtype": None, "shape": None},
]


@pytest.mark.parametrize("obs", WRONG_VALUES, ids=lambda obs: str(obs)[:60])
def test_wrong_observations(served, obs):
    _, call = served
    assert refused(call("action", "a", obs=obs)) == "bad_value"
    assert refused(call("log_action", "a", obs=obs, action=0)) == "bad_value"
    assert refused(call("end", "a", obs=obs)) == "bad_value"
    assert refused(call("act", obs=obs)) in ("bad_value", "conflict")


@pytest.mark.parametrize(
    "number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", "1e39", '"1"', "null", "true", "[1]"]
)
def test_wrong_rewards(served, number):
    _, call = served
    body = b'{"reward":%s}' % number.encode()
    assert refused(call.send("POST", "/v1/episodes/a/returns", body)) == "bad_value"
    if number != "null":
        body = b'{"obs":[0,0],"reward":%s}' % number.encode()
        assert refused(call.send("POST", "/v1/episodes/a/action", body)) == "bad_value"


def test_nan_in_msgpack(served):
    rig, _ = served
    with callers(rig.server, form=MSGPACK) as call:
        nan = float("nan")
        for obs in ([nan, 0.0], [float("inf"), 0.0], np.array([0, nan], np.float32), np.array([nan, 0])):
            assert refused(call("action", "a", obs=obs)) == "bad_value"
        for reward in (nan, float("inf")):
            assert refused(call("returns", "a", reward=reward)) == "bad_value"
            assert refused(call("action", "a", obs=[0, 0], reward=reward)) == "bad_value"
        assert refused(call("log_action", "a", obs=[0, 0], action=1, action_logp=nan)) == "bad_value"
        for array in (np.zeros(2, np.complex64), np.zeros(2, "M8[s]"), np.zeros(2, "m8[s]"), np.array(["a", "b"])):
            assert refused(call("action", "a", obs=array)) == "bad_value"


@pytest.mark.parametrize("action", [3, -1, 1.5, "1", None, [1], True, 2**70])
def test_wrong_actions(served, action):
    _, call = served
    answer = call("log_action", "a", obs=[0, 0], action=action)
    assert refused(answer) == "bad_value"


def test_unknown_extension_types(served):
    _, call = served
    for code in (0, 1, 41, 43, -1):
        ext = msgspec.msgpack.Ext(code, b"\x01")
        body = msgspec.msgpack.encode({"obs": ext})
        assert refused(call.send("POST", "/v1/episodes/a/action", body, Content_Type=MSGPACK)) == "bad_value"
    inner = msgspec.msgpack.encode(["<f4", [2], msgspec.msgpack.Ext(42, b"")])
    for content in (b"", b"\xc1", inner, encode(["<f4", [2]], MSGPACK), encode([["<f4"], [2], b""], MSGPACK)):
        body = msgspec.msgpack.encode({"obs": msgspec.msgpack.Ext(42, content)})
        assert refused(call.send("POST", "/v1/episodes/a/action", body, Content_Type=MSGPACK)) == "bad_value"


# ---------------------------------------------------------------------- who may call


def test_the_token_opens_what_holds_data():
    with Rig(http={"token": "s3cret"}) as rig:
        for token in (None, "", "s3cre", "s3cret ", "s3crets", "S3CRET", "s3cret,"):
            with callers(rig.server, token=token) as call:
                for path in CALLS:
                    answer = call.send("POST", path, b"{}")
                    assert (answer.status, refused(answer)) == (401, "unauthorized")
                    assert answer.headers["www-authenticate"] == "Bearer"
                    assert "s3cret" not in answer.raw.decode()
                for path in ("/v1/spaces", "/v1/weights", "/v1/stats", "/metrics", "/v1/nothing"):
                    assert call.get(path).code == "unauthorized"
                for path in ("/", "/healthz", "/docs", "/openapi.json"):
                    assert call.get(path).status == 200
        with callers(rig.server) as call:
            for header in ("s3cret", "Basic s3cret", "Bearer", "Bearer\ts3cret", "bearer s3cret\x80"):
                assert call.get("/v1/stats", Authorization=header.encode("latin-1")).status == 401
        with callers(rig.server, token="s3cret") as call:
            assert call("action", call.start("a"), obs=[1, 0]).value["action"] == 1
            assert call.get("/openapi.json").value["security"] == [{"token": []}]
            assert call.get("/v1/stats").value["rejected"]["unauthorized"] > 0


def test_no_other_origin_is_let_in(served):
    _, call = served
    answer = call.get("/v1/stats", Origin="http://evil.example")
    assert answer.headers["access-control-allow-origin"] is None
    preflight = call.send("OPTIONS", "/v1/episodes", Origin="http://evil.example")
    assert refused(preflight) == "method"


# ---------------------------------------------------------------------- paths and the protocol itself


@pytest.mark.parametrize(
    "path",
    [
        "/static/../../../etc/passwd",
        "/static/..%2f..%2fetc%2fpasswd",
        "/static/%2e%2e/http_settings.py",
        "/static/....//x",
        "/static//etc/passwd",
        "/static/style.css%00.py",
        "/static/",
        "/static",
        "//etc/passwd",
        "/v1/episodes/../stats",
        "/v1/episodes/%2e%2e/stats",
        "/v1/episodes//action",
        "/v1/episodes/a%2faction/action",
        "/v1/episodes/" + "a" * 5000 + "/action",
        "/%ff%fe",
        "/\\..\\..\\x",
        "/v1/stats/",
        "/V1/STATS",
        "/v1/weights/../stats",
    ],
)
def test_paths_lead_nowhere(served, path):
    _, call = served
    for method, body in (("GET", None), ("POST", b"{}")):
        answer = call.send(method, path, body)
        assert answer.status in (400, 404, 405)
        assert b"root:" not in answer.raw


def test_not_http(served):
    rig, _ = served
    noise = np.random.default_rng(1).bytes(5000)
    for sent in (
        noise,
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + noise[:200],
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /\x00 HTTP/1.1\r\nhost: x\r\n\r\n",
        b"POST /v1/episodes HTTP/1.1\r\nhost: x\r\ncontent-length: -5\r\n\r\n{}",
        b"POST /v1/episodes HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\n{} ",
        b"POST /v1/episodes HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 10 + b"broken header\r\n\r\n",
        b"POST /v1/episodes HTTP/1.1\r\nhost: x\r\nidempotency-key: \xff\x01\r\ncontent-length: 2\r\n\r\n{}",
    ):
        got = raw_exchange(rig.server.address, sent)
        assert not got or got.startswith(b"HTTP/1.1 4"), got[:80]


def test_headers_without_end(served):
    rig, _ = served
    endless = (b"GET / HTTP/1.1\r\nhost: x\r\n" + b"x: y\r\n" * 30_000, b"GET / HTTP/1.1\r\nx: " + b"y" * 200_000)
    trailers = b"POST /v1/act HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n" + b"x: y\r\n" * 30_000
    for sent in (*endless, trailers, b"GET /" + b"x" * 200_000):
        got = raw_exchange(rig.server.address, sent)
        assert not got or got.startswith(b"HTTP/1.1 4")


def test_two_requests_in_one_packet(served):
    rig, _ = served
    one = b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n"
    last = b"GET /healthz HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    assert raw_exchange(rig.server.address, one + last, False).count(b'{"status":"ok"}') == 2


def test_a_client_that_waits_to_be_asked_for_the_body(served):
    rig, _ = served
    with socket.create_connection(rig.server.address, 20) as connection:
        connection.sendall(
            b"POST /v1/act HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-type: application/json\r\n"
            b"content-length: 11\r\n\r\n"
        )
        assert connection.recv(100).startswith(b"HTTP/1.1 100")
        connection.sendall(b'{"obs":[1]}')
        assert connection.recv(1000).startswith(b"HTTP/1.1 4")


def test_slow_requests_are_cut_off():
    """A byte now and then keeps nobody busy: heads and bodies alike, and connections that say nothing at all."""
    with Rig(http={"request_timeout_s": 0.3}) as rig, callers(rig.server) as call:
        starts = [
            b"",
            b"POST /v1/epis",
            b"POST /v1/episodes HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{",
        ]
        slow = [socket.create_connection(rig.server.address, 20) for _ in starts]
        try:
            for connection, start in zip(slow, starts, strict=True):
                connection.sendall(start)
            for connection in slow:
                assert closed_while_dripping(connection)
            time.sleep(0)
            assert call.get("/healthz").status == 200  # between requests it may be silent for longer
        finally:
            for connection in slow:
                connection.close()


def closed_while_dripping(connection):
    connection.settimeout(0.05)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            connection.send(b"x")
            if not connection.recv(1000):
                return True
        except TimeoutError:
            continue
        except OSError:
            return True
    return False


def test_more_connections_than_allowed():
    with Rig(http={"max_connections": 4}) as rig, callers(rig.server) as call:
        held = []
        try:
            for _ in range(8):
                held.append(socket.create_connection(rig.server.address, 20))
                held[-1].sendall(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n")
            answers = [connection.recv(1000)[:12] for connection in held]
            assert b"HTTP/1.1 503" in answers
        finally:
            for connection in held:
                connection.close()
        await_true(lambda: working(call))


def working(call):
    try:
        return call.get("/healthz").status == 200
    except (http.client.HTTPException, OSError):
        call.close()
        return False


def test_a_client_that_resets_the_connection(served):
    rig, _ = served
    body = as_json({"obs": [9, 9], "t": 5})
    for cut in (10, 60, 200):
        connection = socket.create_connection(rig.server.address, 20)
        head = b"POST /v1/episodes/a/action HTTP/1.1\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        connection.sendall((head % len(body) + body)[:cut])
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()
