"""Mutated stores: what the fuzzer finds, and does again."""

import os
import signal
from random import Random

import pytest

from tests.effort import tries
from tools.fuzz import stores as fuzz_stores
from tools.fuzz.mutations import KINDS, StoreDraft
from tools.fuzz.stores import Fuzzer, make_stores, mutated
from tools.fuzz.trial import Bench, Outside


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bases")
    return {kind: StoreDraft.load(path) for kind, path in make_stores(folder).items()}


@pytest.fixture(scope="module")
def outside():
    return Outside()


def test_mutations_are_the_same_again_and_of_every_kind(bases):
    kinds = set()
    for number in range(120):
        first, said = mutated(bases["parts"], f"parts:{number}")
        kinds |= {line.partition(":")[0] for line in said}
        if number % 20 == 0:
            second, again = mutated(bases["parts"], f"parts:{number}")
            assert said == again
            assert first.sign() == second.sign()
    assert kinds == {kind.__name__ for kind, _ in KINDS}


def test_stores_as_they_are_are_served_by_every_plan(bases, tmp_path):
    for kind, base in bases.items():
        trial = Bench(tmp_path / kind, base).attempt(base.copy(), Random(kind))
        assert not trial.defects
        assert {trial.said[name] for name in ("open", "verify", "export", "serve")} == {"done"}
        assert set(trial.said.values()) <= {"done", "Refused"}


MUTATIONS = tries(12, 60)


def test_mutated_stores_are_refused_or_served(bases, tmp_path, outside):
    names = [f"{kind}:{n}" for n in range(MUTATIONS // 3) for kind in bases]
    tally = Fuzzer(bases, tmp_path, outside).run(names)
    assert tally.defects == {}
    assert tally.done == len(names)
    assert tally.said["refused"] > MUTATIONS // 4 < tally.said["opened"]


def test_a_process_that_dies_is_told_by_the_name_of_what_it_was_at(
    bases, tmp_path, outside, monkeypatch
):
    def deadly(base, name):
        if name == "one:1":
            os.kill(os.getpid(), signal.SIGSEGV)
        return mutated(base, name)

    monkeypatch.setattr(fuzz_stores, "mutated", deadly)
    tally = Fuzzer(bases, tmp_path, outside).run(["one:0", "one:1", "one:2"])
    assert tally.defects == {"one:1": ["crash"]}
    assert tally.done == 3


def test_a_file_outside_is_seen(tmp_path, outside):
    outside.allow(tmp_path)
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "outside" / "file")
    outside.found.clear()
    outside.watching = True
    (tmp_path / "mine").touch()
    (tmp_path / "link").open().close()
    outside.watching = False
    assert outside.found == [f"open {tmp_path}/outside/file/"]
