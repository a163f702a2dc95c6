"""Logs played again as if they were being served."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import gymnasium

from rlsample.env.serving import ServingEnv
from rlsample.env.serving.serving_settings import ServingSettings
from rlsample.errors import ServingError
from rlsample.offline.episode_assembler import EpisodeAssembler
from rlsample.offline.log_reader import LogReader
from rlsample.sample_batch import ACTION_LOGP, ACTIONS, NEXT_OBS, OBS, REWARDS, TERMINATED, SampleBatch
from rlsample.tree import Tree, map_tree

__all__ = ["LogReplayEnv"]

_TIMEOUT_S = 1e6  # the learner decides how fast rows are taken; closing the env wakes whoever waits


class LogReplayEnv(ServingEnv):
    """A ServingEnv whose clients are logs: each row goes through log_action and log_returns.

        env = LogReplayEnv("logs", observation_space, action_space)
        with CommonPolicyEvaluator(env, DQNPolicy) as evaluator:
            batch = evaluator.sample()      # obs, actions, rewards and ends as logged; values of this policy

    Episodes are put together first (by eps_id and t) and then played, ``num_lanes`` at a time. One that the logs do not
    hold to its end is ended there as truncated; one without its beginning starts at its first row. They get new
    eps_ids. A row both terminated and truncated comes out as terminated. Rows are never dropped: with the default
    ``sample_queue_full`` the logs wait for the learner.

    After the last row ``run()`` returns: ``sample()`` then gives what is left and raises ServingEnded after that.

    Args:
        logs: what :class:`LogReader` takes, or an iterable of batches (a LogReader, for repeats and sharing).
        observation_space, action_space: of the env that was logged.
        num_lanes: episodes played at a time.

    Raises:
        ConfigError: no logs there.
        SpaceError: from ``sample()``, as its cause: a row that does not fit the spaces. Box actions of policies may lie
            outside the bounds: give an unbounded Box then.
    """

    may_wait = True

    def __init__(
        self,
        logs: str | Path | Iterable[SampleBatch],
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        num_lanes: int = 8,
        settings: ServingSettings | None = None,
    ) -> None:
        settings = settings or ServingSettings(timeout_s=_TIMEOUT_S, idle_timeout_s=None)
        super().__init__(observation_space, action_space, num_lanes, settings)
        self._logs = LogReader(logs) if isinstance(logs, (str, Path)) else logs

    def run(self) -> None:
        """Plays the logs from beginning to end."""
        try:
            self._play()
        except ServingError:
            if not self.over:  # not just closed
                raise
        finally:
            close = getattr(self._logs, "close", None)
            if close is not None:
                close()

    def _play(self) -> None:
        episodes = self._episodes()
        playing: list[Iterator[None]] = []
        while True:
            while len(playing) < self.desk.registry.max_concurrent:
                episode = next(episodes, None)
                if episode is None:
                    break
                playing.append(self._rows(episode))
            if not playing:
                return
            playing = [rows for rows in playing if next(rows, self) is not self]

    def _episodes(self) -> Iterator[SampleBatch]:
        assembler = EpisodeAssembler()
        number = 0
        for batch in self._logs:
            before, number = number, getattr(self._logs, "pass_number", 0)
            if number != before:  # what that pass left open goes on nowhere
                yield from assembler.rest()
            yield from assembler.add(batch)
        yield from assembler.rest()

    def _rows(self, episode: SampleBatch) -> Iterator[None]:
        """Plays one row per ``next``, and the end with the last one."""
        obs, actions, rewards = episode[OBS], episode[ACTIONS], episode[REWARDS]
        logp = episode.get(ACTION_LOGP)
        episode_id = self.start_episode()
        for t in range(episode.count):
            known = logp is not None and math.isfinite(logp[t])
            self.log_action(_row(obs, t), _row(actions, t), episode_id, float(logp[t]) if known else None)
            self.log_returns(float(rewards[t]), episode_id=episode_id)
            if t + 1 < episode.count:
                yield
        final = episode.slice(episode.count - 1, episode.count)[NEXT_OBS]
        self.end_episode(_row(final, 0), episode_id, truncated=not episode[TERMINATED][-1])


def _row(tree: Tree, row: int) -> Any:
    return map_tree(lambda leaf: leaf[row], tree)
