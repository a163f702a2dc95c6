"""From an algorithm's name to a trained policy: presets, the train loop, checkpoints, evaluation."""

from rlsample.algorithms.checkpoint import CheckpointStore
from rlsample.algorithms.evaluate import EvalResult, evaluate
from rlsample.algorithms.run_config import RunConfig, configure
from rlsample.algorithms.train_result import TrainResult
from rlsample.algorithms.train_settings import OutputSettings, TrainSettings
from rlsample.algorithms.trainer import Trainer, train

__all__ = [
    "CheckpointStore",
    "EvalResult",
    "OutputSettings",
    "RunConfig",
    "TrainResult",
    "TrainSettings",
    "Trainer",
    "configure",
    "evaluate",
    "train",
]
