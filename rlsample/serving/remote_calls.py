"""The five calls on episodes that a policy server keeps: what each sends, and what the client remembers of an episode.

A reward waits here until the next call of its episode takes it along, so that a step is one request. The server books
both or, when it refuses the call, neither.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import secrets
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import quote

from rlsample.env.serving.episode_registry import CALL_ORDER
from rlsample.env.serving.lane_rows import checked_logp, checked_reward
from rlsample.errors import EpisodeLostError, ServingError, SpaceError
from rlsample.serving.action_reader import ActionReader
from rlsample.serving.client_episode import ASK, LOG, OTHER, ClientEpisode, SentCall
from rlsample.serving.exchange import Exchange, RefusedCall, Steps, Unanswered, Unsendable
from rlsample.serving.space_codec import space_of

__all__ = ["OpenEpisodes", "RemoteCalls"]


class OpenEpisodes:
    """Finds the open episodes of one client. Any thread may call.

    Attributes:
        open: id -> episode.
    """

    def __init__(self) -> None:
        self.open: dict[str, ClientEpisode] = {}
        self._nonce = secrets.token_hex(8)
        self._numbers = itertools.count()  # threads never get the same one
        self._unanswered: dict[tuple[str | None, bool], int] = {}  # what was asked for -> number of that start

    def start(
        self, exchange: Exchange, episode_id: str | None, training_enabled: bool, timeout_s: float | None
    ) -> Steps[tuple[str, int]]:
        """Has the server open an episode. One that went without an answer and is asked for again, it opens once.

        Returns:
            The episode's id, and a number that no other of this client has.
        """
        wanted = episode_id, bool(training_enabled)
        number = self._unanswered.pop(wanted, None)
        if number is None:
            number = next(self._numbers)
        values: dict[str, Any] = {"training_enabled": bool(training_enabled)}
        if episode_id is not None:
            values["episode_id"] = episode_id
        try:
            answer = yield from exchange.call(
                "POST", "/v1/episodes", values, f"{self._nonce}-start-{number}", timeout_s
            )
        except (Unanswered, GeneratorExit):  # or nobody awaits it any more
            self._unanswered[wanted] = number
            raise
        return str(answer["episode_id"]), number

    @contextlib.contextmanager
    def use(self, episode_id: str | None, first: Any = None, alone: bool = True) -> Iterator[ClientEpisode]:
        """The episode of that id, or the only open one, for one call. If it turns out to be lost, it is dropped.

        Args:
            first: what the call was given first, to notice one that gives the id first.
            alone: the call is about this one only. Otherwise it is lost if the server's words name it.

        Raises:
            ServingError: there is no such episode, or another call on it is going on.
        """
        episode = self._find(episode_id, first)
        if not episode.in_use.acquire(blocking=False):
            raise ServingError(f"episode {episode.id!r} is in use by another call: its calls have to follow each other")
        try:
            yield episode
        except (EpisodeLostError, RefusedCall) as e:
            lost = isinstance(e, EpisodeLostError) and (alone or repr(episode.id) in str(e))
            if lost or (isinstance(e, RefusedCall) and e.code == "policy_failed"):
                self.open.pop(episode.id, None)
            raise
        finally:
            episode.in_use.release()

    def _find(self, episode_id: str | None, first: Any) -> ClientEpisode:
        if episode_id is None:
            if isinstance(first, str):
                raise ServingError(f"{first!r} came first; {CALL_ORDER}")
            episodes = list(self.open.values())
            if len(episodes) == 1:
                return episodes[0]
            if not episodes:
                raise ServingError("this client has no open episode: call start_episode, or pass an episode_id")
            ids = ", ".join(repr(e.id) for e in episodes[:4]) + (", ..." if len(episodes) > 4 else "")
            raise ServingError(f"this client has {len(episodes)} open episodes ({ids}): pass the episode_id of one")
        if not isinstance(episode_id, str):
            raise ServingError(f"the episode_id must be a str, got {type(episode_id).__name__}; {CALL_ORDER}")
        if episode_id not in self.open:
            raise ServingError(f"this client has no open episode {episode_id!r}: it was not started here, or has ended")
        return self.open[episode_id]


class RemoteCalls:
    """The calls of a client whose actions the server chooses. Each is a generator, see :mod:`exchange`."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._episodes = OpenEpisodes()
        self._nonce = secrets.token_hex(8)
        self._reader: ActionReader | None = None

    @property
    def open_episodes(self) -> list[str]:
        """Ids of the episodes that are open as far as the client knows."""
        return list(self._episodes.open)

    def start_episode(self, episode_id: str | None, training_enabled: bool, timeout_s: float | None) -> Steps[str]:
        """See :meth:`PolicyClient.start_episode`."""
        if episode_id is not None and (not isinstance(episode_id, str) or not episode_id):
            raise ServingError(f"start_episode: an episode_id is a non-empty str, got {episode_id!r}")
        if self._reader is None:
            self._reader = yield from self._action_reader(timeout_s)
        started, number = yield from self._episodes.start(self._exchange, episode_id, training_enabled, timeout_s)
        self._episodes.open[started] = ClientEpisode(started, number)
        return started

    def get_action(self, obs: Any, episode_id: str | None, timeout_s: float | None) -> Steps[Any]:
        """See :meth:`PolicyClient.get_action`."""
        with self._episodes.use(episode_id, obs) as episode:
            answer = yield from self._call(episode, "action", {"obs": obs}, SentCall(ASK, episode.calls), timeout_s)
            assert self._reader is not None
            return self._reader.one(answer["action"])

    def get_actions(self, obs: Any, episode_ids: Sequence[str], timeout_s: float | None) -> Steps[list[Any]]:
        """See :meth:`PolicyClient.get_actions`."""
        ids = list(episode_ids)
        if not ids or len(set(ids)) < len(ids):
            raise ServingError(f"get_actions: episode_ids must be distinct, at least one; got {ids}")
        with contextlib.ExitStack() as stack:
            episodes = [stack.enter_context(self._episodes.use(name, obs, alone=False)) for name in ids]
            numbers = "-".join(f"{episode.number}:{episode.calls}" for episode in episodes)
            key = f"{self._nonce}-batch-{hashlib.sha256(numbers.encode()).hexdigest()[:32]}"
            call = SentCall(ASK, key)
            for episode in episodes:
                episode.require_no_question(but=call)
                if episode.unanswered not in (None, call):
                    raise ServingError(f"episode {episode.id!r}: its last call went without an answer; make it again")
            values = {"episode_ids": ids, "obs": obs}
            answer = yield from self._settle(episodes, "/v1/actions", values, key, call, timeout_s)
            assert self._reader is not None
            return self._reader.many(answer["actions"], len(ids))

    def log_action(self, obs: Any, action: Any, episode_id: str | None, action_logp: float | None) -> Steps[None]:
        """See :meth:`PolicyClient.log_action`."""
        with self._episodes.use(episode_id, obs) as episode:
            values = {"obs": obs, "action": action}
            if action_logp is not None:
                values["action_logp"] = checked_logp(action_logp)
            yield from self._call(episode, "log_action", values, SentCall(LOG))

    def log_returns(self, reward: Any, info: dict[str, Any] | None, episode_id: str | None) -> Steps[None]:
        """See :meth:`PolicyClient.log_returns`."""
        with self._episodes.use(episode_id, reward) as episode:
            episode.require_no_question()
            call = SentCall(OTHER, (checked_reward(reward), info))
            if not info or episode.unanswered != call:  # else it is the same call again
                episode.add_reward(reward)
            if info:
                yield from self._call(episode, "returns", {"info": info}, call)

    def end_episode(self, obs: Any, episode_id: str | None, truncated: bool) -> Steps[None]:
        """See :meth:`PolicyClient.end_episode`."""
        with self._episodes.use(episode_id, obs) as episode:
            values: dict[str, Any] = {"obs": obs, "truncated": bool(truncated)}
            if episode.asked:
                yield from self._end_at_question(episode, values)
            else:
                yield from self._call(episode, "end", values, SentCall(OTHER))
            self._episodes.open.pop(episode.id, None)

    def close(self) -> Steps[None]:
        """Nothing to do: the server ends what is still open, truncated, when it had no call for long."""
        yield from ()

    # ------------------------------------------------------------------ one call

    def _action_reader(self, timeout_s: float | None) -> Steps[ActionReader]:
        spaces = yield from self._exchange.call("GET", "/v1/spaces", timeout_s=timeout_s)
        return ActionReader(space_of(spaces["action_space"]))

    def _call(
        self, episode: ClientEpisode, verb: str, values: dict[str, Any], call: SentCall, timeout_s: float | None = None
    ) -> Steps[Any]:
        episode.require_no_question(but=call)
        key = f"{self._nonce}-{episode.number}-{episode.calls}"
        return (yield from self._settle([episode], _path(episode, verb), values, key, call, timeout_s))

    def _end_at_question(self, episode: ClientEpisode, values: dict[str, Any]) -> Steps[None]:
        """Ends it where it asked for an action that nobody carried out, whether or not the server has chosen one."""
        values |= {"truncated": True, "t": episode.t}
        if episode.acted:
            values["reward"] = episode.sent
        key = f"{self._nonce}-{episode.number}-{episode.calls}-end"
        yield from self._exchange.call("POST", _path(episode, "end"), values, key, of_episode=True)

    def _settle(
        self,
        episodes: list[ClientEpisode],
        path: str,
        values: dict[str, Any],
        key: str,
        call: SentCall,
        timeout_s: float | None,
    ) -> Steps[Any]:
        """A call that takes rewards along. Its answer, whatever it is, moves its episodes on to their next number."""
        before = [episode.send(call) for episode in episodes]
        if path == "/v1/actions":
            if any(episode.acted for episode in episodes):
                values["rewards"] = [episode.sent for episode in episodes]
        elif episodes[0].acted or "info" in values:
            values["reward"] = episodes[0].sent
        try:
            answer = yield from self._exchange.call("POST", path, values, key, timeout_s, of_episode=True)
        except Unsendable:
            for episode, earlier in zip(episodes, before, strict=True):
                episode.take_back(earlier)
            raise
        except (RefusedCall, SpaceError, EpisodeLostError) as e:
            reused = isinstance(e, RefusedCall) and e.code == "key_reused"
            for episode, earlier in zip(episodes, before, strict=True):
                instead = episode.done_instead(call) if reused else None
                if reused and instead is None:
                    episode.take_back(earlier)
                    episode.require_no_question()
                else:
                    episode.settle(reused, instead or call.kind)
            raise
        for episode in episodes:
            episode.settle(True, call.kind)
        return answer


def _path(episode: ClientEpisode, verb: str) -> str:
    return f"/v1/episodes/{quote(episode.id, safe='')}/{verb}"
