"""Where compiled kernels are kept: an installation that nobody can write needs no home either."""

import ctypes
import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from numba.core.caching import IndexDataCacheFile

from blockstore.kernels import jit

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = ("blockstore", "preprocess", "loaderd", "clients")
IMPORTS_ALL = """
import numpy as np
import clients.torch, preprocess.__main__, loaderd.cli.commands
from blockstore.kernels.crc import page_crcs
from blockstore.kernels.jit import cache_folder
out = np.zeros(1, np.uint32)
page_crcs(np.zeros(4096, np.uint8), 1, out)
print(hex(out[0]), cache_folder(page_crcs))
"""
TWO_PROCESSES = """
import os, sys
import blockstore.kernels.jit  # and numba, once for both
for source in sys.argv[1:]:
    with open("inner.py", "w") as file:
        file.write(source)
    if os.fork() == 0:
        from outer import outer
        print(outer(), flush=True)
        os._exit(0)
    assert os.wait()[1] == 0
"""
LOADS_ONE = """
import sys
import numpy as np
from blockstore.kernels.rows import expand_counts
out = np.zeros(3, np.int64)
expand_counts(np.array([1, 2], np.uint32), 3, out)
loaded = dict(expand_counts.stats.cache_hits), "numba.np.linalg" in sys.modules

import numba
@numba.njit
def twice(counts, out):
    expand_counts(counts, 3, out)
    return np.sort(2 * out)  # compiled by what is imported only now
print(len(loaded[0]), loaded[1], out, twice(np.array([1, 2], np.uint32), out))
"""
CRC = "0x98f94189"  # of 4096 zeros, by google_crc32c
_CAPBSET_DROP, _DAC_OVERRIDE, _DAC_READ_SEARCH = 24, 1, 2


def without_privileges() -> None:
    """In a child that has not begun yet: permissions of files bind root, too."""
    if os.geteuid() == 0:
        libc = ctypes.CDLL(None, use_errno=True)
        for capability in (_DAC_OVERRIDE, _DAC_READ_SEARCH):
            assert libc.prctl(_CAPBSET_DROP, capability, 0, 0, 0) == 0


@pytest.fixture(scope="module")
def installation(tmp_path_factory):
    """A copy of our packages in which nothing can be written."""
    folder = tmp_path_factory.mktemp("installation")
    for name in PACKAGES:
        # with what Python has compiled, as an installation has it, but without kernels
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("*.nbi", "*.nbc"))
    folders = [folder, *(path for path in folder.rglob("*") if path.is_dir())]
    for each in folders:
        each.chmod(0o555)
    yield folder
    for each in folders:
        each.chmod(0o755)


@pytest.fixture
def places(tmp_path):
    """A home that cannot be written, and folders that may be made so."""
    made = {name: tmp_path / name for name in ("home", "cache", "run", "tmp")}
    for folder in made.values():
        folder.mkdir(0o700)
    made["home"].chmod(0o555)
    return made


