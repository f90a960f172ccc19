"""What the router counts, for Prometheus.  Its own registry: several routers in a process do not meet.

    minisgl_router:requests_total{worker, reason}    by what decided: cache, smallest, balance, ... or the policy
    minisgl_router:retries_total                     requests that went on to another worker
    minisgl_router:failures_total{worker}            requests that a worker did not answer to their end
    minisgl_router:worker_up{worker}                 1 or 0
    minisgl_router:load{worker}                      sequences in flight
    minisgl_router:tree_chars{worker}                characters that the router believes to be in the worker's cache
    minisgl_router:choose_seconds                    time to decide

The workers' own metrics (hit rate, token usage, latencies) are scraped from the workers.
"""

from __future__ import annotations

import contextlib

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_BUCKETS = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 1e-1)


class RouterMetrics:
    media_type = "text/plain; version=0.0.4; charset=utf-8"

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        name = "minisgl_router:{}".format
        self.requests = Counter(name("requests"), "Requests sent to a worker", ["worker", "reason"], registry=registry)
        self.retries = Counter(name("retries"), "Requests that were sent once more", registry=registry)
        self.failures = Counter(name("failures"), "Requests a worker did not answer", ["worker"], registry=registry)
        self.up = Gauge(name("worker_up"), "Whether the worker is healthy", ["worker"], registry=registry)
        self.load = Gauge(name("load"), "Sequences in flight", ["worker"], registry=registry)
        self.tree = Gauge(name("tree_chars"), "Characters believed to be cached", ["worker"], registry=registry)
        self.seconds = Histogram(name("choose_seconds"), "Time to decide", buckets=_BUCKETS, registry=registry)

    def forget(self, worker: str) -> None:
        """Gauges of a worker that is no longer there; what was counted stays."""
        for gauge in (self.up, self.load, self.tree):
            with contextlib.suppress(KeyError):
                gauge.remove(worker)

    def text(self) -> bytes:
        return generate_latest(self._registry)
