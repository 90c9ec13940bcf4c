"""A small storm; and that what a storm checks can fail."""

import pytest

from tools import storm
from tools.storm import FAULTS, TrainerRun, check_history

ORDER = {(epoch, step): f"{epoch}.{step}" for epoch in range(2) for step in range(3)}


def run(begin, first, last):
    """Steps number `first` to `last` of the order."""
    steps = [(*at, found) for at, found in list(ORDER.items())[first : last + 1]]
    return TrainerRun(begin, steps)


def test_a_small_storm_holds(tmp_path):
    words = ["--faults", "3", "--seed", "5", "--gap", "0.2", "--think", "0.005", "--times", "1"]
    line = storm.main([*words, "--folder", str(tmp_path), "--out", str(tmp_path / "lines")])
    assert line["holds"]
    assert sum(line["faults"].values()) == 3
    assert line["faults"].keys() <= FAULTS.keys()
    assert line["consumed"] >= line["steps"] > 0
    assert [p.name for p in tmp_path.iterdir()] == ["lines"]


def test_a_small_storm_over_daemons_with_parts_holds(tmp_path):
    words = ["--faults", "2", "--seed", "2", "--gap", "0.2", "--think", "0.005", "--times", "1"]
    line = storm.main([*words, "--servers", "2", "--trainers", "2", "--folder", str(tmp_path)])
    assert line["holds"]
    assert sum(line["faults"].values()) == 2
    assert {kind.split()[1] for kind in line["faults"]} == {"daemon"}
    assert line["consumed"] >= line["steps"] > 0
    assert line["rows_of_peers"] > 0


def test_runs_that_go_on_from_saved_states_hold():
    check_history(0, [run((0, -1), 0, 5)], ORDER)
    check_history(0, [run((0, -1), 0, 3), run((0, 1), 2, 4), run((1, 1), 5, 5)], ORDER)
    check_history(0, [run((0, -1), 0, 2), run((1, -1), 3, 5)], ORDER)


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        ([run((0, -1), 0, 4)], "ends with"),
        ([run((0, -1), 0, 1), run((0, 2), 3, 5)], "begins after"),
        ([run((0, -1), 0, 1), run((0, 1), 3, 5)], "stands where"),
        ([run((0, -1), 0, 1), run((0, 1), 1, 5)], "stands where"),
        ([TrainerRun((0, -1), [(0, 1, "0.1")])], "stands where"),
        ([TrainerRun((0, -1), [(0, 0, "0.1")])], "another sha256"),
    ],
)
def test_what_is_missing_repeated_or_other_is_found(runs, message):
    with pytest.raises(SystemExit, match=message):
        check_history(0, runs, ORDER)
