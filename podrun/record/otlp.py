"""Spans of a launch to an OpenTelemetry collector, by OpenTelemetry's own SDK (extra ``otlp``).

Ids follow from the record, so that a launch that is sent twice is one trace.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from podrun.core.errors import ServiceError, UnsupportedError, UsageError
from podrun.record.timeline import TraceSpan

if TYPE_CHECKING:
    from opentelemetry.trace import Span

NANOSECONDS = 1_000_000_000
TIMEOUT_S = 10


def traces_address(endpoint: str) -> str:
    """The address for traces of a collector: ``/v1/traces`` is added to a bare one, as the SDK does. Raises
    UsageError."""
    from urllib.parse import urlsplit

    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(
            f"a collector is an http or https address, not {endpoint!r}", hint="As in: http://127.0.0.1:4318"
        )
    return endpoint if parts.path.rstrip("/") else f"{endpoint.rstrip('/')}/v1/traces"


def send_trace(
    spans: Sequence[TraceSpan], endpoint: str, seed: str, headers: Mapping[str, str] | None = None
) -> str:
    """Send spans to a collector and return the id of the trace, 32 hexadecimal digits. ``seed``: text that the ids
    follow from. Raises UnsupportedError without the extra, ServiceError if the collector does not take them."""
    try:
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExportResult
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
    except ImportError as error:
        raise UnsupportedError(
            "OpenTelemetry's exporter is not installed", hint="pip install 'podrun[otlp]'"
        ) from error
    address = traces_address(endpoint)
    ids = _ids_of(seed)
    kept = InMemorySpanExporter()
    provider = TracerProvider(
        resource=Resource.create({"service.name": "podrun"}), id_generator=ids, shutdown_on_exit=False
    )
    provider.add_span_processor(SimpleSpanProcessor(kept))
    tracer = provider.get_tracer("podrun")
    begun: list[Span] = []
    for span in spans:
        parent = None if span.parent is None else trace.set_span_in_context(begun[span.parent])
        one = tracer.start_span(
            span.name,
            parent,
            attributes=_attributes(span.attributes),
            start_time=round(span.start_s * NANOSECONDS),
        )
        if span.failed:
            one.set_status(trace.Status(trace.StatusCode.ERROR, span.failed))
        begun.append(one)
    for span, one in zip(spans, begun, strict=True):
        one.end(round(span.end_s * NANOSECONDS))
    exporter = OTLPSpanExporter(address, headers=dict(headers or {}), timeout=TIMEOUT_S)
    try:
        result = exporter.export(kept.get_finished_spans())
    finally:
        exporter.shutdown()  # type: ignore[no-untyped-call]
    if result is not SpanExportResult.SUCCESS:
        raise ServiceError(f"the collector at {address} did not take the trace", hint=f"curl -v {address}")
    return f"{ids.trace_id:032x}"


def _attributes(values: Mapping[str, str | int]) -> dict[str, str | int]:
    return {f"podrun.{name}": value for name, value in values.items()}


def _ids_of(seed: str) -> Any:
    """A generator of ids for one trace."""
    from opentelemetry.sdk.trace.id_generator import IdGenerator

    class Ids(IdGenerator):
        """Ids that follow from the seed."""

        trace_id = int.from_bytes(hashlib.blake2b(seed.encode(), digest_size=16).digest())
        count = 0

        def generate_trace_id(self) -> int:
            """The one trace."""
            return self.trace_id

        def generate_span_id(self) -> int:
            """The next span."""
            self.count += 1
            return int.from_bytes(hashlib.blake2b(f"{seed} {self.count}".encode(), digest_size=8).digest())

    return Ids()
