"""Rates, hits and the stage that limits, out of two statuses."""

import pytest
from msgspec import structs

from loaderd.monitoring.rates import History, StatusSample, compare, since_start, slow_stage
from tests.loaderd.statuses import MS, SESSION, later, status


def rates(seconds=2.0, **more):
    before = status()
    return compare(
        StatusSample(10.0, before), StatusSample(10.0 + seconds, later(before, seconds, **more))
    )


def test_rates_are_differences_by_the_time_between():
    r = rates(2.0, batches=10, rows=400, edges=900, bytes_read=5_000_000, read_ns=3000 * MS)
    assert (r.batches_s, r.rows_s, r.edges_s, r.read_bytes_s) == (5, 200, 450, 2_500_000)
    assert r.busy["read"] == 1.5
    assert (r.num_sessions, r.in_flight) == (1, 4)


def test_bytes_of_peers_are_there_for_parts_alone():
    r = rates(2.0, peer_requests=0, peer_bytes_asked=3_000_000, peer_bytes_given=1_000)
    assert (r.from_peers_s, r.to_peers_s) == (1_500_000, 500)
    r = rates(2.0, peer_bytes_given=0)  # whoever listens counts what it gives
    assert (r.from_peers_s, r.to_peers_s) == (None, None)


def test_a_counter_that_has_shrunk_counts_as_nothing():
    assert rates(1.0, batches=-50).batches_s == 0


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, None),  # nothing wanted
        ({"row_blocks_hit": 3, "row_blocks_missed": 1}, 0.75),
        ({"hyper_rows_wanted": 100, "hyper_rows_read": 20, "row_blocks_missed": 9}, 0.8),
        ({"batches": 4}, 1.0),  # batches without a look: all in memory
        ({"batches": 4, "bytes_read": 5}, None),
    ],
)
def test_row_hits(more, expected):
    assert rates(**more).row_hit == expected


@pytest.mark.parametrize(
    ("more", "limit"),
    [
        ({}, "idle"),
        ({"ready_ns": 950 * MS, "starved_ns": 50 * MS, "read_wait_ns": 900 * MS}, "trainer"),
        ({"starved_ns": 900 * MS, "sample_ns": 500 * MS, "read_wait_ns": 300 * MS}, "read"),
        ({"starved_ns": 900 * MS, "sample_ns": 500 * MS, "read_wait_ns": 200 * MS}, "sample"),
        ({"starved_ns": 900 * MS, "sample_ns": 500 * MS, "fill_ns": 600 * MS}, "fill"),
        ({"starved_ns": 900 * MS, "fill_ns": 500 * MS, "hyper_bring_ns": 600 * MS}, "gather"),
        ({"starved_ns": 900 * MS, "sample_ns": 5 * MS, "macro_wait_ns": 600 * MS}, "read"),
    ],
)
def test_what_limits(more, limit):
    assert rates(**more).limit == limit


def test_waiting_for_the_client_is_not_gathering():
    counts = {"hyper_bring_ns": 900, "hyper_release_wait_ns": 800, "fill_ns": 200}
    assert slow_stage(counts) == "fill"


def test_a_session_is_compared_with_itself():
    before = status()
    grown = structs.replace(SESSION, batches=110, rows=4400, starved_ns=900 * MS, ready_ns=600 * MS)
    new = structs.replace(SESSION, session=4, batches=2, ready_ns=10 * MS, starved_ns=0)
    after = structs.replace(later(before, 2.0, fill_ns=5), sessions=(grown, new))
    first, second = compare(StatusSample(0, before), StatusSample(2, after)).sessions
    assert (first.batches_s, first.rows_s, first.starved, first.limit) == (5, 200, 0.8, "fill")
    assert (second.batches_s, second.starved, second.limit) == (1, 0, "trainer")


def test_a_life_is_one_interval():
    assert since_start(status()).batches_s == pytest.approx(100 / 60)
    assert since_start(status()).row_hit == 0.75


def test_the_history_keeps_the_newest_and_forgets_sessions():
    history, reply = History(3), status()
    for second in range(6):
        history.add(StatusSample(second, reply))
        reply = later(reply, 1.0, batches=second)
    assert [p.at_s for p in history.after(-1)] == [3, 4, 5]
    assert [p.batches_s for p in history.after(3)] == [3, 4]
    assert [len(p.sessions) for p in history.after(-1)] == [0, 0, 1]


def test_another_daemon_is_not_compared_with_the_one_before():
    history = History(3)
    history.add(StatusSample(0, status(uptime_s=100.0)))
    history.add(StatusSample(1, status(uptime_s=1.0)))
    assert history.after(-1) == []
