"""Evaluators: they sample with a policy and compute its updates."""

from rlsample.evaluation.callbacks import Callbacks, Episode
from rlsample.evaluation.common_policy_evaluator import CommonPolicyEvaluator
from rlsample.evaluation.evaluator_set import EvaluatorSet, EvaluatorSetSettings
from rlsample.evaluation.filters import MeanStdFilter, NoFilter
from rlsample.evaluation.metrics import EpisodeMetrics, MetricsWindow
from rlsample.evaluation.policy_evaluator import PolicyEvaluator
from rlsample.evaluation.requests import Requests
from rlsample.evaluation.sampler_settings import SamplerSettings
from rlsample.sample_batch import NextObs, SampleBatch

__all__ = [
    "Callbacks",
    "CommonPolicyEvaluator",
    "Episode",
    "EpisodeMetrics",
    "EvaluatorSet",
    "EvaluatorSetSettings",
    "MeanStdFilter",
    "MetricsWindow",
    "NextObs",
    "NoFilter",
    "PolicyEvaluator",
    "Requests",
    "SampleBatch",
    "SamplerSettings",
]
