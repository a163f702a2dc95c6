"""Actions as they come over the wire, in the form ``env.step`` takes."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np

from rlsample.env.spaces import ActionCodec, LeafSpec, leaf_spec
from rlsample.errors import ServingError, SpaceError
from rlsample.tree import Tree

__all__ = ["ActionReader"]


class ActionReader:
    """Reads actions of one space.

    Args:
        space: of the actions.
    """

    def __init__(self, space: gymnasium.Space[Any]) -> None:
        self._codec = ActionCodec(space)
        self._spec = leaf_spec(space)
        self._is_discrete = isinstance(space, gymnasium.spaces.Discrete)

    def one(self, value: Any) -> Any:
        """One action. Raises ServingError: it is none of the space."""
        if self._is_discrete and type(value) is int:
            return value
        return self._read(_nest(value, self._spec, 1), 1)[0]

    def many(self, values: Any, count: int) -> list[Any]:
        """``count`` actions that came stacked. Raises ServingError: they are none of the space, or others in number."""
        return self._read(_nest(values, self._spec, None), count)

    def _read(self, column: Tree, count: int) -> list[Any]:
        try:
            return self._codec.check_and_split(column, range(count))
        except SpaceError as e:
            raise ServingError(f"the server's action does not fit its own space: {e}") from e


def _nest(value: Any, spec: Tree, lead: int | None) -> Tree:
    """The columns [K, ...] of a nested value; ``lead`` 1: the value has no axis for K yet."""
    try:
        if isinstance(spec, dict):
            return {key: _nest(value[key], part, lead) for key, part in spec.items()}
        if isinstance(spec, tuple):
            return tuple(_nest(value[k], part, lead) for k, part in enumerate(spec))
        assert isinstance(spec, LeafSpec)
        array = np.array(value, spec.dtype)
        return array[None] if lead else array
    except (KeyError, IndexError, TypeError, ValueError, OverflowError) as e:
        raise ServingError(f"the server's action {str(value)[:100]} does not fit its own space: {e}") from e
