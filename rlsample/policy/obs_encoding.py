"""From observation trees to what models read: one flat float vector, images and the action mask.

=====================  ===========================================================================================
observation space      part of the flat vector, in the order of the space (Dict and Tuple: depth first)
=====================  ===========================================================================================
Box, any shape         its elements as float32
Discrete(n)            n zeros with a one at ``value - start``
MultiDiscrete          one such vector per component
MultiBinary            its bits
image                  none: it stays uint8 and goes to the convolutions
"action_mask"          none (only as a key of a Dict at the top): it masks the action distribution
=====================  ===========================================================================================

An image is a uint8 Box of shape (C, H, W), (H, W, C) or (H, W) with both sides at least 36 (what the convolutions
need). The channel axis is the smaller of the first and the last, the first one of equals.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import gymnasium
import numpy as np

from rlsample.errors import SpaceError
from rlsample.tree import Tree, leaves, num_rows

__all__ = ["ACTION_MASK", "Encoded", "ImageSpec", "ObsEncoder"]

ACTION_MASK = "action_mask"
MIN_IMAGE_SIDE = 36


class Encoded(NamedTuple):
    """K encoded observations, as arrays or as tensors.

    Attributes:
        flat: float32 [K, flat_width]; K rows of width 0 where all observations are images.
        images: uint8 [K, ...] each, in the space's own shape.
    """

    flat: Any
    images: tuple[Any, ...] = ()


@dataclass(frozen=True)
class ImageSpec:
    """Shape of one image and its channel axis: 0, -1, or None for (H, W)."""

    shape: tuple[int, ...]
    channel_axis: int | None


@dataclass(frozen=True)
class _Leaf:
    """One leaf of the observation: where it is in the tree, and its part of the flat vector."""

    path: tuple[Any, ...]
    space: Any
    columns: slice


class ObsEncoder:
    """Encodes observations of one space.

    Attributes:
        flat_width: columns of the flat vector.
        images: one spec per image, in the order of the space.
        has_mask: the space is a Dict with the key "action_mask".

    Raises:
        SpaceError: a space of no fixed size (named, with where it is).
    """

    def __init__(self, space: gymnasium.Space[Any]) -> None:
        self.flat_width = 0
        self.images: tuple[ImageSpec, ...] = ()
        self.has_mask = isinstance(space, gymnasium.spaces.Dict) and ACTION_MASK in space.spaces
        self._leaves: list[_Leaf] = []
        self._image_paths: list[tuple[Any, ...]] = []
        self._add(space, ())
        if self.flat_width == 0 and not self.images:
            raise SpaceError(f"observation space {space} has nothing that a model can read")
        self._is_vector = isinstance(space, gymnasium.spaces.Box) and not self.images
        self._needs_no_copy = self._is_vector and space.dtype == np.float32 and len(space.shape or ()) == 1

    def _add(self, space: gymnasium.Space[Any], path: tuple[Any, ...]) -> None:
        spaces = gymnasium.spaces
        if isinstance(space, (spaces.Dict, spaces.Tuple)):
            members = space.spaces.items() if isinstance(space.spaces, dict) else enumerate(space.spaces)
            for key, member in members:
                if path or not (self.has_mask and key == ACTION_MASK):
                    self._add(member, (*path, key))
            return
        image = _image_spec(space)
        if image is not None:
            self.images = (*self.images, image)
            self._image_paths.append(path)
            return
        width = _flat_width(space, path)
        self._leaves.append(_Leaf(path, space, slice(self.flat_width, self.flat_width + width)))
        self.flat_width += width

    def encode(self, obs: Tree) -> Encoded:
        """K observations (tree [K, ...]). Float32 vectors come back as they are; else the flat part is a fresh array.

        Images are the observations' own arrays.

        Raises:
            SpaceError: a leaf of another shape than the space has.
        """
        if self._needs_no_copy and obs.dtype == np.float32 and obs.ndim == 2 and obs.shape[1] == self.flat_width:
            return Encoded(obs)
        flat = np.empty((num_rows(obs), self.flat_width), np.float32)
        self.write_flat(obs, flat)
        return Encoded(flat, tuple(_at(obs, path) for path in self._image_paths))

    def write_flat(self, obs: Tree, out: np.ndarray) -> None:
        """Writes the flat vectors of K observations into ``out``, float [K, flat_width]; it may be strided."""
        if self._is_vector:
            if obs.shape != out.shape:
                obs = self._reshaped(obs, out, self._leaves[0])
            out[...] = obs
            return
        for leaf in self._leaves:
            column = self._reshaped(_at(obs, leaf.path), out, leaf)
            part = out[:, leaf.columns]
            if isinstance(leaf.space, gymnasium.spaces.Discrete):
                part[...] = 0
                part[np.arange(len(part)), column[:, 0] - leaf.space.start] = 1
            elif isinstance(leaf.space, gymnasium.spaces.MultiDiscrete):
                part[...] = 0
                sizes = leaf.space.nvec.reshape(-1)
                begin = np.cumsum(sizes) - sizes
                index = column - np.asarray(leaf.space.start).reshape(-1) + begin
                part[np.arange(len(part))[:, None], index] = 1
            else:
                part[...] = column

    def _reshaped(self, column: np.ndarray, out: np.ndarray, leaf: _Leaf) -> np.ndarray:
        expected = (len(out), *(leaf.space.shape or ()))
        if column.shape != expected:
            where = "".join(f"[{key!r}]" for key in leaf.path)
            raise SpaceError(f"observations{where} have shape {column.shape}, expected {expected} for {leaf.space}")
        return column.reshape(len(out), -1)

    def mask(self, obs: Tree) -> np.ndarray:
        """The action mask, one entry per choice: [K, ...] flattened to [K, M]. Only where ``has_mask``.

        A Dict or Tuple of masks is joined in its order.
        """
        parts = [part.reshape(len(part), -1) for part in leaves(obs[ACTION_MASK])]
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)


def _at(tree: Tree, path: tuple[Any, ...]) -> np.ndarray:
    for key in path:
        tree = tree[key]
    return tree


def _image_spec(space: gymnasium.Space[Any]) -> ImageSpec | None:
    if not isinstance(space, gymnasium.spaces.Box) or space.dtype != np.uint8:
        return None
    shape = tuple(space.shape)
    if len(shape) == 2:
        return ImageSpec(shape, None) if min(shape) >= MIN_IMAGE_SIDE else None
    if len(shape) != 3:
        return None
    channel_axis = 0 if shape[0] <= shape[2] else -1
    sides = shape[1:] if channel_axis == 0 else shape[:2]
    return ImageSpec(shape, channel_axis) if min(sides) >= MIN_IMAGE_SIDE else None


def _flat_width(space: gymnasium.Space[Any], path: tuple[Any, ...]) -> int:
    spaces = gymnasium.spaces
    if isinstance(space, spaces.Discrete):
        return int(space.n)
    if isinstance(space, spaces.MultiDiscrete):
        return int(space.nvec.sum())
    if isinstance(space, (spaces.Box, spaces.MultiBinary)):
        return int(np.prod(space.shape))
    where = "".join(f"[{key!r}]" for key in path) or "the observation"
    raise SpaceError(f"{where}: no model reads the space {space}; wrap it as a Box, Discrete, Dict or Tuple")
