"""The client for asyncio: the same calls as :class:`~rlsample.serving.policy_client.PolicyClient`, to be awaited."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any, TypeVar

from rlsample.errors import MissingExtraError
from rlsample.serving.client_settings import ClientSettings
from rlsample.serving.exchange import Address, Exchange, NoAnswer, Pause, Reply, Request, Steps
from rlsample.serving.local_calls import calls_for

try:
    import httpx
except ImportError as e:
    raise MissingExtraError("rlsample.serving.AsyncPolicyClient", "serve") from e

__all__ = ["AsyncPolicyClient"]

T = TypeVar("T")


class AsyncPolicyClient:
    """A :class:`~rlsample.serving.policy_client.PolicyClient` whose calls are awaited, within one event loop.

    An async context manager. Arguments, answers and errors are those of the sync client. With ``inference="local"``
    the policy acts in the loop's thread, some tens of microseconds for small nets.

    Args:
        address, token, settings: as for the sync client.
    """

    def __init__(self, address: str, token: str | None = None, settings: ClientSettings | None = None) -> None:
        self.settings = settings or ClientSettings()
        self.address = Address.parse(address)
        self._exchange = Exchange(self.address, token, self.settings)
        self._calls = calls_for(self._exchange)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._over = asyncio.Event()
        self._http = httpx.AsyncClient(limits=limits, follow_redirects=False, trust_env=False)

    @property
    def open_episodes(self) -> list[str]:
        """Ids of the episodes that are open, as far as the client knows."""
        return self._calls.open_episodes

    async def start_episode(
        self, episode_id: str | None = None, training_enabled: bool = True, timeout_s: float | None = None
    ) -> str:
        """Opens an episode and returns its id; see :meth:`PolicyClient.start_episode`."""
        return await self._play(self._calls.start_episode(episode_id, training_enabled, timeout_s))

    async def get_action(self, obs: Any, episode_id: str | None = None, timeout_s: float | None = None) -> Any:
        """The policy's action for an observation; see :meth:`PolicyClient.get_action`."""
        return await self._play(self._calls.get_action(obs, episode_id, timeout_s))

    async def get_actions(self, obs: Any, episode_ids: Sequence[str], timeout_s: float | None = None) -> list[Any]:
        """The actions of K episodes at once; see :meth:`PolicyClient.get_actions`."""
        return await self._play(self._calls.get_actions(obs, episode_ids, timeout_s))

    async def log_action(
        self, obs: Any, action: Any, episode_id: str | None = None, action_logp: float | None = None
    ) -> None:
        """Records an action that was chosen elsewhere; see :meth:`PolicyClient.log_action`."""
        await self._play(self._calls.log_action(obs, action, episode_id, action_logp))

    async def log_returns(self, reward: Any, info: dict[str, Any] | None = None, episode_id: str | None = None) -> None:
        """Adds to the reward of the last action; see :meth:`PolicyClient.log_returns`."""
        await self._play(self._calls.log_returns(reward, info, episode_id))

    async def end_episode(self, obs: Any, episode_id: str | None = None, truncated: bool = False) -> None:
        """Ends the episode at its final observation; see :meth:`PolicyClient.end_episode`."""
        await self._play(self._calls.end_episode(obs, episode_id, truncated))

    async def _play(self, steps: Steps[T]) -> T:
        """Does what a call yields, until it returns."""
        try:
            event = next(steps)
            while True:
                try:
                    reply = None
                    if isinstance(event, Pause):
                        with contextlib.suppress(asyncio.TimeoutError):
                            await asyncio.wait_for(self._over.wait(), event.seconds)
                    else:
                        reply = await self._send(event)
                except NoAnswer as e:
                    event = steps.throw(e)
                else:
                    event = steps.send(reply)
        except StopIteration as end:
            value: T = end.value
            return value
        finally:
            steps.close()

    async def _send(self, request: Request) -> Reply:
        address = self.address._replace(prefix="")
        try:
            asked = self._http.request(
                request.method,
                f"{address}{request.path}",
                headers=dict(request.headers),
                content=request.body or None,
                timeout=request.timeout_s,  # of each read: a server that dribbles would go on for ever
            )
            response = await asyncio.wait_for(asked, request.timeout_s)
        except (httpx.HTTPError, asyncio.TimeoutError, RuntimeError) as e:  # the last: it was closed meanwhile
            raise NoAnswer(f"{type(e).__name__}: {e}" if str(e) else type(e).__name__) from e
        headers = {name.lower(): value for name, value in response.headers.items()}
        return Reply(response.status_code, headers, response.content)

    async def aclose(self) -> None:
        """Ends calls that wait, with a ServingError, and closes the connections. Episodes are left as they are."""
        self._exchange.closed = True
        self._over.set()
        await self._http.aclose()

    async def __aenter__(self) -> AsyncPolicyClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()
