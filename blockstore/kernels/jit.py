"""How kernels are compiled, and where compiled code is kept.

Compiled code is a pickle, which runs whatever its author wants when it is loaded.  So it is kept
beside the sources (whoever can write there can change the kernels themselves), else in a folder
that only this user can write, else nowhere: then kernels are compiled again in each process.
numba's own `cache=True` raises in the last case, and in the second it does not check who can write.

An environment variable (NUMBA_CACHE_DIR) would have to be set by whoever imports the first kernel,
a trainer too, and would move the caches of its own functions; so the choice is made per kernel, by
the classes that numba takes it from.
"""

import contextlib
import hashlib
import os
import secrets
import stat
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numba
from numba.core.caching import CompileResultCacheImpl, FunctionCache, IndexDataCacheFile
from numba.core.config import DISABLE_JIT
from numba.core.runtime import rtsys
from numba.extending import register_jitable


def njit(**options: Any) -> Callable[[Any], Any]:
    """As `numba.njit`; with `cache=True` a function is compiled whether or not it can be cached."""
    cached = options.pop("cache", False) and not DISABLE_JIT

    def compile_later(function: Any) -> Any:
        dispatcher = numba.njit(**options)(function)
        if cached:
            with contextlib.suppress(RuntimeError):  # it can be kept nowhere
                dispatcher._cache = _Cache(dispatcher.py_func)
        return dispatcher

    return compile_later


_compile_by: Callable[[Any, Any], bool] | None = None


def compile_by(other: Callable[[Any, Any], bool]) -> None:
    """From now on have kernels that are not in the cache compiled by `other`.

    other   gets a function and numba's signature; returns whether the cache has the kernel now. If
            not, this process compiles it
    """
    global _compile_by
    _compile_by = other


def cache_folder(kernel: Any) -> str | None:
    """Where a compiled function is kept; None: nowhere."""
    folder: str | None = getattr(getattr(kernel, "_cache", None), "cache_path", None)
    return folder


@cache
def private_folder() -> Path | None:
    """Where this user, and nobody else, can keep what was compiled; None: nowhere."""
    for parent in _parents():
        folder = parent / f"blockstore-kernels-{os.geteuid()}"
        with contextlib.suppress(OSError):
            parent.mkdir(0o700, parents=True, exist_ok=True)
            folder.mkdir(0o700, exist_ok=True)
            if _is_ours_alone(folder):
                tempfile.TemporaryFile(dir=folder).close()
                return folder
    return None


def _parents() -> Iterator[Path]:
    # if there is no home, `Path.home` raises, and this stays relative and is passed over
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111
    for name in (home, os.environ.get("XDG_RUNTIME_DIR", ""), tempfile.gettempdir()):
        if Path(name).is_absolute():
            yield Path(name)


def _is_ours_alone(folder: Path) -> bool:
    """Whether nobody else can write to a folder, or put another one in its place."""
    owner = os.geteuid()
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != owner or found.st_mode & 0o077:
        return False
    above = (parent.stat() for parent in folder.resolve().parents)
    return all(
        s.st_uid in (0, owner) and (not s.st_mode & 0o022 or s.st_mode & stat.S_ISVTX)
        for s in above
    )


class _PrivateLocator:
    """Tells numba the place of a function's cache: in the folder of this user."""

    def __init__(self, function: Any, source: str, folder: Path) -> None:
        self._source, self._line = Path(source), function.__code__.co_firstlineno
        of = hashlib.sha256(os.fsencode(self._source.absolute().parent)).hexdigest()[:16]
        self._folder = folder / f"{self._source.parent.name}-{of}"

    @classmethod
    def from_function(cls, function: Any, source: str) -> "_PrivateLocator | None":
        folder = private_folder()
        return None if folder is None else cls(function, source, folder)

    def ensure_cache_path(self) -> None:
        self._folder.mkdir(0o700, exist_ok=True)

    def get_cache_path(self) -> str:
        return str(self._folder)

    def get_source_stamp(self) -> bytes:
        return hashlib.sha256(self._source.read_bytes()).digest()

    def get_disambiguator(self) -> str:
        return str(self._line)


@cache
def _digest(folder: Path) -> str:
    """Digest of the sources of a folder of kernels, and of this one, on which all build."""
    sources = hashlib.sha256()
    for path in sorted({*folder.glob("*.py"), *Path(__file__).parent.glob("*.py")}):
        sources.update(path.read_bytes())
    return sources.hexdigest()


# numba's classes have no types
class _CacheImpl(CompileResultCacheImpl):  # type: ignore[misc]
    # the first two of numba's: the folder that NUMBA_CACHE_DIR names, and beside the source
    _locator_classes = (*CompileResultCacheImpl._locator_classes[:2], _PrivateLocator)


class _CacheFile(IndexDataCacheFile):  # type: ignore[misc]
    """The index of a kernel's compiled forms, by types of arguments, and a file for each form.

    numba numbers the files from 1, and names a file in the index before writing it.  So two
    processes that compile a kernel for different types at the same time write the same file, and a
    process that is killed in between leaves an index that names code of an earlier version: code
    for other types of arguments would run.  Here each file has its own name, and is complete when
    the index names it.  If two processes save at the same time, the form of one may be missing in
    the index: it is compiled once more.
    """

    def save(self, key: Any, data: Any) -> None:
        """Add a form.  Raises OSError."""
        name = self._data_name(secrets.randbits(48))
        self._save_data(name, data)
        forms = self._load_index() | {key: name}
        self._save_index(forms)
        pattern = self._data_name_pattern.replace("{number:d}", "*")
        for path in Path(self._cache_path).glob(pattern):
            if path.name not in forms.values():
                path.unlink(missing_ok=True)


class _Cache(FunctionCache):  # type: ignore[misc]
    _impl_class = _CacheImpl

    def __init__(self, function: Any) -> None:
        super().__init__(function)
        self._cache_file = _CacheFile(
            self._cache_path, self._impl.filename_base, self._impl.locator.get_source_stamp()
        )
        # numba looks at the source of a function alone.  What is kept also holds the code of those
        # that it calls, and pickles of the records that it takes, which other modules define.
        sources = _digest(Path(function.__code__.co_filename).parent)
        self._cache_file._version = f"{numba.__version__} {sources}"

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        # numba's own method first imports all that it can compile, SciPy too, which takes a second.
        # To run what was compiled needs only the runtime; whatever compiles imports the rest.
        rtsys.initialize(target_context)
        found = self._load_overload(sig, target_context)
        if found is None and _compile_by is not None and _compile_by(self._py_func, sig):
            found = self._load_overload(sig, target_context)
        return found

    def save_overload(self, sig: Any, data: Any) -> None:
        """Save, if possible: a full disk, say, is no reason not to run."""
        with contextlib.suppress(OSError):
            super().save_overload(sig, data)


# No reference counts: numba counts an array up and down whenever one kernel hands it to another,
# by atomic operations on cache lines that all workers share.  Sampling is 1.4 times as fast without
# (measured on 30 M edges, fanout 10, one thread).  What allocates cannot be compiled this way: it
# is a plain `njit` function that calls a `leaf`.
leaf = njit(nogil=True, cache=True, _nrt=False)

# For what only kernels call.  numba makes no entry for Python then, which would unpack every array
# of every record: compiling what sampling needs takes 8.6 s of CPU instead of 14.3.  Called from
# Python such a function runs as Python, and an intrinsic in it raises NotImplementedError.
inner = register_jitable(_nrt=False)
