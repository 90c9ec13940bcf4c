"""The list of faults is up to date, and the tool tells faults that tests notice from others."""

from pathlib import Path

import pytest

from tools.mutants import __main__ as mutants
from tools.mutants.__main__ import FaultNotFound, PlantedFault

CODE = "def add(a, b):\n    return a + b\n\n\ndef twice(a):\n    return add(a, a)\n"
TEST = "from pack.code import twice\n\n\ndef test_twice():\n    assert twice(2) == 4\n"
KILLED = PlantedFault("minus", "pack/code.py", "a + b", "a - b", "It is subtracted.")
SURVIVES = PlantedFault("power", "pack/code.py", "add(a, a)", "a**2", "It is squared.")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A package with a function and its test, as a checkout."""
    root = tmp_path / "checkout"
    for name, text in (("pack/code.py", CODE), ("tests/pack/test_code.py", TEST),
                       (".git/config", ""), ("pack/other.py", "from pack.code import add\n"),
                       ("pack/third.py", "from pack.other import add\n")):  # fmt: skip
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_every_fault_can_be_planted_and_has_tests_in_its_folder():
    faults = mutants.read_faults()
    assert len(faults) >= 60
    for fault in faults:
        mutants.planted(fault, mutants.ROOT)
        folder = mutants.ROOT / fault.folder(mutants.ROOT)
        for test in fault.selection(mutants.ROOT):
            path = mutants.ROOT / test.partition("::")[0]
            assert path.exists(), f"{fault.name}: there is no {path}"
            assert path.parent == folder, f"{fault.name}: {path} is not in {folder}"


def test_faults_are_told_from_those_that_tests_notice(tree, capsys):
    verdicts = [mutants.try_fault(fault, tree, 60) for fault in (KILLED, SURVIVES)]
    assert verdicts == ["killed", "SURVIVED"]
    killed, survived = capsys.readouterr().out.splitlines()
    assert killed.endswith("minus  FAILED tests/pack/test_code.py::test_twice")
    assert survived.endswith("power  It is squared.")
    assert (tree / "pack/code.py").read_text() == CODE


def test_what_hangs_is_ended(tree):
    (tree / "tests/pack/test_code.py").write_text(f"def test_hang():\n    {'while True: pass'}\n")
    assert mutants.try_fault(KILLED, tree, 2.0) == "TIMED OUT"


@pytest.mark.parametrize(("old", "count"), [("a * b", 0), ("add(a", 2)])
def test_a_text_that_is_not_there_once_is_an_error(tree, old, count):
    with pytest.raises(FaultNotFound, match=f"minus: the text stands {count} times in pack/code"):
        mutants.plant(KILLED._replace(old=old), tree)


def test_kernels_that_were_compiled_with_the_file_are_removed(tree, tmp_path):
    cache = tree / "pack/__pycache__"
    cache.mkdir()
    for name in ("code", "third", "apart"):
        (cache / f"{name}.kernel-1.py311.nbi").touch()
    (tree / "pack/apart.py").touch()
    copy = mutants.copy_tree(tree, tmp_path / "copies")
    assert not (copy / ".git").exists()
    assert (copy / "pack/apart.py").stat().st_ino == (tree / "pack/apart.py").stat().st_ino
    mutants.plant(KILLED, copy)
    left = [path.name.split(".")[0] for path in (copy / "pack/__pycache__").iterdir()]
    assert left == ["apart"]
    assert len(list(cache.iterdir())) == 3


def test_selections_are_those_of_the_nearest_folder(tree):
    deep = KILLED._replace(file="pack/inner/code.py")
    assert deep.selection(tree) == ["tests/pack/test_code.py"]
    named = KILLED._replace(tests=("test_code.py::test_twice",))
    assert named.selection(tree) == ["tests/pack/test_code.py::test_twice"]


def test_a_list_must_make_sense(tmp_path):
    entry = '[[fault]]\nname = "a"\nfile = "f"\nold = "x"\nnew = "{}"\nwrong = "w"\n'
    for text, said in ((entry.format("y") * 2, "2 entries are named a"),
                       (entry.format("x"), "a replaces a text by itself")):  # fmt: skip
        (tmp_path / "faults.toml").write_text(text)
        with pytest.raises(ValueError, match=said):
            mutants.read_faults(tmp_path / "faults.toml")
