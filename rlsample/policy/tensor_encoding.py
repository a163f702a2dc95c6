"""The observation encoding on a device: what :class:`~rlsample.policy.obs_encoding.ObsEncoder` does, for tensors.

Observations travel to the device in their own dtypes (a Discrete one as 8 bytes, an image as uint8) and are encoded
there.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import torch
from torch import Tensor

from rlsample.policy.obs_encoding import ACTION_MASK, Encoded, ObsEncoder
from rlsample.tree import Tree, leaves

__all__ = ["encode_tensors", "mask_tensors"]


def encode_tensors(encoder: ObsEncoder, obs: Tree) -> Encoded:
    """K observations (tree of tensors [K, ...]) as the model reads them, on their device."""
    parts = [_flat(leaf.space, _at(obs, leaf.path)) for leaf in encoder._leaves]
    images = tuple(_at(obs, path) for path in encoder._image_paths)
    if len(parts) == 1:
        return Encoded(parts[0], images)
    if not parts:
        return Encoded(torch.empty((len(images[0]), 0), device=images[0].device), images)
    return Encoded(torch.cat(parts, 1), images)


def mask_tensors(obs: Tree) -> Tensor:
    """The action mask [K, M] of observations that have one."""
    parts = [part.reshape(len(part), -1) for part in leaves(obs[ACTION_MASK])]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def _at(tree: Tree, path: tuple[Any, ...]) -> Tensor:
    for key in path:
        tree = tree[key]
    return tree


def _flat(space: gymnasium.Space[Any], column: Tensor) -> Tensor:
    """float32 [K, width] of one leaf."""
    flat = column.reshape(len(column), -1)
    if isinstance(space, gymnasium.spaces.Discrete):
        return _one_hot(flat - int(space.start), (int(space.n),))
    if isinstance(space, gymnasium.spaces.MultiDiscrete):
        start = torch.as_tensor(space.start.reshape(-1).tolist(), device=flat.device)
        return _one_hot(flat - start, tuple(space.nvec.reshape(-1).tolist()))
    return flat.float()


def _one_hot(index: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """One vector per component, side by side; ``index`` is int [K, components]."""
    begin = [sum(sizes[:i]) for i in range(len(sizes))]
    out = torch.zeros((len(index), sum(sizes)), device=index.device)
    return out.scatter_(1, index.long() + torch.as_tensor(begin, device=index.device), 1.0)
