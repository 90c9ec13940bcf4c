"""Metrics: their values, their labels, and docs/metrics.md."""

import re

from msgspec import structs
from prometheus_client.parser import text_string_to_metric_families

from loaderd.monitoring.metrics import metrics_text
from tests.daemons import ROOT
from tests.loaderd.statuses import STORE, status


def families(text: str) -> dict[str, str]:
    """Kind by name, as the format writes them."""
    return dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))


def samples(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {
        (s.name, frozenset(s.labels.items())): s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
    }


def test_values_units_and_labels():
    found = samples(metrics_text(status()).decode())

    def value(name: str, **labels: str) -> float:
        return found[name, frozenset(labels.items())]

    session = {"session": "3", "plan": "minibatch", "store": "store"}
    assert value("loaderd_read_bytes_total") == 1e9
    assert value("loaderd_read_wait_seconds_total") == 0.05
    assert value("loaderd_stage_busy_seconds_total", stage="fill") == 0.2
    assert value("loaderd_stage_busy_seconds_total", stage="hand_over") == 0.5
    assert value("loaderd_session_rows_total", **session) == 4000
    assert value("loaderd_session_starved_seconds_total", **session) == 0.5
    assert value("loaderd_session_in_flight", **session) == 4
    assert value("loaderd_sessions", plan="minibatch") == 1
    assert value("loaderd_hit_ratio", of="row") == 0.75
    assert value("loaderd_ledger_bytes", line="page checksums", of="budget") == 1 << 20
    assert value("loaderd_ledger_bytes", line="session 3, out of the pools", of="pools") == 1 << 28
    assert value("loaderd_store_sessions", store="/data/store", fingerprint="f00d") == 1
    assert value("loaderd_info", store="/data/store", fingerprint="f00d", io_mode="O_DIRECT") == 1


def test_disks_that_blocks_are_dealt_over_are_labels():
    odd = "/mnt/a:b"
    counters = {
        f"disk:bytes_read:{odd}": 5, "disk:bytes_read:/c": 7, f"disk:active_ns:{odd}": 2 * 10**9,
        f"disk:slow:{odd}": 1, f"disk:run_ns:{odd}": 5000,
    }  # fmt: skip
    found = samples(metrics_text(status(counters=counters)).decode())
    own = frozenset({("disk", odd)})
    assert found["loaderd_disk_read_bytes_total", own] == 5
    assert found["loaderd_disk_read_bytes_total", frozenset({("disk", "/c")})] == 7
    assert found["loaderd_disk_active_seconds_total", own] == 2
    assert found["loaderd_disk_slow", own] == 1
    assert found["loaderd_disk_run_seconds", own] == 5e-6


def test_labels_with_odd_characters_are_escaped():
    odd = 'a"b\\c\nd'
    found = samples(metrics_text(status(stores=(structs.replace(STORE, path=odd),))).decode())
    assert odd in {dict(labels).get("store") for _, labels in found}


def test_the_document_lists_every_metric_and_no_other():
    text = (ROOT / "docs/metrics.md").read_text()
    rows = re.findall(r"^\| `(loaderd_\w+)(?:\{[\w,]+\})?` \| (\w+) \|", text, re.MULTILINE)
    assert len(rows) == len(dict(rows))
    assert dict(rows) == families(metrics_text(status()).decode())
