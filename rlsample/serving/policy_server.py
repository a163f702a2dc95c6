"""A policy behind a port: the served env's calls over HTTP, in a thread of their own.

with CommonPolicyEvaluator(ServingEnv(obs_space, action_space), PPOPolicy) as evaluator:
    with PolicyServer(evaluator, HttpSettings(port=8080), sample=False):
        optimizer = SyncSamplesOptimizer(EvaluatorSet(evaluator))
        while True:
            optimizer.step()        # learns from what the clients played
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from rlsample.env.serving import ServingEnv, ServingEnvAdapter
from rlsample.errors import ConfigError, MissingExtraError, ServingError
from rlsample.evaluation import CommonPolicyEvaluator
from rlsample.evaluation.async_sampler import ActingView
from rlsample.serving.app import ServingApp
from rlsample.serving.episode_calls import LONG_TURN_S, EpisodeCalls
from rlsample.serving.http_errors import HttpError
from rlsample.serving.http_protocol import ServingProtocol
from rlsample.serving.http_settings import HttpSettings
from rlsample.serving.openapi import describe_api
from rlsample.serving.other_routes import PUBLIC_PATHS, OtherRoutes
from rlsample.serving.remote_model import describe_model
from rlsample.serving.request_gate import RequestGate
from rlsample.serving.serving_metrics import ServingMetrics
from rlsample.serving.space_codec import SpaceCodec, describe_space
from rlsample.serving.wire import MSGPACK, encode

try:
    import uvicorn
except ImportError as e:
    raise MissingExtraError("rlsample.serving", "serve") from e

__all__ = ["PolicyServer"]

log = logging.getLogger(__name__)

_BACKLOG = 1024
_START_S = 10.0
_AFTER_FAILURE_S = 0.01  # so that one that fails at once again and again does not take a core
_TICK_S = 0.5
_MOST_ROWS = 4096  # of one /v1/act, which a policy shall not answer with a gigabyte of activations
_END_S = 5.0
_VERSION = "1"
_NO_PROGRESS: Mapping[str, int] = {}


class PolicyServer:
    """Serves an evaluator's ServingEnv over HTTP; docs/serving.md says how. A context manager.

    It takes requests from :meth:`start` (or ``with``) on, in a thread of its own.

    Args:
        evaluator: its env is a :class:`~rlsample.env.ServingEnv` that nobody else serves over HTTP.
        settings: see :class:`HttpSettings`.
        sample: True: nobody learns, and the server samples, in one more thread; rows are not kept, and a policy that
            raises costs the episodes it was asked for. The evaluator is closed with the server. False: your optimizer
            samples, and you close the evaluator.
        progress: ``sampled_steps`` and ``trained_steps`` for the statistics, such as an optimizer's counts.

    Raises:
        ConfigError: no such env; or the port cannot be had, at :meth:`start`.
    """

    def __init__(
        self,
        evaluator: CommonPolicyEvaluator,
        settings: HttpSettings | None = None,
        *,
        sample: bool = True,
        progress: Callable[[], Mapping[str, int]] | None = None,
    ) -> None:
        if not isinstance(evaluator.env, ServingEnvAdapter):
            raise ConfigError(f"a PolicyServer serves a ServingEnv, not {type(evaluator.env).__name__}")
        if evaluator.env.agents is not None:
            raise ConfigError("a PolicyServer serves episodes of one agent, not a MultiAgentServingEnv")
        self.evaluator, self.settings = evaluator, settings or HttpSettings()
        self._adapter = evaluator.env
        self._env: ServingEnv = evaluator.env.env
        self._samples, self._progress = sample, progress or (lambda: _NO_PROGRESS)
        self.metrics = ServingMetrics()
        policy = evaluator.policy
        spaces = self._env.observation_space, self._env.action_space
        self._codec = SpaceCodec(*spaces, self._env.desk.lanes)
        self._calls = EpisodeCalls(
            self._env, self._codec, self.metrics, lambda: policy.version, not sample, self.settings.max_pending
        )
        http = self.settings
        is_free = http.token is None and not http.insecure
        gate = RequestGate(http.token, http.rate_limit, http.body_limit(spaces[0]), checks_host=is_free)
        others = OtherRoutes(
            {"observation_space": describe_space(spaces[0]), "action_space": describe_space(spaces[1])},
            describe_api(*spaces, _VERSION, self.settings.token is not None),
            self.stats,
            self.what_is_wrong,
            self.metrics.prometheus(self._gauges),
            self._weights,
            lambda error: self.metrics.rejected.update((error.code,)),
        )
        self._app = ServingApp(self._calls, gate, self._act, others.app(), PUBLIC_PATHS.__contains__)
        self._acts_long = False  # an /v1/act takes so long that the loop should answer others meanwhile
        self._one_long_act = asyncio.Lock()
        self._weights_body: tuple[int, bytes] = (-1, b"")
        self._socket: socket.socket | None = None
        self._bound: tuple[str, int] = ("", 0)
        self._server: uvicorn.Server | None = None
        self._threads: list[threading.Thread] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ready = threading.Event()
        self._failure: BaseException | None = None
        self._closed = False

    # ------------------------------------------------------------------ lifetime

    def start(self) -> PolicyServer:
        """Listens, and returns when requests are answered.

        Raises:
            ConfigError: the address cannot be had, or this server was started before.
        """
        if self._socket is not None or self._closed:
            raise ConfigError("a PolicyServer starts once: make another one")
        self._socket = _listen(self.settings.host, self.settings.port)
        self._bound = self._socket.getsockname()[:2]
        self._run_thread("rlsample-http", self._run_http)
        if not self._ready.wait(_START_S) or self._failure is not None:
            self.close()
            raise ConfigError(f"the HTTP server did not start: {self._failure or 'no answer'}") from self._failure
        if self._samples:
            self._run_thread("rlsample-serve", self._run_sampling)
        return self

    def close(self) -> None:
        """Ends serving: waiting clients get 503, open episodes break off, the port is free. Idempotent.

        Answers have ``drain_s`` to reach their clients.
        """
        if self._closed:
            return
        self._closed = True
        loop = self._loop
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # it has ended by itself
                loop.call_soon_threadsafe(self._begin_end)
        for thread in self._threads[:1]:
            thread.join(self.settings.drain_s + _END_S)
        if self._socket is not None:
            self._socket.close()
        if self._samples:
            self.evaluator.close()
        for thread in self._threads[1:]:
            thread.join(_END_S)

    def __enter__(self) -> PolicyServer:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def address(self) -> tuple[str, int]:
        """Host and port, also where port 0 was asked for.

        Raises:
            ServingError: not started.
        """
        if self._socket is None:
            raise ServingError("this PolicyServer is not started")
        return self._bound

    @property
    def url(self) -> str:
        """Such as ``http://127.0.0.1:8080``."""
        host, port = self.address
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"

    # ------------------------------------------------------------------ what it shows

    def what_is_wrong(self) -> str | None:
        """Why no actions are answered, or None."""
        if self._calls.closed:
            return "the server is shutting down"
        if self._env.over:
            return str(self._env.desk.registry.over_error())
        return None

    def stats(self) -> dict[str, Any]:
        """What ``/v1/stats`` answers; see docs/serving.md."""
        found = {**self.metrics.stats(), **self._gauges()}
        found.update(sampled_steps=self.metrics.rows, trained_steps=0, training=not self._samples)
        found.update(self._progress())
        return found

    def _gauges(self) -> dict[str, Any]:
        return {
            "open_episodes": len(self._calls.open),
            "waiting_requests": len(self._calls.waiting),
            "policy_version": int(self.evaluator.policy.version),
        }

    def _weights(self, have: int | None) -> bytes | None:
        """The body of a weights answer; for one thread at a time, which need not be the loop's."""
        policy = self.evaluator.policy
        version = int(policy.version)
        if have == version:
            return None
        kept_version, body = self._weights_body
        if kept_version != version:
            try:
                if "torch" not in sys.modules:
                    raise ConfigError(f"{type(policy).__name__} is no torch policy: let the server act")
                model = describe_model(self.evaluator)
            except ConfigError as e:
                raise HttpError("not_found", str(e)) from None
            found = {"version": version, "model": model, "weights": dict(policy.get_weights())}
            body = encode(found, MSGPACK)
            self._weights_body = version, body
        return body

    async def _act(self, obs: Any) -> dict[str, Any]:
        rows = self._calls.checked(self._codec.count_rows, obs)
        if not 0 < rows <= _MOST_ROWS:
            raise HttpError(
                "bad_value", f"obs holds 1 to {_MOST_ROWS} observations, stacked at the front of each array; got {rows}"
            )
        column = self._calls.checked(self._codec.obs_batch, obs, rows)
        if not isinstance(self.evaluator.sampler.policy, ActingView):
            raise HttpError("conflict", "sampling has no thread of its own here (sample_async=False): start an episode")
        version = int(self.evaluator.policy.version)

        def choose() -> Any:
            started = time.perf_counter()
            actions = self.evaluator.compute_actions(column, self.evaluator.settings.explore)
            self._acts_long = time.perf_counter() - started > LONG_TURN_S
            return actions

        try:
            if self._acts_long:
                async with self._one_long_act:
                    actions = await asyncio.to_thread(choose)
            else:
                actions = choose()
        except Exception as e:
            raise HttpError("policy_failed", f"the policy failed: {type(e).__name__}: {e}") from e
        return {"actions": actions, "policy_version": version}

    # ------------------------------------------------------------------ threads

    def _run_thread(self, name: str, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _run_http(self) -> None:
        settings = self.settings
        config = uvicorn.Config(
            self._app,
            http=ServingProtocol,
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            log_level="error",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            limit_concurrency=settings.max_connections,
            backlog=_BACKLOG,
            timeout_keep_alive=max(1, int(settings.keep_alive_s)),
            timeout_graceful_shutdown=max(1, int(settings.drain_s)),
        )
        self._server = uvicorn.Server(config)
        loop = _new_loop()
        try:
            self._loop = loop
            loop.run_until_complete(self._serve(self._server))
        except BaseException as e:
            self._failure = e
            log.exception("the HTTP server failed")
        finally:
            self._ready.set()
            loop.run_until_complete(loop.shutdown_default_executor())
            loop.close()

    async def _serve(self, server: uvicorn.Server) -> None:
        self._calls.loop = asyncio.get_running_loop()
        self._adapter.be_driven(True)
        ticker = asyncio.create_task(self._tick(server))
        try:
            await server.serve(sockets=[self._socket] if self._socket else None)
        finally:
            ticker.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await ticker
            self._calls.close("the server was shut down")
            self._adapter.be_driven(False)

    async def _tick(self, server: uvicorn.Server) -> None:
        while True:
            if server.started:
                self._ready.set()
            await asyncio.sleep(_TICK_S if server.started else 0.005)
            try:
                self.metrics.tick()
                self._calls.tick(self.settings.action_timeout_s)
                for connection in list(server.server_state.connections):
                    connection.cut_off_if_slow(self.settings.request_timeout_s)  # type: ignore[union-attr]
            except Exception:  # without this task nothing would be limited in time any more
                log.exception("the look for what takes too long failed")

    def _begin_end(self) -> None:
        self._calls.close("the server is shutting down")
        if self._server is not None:
            self._server.should_exit = True

    def _run_sampling(self) -> None:
        sampler = self.evaluator.sampler
        while not self._closed and not self._env.over:
            try:
                sampler.sample()
                self.evaluator.get_metrics()
            except Exception as e:
                if self._closed or self._env.over:
                    return
                log.warning("the policy failed; the episodes it was asked for are closed: %s: %s", type(e).__name__, e)
                self._env.desk.registry.over.wait(_AFTER_FAILURE_S)


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, protocol)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(address)
            listening.listen(_BACKLOG)
        except BaseException:
            listening.close()
            raise
    except OSError as e:
        raise ConfigError(f"cannot listen on {host}:{port}: {e.strerror or e}; another port or host may be free") from e
    return listening


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()
