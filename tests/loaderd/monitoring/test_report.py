"""Ledgers and statuses as people read them."""

import msgspec

from loaderd.monitoring.report import ledger_text, status_text
from tests.loaderd.samples import SAMPLES

STATUS = SAMPLES[-1]


def test_a_ledger_is_an_aligned_table_with_its_sum():
    assert ledger_text(STATUS.ledger[:2], 2 << 30).splitlines() == [
        "name           size  basis",
        "original ids  3.81M  4 B x 1,000,000 nodes",
        "row pool         1G  1,024 slots x 1,048,576 B",
        "total            1G  of --mem 2G",
    ]


def test_a_status_says_store_memory_sessions_and_counters():
    text = status_text(STATUS)
    for line in (
        "/data/a (store a, fingerprint f00d), O_DIRECT, 1 session",
        "pid 77, up 1:02:05",
        "session  owner  store  plan       seeds        epoch  step  of  in flight  window  done  "
        "held",
        "      3  ann           minibatch  split:train      2     5  10          2       8    25  "
        "  5M",
        "bytes_read  123,456,789",
    ):
        assert line in text.splitlines()
    pools, taken = text.index("total"), text.index("session 3, out of the pools")
    assert pools < taken  # they are part of the sum above them


def test_a_status_without_sessions():
    idle = msgspec.structs.replace(STATUS, sessions=(), ledger=STATUS.ledger[:2], draining=True)
    assert "no sessions" in status_text(idle)
    assert "up 1:02:05, draining" in status_text(idle)
