"""Metrics and spans: off costs nothing, Prometheus gets the names dashboards read."""

import json
import re
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from common.errors import StartupError
from common.telemetry import METRICS, Kind, M, S, start_telemetry

ROOT = Path(__file__).resolve().parents[2]


def scrape(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        return str(answer.read().decode())


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_off_imports_no_library_and_records_nothing() -> None:
    code = (
        "import sys; from common import telemetry; t = telemetry.start_telemetry('x');"
        "t.record(telemetry.M.DRAFTS, 3); t.span('s', 0.0, 1.0); t.close();"
        "assert not t.counts and not t.traces;"
        "assert not [m for m in sys.modules if m.startswith(('opentelemetry', 'prometheus'))]"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30, cwd=ROOT)


def test_prometheus_gets_vllm_names_with_colons_and_ours() -> None:
    port = free_port()
    recorder = start_telemetry("verifier", metrics_port=port, metrics_host="127.0.0.1")
    try:
        recorder.record(M.DRAFTS, 2)
        recorder.record(M.ACCEPTED_PER_POS, 5, position="0")
        recorder.record(M.RUNNING, 3)
        recorder.record(M.REQUEST_SUCCESS, finished_reason="eos")
        recorder.record(M.FIRST_TOKEN, 0.03)
        recorder.record(M.ROUND, 0.002, part="forward")
        text = scrape(port)
    finally:
        recorder.close()
    assert re.search(r"^vllm:spec_decode_num_drafts_total 2\.0$", text, re.M)
    assert re.search(
        r'^vllm:spec_decode_num_accepted_tokens_per_pos_total\{position="0"\} 5\.0$', text, re.M
    )
    assert re.search(r"^vllm:num_requests_running 3\.0$", text, re.M)
    assert re.search(r'^vllm:request_success_total\{finished_reason="eos"\} 1\.0$', text, re.M)
    assert re.search(r'^vllm:time_to_first_token_seconds_bucket\{le="0.04"\} 1\.0$', text, re.M)
    assert re.search(r'^dspark_round_seconds_count\{part="forward"\} 1\.0$', text, re.M)
    assert re.search(r"^dspark_slow_consumers_total 0\.0$", text, re.M), "counters exist from 0"
    assert "# TYPE vllm:spec_decode_num_drafts_total counter" in text
    with pytest.raises(OSError):
        scrape(port)


def test_a_taken_metrics_port_is_a_startup_error() -> None:
    port = free_port()
    first = start_telemetry("a", metrics_port=port, metrics_host="127.0.0.1")
    try:
        with pytest.raises(StartupError, match=f"--metrics-port {port}"):
            start_telemetry("b", metrics_port=port, metrics_host="127.0.0.1")
    finally:
        first.close()


def test_labels_must_be_those_declared() -> None:
    recorder = start_telemetry("a", metrics_port=free_port(), metrics_host="127.0.0.1")
    try:
        with pytest.raises(AssertionError, match="part"):
            recorder.record(M.ROUND, 0.1, step="forward")
    finally:
        recorder.close()


def test_spans_carry_parent_children_and_times(capfd: pytest.CaptureFixture[str]) -> None:
    recorder = start_telemetry("verifier", otel="console")
    now = time.monotonic()
    parent = ("traceparent", f"00-{'ab' * 16}-{'cd' * 8}-01")
    recorder.span(
        S.GENERATE,
        now - 2.0,
        now,
        metadata=(parent, ("x-bin", b"1")),
        attributes={"request_id": "r"},
        children=((S.PREFILL, now - 2.0, now - 1.5),),
    )
    recorder.close()
    out = capfd.readouterr().out
    decoder, spans, at = json.JSONDecoder(), [], 0
    while at < len(out):
        value, end = decoder.raw_decode(out, at)
        spans.append(value)
        at = end + len(out[end:]) - len(out[end:].lstrip())
    by_name = {s["name"]: s for s in spans if "name" in s}
    request, prefill = by_name[S.GENERATE], by_name[S.PREFILL]
    assert request["context"]["trace_id"] == "0x" + "ab" * 16
    assert request["parent_id"] == "0x" + "cd" * 8
    assert prefill["parent_id"] == request["context"]["span_id"]
    assert request["attributes"] == {"request_id": "r"}
    assert abs(_seconds(request) - 2.0) < 0.01 and abs(_seconds(prefill) - 0.5) < 0.01


def _seconds(span: dict[str, str]) -> float:
    from datetime import datetime

    start, end = (datetime.fromisoformat(span[k]) for k in ("start_time", "end_time"))
    return (end - start).total_seconds()


def test_names_are_unique_and_well_formed() -> None:
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names) > 20
    for metric in METRICS:
        assert re.fullmatch(r"(vllm|dspark)\.[a-z0-9_]+", metric.name)
        assert (metric.kind is Kind.HISTOGRAM) == bool(metric.buckets)
        assert list(metric.buckets) == sorted(metric.buckets)
