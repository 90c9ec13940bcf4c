"""A small storm; and that what a storm checks can fail."""

import pytest

from tools import storm
from tools.storm import FAULTS, Life, check_history

ORDER = {(epoch, step): f"{epoch}.{step}" for epoch in range(2) for step in range(3)}


def life(begin, first, last):
    """Steps number `first` to `last` of the order."""
    steps = [(*at, found) for at, found in list(ORDER.items())[first : last + 1]]
    return Life(begin, steps)


def test_a_small_storm_holds(tmp_path):
    words = ["--faults", "4", "--seed", "5", "--gap", "0.2", "--think", "0.005", "--times", "1"]
    line = storm.main([*words, "--folder", str(tmp_path), "--out", str(tmp_path / "lines")])
    assert line["holds"]
    assert sum(line["faults"].values()) == 4
    assert line["faults"].keys() <= FAULTS.keys()
    assert line["consumed"] >= line["steps"] > 0
    assert [p.name for p in tmp_path.iterdir()] == ["lines"]


def test_lives_that_go_on_from_saved_states_hold():
    check_history(0, [life((0, -1), 0, 5)], ORDER)
    check_history(0, [life((0, -1), 0, 3), life((0, 1), 2, 4), life((1, 1), 5, 5)], ORDER)
    check_history(0, [life((0, -1), 0, 2), life((1, -1), 3, 5)], ORDER)


@pytest.mark.parametrize(
    ("lives", "message"),
    [
        ([life((0, -1), 0, 4)], "ends with"),
        ([life((0, -1), 0, 1), life((0, 2), 3, 5)], "begins after"),
        ([life((0, -1), 0, 1), life((0, 1), 3, 5)], "stands where"),
        ([life((0, -1), 0, 1), life((0, 1), 1, 5)], "stands where"),
        ([Life((0, -1), [(0, 1, "0.1")])], "stands where"),
        ([Life((0, -1), [(0, 0, "0.1")])], "another sha256"),
    ],
)
def test_what_is_missing_repeated_or_other_is_found(lives, message):
    with pytest.raises(SystemExit, match=message):
        check_history(0, lives, ORDER)
