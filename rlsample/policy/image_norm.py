"""Images as the convolutions read them once their pixels' statistics are known.

What never moves (a board, walls, a white frame) is most of an image. Scaled to [0, 1] it drives every filter, while a
ball of a few pixels changes a sum of hundreds by a few per cent. Less the mean, what moves is all that is left.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from rlsample.errors import ConfigError

__all__ = ["ImageNorm", "PixelStatistics"]

LIMIT = 5.0
MIN_SPREAD = 5.0  # of 255 levels: a pixel that hardly ever changed must not become the loudest one
_SCALED = 255.0  # the spread that makes [0, 1] of pixels whose statistics are not known


class ImageNorm(nn.Module):
    """``(pixel - mean) / spread``, limited to [-5, 5], for each pixel by itself.

    Both are parameters without a gradient: they travel with the weights, to other processes, devices and checkpoints,
    and no update changes them. Until :meth:`set` they scale to [0, 1].

    Args:
        shape: of an image, in whatever order of axes.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.zeros(shape), requires_grad=False)
        self.spread = nn.Parameter(torch.full(shape, _SCALED), requires_grad=False)

    def forward(self, image: Tensor) -> Tensor:
        """uint8 [K, *shape] to float32."""
        return ((image.float() - self.mean) / self.spread).clamp(-LIMIT, LIMIT)

    @torch.no_grad()
    def set(self, mean: np.ndarray, deviation: np.ndarray) -> None:
        """Takes over each pixel's mean and standard deviation (copies), of which less than 5 levels count as 5."""
        self.mean.copy_(torch.from_numpy(np.asarray(mean, np.float32)))
        self.spread.copy_(torch.from_numpy(np.maximum(deviation, MIN_SPREAD).astype(np.float32)))


class PixelStatistics:
    """Mean and standard deviation of each pixel over rows that come in batches.

    Sums are whole numbers: how the rows are cut into batches changes no bit of the result.
    """

    def __init__(self) -> None:
        self._count, self._sum, self._squares = 0, np.zeros((), np.int64), np.zeros((), np.int64)

    def add(self, images: np.ndarray) -> None:
        """Counts uint8 [K, ...]."""
        wide = images.astype(np.int64)
        self._count += len(images)
        self._sum = self._sum + wide.sum(0)
        self._squares = self._squares + np.square(wide, out=wide).sum(0)

    def result(self) -> tuple[np.ndarray, np.ndarray]:
        """Mean and deviation: float64 [...].

        Raises:
            ConfigError: there are no rows.
        """
        if not self._count:
            raise ConfigError("the mean of pixels needs at least one image")
        mean = self._sum / self._count
        return mean, np.sqrt(np.maximum(self._squares / self._count - mean * mean, 0.0))
