"""Forward passes of small nets without torch: a fraction of its fixed cost per call, on one core.

The weights are copied into matrices that carry the biases with them. A layer's matrix is [in + 1, out + 1]: the last
row is the bias, for which every input row ends in a 1, and the last column makes the 1 for the next layer (a unit that
is saturated, whatever the input: tanh(30) is 1 in float32). Policy and value net run side by side, so that one call of
the activation serves both. What is left per layer is two matrix products and one activation, into buffers made once.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np
import torch

from rlsample.policy.models import Chains, Layer

__all__ = ["NumpyInference", "Plan"]

_ZERO = np.zeros((), np.float32)

# OpenBLAS shares a product of more multiplications than this among threads, which costs many times what it saves here.
_ONE_THREAD = 1 << 18
_FEWEST_ROWS = 16  # of a piece; wider layers are left whole


def _relu(x: np.ndarray, out: np.ndarray) -> None:
    np.maximum(x, _ZERO, out=out)


_ACTIVATIONS: dict[str, tuple[Any, float]] = {"tanh": (np.tanh, 30.0), "relu": (_relu, 1.0)}
"""Name -> (function(x, out), the input for which it gives 1)."""


class Plan(NamedTuple):
    """What one forward pass of K rows does, laid out once.

    Attributes:
        flat: float32 [K, flat_width], to be filled with the encoded observations.
        steps: calls ``f(a, b)`` in order.
        inputs: float32 [K, num_inputs], the result for the distribution.
        values: float32 [K], the result of the value net.
    """

    flat: np.ndarray
    steps: tuple[tuple[Any, np.ndarray, np.ndarray], ...]
    inputs: np.ndarray
    values: np.ndarray


@dataclass(frozen=True)
class _Matrix:
    """A layer's matrix with the parameters it is copied from."""

    array: np.ndarray
    layer: Layer
    free: Any = None

    def refresh(self) -> None:
        linear = self.layer.linear
        out = linear.out_features
        self.array[:-1, :out] = linear.weight.detach().cpu().numpy().T
        self.array[-1, :out] = linear.bias.detach().cpu().numpy()
        if self.free is not None:
            self.array[-1, out:] = self.free.detach().cpu().numpy()


class NumpyInference:
    """A numpy copy of a model's weights, and forward passes through it.

    The owner calls :meth:`refresh` after the weights changed, and sees to it that no thread is in here meanwhile.

    Args:
        chains: the model's layers.
        log_std: parameter whose elements are appended to every row of the policy's outputs, or None.
    """

    def __init__(self, chains: Chains, log_std: torch.Tensor | None) -> None:
        trunk = [_matrix(layer) for layer in chains.trunk]
        policy = [_matrix(layer) for layer in chains.policy[:-1]] + [_matrix(chains.policy[-1], log_std)]
        value = [_matrix(layer) for layer in chains.value]
        self._value_chain = (*trunk, *value)
        # One stage per depth: its matrices, each with the nets (0 policy, 1 value) whose rows it takes and makes.
        self._stages: list[list[tuple[tuple[int, ...], _Matrix]]] = [[((0, 1), matrix)] for matrix in trunk]
        for pair in zip_longest(policy, value):
            self._stages.append([((net,), matrix) for net, matrix in enumerate(pair) if matrix is not None])
        self._flat_width = len(self._value_chain[0].array) - 1
        self._max_rows = 0
        self._plans: dict[int, Plan] = {}
        self.refresh()

    def refresh(self) -> None:
        """Copies the weights, in place."""
        for stage in self._stages:
            for _, matrix in stage:
                matrix.refresh()

    def plan(self, num_rows: int) -> Plan:
        """The plan for K rows. Plans share their buffers: results hold until the next pass of any plan."""
        plan = self._plans.get(num_rows)
        if plan is None:
            if num_rows > self._max_rows:
                self._allocate(num_rows)
            plan = self._plans[num_rows] = self._make_plan(num_rows)
        return plan

    def run(self, plan: Plan) -> tuple[np.ndarray, np.ndarray]:
        """Computes ``(plan.inputs, plan.values)`` from ``plan.flat``."""
        for function, a, b in plan.steps:
            function(a, b)
        return plan.inputs, plan.values

    def values(self, flat: np.ndarray) -> np.ndarray:
        """V of K encoded observations, float32[K], a fresh array."""
        x = np.ones((len(flat), self._flat_width + 1), np.float32)
        x[:, :-1] = flat
        for matrix in self._value_chain:
            x = x.dot(matrix.array)
            if matrix.layer.activation:
                _ACTIVATIONS[matrix.layer.activation][0](x, x)
        return x[:, 0]

    def _allocate(self, num_rows: int) -> None:
        self._plans.clear()
        self._max_rows = num_rows
        self._input = np.ones((num_rows, self._flat_width + 1), np.float32)
        widths = [sum(matrix.array.shape[1] for _, matrix in stage) for stage in self._stages]
        self._buffers = [np.empty(num_rows * width, np.float32) for width in widths]

    def _make_plan(self, num_rows: int) -> Plan:
        steps: list[tuple[Any, np.ndarray, np.ndarray]] = []
        rows = [self._input[:num_rows]] * 2
        for stage, buffer in zip(self._stages, self._buffers, strict=True):
            start = 0
            activated: list[tuple[str, int, int]] = []
            results = list(rows)
            for nets, matrix in stage:
                stop = start + num_rows * matrix.array.shape[1]
                out = buffer[start:stop].reshape(num_rows, -1)
                steps += _products(rows[nets[0]], matrix.array, out)
                for net in nets:
                    results[net] = out
                if matrix.layer.activation:
                    activated.append((matrix.layer.activation, start, stop))
                start = stop
            rows = results
            if len(activated) == 2 and activated[0][0] == activated[1][0]:
                activated = [(activated[0][0], 0, start)]
            for name, first, last in activated:
                steps.append((_ACTIVATIONS[name][0], buffer[first:last], buffer[first:last]))
        return Plan(self._input[:num_rows, :-1], tuple(steps), rows[0], rows[1][:, 0])


def _products(rows: np.ndarray, matrix: np.ndarray, out: np.ndarray) -> list[tuple[Any, np.ndarray, np.ndarray]]:
    """The steps of ``out = rows @ matrix``: equal stretches of rows that are small enough for one thread."""
    most = _ONE_THREAD // matrix.size
    pieces = -(-len(rows) // most) if most >= _FEWEST_ROWS else 1
    size = -(-len(rows) // pieces)
    starts = range(0, len(rows), size)
    return [(rows[start : start + size].dot, matrix, out[start : start + size]) for start in starts]


def _matrix(layer: Layer, free: torch.Tensor | None = None) -> _Matrix:
    """The layer's matrix, with everything in place that no refresh touches."""
    linear = layer.linear
    extra = 1 if layer.activation else (0 if free is None else len(free))
    array = np.zeros((linear.in_features + 1, linear.out_features + extra), np.float32)
    if layer.activation:
        array[-1, -1] = _ACTIVATIONS[layer.activation][1]
    return _Matrix(array, layer, free)
