"""Statistics of several updates as one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

__all__ = ["mean_stats"]


def mean_stats(stats: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The mean of each statistic over the updates that have it; empty for no updates."""
    names = dict.fromkeys(name for one in stats for name in one)
    return {name: float(np.mean([one[name] for one in stats if name in one])) for name in names}
