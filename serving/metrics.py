"""What /metrics tells Prometheus. Names and units are vLLM's where the thing is the same, so that its dashboards work;
what only this engine has is named `pagedjax:`."""

from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from pagedjax.outputs import EngineStats, RequestOutput

_SECONDS = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
    80.0,
)
_LONG_SECONDS = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 60.0, 120.0, 240.0, 480.0, 960.0)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)

_GAUGES: dict[str, tuple[str, Callable[[EngineStats], float]]] = {
    "vllm:num_requests_running": ("Sequences that run.", lambda stats: stats.num_running),
    "vllm:num_requests_waiting": ("Sequences that wait.", lambda stats: stats.num_waiting),
    "vllm:kv_cache_usage_perc": (
        "Share of the KV blocks in use, 0 to 1.",
        lambda stats: 1 - stats.num_free_blocks / stats.num_blocks,
    ),
    "pagedjax:num_blocks": ("KV blocks of the pool.", lambda stats: stats.num_blocks),
    "pagedjax:num_free_blocks": ("KV blocks that nobody holds.", lambda stats: stats.num_free_blocks),
    "pagedjax:num_cached_blocks": ("KV blocks that the prefix cache finds.", lambda stats: stats.num_cached_blocks),
    "pagedjax:num_block_references": (
        "KV blocks that would be in use without sharing.",
        lambda stats: stats.num_block_references,
    ),
}
_COUNTERS: dict[str, tuple[str, Callable[[EngineStats], float]]] = {
    "vllm:prefix_cache_queries": (
        "Tokens that the prefix cache was asked for.",
        lambda stats: stats.prefix_cache_query_tokens,
    ),
    "vllm:prefix_cache_hits": (
        "Those of them that were not computed again.",
        lambda stats: stats.prefix_cache_hit_tokens,
    ),
    "vllm:num_preemptions": ("Sequences that lost their blocks.", lambda stats: stats.num_preemptions),
    "vllm:prompt_tokens": ("Tokens of prompts.", lambda stats: stats.num_prompt_tokens),
    "vllm:generation_tokens": ("Tokens generated.", lambda stats: stats.num_output_tokens),
    "pagedjax:num_block_copies": ("Blocks copied on write.", lambda stats: stats.num_block_copies),
    "pagedjax:num_steps": ("Steps of the engine.", lambda stats: stats.num_steps),
    "pagedjax:num_programs": ("Shapes of steps compiled.", lambda stats: stats.num_programs),
}


class ServerMetrics:
    """The metrics of one server, in a registry of its own."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._model_name = model_name

        def histogram(name: str, text: str, buckets: Sequence[float | int]) -> Histogram:
            metric = Histogram(name, text, ["model_name"], registry=self.registry, buckets=buckets)
            return metric.labels(model_name)

        self._ttft = histogram("vllm:time_to_first_token_seconds", "From arrival to the first token.", _SECONDS)
        self._between = histogram("vllm:inter_token_latency_seconds", "Between two tokens of a request.", _SECONDS)
        self._latency = histogram("vllm:e2e_request_latency_seconds", "From arrival to the end.", _LONG_SECONDS)
        self._prompt = histogram("vllm:request_prompt_tokens", "Tokens of a prompt.", _TOKENS)
        self._generation = histogram("vllm:request_generation_tokens", "Tokens generated for a request.", _TOKENS)
        self._success = Counter(
            "vllm:request_success", "Completions that ended.", ["model_name", "finished_reason"], registry=self.registry
        )
        self._answers = Counter(
            "pagedjax:http_responses", "Answers by their HTTP status.", ["status"], registry=self.registry
        )

    def follow(self, stats: Callable[[], EngineStats]) -> None:
        """Takes gauges and counters from what `stats` gives when somebody asks."""
        self.registry.register(_StatsCollector(stats, self._model_name))

    def tokens(self, num_tokens: int, now_s: float, arrived_s: float, last_token_s: float | None) -> None:
        """A request got tokens from a step."""
        if last_token_s is None:
            self._ttft.observe(now_s - arrived_s)
        else:
            self._between.observe((now_s - last_token_s) / num_tokens)

    def finished(self, output: RequestOutput, seconds: float) -> None:
        """A request ended."""
        self._latency.observe(seconds)
        self._prompt.observe(len(output.prompt_token_ids))
        self._generation.observe(sum(len(completion.token_ids) for completion in output.outputs))
        for completion in output.outputs:
            self._success.labels(self._model_name, completion.finish_reason).inc()

    def answered(self, status: int) -> None:
        """An HTTP response was begun."""
        self._answers.labels(str(status)).inc()

    def text(self) -> bytes:
        """All of them in Prometheus' text format."""
        return generate_latest(self.registry)


class _StatsCollector:
    def __init__(self, stats: Callable[[], EngineStats], model_name: str) -> None:
        self._stats = stats
        self._labels = [model_name]

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        for name, (text, value) in _GAUGES.items():
            gauge = GaugeMetricFamily(name, text, labels=["model_name"])
            gauge.add_metric(self._labels, float(value(stats)))
            yield gauge
        for name, (text, value) in _COUNTERS.items():
            counter = CounterMetricFamily(name, text, labels=["model_name"])
            counter.add_metric(self._labels, float(value(stats)))
            yield counter
