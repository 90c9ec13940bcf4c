"""Partitioners side by side: lines and their table."""

import importlib.util
import json
from pathlib import Path

from preprocess.sources.generate import GraphRecipe, generate
from tests.preprocess.quiet import QUIET
from tools import partition


def test_partitioners_side_by_side(tmp_path: Path, capsys):
    generate(tmp_path / "graph", GraphRecipe(1500, 12, 4, 5, train=0.4, seed=2), QUIET)
    out = tmp_path / "lines.jsonl"
    words = [str(tmp_path / "graph"), "--k", "8", "--passes", "2", "--work", str(tmp_path)]
    lines = partition.main([*words, "--mem", "512M", "--out", str(out)])
    by_method = {line["method"]: line for line in lines}
    assert list(by_method) == ["gap", "fennel", "ldg", "random", "metis"]
    if importlib.util.find_spec("pymetis") is None:
        assert "pip install" in by_method.pop("metis")["skipped"]
    assert by_method["gap"]["kept_8"] > by_method["random"]["kept_8"]
    assert by_method["gap"]["pass_cpu_s"] > 0
    assert [json.loads(text) for text in out.read_text().splitlines()] == lines
    printed = capsys.readouterr().out
    assert "| graph, 8 | fennel |" in printed
    assert sorted(p.name for p in tmp_path.iterdir()) == ["graph", "lines.jsonl"]


def test_a_table_against_metis():
    line = {
        "graph": "g", "num_partitions": 4, "num_edges": 100, "num_nodes": 20, "cut": 0.5,
        "kept_8": 0.4, "kept_16": 0.3, "kl_mean": 0.02, "kl_max": 0.03, "kl_random": 0.04,
        "node_balance": 1.1, "train_balance": 1.05, "evaluations": 120, "passes": 2,
        "pass_s": 1e-6, "pass_edges": 100, "pass_cpu_s": 5e-7,
    }  # fmt: skip
    metis = line | {"method": "metis", "kept_8": 0.5, "kl_mean": 0.4, "passes": 0, "pass_cpu_s": 0}
    rows = partition.as_table([line | {"method": "gap"}, metis]).splitlines()
    assert rows[2] == (
        "| g, 4 | gap | 0.500 | 0.400 (0.800) | 0.300 | 0.02, 0.03 | 0.50 | 1.100, 1.050 "
        "| 100 (200) |"
    )
    assert rows[3].endswith("| 10.00 | 1.100, 1.050 |  |")
