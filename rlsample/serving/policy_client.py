"""A policy server's client: the five calls of a ServingEnv, over HTTP.

with PolicyClient("http://127.0.0.1:8080") as client:
    while True:
        obs, ended = shop.open(), False
        client.start_episode()
        while not ended:
            obs, profit, ended = shop.sell_at(client.get_action(obs))
            client.log_returns(profit)
        client.end_episode(obs)
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, TypeVar

from rlsample.serving.client_settings import ClientSettings
from rlsample.serving.exchange import Address, Exchange, NoAnswer, Pause, Steps
from rlsample.serving.http_connections import HttpConnections
from rlsample.serving.local_calls import calls_for

__all__ = ["PolicyClient"]

T = TypeVar("T")


class PolicyClient:
    """Plays episodes with the policy of a server, which learns from them.

    A context manager. Any thread may call; one episode takes one call at a time. Calls take the episode_id last; it may
    be left out while the client has exactly one open episode.

    A call is tried again when the connection fails, or when the server is busy (as it asks for, by Retry-After), until
    ``timeout_s`` is over. Each carries a key, so that the server does it once, however often it comes. When time is
    over it raises, and the same call may be made again then; another one in its place is refused, once, if the server
    has done the first.

    When the server is gone for good, so are its open episodes: their next call raises EpisodeLostError. Start a new
    one: ``start_episode`` waits until a server is back. A client that is gone leaves its episodes open; the server ends
    them, truncated, when they had no call for its ``idle_timeout_s``.

    With ``inference="local"`` the client has a copy of the policy, looked up again every ``update_interval_s``; it acts
    by itself, and uploads the rows of an episode when it ends or ``fragment_rows`` are there. Both happen within calls.

    Args:
        address: such as ``http://127.0.0.1:8080``.
        token: the server's, if it has one.
        settings: see :class:`ClientSettings`.

    Raises:
        ConfigError: no such address, or a token that cannot be sent. Nothing is sent before the first call.
    """

    def __init__(self, address: str, token: str | None = None, settings: ClientSettings | None = None) -> None:
        self.settings = settings or ClientSettings()
        self.address = Address.parse(address)
        self._exchange = Exchange(self.address, token, self.settings)
        self._calls = calls_for(self._exchange)
        self._connections = HttpConnections(self.address)
        self._over = threading.Event()

    @property
    def open_episodes(self) -> list[str]:
        """Ids of the episodes that are open, as far as the client knows."""
        return self._calls.open_episodes

    def start_episode(
        self, episode_id: str | None = None, training_enabled: bool = True, timeout_s: float | None = None
    ) -> str:
        """Opens an episode and returns its id.

        Args:
            episode_id: your own, of no open episode of the server; None: the server makes one.
            training_enabled: False: actions are answered and returns counted, but no rows are kept.
            timeout_s: how long to try, for a place too; None: ``settings.timeout_s``.

        Raises:
            ServingError: the id is open already, a wrong token, no answer in time, or the client is closed.
        """
        return self._play(self._calls.start_episode(episode_id, training_enabled, timeout_s))

    def get_action(self, obs: Any, episode_id: str | None = None, timeout_s: float | None = None) -> Any:
        """The policy's action for an observation, in the form ``env.step`` takes. Waits for it.

        Raises:
            SpaceError: the observation does not fit the space; the episode goes on.
            EpisodeLostError: the server has this episode no more.
            ServingError: no such open episode of this client; another call on it is going on; the policy failed (the
                episode is closed); the client is closed; no answer in time. The question stands then: ask again with
                the same observation, or end the episode, which then ends, truncated, at that observation.
        """
        return self._play(self._calls.get_action(obs, episode_id, timeout_s))

    def get_actions(self, obs: Any, episode_ids: Sequence[str], timeout_s: float | None = None) -> list[Any]:
        """The actions of K episodes at once, much faster than one by one.

        Args:
            obs: stacked, a tree [K, ...], in the order of the ids.
            episode_ids: K distinct open episodes.

        Raises:
            as :meth:`get_action`. Nothing was done then for any of the episodes.
        """
        return self._play(self._calls.get_actions(obs, episode_ids, timeout_s))

    def log_action(
        self, obs: Any, action: Any, episode_id: str | None = None, action_logp: float | None = None
    ) -> None:
        """Records an action that was chosen elsewhere; ``action_logp``: its log-probability there, if known.

        Raises:
            as :meth:`get_action`; also SpaceError for the action.
        """
        self._play(self._calls.log_action(obs, action, episode_id, action_logp))

    def log_returns(self, reward: Any, info: dict[str, Any] | None = None, episode_id: str | None = None) -> None:
        """Adds to the reward of the episode's last action. Before the first action nothing is counted.

        Without an ``info`` nothing is sent: the next call on the episode takes the reward along.

        Raises:
            ServingError: no finite number; or as :meth:`get_action`.
        """
        self._play(self._calls.log_returns(reward, info, episode_id))

    def end_episode(self, obs: Any, episode_id: str | None = None, truncated: bool = False) -> None:
        """Ends the episode at its final observation.

        Args:
            truncated: it was cut off: the value of ``obs`` counts. False: it terminated.

        Raises:
            as :meth:`get_action`; after SpaceError the episode is still open.
        """
        self._play(self._calls.end_episode(obs, episode_id, truncated))

    def _play(self, steps: Steps[T]) -> T:
        """Does what a call yields, until it returns."""
        try:
            event = next(steps)
            while True:
                try:
                    reply = None
                    if isinstance(event, Pause):
                        self._over.wait(event.seconds)
                    else:
                        reply = self._connections.send(event)
                except NoAnswer as e:
                    event = steps.throw(e)
                else:
                    event = steps.send(reply)
        except StopIteration as end:
            value: T = end.value
            return value
        finally:
            steps.close()

    def close(self) -> None:
        """Ends calls that wait, with a ServingError, and closes the connections. Episodes are left as they are."""
        self._exchange.closed = True
        self._over.set()
        self._connections.close()

    def __enter__(self) -> PolicyClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
