"""The choice among ways of bringing rows: pure, so all of it is told by numbers."""

import pytest

from clients.device.calibration import CACHED, DIRECT, MODES, STAGING, TRIALS, WARM, Calibration


def measure(calibration, costs, batches=1000):
    """Note batches until it has chosen; costs: mode -> (host, device) seconds a row."""
    tried = []
    for _ in range(batches):
        if calibration.choice is not None:
            return tried
        mode = calibration.mode
        tried.append(mode)
        host_s, device_s = costs[mode]
        calibration.note(10 * host_s, 10 * device_s, 10)
    raise AssertionError("never chose")


@pytest.mark.parametrize(
    ("costs", "chosen"),
    [
        ({STAGING: (3, 1), DIRECT: (1, 2), CACHED: (1, 1)}, CACHED),
        ({STAGING: (3, 1), DIRECT: (1, 2), CACHED: (1, 2.5)}, DIRECT),
        ({STAGING: (1, 1), DIRECT: (0.1, 2), CACHED: (0.1, 3)}, STAGING),
        ({STAGING: (2, 1), DIRECT: (1, 2), CACHED: (1, 2)}, STAGING),  # of equals the plainest
    ],
)
def test_the_slower_of_host_and_device_counts(costs, chosen):
    calibration = Calibration(MODES, "")
    tried = measure(calibration, costs)
    assert tried == [mode for mode in MODES for _ in range(WARM + TRIALS)]
    assert calibration.mode == calibration.choice.mode == chosen
    expected = {mode: 1e9 * max(pair) for mode, pair in costs.items()}
    assert calibration.choice.ns_per_row == pytest.approx(expected)


def test_the_first_batches_do_not_count():
    calibration = Calibration((STAGING, DIRECT), "")
    for _ in range(WARM):
        calibration.note(100.0, 100.0, 1)
    measure(calibration, {STAGING: (1, 1), DIRECT: (2, 2)})
    assert calibration.choice.mode == STAGING


def test_one_way_needs_no_measuring():
    calibration = Calibration((DIRECT,), "asked for")
    assert calibration.choice == (DIRECT, "asked for", {}, 0, 0)


def test_empty_batches_say_nothing():
    calibration = Calibration((STAGING, DIRECT), "")
    for _ in range(100):
        calibration.note(1.0, 1.0, 0)
    assert calibration.mode == STAGING
    assert calibration.choice is None


@pytest.mark.parametrize("modes", [MODES, (DIRECT,), (CACHED,)])
@pytest.mark.parametrize("before", [0, WARM + TRIALS])
def test_staging_takes_the_place_of_what_does_not_work(modes, before):
    calibration = Calibration(modes, "asked for")
    for _ in range(before):
        calibration.note(1.0, 1.0, 1)
    calibration.decline("no")
    assert calibration.mode == STAGING
    assert calibration.choice[:2] == (STAGING, "no")
