"""Batches from several sources, each with its probability."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlsample.errors import ConfigError
from rlsample.evaluation.batch_ends import BatchSource
from rlsample.sample_batch import SampleBatch

__all__ = ["MixedReader"]

log = logging.getLogger(__name__)


class MixedReader:
    """Draws the source of each batch at random. A context manager.

        with MixedReader([(LogReader("old", repeat=None), 0.3), (LogReader("new", repeat=None), 0.7)]) as reader: ...

    A source that ends is left out from then on; this ends when all have.

    Args:
        sources: ``(source, probability)``; they are closed with this.
        seed: of the draws.

    Raises:
        ConfigError: no sources, or probabilities that are not positive or do not sum to 1.
    """

    def __init__(self, sources: Sequence[tuple[BatchSource, float]], seed: int = 0) -> None:
        shares = [share for _, share in sources]
        if not sources or not all(share > 0 for share in shares) or not math.isclose(sum(shares), 1.0, abs_tol=1e-9):
            raise ConfigError(f"the probabilities of mixed sources must be positive and sum to 1, not {shares}")
        self._sources = [source for source, _ in sources]
        self._shares = np.array(shares)
        self._rng = np.random.default_rng(seed)

    @property
    def samples(self) -> bool:
        """Whether one of the sources is a sampler."""
        return any(getattr(source, "samples", False) for source in self._sources)

    def __iter__(self) -> MixedReader:
        return self

    def __next__(self) -> SampleBatch:
        while self._shares.any():
            at = int(self._rng.choice(len(self._sources), p=self._shares / self._shares.sum()))
            batch = next(self._sources[at], None)
            if batch is not None:
                return batch
            self._shares[at] = 0.0
        raise StopIteration

    def get_state(self) -> dict[str, Any]:
        """Where it and its sources are."""
        return {
            "rng": self._rng.bit_generator.state,
            "shares": self._shares.copy(),
            "sources": [source.get_state() for source in self._sources],
        }

    def set_state(self, state: Mapping[str, Any] | None) -> None:
        """Goes on from :meth:`get_state` of one with the same arguments. Of another one: begins anew, and warns."""
        if not state or len(state.get("sources", ())) != len(self._sources):
            log.warning("the state is not one of these %d sources: begins with its input", len(self._sources))
            return
        self._rng.bit_generator.state = state["rng"]
        self._shares = np.array(state["shares"])
        for source, inner in zip(self._sources, state["sources"], strict=True):
            source.set_state(inner)

    def close(self) -> None:
        """Closes the sources. Idempotent."""
        for source in self._sources:
            source.close()

    def __enter__(self) -> MixedReader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
