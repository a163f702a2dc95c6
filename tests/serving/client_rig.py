"""A policy server whose rows a test can count, and a proxy that loses answers on demand."""

import collections
import contextlib
import http.client
import http.server
import importlib.util
import socket
import subprocess
import sys
import threading
from pathlib import Path

from rlsample.env import ServingEnv
from rlsample.errors import RlsampleError
from rlsample.evaluation import CommonPolicyEvaluator
from rlsample.serving.client_settings import ClientSettings
from rlsample.serving.http_settings import HttpSettings
from rlsample.serving.policy_client import PolicyClient
from rlsample.serving.policy_server import PolicyServer
from tests.env.serving.conftest import ACTION_SPACE, OBS_SPACE, RuledPolicy, rows_of

LIMIT_S = 20.0
if importlib.util.find_spec("uvloop"):  # libuv keeps one pipe for the whole process, from its first loop on
    importlib.import_module("uvloop").new_event_loop().close()


class Rig:
    """A server over an evaluator that is sampled all the time, row by row; every row is kept. A context manager."""

    def __init__(self, policy=RuledPolicy, spaces=(OBS_SPACE, ACTION_SPACE), http=None, settings=None, **options):
        self.env = ServingEnv(*spaces, max_concurrent=8, settings=settings)
        options = {"rollout_fragment_length": 1, "sample_async": False, **options}
        self.evaluator = CommonPolicyEvaluator(self.env, policy, **options)
        self.server = PolicyServer(self.evaluator, HttpSettings(**{"port": 0, **(http or {})}), sample=False)
        self.batches = []
        self.error = None
        self._more = threading.Condition()
        self._thread = threading.Thread(target=self._collect, daemon=True)

    def _collect(self):
        try:
            while True:
                batch = self.evaluator.sample()
                with self._more:
                    self.batches.append(batch)
                    self._more.notify_all()
        except Exception as e:
            with self._more:
                self.error = e
                self._more.notify_all()

    def _count(self):
        return sum(batch.count for batch in self.batches)

    def __enter__(self):
        self.server.start()
        self._thread.start()
        return self

    def __exit__(self, *exc):
        self.server.close()
        self.evaluator.close()
        self._thread.join(LIMIT_S)

    def await_rows(self, count):
        """Waits until so many rows were sampled."""
        with self._more:
            assert self._more.wait_for(lambda: self._count() >= count or self.error, LIMIT_S)
            assert self._count() >= count, self.error

    def await_error(self):
        """Waits until sampling has failed."""
        with self._more:
            assert self._more.wait_for(lambda: self.error, LIMIT_S)

    def finish(self, count):
        """Closes everything and returns the batches, which are exactly ``count`` rows."""
        self.await_rows(count)
        self.__exit__()
        assert self._count() == count
        assert isinstance(self.error, RlsampleError)  # closed
        return self.batches

    def episodes(self, count):
        """Closes everything and returns the rows of each episode, sorted; they are exactly ``count``."""
        return sorted(rows_of(self.finish(count)).values())


class Unsampled(Rig):
    """Nobody samples until ``sample`` is called."""

    def __enter__(self):
        self.server.start()
        return self

    def sample(self):
        self._thread.start()

    def __exit__(self, *exc):
        self.server.close()
        self.evaluator.close()
        if self._thread.ident is not None:
            self._thread.join()


def quick(**options):
    """Settings for tests: short pauses."""
    return ClientSettings(**{"timeout_s": LIMIT_S, "backoff_s": 0.01, **options})


@contextlib.contextmanager
def client_of(rig, token=None, **options):
    with PolicyClient(getattr(rig, "url", None) or rig.server.url, token, quick(**options)) as client:
        yield client


class LosingProxy:
    """Passes requests on. ``lose`` has names of calls; the next answer of each is read and thrown away. ``drop``: of
    calls that are not even passed on."""

    def __init__(self, target):
        self.lose, self.drop = collections.Counter(), collections.Counter()
        self.seen = []  # (name of the call, status)
        proxy = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                name = self.path.rpartition("/")[2].partition("?")[0]
                if proxy.drop[name] > 0:
                    proxy.drop[name] -= 1
                    self.close_connection = True
                    return
                upstream = http.client.HTTPConnection(*target, timeout=LIMIT_S)
                with contextlib.closing(upstream):
                    upstream.request(self.command, self.path, body or None, dict(self.headers))
                    answer = upstream.getresponse()
                    content = answer.read()
                proxy.seen.append((name, answer.status))
                if proxy.lose[name] > 0:
                    proxy.lose[name] -= 1
                    self.close_connection = True
                    return
                self.send_response(answer.status)
                for field in ("content-type", "retry-after"):
                    if answer.getheader(field):
                        self.send_header(field, answer.getheader(field))
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_POST

            def log_message(self, *_):
                pass

        class Server(http.server.ThreadingHTTPServer):
            daemon_threads = True

            def get_request(self):
                connection, address = super().get_request()
                proxy._connections.append(connection)
                return connection, address

        self._connections = []
        self._server = Server(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *exc):
        self._server.shutdown()
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._server.server_close()
        self._thread.join(LIMIT_S)


class RigProcess:
    """A Rig in a process of its own, on a given port, that may be killed. A context manager."""

    def __init__(self, port):
        self.url = f"http://127.0.0.1:{port}"
        root = Path(__file__).parents[2]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.serving.client_rig", str(port)],
            cwd=root,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self):
        return self

    def ready(self):
        assert self._process.stdout.readline() == "ready\n"

    def kill(self):
        self._process.kill()
        self._process.wait(LIMIT_S)

    def episodes(self, count):
        """As :meth:`Rig.episodes`; ends the process."""
        found, _ = self._process.communicate(f"{count}\n", timeout=LIMIT_S)
        return [[tuple(tuple(x) if isinstance(x, list) else x for x in row) for row in rows] for rows in eval(found)]

    def __exit__(self, *exc):
        self.kill()
        self._process.stdin.close()
        self._process.stdout.close()


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


if __name__ == "__main__":
    with Rig(http={"port": int(sys.argv[1])}) as served:
        print("ready", flush=True)
        print(served.episodes(int(sys.stdin.readline() or 0)), flush=True)
