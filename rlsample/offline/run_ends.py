"""A run's reader, writer and judge, as its settings say."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Generator
from typing import Any

import numpy as np

from rlsample.env.spaces import leaf_spec
from rlsample.errors import ConfigError
from rlsample.offline.episode_assembler import EpisodeAssembler
from rlsample.offline.estimators import episode_ratios, estimate_from_ratios, require_logp
from rlsample.offline.log_reader import LogReader
from rlsample.offline.mixed_reader import MixedReader
from rlsample.offline.offline_settings import SAMPLER, OfflineSettings, parse_input
from rlsample.policy.policy import Policy
from rlsample.sample_batch import (
    ACTION_LOGP,
    ACTIONS,
    NEXT_OBS,
    OBS,
    POLICY_VERSION,
    REWARDS,
    TERMINATED,
    VALUES,
    SampleBatch,
)
from rlsample.tree import Tree, flatten

__all__ = ["InputJudge", "PolicyInput", "SamplerInput", "make_input"]

_NEEDED = (OBS, ACTIONS, REWARDS, TERMINATED)


class SamplerInput:
    """The evaluator's own sampler as one source among several."""

    samples = True

    def __init__(self, sample: Callable[[], SampleBatch]) -> None:
        self._sample = sample

    def __iter__(self) -> SamplerInput:
        return self

    def __next__(self) -> SampleBatch:
        return self._sample()

    def get_state(self) -> None:
        """The evaluator keeps its state."""

    def set_state(self, state: Any) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing to close: the evaluator does."""


class PolicyInput:
    """Logged batches as a policy learns from them: checked against its spaces; ``values``, if it has such a column, and
    ``policy_version`` are those of its weights of now (the logged version counts another run's updates).

    Raises:
        ConfigError: from ``next``: a column that is missing or does not fit (named with its dtype and shape).
    """

    samples = False

    def __init__(self, reader: LogReader, policy: Policy) -> None:
        self._reader, self._policy = reader, policy
        self._specs = {OBS: leaf_spec(policy.observation_space), ACTIONS: leaf_spec(policy.action_space)}
        self.get_state, self.set_state, self.close = reader.get_state, reader.set_state, reader.close

    def __iter__(self) -> PolicyInput:
        return self

    def __next__(self) -> SampleBatch:
        batch = next(self._reader)
        self._check(batch)
        batch[POLICY_VERSION] = np.full(batch.count, self._policy.version)
        if VALUES in self._policy.extra_columns:
            batch[VALUES] = self._policy.values(batch[OBS])
        return batch

    def _check(self, batch: SampleBatch) -> None:
        missing = [name for name in (*_NEEDED, NEXT_OBS) if name not in batch]
        if ACTION_LOGP in self._policy.extra_columns and VALUES in self._policy.extra_columns:
            if ACTION_LOGP not in batch:
                missing.append(ACTION_LOGP)
            elif not np.isfinite(batch[ACTION_LOGP]).all():
                raise ConfigError(
                    f"action_logp is not finite in some rows of {self._reader.source}; "
                    f"{type(self._policy).__name__} weighs rows by it: use an algorithm that does not, such as dqn"
                )
        if missing:
            raise ConfigError(
                f"the logs in {self._reader.source} lack {', '.join(missing)}, which {type(self._policy).__name__} "
                f"learns from; they have {', '.join(batch)}"
            )
        specs_of = self._specs if NEXT_OBS not in batch.keys() else {**self._specs, NEXT_OBS: self._specs[OBS]}  # noqa: SIM118
        for name, specs in specs_of.items():
            got, expected = _shapes(batch[name]), {path: (str(s.dtype), s.shape) for path, s in flatten(specs)}
            if got != expected:
                raise ConfigError(
                    f"column {name!r} of the logs in {self._reader.source} does not fit the env: it has {got}, the "
                    f"space {expected}"
                )


def make_input(
    settings: OfflineSettings,
    policy: Policy,
    index: int,
    num_readers: int,
    seed: int,
    sample: Callable[[], SampleBatch],
) -> Any:
    """A :class:`~rlsample.evaluation.batch_ends.BatchSource` as ``settings.input`` says, without end.

    Args:
        index, num_readers: which share of the logs.
        seed: of shuffles and mixing.
        sample: what the source "sampler" is.

    Raises:
        ConfigError: a source without logs.
    """
    assert settings.input is not None
    seeds = np.random.SeedSequence([seed, index]).generate_state(64)
    sources: list[tuple[Any, float]] = []
    for number, (source, share) in enumerate(parse_input(settings.input)):
        if source == SAMPLER:
            sources.append((SamplerInput(sample), share))
            continue
        window, shuffle_seed = settings.input_shuffle_window, int(seeds[1 + number % 63])
        reader = LogReader(
            source, index, num_readers, None, window, shuffle_seed, max_fragment_size=settings.input_max_fragment_size
        )
        sources.append((PolicyInput(reader, policy), share))
    return sources[0][0] if len(sources) == 1 else MixedReader(sources, int(seeds[0]))


class InputJudge:
    """Estimates of the policy's return from the first whole episodes of the logs, which it keeps in memory.

    Raises:
        ConfigError: fewer than two whole episodes in the logs, or rows without a finite action_logp.
    """

    def __init__(self, settings: OfflineSettings, gamma: float) -> None:
        assert settings.input is not None
        self._settings, self._gamma = settings, gamma
        logs = [source for source, _ in parse_input(settings.input) if source != SAMPLER]
        with contextlib.closing(_whole_episodes(logs, settings.input_max_fragment_size)) as episodes:
            self._episodes = list(itertools.islice(episodes, settings.input_evaluation_episodes))
        if len(self._episodes) < 2:
            raise ConfigError(f"input_evaluation: fewer than two whole episodes in {', '.join(logs)}")
        require_logp(self._episodes)
        self._last: dict[str, float | None] = {}

    def tags(self, policy: Policy, iteration: int) -> dict[str, float | None]:
        """Per estimator ``input/<name>_return``, ``_error`` (standard error) and ``_ess`` (effective sample size), and
        ``input/logged_return``; new ones every ``input_evaluation_interval`` iterations, else the last. NaN: None."""
        if self._last and iteration % self._settings.input_evaluation_interval:
            return self._last
        ratios = episode_ratios(self._episodes, policy)
        found: dict[str, float] = {}
        for name in self._settings.input_evaluation:
            estimate = estimate_from_ratios(ratios, self._gamma, name)
            found[f"input/{name}_return"] = estimate.value
            found[f"input/{name}_error"] = estimate.standard_error
            found[f"input/{name}_ess"] = estimate.effective_sample_size
            found["input/logged_return"] = estimate.logged_value
        self._last = {tag: value if math.isfinite(value) else None for tag, value in found.items()}
        return self._last


def _whole_episodes(logs: list[str], max_fragment_size: int) -> Generator[SampleBatch, None, None]:
    assembler = EpisodeAssembler()
    with LogReader(logs, max_fragment_size=max_fragment_size) as reader:
        for batch in reader:
            yield from assembler.add(batch)


def _shapes(tree: Tree) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {path: (str(leaf.dtype), leaf.shape[1:]) for path, leaf in flatten(tree)}
