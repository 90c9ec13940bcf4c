"""What a dry run says: pure figures by hand, the rest against what then happens."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from preprocess.cli.dryrun import ProcessorRates, dry_run, dry_run_text, estimate_stages
from preprocess.ingest.contents import list_contents
from preprocess.ingest.ingest import IngestStages, ingest
from preprocess.ingest.options import IngestOptions
from preprocess.ingest.plan import COUNT, ORDER
from preprocess.pipeline.disk import DiskRates, existing_folder, measure_disk
from preprocess.sources.plain import PlainSource
from tests.preprocess.ingest.test_plan import Headers
from tests.preprocess.naive import Graph
from tests.preprocess.quiet import QUIET

OPTIONS = IngestOptions(mem_bytes=64 << 20, block_bytes=1 << 16)


def stages_of(source, options):
    """As an ingest declares them."""
    return IngestStages(source, list_contents(source, options), options).all_stages()


def test_a_disk_is_measured_and_left_as_it_was(tmp_path: Path):
    found = measure_disk(tmp_path)
    assert found.read > 0
    assert found.write > 0
    assert list(tmp_path.iterdir()) == []
    assert existing_folder(tmp_path / "not" / "there" / "store") == tmp_path


def test_a_stage_takes_as_long_as_disk_or_processors():
    source, options = Headers(1000, 6_000_000, 4), IngestOptions(mem_bytes=2 << 30)
    stages = stages_of(source, options)
    rates = ProcessorRates(1e6, 2e6, 3e6, 4e6, 1e9)
    fast = DiskRates("", 1e15, 1e15, True, 0)
    found = {s.name: s for s in estimate_stages(stages, fast, rates)}
    assert found[COUNT].seconds == pytest.approx(6)
    assert found[ORDER].seconds == pytest.approx(2 + 3)  # columns fit: sorted, then walked
    assert found["edges/node___to___node"].seconds == pytest.approx(3)
    assert {s.bound for s in found.values() if s.seconds > 1} == {"CPU"}
    slow = replace(fast, read=1e6, write=5e5)
    for s in estimate_stages(stages, slow, rates):
        assert s.disk_s == pytest.approx(s.read_bytes / 1e6 + s.written_bytes / 5e5)
        assert s.seconds == max(s.disk_s, s.processor_s)
    assert found["nodes/node/features/x"].processor_s == pytest.approx(
        sum(getattr(found["nodes/node/features/x"], n) for n in ("read_bytes", "written_bytes"))
        / 1e9
    )


def test_estimated_columns_on_disk_are_a_stage_of_their_own():
    source, options = Headers(1000, 60_000_000, 4), IngestOptions(mem_bytes=256 << 20)
    rates, disk = ProcessorRates(), DiskRates("", 1e15, 1e15, True, 0)
    found = estimate_stages(stages_of(source, options), disk, rates)
    by_name = {s.name: s.seconds for s in found}
    assert by_name["columns by source id"] == pytest.approx(60e6 / rates.sorted_edges)
    assert by_name[ORDER] == pytest.approx(60e6 / rates.ordered_edges)


def test_a_dry_run_is_what_then_happens(small_graph: Path, tmp_path: Path):
    source = PlainSource(small_graph)
    found = dry_run(source, tmp_path / "store", OPTIONS)
    assert list(tmp_path.iterdir()) == []
    assert found.fits_disk
    assert found.source_bytes == sum(p.stat().st_size for p in small_graph.iterdir())
    assert found.elapsed_s > sum(s.seconds for s in found.stages)
    result = ingest(source, tmp_path / "store", OPTIONS, QUIET)
    assert [s.name for s in result.stages] == [s.name for s in found.stages]
    on_disk = sum(p.stat().st_size for p in (tmp_path / "store").rglob("*") if p.is_file())
    assert 0.8 * on_disk < found.plan.store_bytes < 1.5 * on_disk
    text = dry_run_text(found)
    for words in (
        "4,000", "40,000 at most", "it fits", "--mem", "64M", "count edges", "measured in",
        "CPU, assumed: 60M edges/s counted",
    ):  # fmt: skip
        assert words in text
    assert not [line for line in text.splitlines() if line != line.rstrip()]


def test_a_disk_that_is_too_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    source = Graph().add_type("node", 4, x=np.zeros((4, 8), np.float32))
    source.add_relation("node", "to", "node", [(0, 1)])
    found = replace(dry_run(source, tmp_path / "store", OPTIONS), free_bytes=10, fits_disk=False)
    assert "of 10B free: IT DOES NOT FIT" in dry_run_text(found)
