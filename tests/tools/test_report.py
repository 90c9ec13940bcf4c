"""Figures and tables out of lines of a bench and a trace."""

import json

import numpy as np
import pytest

from loaderd.trace import STAGE, Trace
from tools.report import hyperbatch_table, main, read_spans

PNG = b"\x89PNG"


def line(name: str, size: int, rate: float, **more) -> dict:
    spread = {"median": rate, "min": rate / 2, "max": rate * 2}
    read = {"median": 1e5 / max(1, size), "min": 0.0, "max": 1e6}
    return {
        "bench": "hyperbatch", "case": "ours", "side": name, "size": size, "limit": "2G",
        "store": "store", "mem": "1G", "seeds_per_s": spread, "bytes_per_seed": read, "kills": 0,
    } | more  # fmt: skip


def test_figures_are_drawn_and_a_table_printed(tmp_path, capsys):
    lines = [
        line("auto, small", 0, 5000), line("auto, large", 0, 20000, limit="4G"),
        line("H=4", 4, 3000), line("H=16", 16, 9000), line("gone", 64, 1, failed="killed"),
    ]  # fmt: skip
    path = tmp_path / "lines.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    trace = Trace(tmp_path / "trace")
    for number, span in ((0, (1000, 2000)), (1, (1500, 9000)), (2, (9000, 9500))):
        trace.write(STAGE, 1, number, np.array(span))
    trace.close()
    main([str(path), str(tmp_path / "figures"), "--trace", str(tmp_path / "trace")])
    for name in ("reads", "budgets", "stages"):
        raw = (tmp_path / "figures" / f"{name}.png").read_bytes()
        assert raw.startswith(PNG)
        assert len(raw) > 5000
    printed = capsys.readouterr().out
    assert printed.count("\n") == 6  # a head, a rule, four lines: what failed is left out
    assert "| auto, large | 20,000 (10,000 - 40,000) | 100.0 |" in printed


def test_accuracy_against_chunks(tmp_path):
    """Of several files together."""
    for model, level in (("sgc", 45.0), ("sign", 55.0)):
        found = [
            {"bench": "compare", "case": "hops", "way": f"{model}, {way}", "seed": seed,
             "accuracy": level + seed + more}
            for seed in range(3)
            for way, more in (("rows", 0.0), ("chunks of 1", 0.0), ("chunks of 800", 0.1 * seed))
        ]  # fmt: skip
        (tmp_path / model).write_text("\n".join(map(json.dumps, found)))
    main([str(tmp_path / "sgc"), str(tmp_path / "sign"), str(tmp_path / "figures")])
    assert (tmp_path / "figures" / "chunks.png").read_bytes().startswith(PNG)


def test_spans_count_from_the_first(tmp_path):
    trace = Trace(tmp_path / "trace")
    trace.write(STAGE, 1, 1, np.array([5 * 10**9, 6 * 10**9]))
    trace.write(STAGE, 1, 0, np.array([4 * 10**9, 5 * 10**9]))
    trace.close()
    assert read_spans(tmp_path / "trace") == [("bring in", 1.0, 2.0), ("sample", 0.0, 1.0)]


def test_a_table_has_a_row_a_line():
    assert hyperbatch_table([]).count("\n") == 1
    assert hyperbatch_table([line("a", 1, 1)]).endswith("| 0 |")
    assert pytest.approx(1) == float(hyperbatch_table([line("a", 1, 1)]).split("|")[-6].split()[0])


def test_lines_that_nobody_draws_are_told(tmp_path):
    (tmp_path / "lines").write_text(json.dumps({"way": "in memory", "accuracy": 93.0}) + "\n")
    with pytest.raises(SystemExit, match="1 lines, expected some of a bench that is drawn"):
        main([str(tmp_path / "lines"), str(tmp_path / "figures")])
    assert not (tmp_path / "figures").exists()


def test_a_trace_alone_is_drawn(tmp_path):
    trace = Trace(tmp_path / "trace")
    trace.write(STAGE, 1, 0, np.array((1000, 2000)))
    trace.close()
    main([str(tmp_path / "figures"), "--trace", str(tmp_path / "trace")])
    assert [p.name for p in (tmp_path / "figures").iterdir()] == ["stages.png"]
