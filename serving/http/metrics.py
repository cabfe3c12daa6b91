"""What GET /metrics shows, in Prometheus' text form; names, units and labels are vLLM's under our prefix.

Each service has a registry of its own, so several can live in one process. With more than one replica, every
scrape through the proxy is answered by one of them.
"""

from collections import Counter as CountOf

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from serving.engine.engine import Engine, RequestStream
from serving.http.generation import Generation

PREFIX = "rayjob:"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
# From 0.2 ms: a model of this size decodes a token in less than vLLM's lowest limit, 10 ms.
_TPOT_S = (0.0002, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 1, 2.5, 5)
_REQUEST_S = (0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000)
_HISTOGRAMS = {
    "time_to_first_token_seconds": ("From a request's acceptance to its first token.", _TTFT_S),
    "time_per_output_token_seconds": ("Mean gap between the later tokens of a sequence.", _TPOT_S),
    "e2e_request_latency_seconds": ("From a request's acceptance to its last token.", _REQUEST_S),
    "request_queue_time_seconds": ("From a request's acceptance until a slot took it.", _REQUEST_S),
    "request_prompt_tokens": ("Prompt tokens of a request.", _TOKENS),
    "request_generation_tokens": ("Generated tokens of a request.", _TOKENS),
}
_COUNTERS = {
    "prompt_tokens": ("Prompt tokens of the requests that got a token.", ()),
    "generation_tokens": ("Generated tokens.", ()),
    "request_success": ("Sequences that ended, by how: stop, length or abort.", ("finished_reason",)),
}
_GAUGES = {
    "num_requests_running": "Sequences that a slot decodes.",
    "num_requests_waiting": "Sequences that wait for a slot.",
    "kv_cache_usage_perc": "Share of the slots that are taken, 1 = all.",
}
_LABEL = "model_name"


class Metrics:
    """Counters and histograms of one service; used by its event loop only."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._histograms = {
            name: Histogram(PREFIX + name, about, [_LABEL], buckets=buckets, registry=self._registry)
            for name, (about, buckets) in _HISTOGRAMS.items()
        }
        self._counters = {
            name: Counter(PREFIX + name, about, [_LABEL, *labels], registry=self._registry)
            for name, (about, labels) in _COUNTERS.items()
        }
        about = "Error answers and error events of streams, by their code."
        self._errors = Counter(PREFIX + "request_errors", about, ["code"], registry=self._registry)
        self._gauges = {
            name: Gauge(PREFIX + name, about, [_LABEL], registry=self._registry) for name, about in _GAUGES.items()
        }

    def record(self, generation: Generation, stream: RequestStream) -> None:
        """Counts a request that ended, whether it is finished or its client went away."""
        reasons = CountOf(generation.finish_reasons())
        for reason, count in reasons.items():
            self._counters["request_success"].labels(generation.served.name, reason or "abort").inc(count)
        if generation.first_delta_at_s or (generation.is_scoring and None not in reasons):
            self._record_tokens(generation)
        if generation.first_delta_at_s:
            self._record_times(generation, stream, is_finished=None not in reasons)

    def _record_tokens(self, generation: Generation) -> None:
        usage = generation.usage()
        self._count("prompt_tokens", generation, usage.prompt_tokens)
        self._count("generation_tokens", generation, usage.completion_tokens)
        self._observe("request_prompt_tokens", generation, usage.prompt_tokens)
        self._observe("request_generation_tokens", generation, usage.completion_tokens)

    def _record_times(self, generation: Generation, stream: RequestStream, *, is_finished: bool) -> None:
        timings = generation.timings(stream)
        self._observe("time_to_first_token_seconds", generation, timings.ttft_ms / 1000)
        self._observe("request_queue_time_seconds", generation, timings.queue_ms / 1000)
        for tpot_s in generation.tpots_s():
            self._observe("time_per_output_token_seconds", generation, tpot_s)
        if is_finished:
            self._observe("e2e_request_latency_seconds", generation, (timings.ttft_ms + timings.decode_ms) / 1000)

    def count_error(self, code: str) -> None:
        """Counts an answer other than 200, or an error event of a stream."""
        self._errors.labels(code).inc()

    def render(self, engine: Engine) -> bytes:
        """Returns the text form, with the gauges as they are now."""
        load, name = engine.load(), engine.served.name
        values = (load.running, load.waiting, min(load.running / engine.num_slots, 1.0))
        for gauge, value in zip(self._gauges.values(), values, strict=True):
            gauge.labels(name).set(value)
        return generate_latest(self._registry)

    def _observe(self, name: str, generation: Generation, value: float) -> None:
        self._histograms[name].labels(generation.served.name).observe(value)

    def _count(self, name: str, generation: Generation, amount: int) -> None:
        self._counters[name].labels(generation.served.name).inc(amount)
