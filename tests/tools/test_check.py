"""The one command of daily habits: names, exit codes, environments."""

import pytest

from tools import check


@pytest.fixture
def ran(monkeypatch):
    """Checks that were run; those named in `failing` fail."""
    names, failing = [], set()

    def run(found):
        names.append(found.name)
        return found.name not in failing

    monkeypatch.setattr(check, "run", run)
    return names, failing


def test_all_checks_run_even_after_a_failure(ran):
    names, failing = ran
    failing.add("lint")
    assert check.main([]) == 1
    assert names == [c.name for c in check.CHECKS]


def test_some_checks_by_name(ran):
    assert check.main(["types", "format"]) == 0
    assert ran[0] == ["format", "types"]


def test_unknown_names_are_an_error(ran, capsys):
    assert check.main(["lint", "style"]) == 2
    assert ran[0] == []
    assert capsys.readouterr().out.startswith("error: no check style; there are format, lint")


def test_a_check_runs_its_command_in_its_environment(capfd, monkeypatch):
    monkeypatch.delenv("MARK", raising=False)
    good = check.CheckCommand("good", ("this",), (("MARK", "1"),))
    bad = check.CheckCommand("bad", ("no_such_module",))
    assert check.run(good)
    assert not check.run(bad)
    out = capfd.readouterr().out
    assert "good: passed" in out
    assert "bad: FAILED" in out
