"""The five calls of a client that acts by itself: on weights it pulls, with rows it uploads.

The server opens the episode, so that ids, places and expiry are as for all others; then it hears of the episode only
when rows come. Pulls and uploads happen within calls, between two steps: there is no thread.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from rlsample.env.serving.lane_rows import LaneRows, checked_logp
from rlsample.errors import EpisodeLostError, ServingError, SpaceError
from rlsample.serving.exchange import Exchange, RefusedCall, Steps, Unanswered
from rlsample.serving.local_episode import LocalEpisode
from rlsample.serving.remote_calls import OpenEpisodes, RemoteCalls
from rlsample.serving.remote_model import ActingCopy
from rlsample.serving.space_codec import SpaceCodec, space_of
from rlsample.tree import map_tree

__all__ = ["LocalCalls", "calls_for"]

log = logging.getLogger(__name__)
_UPDATE_S = 5.0  # that a look for newer weights may take, once there are some


def calls_for(exchange: Exchange) -> RemoteCalls | LocalCalls:
    """The calls that the client's settings ask for."""
    return LocalCalls(exchange) if exchange.settings.inference == "local" else RemoteCalls(exchange)


class LocalCalls:
    """The calls of a client that acts by itself. Each is a generator, see :mod:`exchange`."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange, self._settings = exchange, exchange.settings
        self._episodes = OpenEpisodes()
        self._nonce = secrets.token_hex(8)
        self._lanes: LaneRows  # these two: once there is a policy
        self._codec: SpaceCodec
        self._policy: ActingCopy | None = None
        self._acting = threading.Lock()  # one thread acts or sets weights at a time
        self._look_at = 0.0

    @property
    def open_episodes(self) -> list[str]:
        """Ids of the episodes that are open as far as the client knows."""
        return list(self._episodes.open)

    def start_episode(self, episode_id: str | None, training_enabled: bool, timeout_s: float | None) -> Steps[str]:
        """See :meth:`PolicyClient.start_episode`."""
        yield from self._update(timeout_s)
        started, number = yield from self._episodes.start(self._exchange, episode_id, training_enabled, timeout_s)
        episode = LocalEpisode(started, bool(training_enabled), number)
        self._episodes.open[episode.id] = episode
        return episode.id

    def get_action(self, obs: Any, episode_id: str | None, timeout_s: float | None) -> Steps[Any]:
        """See :meth:`PolicyClient.get_action`."""
        yield from self._update(timeout_s)
        with self._use(episode_id, obs) as episode:
            column = self._lanes.obs_copy(obs, "get_action")
            yield from self._make_room(episode, True, timeout_s)
            return self._act(episode, column)

    def get_actions(self, obs: Any, episode_ids: Sequence[str], timeout_s: float | None) -> Steps[list[Any]]:
        """See :meth:`PolicyClient.get_actions`."""
        ids = list(episode_ids)
        if not ids or len(set(ids)) < len(ids):
            raise ServingError(f"get_actions: episode_ids must be distinct, at least one; got {ids}")
        yield from self._update(timeout_s)
        with contextlib.ExitStack() as stack:
            episodes = [stack.enter_context(self._use(name, obs)) for name in ids]
            rows = self._codec.obs_batch(obs, len(ids))
            for episode in episodes:
                yield from self._make_room(episode, True, timeout_s)
            columns = [map_tree(lambda leaf, k=k: leaf[k : k + 1], rows) for k in range(len(ids))]
            return [self._act(episode, column) for episode, column in zip(episodes, columns, strict=True)]

    def log_action(self, obs: Any, action: Any, episode_id: str | None, action_logp: float | None) -> Steps[None]:
        """See :meth:`PolicyClient.log_action`."""
        with self._use(episode_id, obs) as episode:
            column = self._lanes.obs_copy(obs, "log_action")
            own = self._lanes.action_copy(action, obs, "log_action")
            logp = None if action_logp is None else checked_logp(action_logp)
            yield from self._make_room(episode, logp is not None, None)
            episode.begin_row(column, own, logp)

    def log_returns(self, reward: Any, info: dict[str, Any] | None, episode_id: str | None) -> Steps[None]:
        """See :meth:`PolicyClient.log_returns`. Infos are not uploaded."""
        with self._use(episode_id, reward) as episode:
            if episode.unanswered_body is not None:
                raise ServingError(
                    f"episode {episode.id!r}: its rows were sent and no answer came; make the same call again first"
                )
            episode.add_reward(reward)
        yield from ()

    def end_episode(self, obs: Any, episode_id: str | None, truncated: bool) -> Steps[None]:
        """See :meth:`PolicyClient.end_episode`."""
        with self._use(episode_id, obs) as episode:
            final = map_tree(lambda leaf: leaf[0, ...], self._lanes.obs_copy(obs, "end_episode"))
            ends = yield from self._send_again(episode, None)
            if not ends and episode.num_rows:
                yield from self._upload(episode, None, final_obs=final, truncated=bool(truncated))
            elif not ends:
                path, values = f"/v1/episodes/{episode.id}/end", {"obs": final, "truncated": bool(truncated)}
                yield from self._settle(episode, path, values, None)
            self._episodes.open.pop(episode.id, None)

    # ------------------------------------------------------------------ rows

    @contextlib.contextmanager
    def _use(self, episode_id: str | None, first: Any) -> Iterator[LocalEpisode]:
        with self._episodes.use(episode_id, first) as episode:
            assert isinstance(episode, LocalEpisode)
            yield episode

    def _act(self, episode: LocalEpisode, column: Any) -> Any:
        assert self._policy is not None
        with self._acting:
            action, own, logp = self._policy.act(column)
        episode.begin_row(column, own, logp)
        return action

    def _make_room(self, episode: LocalEpisode, knows_logp: bool, timeout_s: float | None) -> Steps[None]:
        """Uploads the rows that are there if they are many, or of another kind than the next one."""
        if (yield from self._send_again(episode, timeout_s)):
            self._episodes.open.pop(episode.id, None)
            raise ServingError(
                f"episode {episode.id!r} has ended: the end_episode that went without an answer was done"
            )
        if episode.num_rows and (
            episode.num_rows >= self._settings.fragment_rows or episode.knows_logp() is not knows_logp
        ):
            yield from self._upload(episode, timeout_s)

    def _upload(self, episode: LocalEpisode, timeout_s: float | None, **end: Any) -> Steps[None]:
        episode.unanswered_body = {**episode.fragment(), **end}
        yield from self._send_again(episode, timeout_s)

    def _send_again(self, episode: LocalEpisode, timeout_s: float | None) -> Steps[bool]:
        """Sends the upload that went without an answer, if there is one; whether it ended the episode."""
        body = episode.unanswered_body
        if body is None:
            return False
        yield from self._settle(episode, "/v1/fragments", body, timeout_s)
        episode.unanswered_body = None
        episode.uploaded()
        return "final_obs" in body

    def _settle(self, episode: LocalEpisode, path: str, values: Any, timeout_s: float | None) -> Steps[None]:
        """An upload that was refused cannot come again: the episode is given up."""
        key = f"{self._nonce}-{episode.number}-{episode.calls}"
        try:
            yield from self._exchange.call("POST", path, values, key, timeout_s, of_episode=True)
        except (RefusedCall, SpaceError) as e:
            self._episodes.open.pop(episode.id, None)
            lost = f"the server refused rows of episode {episode.id!r}: {e}"
            raise EpisodeLostError(f"{lost}. Start a new episode") from e
        episode.calls += 1

    # ------------------------------------------------------------------ weights

    def _update(self, timeout_s: float | None) -> Steps[None]:
        """Looks for newer weights, if it is time to; goes on with the old ones when no answer comes."""
        if time.monotonic() < self._look_at:
            return
        if self._policy is None:
            spaces = yield from self._exchange.call("GET", "/v1/spaces", timeout_s=timeout_s)
            answer = yield from self._exchange.call("GET", "/v1/weights", timeout_s=timeout_s)
            self._make_policy(space_of(spaces["observation_space"]), space_of(spaces["action_space"]), answer["model"])
        else:
            self._look_at = time.monotonic() + self._settings.update_interval_s
            try:
                path = f"/v1/weights?have={self._policy.version}"
                answer = yield from self._exchange.call("GET", path, timeout_s=_UPDATE_S)
            except Unanswered as e:
                log.warning("acting on with weights of version %d: %s", self._policy.version, e)
                return
        if answer is not None:
            assert self._policy is not None
            with self._acting:
                self._policy.update(int(answer["version"]), answer["weights"], answer["model"])
        self._look_at = time.monotonic() + self._settings.update_interval_s

    def _make_policy(self, observation_space: Any, action_space: Any, description: Any) -> None:
        seed = secrets.randbits(32) if self._settings.seed is None else self._settings.seed
        policy = ActingCopy(description, observation_space, action_space, seed)
        self._lanes = LaneRows(observation_space, action_space, 1)
        self._codec = SpaceCodec(observation_space, action_space, self._lanes)
        self._policy = policy
