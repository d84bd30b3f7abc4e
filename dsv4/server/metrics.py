"""Metrics: what /metrics says, in Prometheus' text form. One registry per server; nothing is global."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)
GAUGES = {
    "running": "Sequences that have a slot",
    "waiting": "Requests that wait for one",
    "prefix_entries": "Prefixes kept for reuse",
    "prefix_bytes": "Bytes of them",
}
COUNTERS = {
    "prompt_tokens": "Tokens of prompts computed, without reused ones",
    "generated_tokens": "Tokens generated",
    "steps": "Forwards",
    "rows": "Rows of all forwards",
    "rounds": "Rounds of speculation",
    "drafted": "Drafted tokens that were verified",
    "accepted": "Drafted tokens that were accepted",
    "skipped_rounds": "Rounds that verified no drafted token",
    "prefix_hits": "Prompts that began with a kept prefix",
    "prefix_misses": "Prompts that did not",
    "prefix_tokens": "Tokens of prompts taken from kept prefixes",
    "cancelled": "Requests cancelled, as by clients that left",
    "queue_s": "Seconds that requests waited for a slot",
    "step_s": "Seconds spent in forwards",
    "draft_s": "Seconds spent drafting",
}


class Metrics:
    """Counts what the server sees itself, and reads the rest from stats(), the scheduler's, when asked."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, stats: Callable[[], dict]):
        self._stats = stats
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "dsv4_http_requests", "Requests answered", ["path", "status"], registry=self.registry
        )
        self.disconnects = Counter("dsv4_disconnects", "Clients that left before the end", registry=self.registry)
        self.first_token = self._seconds("dsv4_first_token_seconds", "From a request to its first token")
        self.whole = self._seconds("dsv4_request_seconds", "From a request to its last token")
        self.registry.register(self)

    def _seconds(self, name: str, text: str) -> Histogram:
        return Histogram(name, text, buckets=SECONDS, registry=self.registry)

    def collect(self) -> Iterator[Metric]:
        """What the scheduler counts. (The registry calls this.)"""
        stats = self._stats()
        for name, text in GAUGES.items():
            yield GaugeMetricFamily(f"dsv4_{name}", text, value=stats[name])
        for name, text in COUNTERS.items():
            name_of = f"{name[:-2]}_seconds" if name.endswith("_s") else name
            yield CounterMetricFamily(f"dsv4_{name_of}", text, value=stats[name])

    def text(self) -> bytes:
        return generate_latest(self.registry)
