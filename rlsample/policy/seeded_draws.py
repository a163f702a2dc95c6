"""Draws from torch's global generator that leave it as it was."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch

__all__ = ["seeded_draws"]

_one_at_a_time = threading.Lock()


@contextlib.contextmanager
def seeded_draws(seed: int | None) -> Iterator[None]:
    """Inside, torch's global CPU generator starts from ``seed`` (None: from where it is); afterwards it is put back.

    One thread at a time: two would take each other's numbers, and torch 2.13 can block for ever where two threads ask
    for the generator's state at once.
    """
    with _one_at_a_time, torch.random.fork_rng(devices=[]):
        if seed is not None:
            torch.manual_seed(seed)
        yield
