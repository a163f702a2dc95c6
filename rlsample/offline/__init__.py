"""Logs of experience: written while sampling, read back for learning, replayed and judged.

``LogWriter`` and ``LogReader`` handle JSONL and Parquet (the latter with ``rlsample[offline]``), ``MinariWriter`` and
``LogReader("minari:ID")`` Minari datasets. ``LogReplayEnv`` plays logs as a served env. ``estimate_return`` says what a
policy would have earned where another one acted. docs/offline.md has the formats.
"""

from rlsample.offline.episode_assembler import EpisodeAssembler
from rlsample.offline.estimators import ReturnEstimate, estimate_return
from rlsample.offline.log_reader import LogReader
from rlsample.offline.log_replay_env import LogReplayEnv
from rlsample.offline.log_writer import LogWriter
from rlsample.offline.minari_datasets import MinariWriter
from rlsample.offline.mixed_reader import MixedReader

__all__ = [
    "EpisodeAssembler",
    "LogReader",
    "LogReplayEnv",
    "LogWriter",
    "MinariWriter",
    "MixedReader",
    "ReturnEstimate",
    "estimate_return",
]
