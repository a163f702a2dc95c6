"""A plain HTTP client for tests: one connection, JSON or msgpack, and raw bytes over a socket."""

import contextlib
import http.client
import json
import socket
import threading
import time

from rlsample.serving.wire import JSON, MSGPACK, decoder, encode

LIMIT_S = 20.0
with contextlib.suppress(ImportError):  # libuv keeps one pipe for the whole process, from its first loop on: no leak
    import uvloop

    uvloop.new_event_loop().close()


class Answer:
    """What came back: ``status``, ``headers``, ``raw``, and ``value`` where the body is JSON or msgpack."""

    def __init__(self, response):
        self.status, self.headers, self.raw = response.status, response.headers, response.read()
        kind = (self.headers.get("content-type") or "").partition(";")[0]
        self.value = decoder(kind)(self.raw) if kind in (JSON, MSGPACK) and self.raw else None

    @property
    def code(self):
        """The code of a refusal."""
        return self.value["error"]["code"]

    @property
    def message(self):
        return self.value["error"]["message"]


class Caller:
    """``caller("action", "a", obs=[0, 0])`` and ``caller.get("/v1/stats")``; one keep-alive connection."""

    def __init__(self, server, form=JSON, token=None):
        self.address, self.form, self.token = server.address, form, token
        self._connection = http.client.HTTPConnection(*self.address, timeout=LIMIT_S)

    def __call__(self, verb, of=None, /, key=None, **values):
        path = f"/v1/{verb}" if of is None else f"/v1/episodes/{of}/{verb}"
        return self.send("POST", path, encode(values, self.form), **({"Idempotency-Key": key} if key else {}))

    def get(self, path, **headers):
        return self.send("GET", path, None, **headers)

    def send(self, method, path, body=None, **headers):
        """Any request; ``headers`` with underscores for hyphens."""
        sent = {"Content-Type": self.form} if body is not None else {}
        if self.token is not None:
            sent["Authorization"] = f"Bearer {self.token}"
        sent.update({name.replace("_", "-"): value for name, value in headers.items() if value is not None})
        for name in [name for name, value in headers.items() if value is None]:
            sent.pop(name.replace("_", "-"), None)
        self._connection.request(method, path, body, sent)
        return Answer(self._connection.getresponse())

    def start(self, episode_id=None, **values):
        """Opens an episode, and returns its id."""
        if episode_id is not None:
            values["episode_id"] = episode_id
        answer = self("episodes", **values)
        assert answer.status == 201, answer.raw
        return answer.value["episode_id"]

    def close(self):
        self._connection.close()


@contextlib.contextmanager
def callers(server, count=1, **options):
    """Several callers; they are closed at the end."""
    made = [Caller(server, **options) for _ in range(count)]
    try:
        yield made if count > 1 else made[0]
    finally:
        for caller in made:
            caller.close()


def raw_exchange(address, sent, ends=True, timeout_s=LIMIT_S):
    """Sends bytes and returns all that comes until the server closes; ``ends``: says that no more will be sent."""
    with socket.create_connection(address, timeout_s) as connection:
        connection.sendall(sent)
        if ends:
            with contextlib.suppress(OSError):  # it had enough, and has closed
                connection.shutdown(socket.SHUT_WR)
        parts = []
        with contextlib.suppress(ConnectionError):
            while data := connection.recv(65536):
                parts.append(data)
        return b"".join(parts)


def await_true(condition, what="it", limit_s=LIMIT_S):
    """Polls until the condition holds."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come true in {limit_s} s"
        time.sleep(0.005)


class Background:
    """A call in a thread; ``result()`` waits for it."""

    def __init__(self, call):
        self._call, self._value, self._error = call, None, None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self):
        try:
            self._value = self._call()
        except Exception as e:
            self._error = e

    def result(self):
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive(), "no answer in time"
        if self._error is not None:
            raise self._error
        return self._value


def as_json(value):
    return json.dumps(value).encode()
