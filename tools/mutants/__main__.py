"""Plant faults one at a time: `python -m tools.mutants [--only NAME] [--jobs 1]`.

`faults.toml` lists them: the file, the text that is replaced (it stands there once), the text in
its place, what goes wrong, and the tests that must fail within LIMIT_S.  Tests mirror the packages:
those of `a/b/c.py` lie in `tests/a/b`, or in `tests/a` if there is no such folder, and an entry
names files or tests of that folder only.  An entry without `tests` is left to `test_c.py`, or to
all files of the folder if there is none.

The tree is copied by hard links, with the caches of compiled kernels as far as the planted file is
not compiled into them.  All selections run once without a fault first: what fails then says
nothing.
The exit code is 1 if a fault survived or ran out of time, 2 if a text is not found exactly once.
"""

import ast
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

from tools.command import parse

ROOT = Path(__file__).resolve().parent.parent.parent
LIST = Path(__file__).with_name("faults.toml")
LIMIT_S = 60.0
CLEAN_LIMIT_S = 1800.0  # for all selections together, including the compilation of kernels
LEFT_OUT = (".git", ".venv", ".hypothesis", ".mypy_cache", ".ruff_cache", "build")


class PlantedFault(NamedTuple):
    name: str
    file: str
    old: str
    new: str
    wrong: str  # what goes wrong, in a sentence
    tests: tuple[str, ...] = ()  # in the mirrored folder

    def folder(self, root: Path) -> Path:
        """The folder of tests that mirrors the file's folder, or the nearest parent's."""
        folder = Path("tests", self.file).parent
        while not (root / folder).is_dir():
            folder = folder.parent
        return folder

    def selection(self, root: Path) -> list[str]:
        folder = self.folder(root)
        own = folder / f"test_{Path(self.file).stem}.py"
        if self.tests:
            return [f"{folder}/{test}" for test in self.tests]
        if (root / own).exists():
            return [str(own)]
        return sorted(str(p.relative_to(root)) for p in (root / folder).glob("test_*.py"))


class FaultNotFound(Exception):
    """The text of an entry does not occur exactly once in its file."""


def read_faults(path: Path = LIST) -> list[PlantedFault]:
    """All entries.  Raises ValueError: two have the same name, or an entry changes nothing."""
    entries = tomllib.loads(path.read_text())["fault"]
    faults = [
        PlantedFault(**{**entry, "tests": tuple(entry.get("tests", ()))}) for entry in entries
    ]
    for name, count in Counter(fault.name for fault in faults).items():
        if count > 1:
            raise ValueError(f"{path}: {count} entries are named {name}, expected one")
    for fault in faults:
        if fault.old == fault.new:
            raise ValueError(f"{path}: {fault.name} replaces a text by itself")
    return faults


def planted(fault: PlantedFault, root: Path) -> str:
    """The file's text with the fault.  Raises FaultNotFound."""
    text = (root / fault.file).read_text() if (root / fault.file).exists() else ""
    count = text.count(fault.old)
    if count != 1:
        raise FaultNotFound(
            f"{fault.name}: the text stands {count} times in {fault.file}, expected once; "
            "bring the entry up to date"
        )
    return text.replace(fault.old, fault.new)


def plant(fault: PlantedFault, root: Path) -> None:
    """Change the file in a copy, and remove kernels that were compiled from its old text."""
    text = planted(fault, root)
    (root / fault.file).unlink()  # a hard link: the original stays as it is
    (root / fault.file).write_text(text)
    for module in dependents(fault.file, root):
        for cached in module.parent.glob(f"__pycache__/{module.stem}.*.nb[ic]"):
            cached.unlink()


def dependents(file: str, root: Path) -> set[Path]:
    """The file, and all modules that import it, directly or indirectly."""
    users: dict[str, set[Path]] = {}
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                users.setdefault(node.module, set()).add(path)
    found, ahead = set(), [root / file]
    while ahead:
        path = ahead.pop()
        if path not in found:
            found.add(path)
            ahead += users.get(".".join(path.relative_to(root).with_suffix("").parts), ())
    return found


def copy_tree(root: Path, to: Path) -> Path:
    """Copy the tree by hard links, with a link to the folder `shared` beside the tree."""
    ignored = shutil.ignore_patterns(*LEFT_OUT)
    shutil.copytree(root, to / root.name, copy_function=_link, ignore=ignored, symlinks=True)
    if (root.parent / "shared").exists():
        (to / "shared").symlink_to(root.parent / "shared")
    return to / root.name


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy2(source, target)


class Tested(NamedTuple):
    code: int | None  # None: timed out
    printed: str
    seconds: float


def run_tests(selection: Sequence[str], root: Path, limit_s: float) -> Tested:
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:randomly", *selection]
    environment = os.environ | {"PYTHONPATH": str(root)}
    with tempfile.TemporaryFile("w+") as out:
        begun = time.perf_counter()
        process = subprocess.Popen(
            command, cwd=root, env=environment, stdout=out, stderr=out, start_new_session=True
        )
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        out.seek(0)
        return Tested(code, out.read(), time.perf_counter() - begun)


def try_fault(fault: PlantedFault, root: Path, limit_s: float) -> str:
    """Plant a fault in a copy, run its tests, and print the verdict: killed, SURVIVED, ..."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        copy = copy_tree(root, Path(folder))
        plant(fault, copy)
        tested = run_tests(fault.selection(root), copy, limit_s)
    verdict = {None: "TIMED OUT", 0: "SURVIVED", 1: "killed", 2: "killed"}.get(tested.code, "ERROR")
    lines = tested.printed.splitlines() or [""]
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    by = failed[0].split(" - ")[0] if failed else lines[-1]
    said = by if tested.code else fault.wrong
    print(f"{verdict:9} {tested.seconds:5.1f} s  {fault.name}  {said}", flush=True)
    return verdict


def passes_clean(faults: Sequence[PlantedFault], root: Path) -> bool:
    """Whether the selections pass without a fault; this also compiles kernels."""
    selection = sorted({test for fault in faults for test in fault.selection(root)})
    tested = run_tests(selection, root, CLEAN_LIMIT_S)
    if tested.code != 0:
        print(f"{tested.printed}\nthese tests fail without a fault, so they say nothing of one")
    return tested.code == 0


@dataclass(frozen=True)
class MutantOptions:
    only: Annotated[tuple[str, ...], "faults by name"] = ()
    jobs: Annotated[int, "faults at a time"] = 1
    limit: Annotated[float, "seconds for a fault's tests"] = LIMIT_S


def main(words: Sequence[str]) -> int:
    options = parse(MutantOptions, words)
    faults = read_faults()
    if unknown := set(options.only) - {fault.name for fault in faults}:
        print(f"error: no fault {', '.join(sorted(unknown))} in {LIST}")
        return 2
    faults = [fault for fault in faults if not options.only or fault.name in options.only]
    try:
        for fault in faults:
            planted(fault, ROOT)
    except FaultNotFound as error:
        print(f"error: {error}")
        return 2
    if not passes_clean(faults, ROOT):
        return 2
    with ThreadPoolExecutor(options.jobs) as pool:
        verdicts = Counter(pool.map(lambda one: try_fault(one, ROOT, options.limit), faults))
    print(", ".join(f"{count} {verdict}" for verdict, count in sorted(verdicts.items())))
    return int(set(verdicts) != {"killed"})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
