"""Traces are read back, and replayed by every policy."""

import numpy as np
import pytest

from loaderd.trace import BLOCKS, ROWS, Trace
from tests.graphs import make_csc
from tests.stores import write_store
from tools.traces import main, needs_of, read_trace, row_groups


def test_needs_look_ahead():
    needs = needs_of([np.array([0, 2]), np.array([1]), np.array([0, 1])], 3)
    assert needs.starts.tolist() == [0, 2, 3, 5]
    assert needs.after.tolist() == [2, 3, 2, 3, 3]


def test_a_trace_is_read_back_and_replayed(tmp_path):
    write_store(tmp_path / "store", make_csc([3] * 2000, 0), range(10))
    trace = Trace(tmp_path / "trace")
    batches = [np.arange(0, 900), np.arange(800, 1000), np.arange(0, 900)]
    for number, nodes in enumerate(batches):
        trace.write(ROWS, 1, number, nodes.astype(np.uint32))
    trace.write(BLOCKS, 0, 0, np.arange(5))
    trace.write(BLOCKS, 0, 0, np.arange(5))
    trace.close()
    with (tmp_path / "trace").open("ab") as f:
        f.write(np.array([ROWS, 1, 9, 100], np.int64).tobytes())  # cut off
    records = list(read_trace(tmp_path / "trace"))
    assert [g.tolist() for g in row_groups(records)] == [b.tolist() for b in batches]
    lines = main([
        str(tmp_path / "trace"), str(tmp_path / "store"), "--entries", "950", "--graph-mem", "8192",
    ])  # fmt: skip
    found = {(line["what"], line["policy"]): line["read"] for line in lines}
    assert found["rows", "optimal"] == found["rows", "next-use"] == 900 + 100 + 50
    assert found["graph blocks", "optimal"] == found["graph blocks", "present first"] == 5 + 3
    assert found["graph blocks", "lru"] == found["graph blocks", "second-chance"] == 10
    assert all(line["bytes"] % 4096 == 0 < line["bytes"] for line in lines)
    with pytest.raises(ValueError, match="group 0 needs 900 rows, there is room for 800"):
        main([str(tmp_path / "trace"), str(tmp_path / "store"), "--entries", "800"])


def test_blocks_of_relations_are_told_apart(tmp_path):
    write_store(tmp_path / "store", make_csc([3] * 2000, 0), range(10))
    trace = Trace(tmp_path / "trace")
    for relation in (0, 1):
        trace.write(BLOCKS, 0, relation, np.arange(4))
    trace.close()
    lines = main([str(tmp_path / "trace"), str(tmp_path / "store"), "--graph-mem", "64K"])
    assert {line["read"] for line in lines} == {8}
