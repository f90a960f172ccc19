"""What /metrics shows: the engine's state as Prometheus metrics, under SGLang's names with the prefix `minisgl:`.

Most values are read from the engine when Prometheus asks (`Runtime.stats`), so they cost nothing in between.  Only
latencies must be noted as requests end: three histograms of the requests that came over HTTP.

Each server has a registry of its own: several in one process, as in tests and notebooks, do not add up, and nothing of
the interpreter's (garbage collection, process memory) is mixed in.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

try:
    from prometheus_client import CollectorRegistry, Counter, Histogram
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
    from prometheus_client.exposition import choose_encoder
except ImportError as error:
    raise ImportError('metrics need prometheus-client: pip install "minisgl[server]"') from error

from .output import EngineError

if TYPE_CHECKING:
    from .request import Request
    from .runtime import Runtime

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)
_PER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2)

# name -> (what it is, key of Runtime.stats)
_GAUGES = {
    "num_running_reqs": ("Sequences that the engine runs now", "running"),
    "num_queue_reqs": ("Sequences that wait to be run", "waiting"),
    "max_total_num_tokens": ("Size of the KV pool in tokens", "kv_capacity"),
    "num_evictable_tokens": ("Cached tokens that no request uses", "kv_evictable"),
    "cache_hit_rate": ("Share of all prompt tokens that the cache had, since the start", "hit_rate"),
    "gen_throughput": ("Output tokens per second of busy time, since the start", "output_tokens_per_s"),
}
_COUNTERS = {
    "prompt_tokens": ("Prompt tokens of ended requests", "prompt_tokens"),
    "cached_tokens": ("Of them, those that the cache had", "cached_tokens"),
    "generation_tokens": ("Output tokens", "output_tokens"),
    "num_requests": ("Ended requests", "requests"),
    "num_retracted_requests": ("Requests sent back to the queue because memory was short", "retractions"),
}


class Metrics:
    """The metrics of one server over one runtime, labelled with the model's name."""

    def __init__(self, runtime: Runtime, model_name: str):
        self.runtime, self._labels = runtime, {"model_name": model_name}
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)
        self._first = self._histogram("time_to_first_token_seconds", "From submission to the first token", _SECONDS)
        self._whole = self._histogram("e2e_request_latency_seconds", "From submission to the end", _SECONDS)
        self._next = self._histogram(
            "time_per_output_token_seconds", "Between output tokens, the mean of each request", _PER_TOKEN
        )
        aborted = Counter(
            "minisgl:num_aborted_requests", "Aborted requests", ["model_name"], registry=self.registry
        )
        self._aborted = aborted.labels(**self._labels)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Any:
        made = Histogram(f"minisgl:{name}", text, ["model_name"], registry=self.registry, buckets=buckets)
        return made.labels(**self._labels)

    def observe(self, request: Request) -> None:
        """Note the latencies of a request that has ended; on the engine's thread."""
        if request.finish_reason is not None and request.finish_reason["type"] == "abort":
            self._aborted.inc()
            return
        if not request.first_token:  # it only scored its prompt, or failed
            return
        self._first.observe(request.first_token - request.submitted)
        self._whole.observe(request.ended - request.submitted)
        count = len(request.output)
        if count > 1:
            self._next.observe((request.ended - request.first_token) / (count - 1))

    def collect(self) -> Iterator[Metric]:
        """For the registry: the engine's state now."""
        try:
            stats = self.runtime.stats()
        except EngineError:
            stats = None
        yield self._gauge("engine_up", "Whether the engine runs", 0 if stats is None else 1)
        if stats is None:
            return
        used = stats["kv_capacity"] - stats["kv_free"] - stats["kv_evictable"]
        yield self._gauge("num_used_tokens", "Tokens of the KV pool that running requests hold", used)
        yield self._gauge("token_usage", "The same as a share of the pool", used / stats["kv_capacity"])
        for name, (text, key) in _GAUGES.items():
            yield self._gauge(name, text, stats[key])
        for name, (text, key) in _COUNTERS.items():
            counter = CounterMetricFamily(f"minisgl:{name}", text, labels=list(self._labels))
            counter.add_metric(list(self._labels.values()), stats[key])
            yield counter

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        gauge = GaugeMetricFamily(f"minisgl:{name}", text, labels=list(self._labels))
        gauge.add_metric(list(self._labels.values()), value)
        return gauge

    def page(self, accept: str) -> tuple[bytes, str]:
        """The page and its content type, in the format that an Accept header asks for.  Waits for the engine."""
        encode, kind = choose_encoder(accept)
        return encode(self.registry), kind
