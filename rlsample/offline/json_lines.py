"""A batch as one line of JSON."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np

from rlsample.errors import ConfigError
from rlsample.offline.array_codec import MAX_FRAGMENT_SIZE, ByteBudget, decode_tree, encode_tree
from rlsample.sample_batch import EPS_ID, OBS, REWARDS, TERMINATED, TRUNCATED, NextObs, SampleBatch
from rlsample.tree import Tree, leaves, map_tree

__all__ = ["VERSION", "decode_line", "encode_line", "require_like_obs"]

VERSION = 1


def encode_line(batch: SampleBatch, level: int = 1) -> bytes:
    """The batch as one line, with the newline at its end; see docs/offline.md for the fields.

    Args:
        level: of zlib.

    Raises:
        ConfigError: a column that logs cannot hold.
    """
    document: dict[str, Any] = {"rlsample": VERSION, "count": batch.count, "summary": _summary(batch)}
    if batch.fragment_lengths is not None:
        document["fragment_lengths"] = batch.fragment_lengths.tolist()
    document["columns"] = {name: encode_tree(column, name, level) for name, column in batch.items()}
    nxt = batch.next_obs_source
    if nxt is not None:
        if nxt.source is not None:  # a slice or a selection: its next observations lie in another batch
            nxt = nxt.detach(batch.get(OBS))
        document["next_obs"] = {
            "index": encode_tree(nxt.index, "next_obs", level),
            "extra": encode_tree(nxt.extra, "next_obs", level),
        }
    return json.dumps(document, allow_nan=False, separators=(",", ":")).encode() + b"\n"


def decode_line(line: bytes, max_fragment_size: int = MAX_FRAGMENT_SIZE) -> SampleBatch:
    """The batch of a line: equal columns (values bit for bit, dtypes, shapes), next_obs and fragment_lengths.

    Args:
        max_fragment_size: bytes that its arrays may have; no more than that are unpacked.

    Raises:
        ValueError: the line is damaged, cut, too large, or of a newer version; says which.
    """
    try:
        document = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"no JSON ({error})") from error
    if not isinstance(document, dict) or not isinstance(document.get("columns"), dict):
        raise ValueError("no rlsample fragment: it has no columns")
    if document.get("rlsample") != VERSION:
        raise ValueError(f"written as version {document.get('rlsample')!r}, this rlsample reads {VERSION}")
    budget = ByteBudget(max_fragment_size)
    columns = {name: decode_tree(column, budget) for name, column in document["columns"].items()}
    nxt = document.get("next_obs")
    lengths = document.get("fragment_lengths")
    try:
        source = None if nxt is None else NextObs(decode_tree(nxt["index"], budget), decode_tree(nxt["extra"], budget))
        if source is not None and getattr(source.index, "dtype", None) != np.int64:
            raise ValueError("the index of next_obs is no int64 array")
        batch = SampleBatch(columns, source, None if lengths is None else np.array(lengths, np.int64))
    except (ConfigError, LookupError, TypeError, OverflowError, AttributeError, StopIteration) as error:
        raise ValueError(f"parts that do not fit each other ({error})") from error
    if batch.count != document.get("count"):
        raise ValueError(f"{batch.count} rows, where count says {document.get('count')!r}")
    if source is not None:
        require_like_obs(source.extra, batch[OBS])
    return batch


def require_like_obs(extra: Tree, obs: Tree) -> None:
    """Raises ValueError unless the observations [E, ...] that ``next_obs`` adds are of the structure of ``obs``."""
    found, expected = (map_tree(lambda leaf: f"{leaf.dtype}{list(leaf.shape[1:])}", tree) for tree in (extra, obs))
    if found != expected or len({leaf.shape[:1] for leaf in leaves(extra)}) > 1:
        raise ValueError(f"next_obs has observations of {found}, the column obs of {expected}")


def _summary(batch: SampleBatch) -> dict[str, Any]:
    """For people and for grep; nothing reads it."""
    found: dict[str, Any] = {}
    for name in (REWARDS, EPS_ID, TERMINATED, TRUNCATED):
        column = batch.get(name)
        if not isinstance(column, np.ndarray) or column.dtype.kind not in "biuf":
            continue
        if name == REWARDS:
            with np.errstate(all="ignore"):
                total = float(np.sum(column, dtype=np.float64))
            found["reward_sum"] = total if math.isfinite(total) else None
        elif name == EPS_ID:
            found["episodes"] = len(np.unique(column))
        else:
            found[name] = int(np.count_nonzero(column))
    return found
