"""What a page of another site, or a client that counts on slips in parsers, may try."""

import socket
import time

import pytest

from rlsample.serving import HttpSettings, wire
from rlsample.serving.request_gate import Headers, RequestGate
from rlsample.serving.wire import JSON, MSGPACK
from tests.serving.client_rig import Rig
from tests.serving.http_rig import callers, raw_exchange

DOTTED = "evil.example:8080"


@pytest.mark.parametrize("form", [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
@pytest.mark.parametrize("body", [b"", b"{}"])
def test_a_page_of_another_site_cannot_post(form, body):
    """Browsers send these across sites without asking the server; one without a type, too (a Blob)."""
    with Rig() as rig, callers(rig.server) as call:
        assert call.send("POST", "/v1/episodes", body, Content_Type=form).code == "media_type"
        assert call.get("/v1/stats").value["open_episodes"] == 0


def test_an_empty_body_has_no_fields_in_either_form():
    with Rig() as rig, callers(rig.server) as call:
        for form in (JSON, MSGPACK):
            assert call.send("POST", "/v1/episodes", b"", Content_Type=form).status == 201


def asked_by(server, host, path="/v1/stats"):
    field = b"" if host is None else f"host: {host}\r\n".encode()
    sent = b"GET " + path.encode() + b" HTTP/1.1\r\n" + field + b"connection: close\r\n\r\n"
    return raw_exchange(server.address, sent, ends=False)


def test_a_name_that_was_pointed_at_this_machine_is_refused():
    """DNS rebinding: the browser takes evil.example for the page's own server."""
    with Rig() as rig:
        for path in ("/v1/stats", "/", "/v1/weights"):
            assert b" 403 " in asked_by(rig.server, DOTTED, path)[:13]
        for host in ("evil.example.", "127.0.0.1.evil.example", "localhost.evil.example"):
            assert b" 403 " in asked_by(rig.server, host)[:13]
        for host in ("127.0.0.1:1", "localhost", "LOCALHOST:80", "[::1]:80", "box", "a.localhost:3", "10.0.0.7", None):
            assert b" 200 " in asked_by(rig.server, host)[:13], host


@pytest.mark.parametrize("http", [{"token": "t"}, {"insecure": True}])
def test_names_are_free_where_a_token_or_a_person_says_so(http):
    with Rig(http=http) as rig:
        assert b" 200 " in asked_by(rig.server, DOTTED, "/healthz")[:13]


def test_head_is_answered_at_once():
    with Rig() as rig, callers(rig.server) as call:
        for path in ("/", "/healthz"):
            answer = call.send("HEAD", path)
            assert (answer.status, answer.raw) == (200, b"")
        assert call.get("/healthz").value == {"status": "ok"}


def test_text_that_never_ends_takes_no_time():
    """Its quotes, each behind a backslash, must not be tried as beginnings one by one: that took hours."""
    body = b"[" * 40 + b'"' + b'\\"' * 200_000
    began = time.process_time()
    for end in (b"", b"\\"):
        with pytest.raises(wire.WireError):
            wire.decoder(JSON)(body + end)
    assert time.process_time() - began < 10


@pytest.mark.parametrize("shape", [[2**70, 0], [2**62, 0], [0, 2**62], [0, 2**63]])
def test_shapes_that_numpy_cannot_have(shape):
    with Rig() as rig, callers(rig.server) as call:
        call.start("a")
        array = {"__array__": "", "dtype": "<f4", "shape": shape}
        assert call("action", "a", obs=array).code == "bad_value"
        assert call("act", obs=array).code == "bad_value"


def test_a_body_in_one_chunk_is_measured_too():
    with Rig(http={"max_body_bytes": 100}) as rig:
        body = b'{"training_enabled": true' + b" " * 200 + b"}"
        head = b"POST /v1/episodes HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nconnection: close\r\n"
        sent = head + b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
        assert raw_exchange(rig.server.address, sent, ends=False).startswith(b"HTTP/1.1 413")


def test_one_connection_too_many_is_told_when_to_come_back():
    """Those that were there before go on."""
    with Rig(http={"max_connections": 2}) as rig, callers(rig.server, 3) as (one, two, three):
        assert one.get("/healthz").status == two.get("/healthz").status == 200
        refused = three.send("POST", "/v1/episodes", b"{}")
        assert (refused.status, refused.code, refused.headers["retry-after"]) == (503, "busy", "1")
        assert refused.headers["connection"] == "close"
        assert one.send("POST", "/v1/episodes", b"{}").status == 201
        assert one.get("/v1/stats").value["rejected"] == {"busy": 1}
        two.close()
        with socket.create_connection(rig.server.address, 20):
            pass
        assert one.get("/healthz").status == 200


def test_what_breaks_inside_is_for_the_log_only(monkeypatch):
    def broken(*_):
        raise OSError("/home/somebody/secret")

    with Rig() as rig, callers(rig.server) as call:
        monkeypatch.setattr(rig.server._calls, "find", broken)
        answer = call("action", "a", obs=[1, 0])
        assert (answer.status, answer.code) == (500, "policy_failed")
        assert "secret" not in answer.message
        assert "OSError" in answer.message


def test_the_gate_keeps_its_settings():
    assert HttpSettings().token is None
    gate = RequestGate(None, None, 10, checks_host=True)
    gate.require_host(Headers([(b"host", b"127.0.0.1")]))
