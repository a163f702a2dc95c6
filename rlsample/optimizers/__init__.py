"""Optimizers drive evaluators; they see evaluators and batches only."""

from rlsample.optimizers.async_gradients_optimizer import AsyncGradientsOptimizer, AsyncGradientsSettings
from rlsample.optimizers.microbatch_optimizer import MicrobatchOptimizer, MicrobatchSettings
from rlsample.optimizers.policy_optimizer import PolicyOptimizer
from rlsample.optimizers.sync_samples_optimizer import SyncSamplesOptimizer, SyncSamplesSettings

__all__ = [
    "AsyncGradientsOptimizer",
    "AsyncGradientsSettings",
    "MicrobatchOptimizer",
    "MicrobatchSettings",
    "PolicyOptimizer",
    "SyncSamplesOptimizer",
    "SyncSamplesSettings",
]
