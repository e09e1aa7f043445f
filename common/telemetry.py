"""Traces and metrics: every name in one list, off unless asked for.

One OpenTelemetry pipeline feeds the console, an OTLP collector and the Prometheus endpoint. The
`vllm:` names are those that existing dashboards, gateways and autoscalers read; OpenTelemetry
forbids colons, so they are recorded as `vllm.` and renamed on the Prometheus side. The libraries
are imported only when something is switched on; otherwise recording is one attribute test.
"""

import enum
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from common.errors import StartupError


class Kind(enum.Enum):
    """What a metric does with the values it is given."""

    COUNTER = "counter"  # sums
    GAUGE = "gauge"  # keeps the last
    HISTOGRAM = "histogram"  # counts by bucket


@dataclass(frozen=True)
class Metric:
    """One metric; `buckets` are a histogram's upper bounds, in the unit that the name ends with."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


# Buckets of vLLM's own histograms, so that its dashboards' quantiles stay comparable.
_FIRST_TOKEN_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5)
_PER_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5)
_REQUEST_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
_ROUND_S = tuple(0.0001 * 2**i for i in range(16))  # 0.1 ms .. 3.3 s

_LAST_EXPORT_S = 2.0  # at the end, for a collector that may be down


def _counter(name: str, help: str, *labels: str) -> Metric:
    return Metric(name, Kind.COUNTER, help, labels)


def _gauge(name: str, help: str, *labels: str) -> Metric:
    return Metric(name, Kind.GAUGE, help, labels)


def _histogram(name: str, help: str, buckets: tuple[float, ...], *labels: str) -> Metric:
    return Metric(name, Kind.HISTOGRAM, help, labels, buckets)


class M:
    """All metrics. Counters are exported to Prometheus with `_total` added."""

    # The names that vLLM's dashboards read.
    DRAFTS = _counter("vllm.spec_decode_num_drafts", "Draft blocks verified.")
    DRAFT_TOKENS = _counter("vllm.spec_decode_num_draft_tokens", "Draft tokens verified.")
    ACCEPTED_TOKENS = _counter("vllm.spec_decode_num_accepted_tokens", "Draft tokens accepted.")
    ACCEPTED_PER_POS = _counter(
        "vllm.spec_decode_num_accepted_tokens_per_pos", "Accepted, by place in block.", "position"
    )
    RUNNING = _gauge("vllm.num_requests_running", "Requests that hold KV blocks.")
    WAITING = _gauge("vllm.num_requests_waiting", "Requests in the queue.")
    KV_USAGE = _gauge("vllm.kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.")
    FIRST_TOKEN = _histogram(
        "vllm.time_to_first_token_seconds", "Arrival to first token.", _FIRST_TOKEN_S
    )
    INTER_TOKEN = _histogram(
        "vllm.inter_token_latency_seconds", "A round's time over its tokens.", _PER_TOKEN_S
    )
    REQUEST_LATENCY = _histogram(
        "vllm.e2e_request_latency_seconds", "Arrival to last token.", _REQUEST_S
    )
    PROMPT_TOKENS = _counter("vllm.prompt_tokens", "Prompt tokens of finished requests.")
    GENERATION_TOKENS = _counter("vllm.generation_tokens", "Tokens emitted.")
    REQUEST_SUCCESS = _counter("vllm.request_success", "Finished requests.", "finished_reason")

    # Ours, both services.
    RPCS = _counter("dspark.rpcs", "Finished calls, by method and status.", "method", "code")
    RPC_SECONDS = _histogram("dspark.rpc_seconds", "Duration of calls.", _REQUEST_S, "method")
    INTERNAL_ERRORS = _counter("dspark.internal_errors", "Bugs caught at the rpc edge.", "method")

    # Ours, verifier.
    ROUND = _histogram(
        "dspark.round_seconds", "A finished request's mean decode round, by part.", _ROUND_S, "part"
    )
    DRAFT_LATE = _counter("dspark.draft_late", "Steps whose drafts came too late or not.", "reason")
    FALLBACK_ROUNDS = _counter(
        "dspark.fallback_rounds", "Decode rounds that wanted drafts in vain."
    )
    ASKED_AHEAD = _counter(
        "dspark.asked_ahead", "Drafts asked for before their anchor was decided.", "outcome"
    )
    STALE_PROPOSALS = _counter("dspark.stale_proposals", "Proposals for an earlier state, dropped.")
    BAD_PROPOSALS = _counter("dspark.bad_proposals", "Proposals that broke the contract, dropped.")
    CONTRACT_MISMATCH = _counter("dspark.contract_mismatch", "Drafters refused at the handshake.")
    FEATURE_BYTES = _counter("dspark.feature_bytes", "Feature rows sent to the drafter.")
    SLOW_CONSUMERS = _counter("dspark.slow_consumers", "Requests ended since nobody read them.")

    # Ours, drafter.
    SESSIONS = _gauge("dspark.sessions", "Open draft sessions.")
    EVICTIONS = _counter("dspark.evictions", "Sessions dropped to make room.")
    UNDRAFTED = _counter(
        "dspark.undrafted_entries", "Entries of an old epoch, or replaced by newer ones.", "reason"
    )
    DRAFT_STEP = _histogram("dspark.draft_step_seconds", "One batch, by part.", _ROUND_S, "part")


METRICS: tuple[Metric, ...] = tuple(v for v in vars(M).values() if isinstance(v, Metric))


class S:
    """All spans."""

    GENERATE = "dspark.generate"  # one request, from admission to its end
    QUEUE = "dspark.queue"  # admitted, not yet scheduled
    PREFILL = "dspark.prefill"  # scheduled to first token
    DECODE = "dspark.decode"  # first token to last


class Telemetry:
    """Records metrics and spans; does nothing unless `start_telemetry` switched something on."""

    def __init__(self) -> None:
        self._instruments: dict[Metric, Any] = {}
        self._tracer: Any = None
        self._stack = ExitStack()  # endpoints
        self._providers: list[Any] = []  # OpenTelemetry's, shut down first

    @property
    def counts(self) -> bool:
        """Some metric sink is on: worth computing what to record."""
        return bool(self._instruments)

    @property
    def traces(self) -> bool:
        """Some trace sink is on."""
        return self._tracer is not None

    def record(self, metric: Metric, value: float = 1, **labels: str) -> None:
        """Adds to a counter, sets a gauge, or observes into a histogram. Callable on any thread."""
        instruments = self._instruments  # another thread may close
        if not instruments:
            return
        assert tuple(labels) == metric.labels, f"{metric.name} takes {metric.labels}, got {labels}"
        instrument = instruments[metric]
        if metric.kind is Kind.COUNTER:
            instrument.add(value, labels)
        elif metric.kind is Kind.GAUGE:
            instrument.set(value, labels)
        else:
            instrument.record(value, labels)

    def span(
        self,
        name: str,
        start: float,
        end: float,
        *,
        metadata: Iterable[tuple[str, str | bytes]] = (),
        attributes: Mapping[str, Any] | None = None,
        children: Sequence[tuple[str, float, float]] = (),
    ) -> None:
        """Records a finished span and its children; times are `time.monotonic()` seconds.

        `metadata` is the call's, whose W3C `traceparent` (if any) becomes the parent.
        """
        if self._tracer is None:
            return
        from opentelemetry import trace
        from opentelemetry.trace.propagation import tracecontext

        carrier = {k: v for k, v in metadata if isinstance(v, str)}
        parent = tracecontext.TraceContextTextMapPropagator().extract(carrier)
        offset_ns = time.time_ns() - time.monotonic_ns()

        def at(seconds: float) -> int:
            return offset_ns + int(seconds * 1e9)

        span = self._tracer.start_span(
            name, context=parent, start_time=at(start), attributes=dict(attributes or {})
        )
        inside = trace.set_span_in_context(span, parent)
        for child, begin, finish in children:
            self._tracer.start_span(child, context=inside, start_time=at(begin)).end(at(finish))
        span.end(at(end))

    def close(self) -> None:
        """Flushes and stops exporters and the Prometheus endpoint. Idempotent."""
        self._instruments = {}
        self._tracer = None
        last = [
            threading.Thread(target=provider.shutdown, name="last-export", daemon=True)
            for provider in self._providers
        ]
        self._providers = []
        for thread in last:
            thread.start()
        deadline = time.monotonic() + _LAST_EXPORT_S
        for thread in last:  # not for the retries of an exporter that nobody answers
            thread.join(max(0.0, deadline - time.monotonic()))
        self._stack.close()


def start_telemetry(
    service: str, *, otel: str = "off", metrics_port: int | None = None, metrics_host: str = ""
) -> Telemetry:
    """`otel` is "off", "console" or "otlp"; raises StartupError when the metrics port is taken."""
    telemetry = Telemetry()
    if otel == "off" and metrics_port is None:
        return telemetry
    from opentelemetry.sdk.metrics.export import MetricReader
    from opentelemetry.sdk.resources import Resource

    resource = Resource.create({"service.name": service})
    readers: list[MetricReader] = []
    if metrics_port is not None:
        readers.append(_prometheus(telemetry._stack, metrics_host, metrics_port))
    if otel != "off":
        readers.append(_push_reader(otel))
        telemetry._tracer = _tracer(telemetry._providers, otel, resource)
    telemetry._instruments = _instruments(telemetry._providers, readers, resource)
    return telemetry


def _instruments(providers: list[Any], readers: list[Any], resource: Any) -> dict[Metric, Any]:
    from opentelemetry.sdk.metrics import MeterProvider

    provider = MeterProvider(metric_readers=readers, resource=resource, shutdown_on_exit=False)
    providers.append(provider)
    meter = provider.get_meter("dspark")
    make = {
        Kind.COUNTER: lambda m: meter.create_counter(m.name, description=m.help),
        Kind.GAUGE: lambda m: meter.create_gauge(m.name, description=m.help),
        Kind.HISTOGRAM: lambda m: meter.create_histogram(
            m.name, description=m.help, explicit_bucket_boundaries_advisory=m.buckets
        ),
    }
    instruments: dict[Metric, Any] = {metric: make[metric.kind](metric) for metric in METRICS}
    for metric, instrument in instruments.items():
        if metric.kind is Kind.COUNTER and not metric.labels:
            instrument.add(0)  # so that rates start at the first event, not at the second
    return instruments


def _tracer(providers: list[Any], otel: str, resource: Any) -> Any:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import (
        BatchSpanProcessor,
        ConsoleSpanExporter,
        SpanExporter,
    )

    exporter: SpanExporter
    if otel == "console":
        exporter = ConsoleSpanExporter()
    else:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

        exporter = OTLPSpanExporter()
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    providers.append(provider)
    return provider.get_tracer("dspark")


def _push_reader(otel: str) -> Any:
    from opentelemetry.sdk.metrics.export import (
        ConsoleMetricExporter,
        MetricExporter,
        PeriodicExportingMetricReader,
    )

    exporter: MetricExporter
    if otel == "console":
        exporter = ConsoleMetricExporter()
    else:
        from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter

        exporter = OTLPMetricExporter()
    return PeriodicExportingMetricReader(exporter)


def _prometheus(stack: ExitStack, host: str, port: int) -> Any:
    """The Prometheus reader and its HTTP endpoint, in a registry of their own."""
    from opentelemetry.exporter.prometheus import PrometheusMetricReader
    from prometheus_client import CollectorRegistry, start_http_server

    inner, outer = CollectorRegistry(), CollectorRegistry()
    reader = PrometheusMetricReader(registry=inner, scope_info_enabled=False)
    outer.register(_VllmNames(inner))
    try:
        server, thread = start_http_server(port, addr=host, registry=outer)
    except OSError as error:
        raise StartupError(
            f"--metrics-port {port} on {host} cannot be served: {error.strerror}; choose another"
        ) from error

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    stack.callback(stop)
    return reader


class _VllmNames:
    """A Prometheus collector that gives `vllm_...` metrics the colon of the original names."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def collect(self) -> Iterator[Any]:
        for family in self._inner.collect():
            if family.name.startswith("vllm_"):
                family.name = _with_colon(family.name)
                family.samples = [s._replace(name=_with_colon(s.name)) for s in family.samples]
            yield family


def _with_colon(name: str) -> str:
    return "vllm:" + name.removeprefix("vllm_")
