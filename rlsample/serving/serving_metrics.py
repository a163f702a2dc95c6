"""What a server counts, for its page and for Prometheus."""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

__all__ = ["ServingMetrics"]

_LATENCIES = 4096  # latest ones that percentiles are taken of
_RETURNS = 200
_RATE_S = 5.0  # length of time the rate is taken over
_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)


class ServingMetrics:
    """Counts and latencies. Written by the server's loop only; cheap, as each action passes here.

    Attributes:
        actions: actions answered. ``rows``: actions of episodes that are recorded, chosen here or logged.
        episodes: ended. ``returns``: of the latest 200 of them. ``rejected``: error code -> requests.
        requests: all that were answered.
    """

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.actions = self.rows = self.episodes = self.requests = 0
        self.rejected: collections.Counter[str] = collections.Counter()
        self.returns: collections.deque[float] = collections.deque(maxlen=_RETURNS)
        self.latencies: collections.deque[float] = collections.deque(maxlen=_LATENCIES)
        self._seen: list[int] = [0] * (len(_BUCKETS_S) + 1)
        self._latency_sum = 0.0
        self._marks: collections.deque[tuple[float, int]] = collections.deque([(self.started, 0)])

    def answered(self, seconds: float, actions: int) -> None:
        """A request for actions was answered after so long."""
        self.actions += actions
        self.latencies.append(seconds)
        self._latency_sum += seconds
        bucket = 0
        while bucket < len(_BUCKETS_S) and seconds > _BUCKETS_S[bucket]:
            bucket += 1
        self._seen[bucket] += 1

    def episode_ended(self, episode_return: float) -> None:
        """An episode came to its end."""
        self.episodes += 1
        self.returns.append(episode_return)

    def tick(self) -> None:
        """Call it once or twice a second: the rate of actions is taken between such calls."""
        now = time.monotonic()
        self._marks.append((now, self.actions))
        while len(self._marks) > 2 and now - self._marks[1][0] >= _RATE_S:
            self._marks.popleft()

    def actions_per_s(self) -> float:
        """Over the last seconds."""
        at, before = self._marks[0]
        return (self.actions - before) / max(time.monotonic() - at, 1e-3)

    def percentiles_ms(self) -> tuple[float, float]:
        """Median and 99th percentile of the latest requests for actions; 0 where there was none."""
        if not self.latencies:
            return 0.0, 0.0
        p50, p99 = np.percentile(np.array(self.latencies), (50, 99)) * 1e3
        return float(p50), float(p99)

    def stats(self) -> dict[str, Any]:
        """What ``/v1/stats`` shows of this."""
        p50, p99 = self.percentiles_ms()
        returns = list(self.returns)
        return {
            "actions": self.actions,
            "actions_per_s": round(self.actions_per_s(), 1),
            "p50_ms": round(p50, 3),
            "p99_ms": round(p99, 3),
            "episodes": self.episodes,
            "return_mean": float(np.mean(returns)) if returns else None,
            "returns": returns,
            "rejected": dict(self.rejected),
            "uptime_s": round(time.monotonic() - self.started, 1),
        }

    def prometheus(self, gauges: Callable[[], Mapping[str, float]]) -> Callable[[], bytes]:
        """A function that writes everything in Prometheus' text format, with a registry of its own.

        Args:
            gauges: name -> value, read at each call.
        """
        from prometheus_client import CollectorRegistry, generate_latest

        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Collector(self, gauges))
        return lambda: generate_latest(registry)

    def buckets(self) -> list[tuple[str, float]]:
        """Upper bound -> requests up to it, added up, as Prometheus wants them; the last bound is +Inf."""
        bounds = [str(b) for b in _BUCKETS_S] + ["+Inf"]
        return list(zip(bounds, np.cumsum(self._seen).astype(float).tolist(), strict=True))

    @property
    def latency_sum_s(self) -> float:
        """All latencies together."""
        return self._latency_sum


class _Collector:
    def __init__(self, metrics: ServingMetrics, gauges: Callable[[], Mapping[str, float]]) -> None:
        self._metrics, self._gauges = metrics, gauges

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        metrics = self._metrics
        for name, help_text, value in (
            ("actions", "Actions answered", metrics.actions),
            ("rows", "Actions of recorded episodes, chosen here or logged", metrics.rows),
            ("episodes", "Episodes ended", metrics.episodes),
            ("requests", "Requests answered", metrics.requests),
        ):
            yield CounterMetricFamily(f"rlsample_{name}", help_text, value=value)
        rejected = CounterMetricFamily("rlsample_rejected", "Requests refused, by error code", labels=["code"])
        for code, count in sorted(metrics.rejected.items()):
            rejected.add_metric([code], count)
        yield rejected
        latency = HistogramMetricFamily("rlsample_action_latency_seconds", "From a request for actions to its answer")
        latency.add_metric([], metrics.buckets(), metrics.latency_sum_s)
        yield latency
        for name, gauge in self._gauges().items():
            yield GaugeMetricFamily(f"rlsample_{name}", name.replace("_", " "), value=gauge)
