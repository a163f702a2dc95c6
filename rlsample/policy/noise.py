"""Random numbers for actions, drawn ahead in blocks so that one poll costs a slice and no generator call.

Rows are handed out strictly in order: one call for K rows gives what K calls for one row give. So how observations
are batched does not change which noise an observation gets.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlsample.errors import ConfigError

__all__ = ["BLOCK_ROWS", "NoiseStream"]

BLOCK_ROWS = 4096


def _gumbel(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    return -np.log(np.maximum(rng.standard_exponential(shape), np.finfo(np.float64).tiny))


_DRAW: dict[str, Any] = {
    "gumbel": _gumbel,
    "normal": lambda rng, shape: rng.standard_normal(shape),
    "logistic": lambda rng, shape: rng.logistic(size=shape),
}


class NoiseStream:
    """An endless table of noise rows, float32 [.., width], made of columns of fixed kinds.

        noise = NoiseStream([("gumbel", 2), ("normal", 3)], seed=0)
        noise.take(8)                # float32[8, 5]: two columns Gumbel, three columns standard normal

    Args:
        kinds: ``(kind, columns)`` from left to right; kinds are "gumbel", "normal" and "logistic" (all standard).
        seed: of the stream's own PCG64 generator; an int or a SeedSequence.
    """

    def __init__(self, kinds: Sequence[tuple[str, int]], seed: int | np.random.SeedSequence) -> None:
        self._kinds = tuple(kinds)
        self.width = sum(columns for _, columns in self._kinds)
        self._rng = np.random.Generator(np.random.PCG64(seed))
        self._draw_block()

    def _draw_block(self) -> None:
        self._block_state = json.dumps(self._rng.bit_generator.state)
        block = np.empty((BLOCK_ROWS, self.width), np.float32)
        start = 0
        for kind, columns in self._kinds:
            block[:, start : start + columns] = _DRAW[kind](self._rng, (BLOCK_ROWS, columns))
            start += columns
        self._block = block
        self._position = 0

    def take(self, num_rows: int) -> np.ndarray:
        """The next rows, float32 [num_rows, width]. Often a view of the block: read it, do not write to it."""
        start = self._position
        stop = start + num_rows
        if stop <= BLOCK_ROWS:
            self._position = stop
            return self._block[start:stop]
        parts = [self._block[start:]]
        missing = num_rows - len(parts[0])
        while missing > 0:
            self._draw_block()
            self._position = min(missing, BLOCK_ROWS)
            parts.append(self._block[: self._position])
            missing -= self._position
        return np.concatenate(parts)

    def get_state(self) -> dict[str, Any]:
        """Strings and numbers from which :meth:`set_state` continues with the same rows."""
        return {"block": self._block_state, "position": self._position, "kinds": json.dumps(self._kinds)}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continues exactly where :meth:`get_state` was called, also on a stream of another seed.

        Raises:
            ConfigError: the state is of a stream with other columns; nothing changed.
        """
        kinds = json.dumps(self._kinds)
        if state["kinds"] != kinds:
            raise ConfigError(f"noise state has the columns {state['kinds']}, this policy draws {kinds}")
        self._rng.bit_generator.state = json.loads(state["block"])
        self._draw_block()
        self._position = int(state["position"])