def run(installation: Path, places: dict[str, Path], *words: str) -> "subprocess.CompletedProcess":
    names = {"HOME": "home", "XDG_CACHE_HOME": "cache", "XDG_RUNTIME_DIR": "run", "TMPDIR": "tmp"}
    found = {name: str(places[place]) for name, place in names.items()}
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("NUMBA", "XDG", "PYTHON"))}
    return subprocess.run(
        [sys.executable, "-W", "ignore", *words], cwd=installation, capture_output=True, text=True,
        env=kept | found | {"PYTHONPATH": str(installation)}, preexec_fn=without_privileges,
        check=False,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("where", ["cache", pytest.param("tmp", marks=pytest.mark.long)])
def test_kernels_are_kept_in_the_first_folder_that_can_be_written(installation, places, where):
    for name in ("cache", "run", "tmp"):
        if name == where:
            break
        places[name].chmod(0o555)
    done = run(installation, places, "-c", IMPORTS_ALL)
    assert done.returncode == 0, done.stderr
    crc, folder = done.stdout.split()
    assert crc == CRC
    private = places[where] / f"blockstore-kernels-{os.geteuid()}"
    assert Path(folder).parent == private
    assert list(Path(folder).glob("crc.page_crcs-*.nbc"))
    assert {path.stat().st_mode & 0o777 for path in (private, Path(folder))} == {0o700}


@pytest.mark.slow
@pytest.mark.long
def test_with_no_folder_of_ones_own_kernels_are_compiled_in_each_process(installation, places):
    for name in ("cache", "run"):
        places[name].chmod(0o555)
    shared = places["tmp"] / f"blockstore-kernels-{os.geteuid()}"
    shared.mkdir()
    shared.chmod(0o777)
    done = run(installation, places, "-c", IMPORTS_ALL)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [CRC, "None"]
    assert list(shared.iterdir()) == []
    told = run(installation, places, "-m", "loaderd", "doctor", "--mem", "16M")
    assert "Traceback" not in told.stderr
    assert "kernel cache" in told.stdout
    assert "compiles for about a minute" in told.stdout


@pytest.mark.slow
def test_a_kernel_is_loaded_without_what_compiles_kernels():
    found = [
        subprocess.run(
            [sys.executable, "-W", "ignore", "-c", LOADS_ONE], capture_output=True, text=True,
            check=True, cwd=ROOT,
        ).stdout
        for _ in range(2)
    ]  # fmt: skip
    assert found[1] == "1 False [3 4 4] [6 8 8]\n", found


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """What would be taken; all other places are out of reach."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(jit, "_parents", lambda: iter([tmp_path]))
    jit.private_folder.cache_clear()
    yield tmp_path / f"blockstore-kernels-{os.geteuid()}"
    jit.private_folder.cache_clear()


def test_a_private_folder_is_taken(folder):
    assert jit.private_folder() == folder


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o720, 0o702])
def test_a_folder_that_others_can_write_is_refused(folder, mode):
    folder.mkdir()
    folder.chmod(mode)
    assert jit.private_folder() is None


@pytest.mark.parametrize("mode", [0o777, 0o775])
def test_a_folder_in_one_that_others_can_write_is_refused(folder, mode):
    folder.parent.chmod(mode)
    assert jit.private_folder() is None
    folder.parent.chmod(mode | 0o1000)  # as /tmp: others cannot rename what is ours
    jit.private_folder.cache_clear()
    assert jit.private_folder() == folder


def test_a_link_in_place_of_the_folder_is_refused(folder, tmp_path_factory):
    folder.symlink_to(tmp_path_factory.mktemp("elsewhere"))
    assert jit.private_folder() is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_somebody_else_is_refused(folder):
    folder.mkdir(0o700)
    os.chown(folder, 65534, 65534)
    assert jit.private_folder() is None


def test_a_cache_that_cannot_be_written_stops_nobody(monkeypatch):
    @jit.njit(nogil=True, cache=True)
    def twice(x):
        return 2 * x

    def full(*words):
        raise OSError(28, "No space left on device")

    if jit.cache_folder(twice) is not None:
        monkeypatch.setattr(twice._cache._cache_file, "save", full)
    assert twice(4) == 8


CODE = {"int": "code for int", "float": "code for float"}


def save_at_the_same_time(kind: type, folder: Path) -> tuple[Any, Any]:
    """Two processes have read the index; one saves as the other one is about to end."""
    folder.mkdir()
    first, second = (kind(str(folder), "kernel", "stamp") for _ in range(2))
    written, write, read = itertools.count(1), first._open_for_write, second._load_index()

    def write_after_the_other(path):
        if next(written) == 2:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(second, "_load_index", lambda: dict(read))
                second.save("float", CODE["float"])
        return write(path)

    first._open_for_write = write_after_the_other
    first.save("int", CODE["int"])
    return first, second


def test_processes_that_save_at_the_same_time_mix_up_no_code(tmp_path):
    theirs, _ = save_at_the_same_time(IndexDataCacheFile, tmp_path / "numba")
    assert theirs.load("float") == CODE["int"]  # else numba can be left as it is
    first, second = save_at_the_same_time(jit._CacheFile, tmp_path / "ours")
    for key in CODE:  # what is missing is compiled once more
        assert first.load(key) in (CODE[key], None)
        second.save(key, CODE[key])
    assert {key: first.load(key) for key in CODE} == CODE
    assert len(list((tmp_path / "ours").iterdir())) == 3  # the index, and a file for each


def test_a_process_that_is_killed_while_it_saves_leaves_no_code_of_an_earlier_version(
    tmp_path, monkeypatch
):
    old, new = (jit._CacheFile(str(tmp_path), "kernel", stamp) for stamp in ("old", "new"))
    old.save("int", "old code")
    for number in (1, 2):
        with monkeypatch.context() as patch:
            written, write = itertools.count(1), new._open_for_write

            def write_or_die(path, written=written, write=write, number=number):
                if next(written) == number:
                    raise KeyboardInterrupt
                return write(path)

            patch.setattr(new, "_open_for_write", write_or_die)
            with pytest.raises(KeyboardInterrupt):
                new.save("int", "new code")
        assert new.load("int") is None
    new.save("int", "new code")
    assert new.load("int") == "new code"
    assert old.load("int") is None


def test_a_change_of_what_a_kernel_calls_is_seen(tmp_path):
    """numba alone would go on with the old code: it looks at the file of the caller."""
    head = "from blockstore.kernels.jit import njit\n"
    kernel = "@njit(cache=True)\ndef {}():\n    return {}\n"
    (tmp_path / "outer.py").write_text(
        f"{head}from inner import inner\n" + kernel.format("outer", "inner() + 1")
    )
    # of another length: Python itself takes a source of the same second and length for the same
    inner = [head + kernel.format("inner", value) for value in (1, 50)]
    said = subprocess.run(
        [sys.executable, "-c", TWO_PROCESSES, *inner],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert said.stdout == "2\n51\n"
