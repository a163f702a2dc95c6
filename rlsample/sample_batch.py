"""Rows of experience as columns of equal length.

A batch that came from ``sample()`` stores each observation once. ``next_obs`` is derived: it is the observation of
another row, or one of a few extra observations (the last ones of episodes, and where a fragment was cut).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlsample.tree import Tree

__all__ = ["NextObs", "SampleBatch"]

OBS = "obs"
ACTIONS = "actions"
REWARDS = "rewards"
TERMINATED = "terminated"
TRUNCATED = "truncated"
NEXT_OBS = "next_obs"
ACTION_LOGP = "action_logp"
VALUES = "values"
ADVANTAGES = "advantages"
VALUE_TARGETS = "value_targets"
EPS_ID = "eps_id"
T = "t"
ENV_ID = "env_id"
AGENT_ID = "agent_id"
FRAGMENT_ID = "fragment_id"
POLICY_VERSION = "policy_version"


@dataclass(frozen=True)
class NextObs:
    """Where each row's next observation is.

    Attributes:
        index: int64[N]. ``i >= 0``: row i of ``source``; ``i < 0``: row ``-1 - i`` of ``extra``.
        extra: tree [E, ...], observations that are no row's own.
        source: tree [M, ...], the observations that ``index`` counts in; None: the batch's own ``obs`` column.
    """

    index: np.ndarray
    extra: Tree
    source: Tree = None


class SampleBatch:
    """Contract to be filled in."""

    def __init__(self, columns: Mapping[str, Tree], next_obs: NextObs | None = None) -> None: ...
