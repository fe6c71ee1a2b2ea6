"""What the server counts, in Prometheus' form. Each server has a registry of its own."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
GENERATED, READ, EMBEDDED = "generated", "read", "embedded"  # kinds of tokens


class Metrics:
    """Routes are those of the server, and `other`: what anybody asks for makes no new names."""

    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()
        self.requests = Counter("replug_requests", "Requests by their status", ["route", "status"], registry=registry)
        self.seconds = Histogram(
            "replug_request_seconds", "From a request to its last byte", ["route"], buckets=SECONDS, registry=registry
        )
        self.tokens = Counter("replug_tokens", "Tokens that models read or made", ["kind"], registry=registry)
        self.batches = Histogram(
            "replug_batch_size", "Requests computed in one call", ["queue"], buckets=SIZES, registry=registry
        )
        self.queued = Gauge("replug_queue_length", "Requests that wait for a call", ["queue"], registry=registry)
        self.under_way = Gauge("replug_requests_under_way", "Requests that are admitted", registry=registry)
        self.version = Gauge("replug_index_version", "The version that is searched", registry=registry)
        self.swaps = Counter("replug_index_swaps", "Looks that found another version", ["outcome"], registry=registry)

    def watch_queue(self, name: str, length: Callable[[], int]) -> None:
        self.queued.labels(name).set_function(length)

    def text(self) -> bytes:
        return generate_latest(self._registry)
