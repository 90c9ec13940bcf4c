"""Where hop-wise features are advised to lie: each place, each order, and what a checkpoint has."""

from pathlib import Path

import msgspec
import pytest

from loaderd.api.placement import HopFacts, advise_hops, parse_advice
from loaderd.cli.advise.report import free_bytes

FACTS = HopFacts(
    num_rows=1000, row_bytes=1 << 20, device_bytes=0, training_bytes=1 << 30, held=True,
    chunks_s=2.0, rows_s=2.1,
)  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "place", "method"),
    [
        ({}, "host", "rr"),
        ({"rows_s": 2.3}, "host", "cr"),
        ({"held": False, "rows_s": 9.0}, "storage", "cr"),
        ({"held": False}, "storage", "rr"),
        ({"device_bytes": (1 << 30) + (1000 << 20)}, "device", "rr"),
        ({"device_bytes": (1 << 30) + (1000 << 20) - 1, "rows_s": 9.0}, "host", "cr"),
        ({"training_bytes": 0, "device_bytes": 1000 << 20}, "device", "rr"),
        ({"rows_s": None, "held": False}, "storage", "cr"),  # rows had no room to be tried
        ({"chunks_s": None}, "host", "rr"),
    ],
)
def test_the_fastest_place_with_room(changes, place, method):
    advice = advise_hops(msgspec.structs.replace(FACTS, **changes))
    assert (advice.place, advice.method) == (place, method)
    assert "1,000 rows of 1048576 bytes" in advice.text
    assert f'place "{place}", method "{method}"' in advice.text
    again = parse_advice(msgspec.json.decode(msgspec.json.encode(advice)))
    assert again == advice


@pytest.mark.parametrize(
    ("advice", "words"),
    [({}, "expected that of HopDataset.advised"), (7, "HopDataset.advised"),
     (msgspec.to_builtins(advise_hops(FACTS)) | {"place": "moon"}, "moon")],
)  # fmt: skip
def test_what_is_no_advice_is_refused(advice, words):
    with pytest.raises(ValueError, match=words):
        parse_advice(advice)


@pytest.mark.parametrize(
    ("script", "found"),
    [
        ("echo 1024; echo 80000; echo '[N/A]'", 80000 << 20),
        ("echo no devices were found", 0),
        ("exit 9", 0),
    ],
)
def test_free_memory_is_what_the_driver_says(tmp_path: Path, monkeypatch, script, found):
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert free_bytes() == found


def test_without_a_driver_there_is_no_accelerator(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert free_bytes() == 0
