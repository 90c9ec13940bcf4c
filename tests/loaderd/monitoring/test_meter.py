"""Meter: time goes to `ready` or `starved`, and only while a run is open."""

from hypothesis import given
from hypothesis import strategies as st

from loaderd.monitoring.meter import Meter, add_counts


class Clock:
    now = 0

    def __call__(self) -> int:
        return self.now


def test_a_run_from_its_start_to_its_last_release():
    clock = Clock()
    meter = Meter(clock)
    clock.now = 5  # before the run: nobody's
    meter.begin(2)
    clock.now = 8
    meter.handed(10, 100)
    clock.now = 12
    meter.handed(20, 200)
    meter.released()
    clock.now = 13
    assert meter.times() == {"ready_ns": 5, "starved_ns": 3}
    meter.released()
    clock.now = 50  # after it
    assert meter.times() == {"ready_ns": 5, "starved_ns": 3}
    assert (meter.rows, meter.edges) == (30, 300)


@given(
    st.lists(st.tuples(st.sampled_from(["begin", "handed", "released", "end"]), st.integers(0, 9)))
)
def test_time_is_never_counted_twice(events):
    clock = Clock()
    meter = Meter(clock)
    spent = 0
    for name, more in events:
        clock.now += more
        spent += more
        match name:
            case "begin":
                meter.begin(3)
            case "handed":
                meter.handed(1)
            case "released":
                meter.released()
            case "end":
                meter.end()
        times = meter.times()
        assert min(times.values()) >= 0
        assert sum(times.values()) <= spent


def test_counts_are_added_by_name():
    counts = {"a": 1}
    add_counts(counts, {"a": 2, "b": 3})
    assert counts == {"a": 3, "b": 3}


def test_what_two_stores_measured_of_one_disk_is_not_added():
    counts: dict[str, int] = {}
    for slow, run_ns in ((1, 40), (1, 70), (0, 50)):
        add_counts(counts, {"disk:slow:/d": slow, "disk:run_ns:/d": run_ns})
        add_counts(counts, {"device_page_ns": 9, "disk:reads:/d": 2})
    assert counts == {
        "disk:slow:/d": 1, "disk:run_ns:/d": 70, "device_page_ns": 9, "disk:reads:/d": 6,
    }  # fmt: skip


def test_a_trainer_that_has_released_all_it_was_handed_starves():
    clock = Clock()
    meter = Meter(clock)
    meter.begin(3)
    meter.handed(1)
    clock.now = 4
    meter.released()
    clock.now = 14
    meter.handed(1)
    clock.now = 15
    assert meter.times() == {"ready_ns": 5, "starved_ns": 10}
