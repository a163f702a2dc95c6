"""Optimizers drive evaluators; they see evaluators and batches only."""

from rlsample.optimizers.policy_optimizer import PolicyOptimizer
from rlsample.optimizers.sync_samples_optimizer import SyncSamplesOptimizer, SyncSamplesSettings

__all__ = ["PolicyOptimizer", "SyncSamplesOptimizer", "SyncSamplesSettings"]
