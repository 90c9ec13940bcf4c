"""Power loss at any moment, simulated: `python -m tools.lost_writes [--points 2000]`.

A command runs once while everything that changes below one folder is logged: what is written to
which file, names that appear, move and go, and each fsync.  Then the folder is made again as a disk
might hold it if the power failed at some place of that log: what was synced is there; of the rest
all, nothing, or any combination, of a file by pages.  After each such loss the store must be whole
or absent, and the same command must complete, with the bytes of a run that nothing disturbed.
After the end of the log nothing may be missing: exit code 0 means that the store is on disk.

The log is a comparison of the whole folder before each call that opens a file to write, renames,
removes or syncs, so no write passes by unseen, whatever library makes it.
"""

import json
import os
import random
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from io import StringIO
from pathlib import Path
from threading import RLock
from typing import Annotated, Any, NamedTuple
from unittest import mock

import numpy as np

from blockstore.errors import StoreExists
from blockstore.store import open_store
from blockstore.verify import verify_store
from preprocess.derive.derive import derive
from preprocess.derive.plan import Derivation
from preprocess.errors import BadInput
from preprocess.hops.hops import make_hops
from preprocess.ingest.ingest import ingest
from preprocess.ingest.options import HopsRequest, IngestOptions
from preprocess.partition.partition import InfluenceOptions, PartitionOptions
from preprocess.partition.repartition import repartition
from preprocess.pipeline.progress import Progress
from preprocess.sources.layouts import open_source
from tools.command import parse, put
from tools.tree import differences, file_digests

_PAGE = 4096
_CALLS = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link", "os.truncate"}
_ROOT = 0  # number of the folder itself
Place = tuple[int, str]  # folder, name in it
Effect = tuple[Place, int, bool]  # place, file or folder with that name, appears (or goes)


@dataclass
class Change:
    file: int = -1  # that is written (with `content` afterwards) or synced
    content: bytes | None = None
    effects: list[Effect] = field(default_factory=list)  # on names; all of them happen, or none


class _Look(NamedTuple):
    """A snapshot of a folder; each file and folder has a number of its own."""

    names: dict[Place, int]
    files: dict[int, bytes]


class _Known(NamedTuple):
    """A file or folder that a snapshot has found.

    It stays open, so that another one that appears before the next snapshot cannot get its inode.
    """

    number: int
    descriptor: int


class Recorder:
    """Context that logs all changes below a folder.  Replaces `os.fsync`: nothing is synced."""

    def __init__(self, root: Path) -> None:
        self._root, self._lock = root, RLock()
        self._known: dict[int, _Known] = {}  # by inode
        self._next, self._on = _ROOT + 1, False
        self._patch = mock.patch("os.fsync", self._fsync)
        self.log: list[Change] = []
        self.first = self.last = self._look()
        sys.addaudithook(self._hear)

    def _hear(self, event: str, args: tuple[Any, ...]) -> None:
        if self._on and (event in _CALLS or (event == "open" and _writes(args))):
            self._note()

    def _note(self) -> None:
        with self._lock:
            look = self._look()
            self.log += _changes(self.last, look)
            self.last = look

    def _look(self) -> _Look:
        while True:  # until no other thread has changed names meanwhile
            with suppress(FileNotFoundError):
                look, again = _Look({}, {}), _Look({}, {})
                for each in (look, again):
                    self._walk(self._root, _ROOT, each)
                if look.names == again.names:
                    break
        self._forget(set(look.names.values()))
        return look

    def _forget(self, present: set[int]) -> None:
        """Forget all files but those `present`."""
        for inode, known in list(self._known.items()):
            if known.number not in present:
                os.close(known.descriptor)
                del self._known[inode]

    def _walk(self, folder: Path, number: int, look: _Look) -> None:
        for entry in sorted(os.scandir(folder), key=lambda e: e.name):
            inner, is_folder = self._find(entry)
            look.names[number, entry.name] = inner
            if is_folder:
                self._walk(Path(entry.path), inner, look)
            else:
                look.files[inner] = Path(entry.path).read_bytes()

    def _find(self, entry: os.DirEntry[str]) -> tuple[int, bool]:
        """The number of a file or folder, and whether it is a folder."""
        found = entry.stat()
        if found.st_ino not in self._known:
            descriptor = os.open(entry.path, os.O_PATH)
            found = os.fstat(descriptor)
            if found.st_ino in self._known:  # moved to this name just now
                os.close(descriptor)
            else:
                self._known[found.st_ino] = _Known(self._next, descriptor)
                self._next += 1
        return self._known[found.st_ino].number, stat.S_ISDIR(found.st_mode)

    def _fsync(self, fd: int) -> None:
        with self._lock:
            self._note()
            inode = os.fstat(fd).st_ino
            if inode == self._root.stat().st_ino:
                self.log.append(Change(_ROOT))
            elif inode in self._known:
                self.log.append(Change(self._known[inode].number))

    def __enter__(self) -> "Recorder":
        self._patch.start()
        self._on = True
        return self

    def __exit__(self, *_: object) -> None:
        self._note()
        self._patch.stop()
        self._on = False
        self._forget(set())


def _writes(args: tuple[Any, ...]) -> bool:
    _, mode, flags = args
    return bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)) or "w" in str(mode or "")


def _changes(old: _Look, new: _Look) -> Iterator[Change]:
    """The changes between two snapshots."""
    for number, content in new.files.items():
        if old.files.get(number) != content:
            yield Change(number, content)
    gone = {number: place for place, number in old.names.items() if new.names.get(place) != number}
    for place, number in new.names.items():
        if (replaced := old.names.get(place)) == number:
            continue
        effects = [(place, number, True)]
        if number in gone:  # a move: the old name goes as the new one comes
            effects.append((gone.pop(number), number, False))
        if replaced is not None and gone.get(replaced) == place:
            del gone[replaced]
        yield Change(effects=effects)
    for number, place in gone.items():
        yield Change(effects=[(place, number, False)])


class Loss:
    """The possible contents of a disk after the first `stop` entries of a log."""

    def __init__(self, recorder: Recorder, stop: int) -> None:
        self._first = recorder.first
        self._versions = {n: [content] for n, content in self._first.files.items()}
        self._changes: list[tuple[Change, bool]] = []  # (change, whether it is synced)
        for change in recorder.log[:stop]:
            if change.effects:
                self._changes.append((change, False))
            elif change.content is not None:
                self._versions.setdefault(change.file, [b""]).append(change.content)
            elif change.file in self._versions:
                self._versions[change.file] = self._versions[change.file][-1:]
            else:
                self._changes = [
                    (c, synced or any(folder == change.file for (folder, _), _, _ in c.effects))
                    for c, synced in self._changes
                ]

    def make(self, folder: Path, share: float, draws: random.Random) -> str:
        """Make the folder with a `share` of all unsynced changes.  Returns a digest of it."""
        names = dict(self._first.names)
        for change, synced in self._changes:
            if synced or draws.random() < share:
                for place, number, comes in change.effects:
                    if comes:
                        names[place] = number
                    elif names.get(place) == number:
                        del names[place]
        inside: dict[int, list[tuple[str, int]]] = {}
        for (within, name), number in sorted(names.items()):
            inside.setdefault(within, []).append((name, number))
        total = blake2b()

        def put(path: Path, number: int) -> None:
            path.mkdir()
            for name, inner in inside.get(number, ()):
                total.update(f"{len(path.parts)} {name}\n".encode())
                if inner in self._versions:
                    content = _mixed(self._versions[inner], share, draws)
                    total.update(content)
                    (path / name).write_bytes(content)
                else:
                    put(path / name, inner)

        put(folder, _ROOT)
        return total.hexdigest()


def _mixed(versions: list[bytes], share: float, draws: random.Random) -> bytes:
    """A file whose pages and size come from random versions since the last sync."""
    if len(versions) == 1 or share == 1:
        return versions[-1]
    if share == 0:
        return versions[0]
    size = len(draws.choice(versions))
    out = bytearray(size)
    for at in range(0, size, _PAGE):
        page = draws.choice(versions)[at : min(at + _PAGE, size)]
        out[at : at + len(page)] = page
    return bytes(out)


class Command(NamedTuple):
    """A command: `prepare(root)` makes what must exist before, `run(root)` makes `store`."""

    name: str
    prepare: Callable[[Path], None]
    run: Callable[[Path], object]
    store: str = "store"


def commands(source: Path) -> list[Command]:
    """Small commands on a source that `write_source` wrote."""

    def quiet() -> Progress:
        return Progress(StringIO())

    def make(root: Path, **asked: Any) -> None:
        options = IngestOptions(block_bytes=4096, **asked)
        ingest(open_source(source).source, root / "store", options, quiet())

    def deal(root: Path) -> None:
        settings, copies = PartitionOptions(2, passes=1), InfluenceOptions(halo=0.3)
        old = open_store(root / "store")
        repartition(old, root / "new" / "store", settings, quiet(), influence=copies)

    plain, mean = partial(make, edge_ids=True), Derivation("u", "u", "e", "mean", "new")
    sym, two = HopsRequest(("sym",), 1), HopsRequest(("sym", "row"), 1)
    return [
        Command("ingest", lambda _: None, plain),
        Command("ingest --hops", lambda _: None, partial(make, hops=sym)),
        Command("derive", plain, lambda root: derive(root / "store", mean, quiet())),
        Command("hops", plain, lambda root: make_hops(root / "store", two, quiet())),
        Command("repartition", plain, deal, "new/store"),
    ]


def write_source(folder: Path) -> Path:
    """Write tables with text ids, so that a folder of keys is made beside the store."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(5)
    rows = [f"n{i},{rng.random():.4f},{i % 3},{'train' if i % 2 else 'test'}" for i in range(90)]
    (folder / "nodes.csv").write_text("\n".join(["id,x,y,part", *rows, ""]))
    ends = [f"n{a},n{b}" for a, b in rng.integers(0, 90, (400, 2))]
    (folder / "edges.csv").write_text("\n".join(["a,b", *ends, ""]))
    node = {
        "node_type": "u", "files": "nodes.csv", "node_id_col": "id", "split_col": "part",
        "features": [{"feature_col": "x"}], "labels": [{"label_col": "y"}],
    }  # fmt: skip
    edge = {
        "relation": ["u", "e", "u"], "files": "edges.csv", "source_id_col": "a", "dest_id_col": "b"
    }  # fmt: skip
    (folder / "schema.json").write_text(json.dumps({"nodes": [node], "edges": [edge]}))
    return folder


def lose(command: Command, folder: Path, points: int, seed: int) -> dict[str, Any]:
    """Check a command after `points` losses.  Raises SystemExit: one that is not survived.

    Losses that leave the same bytes are checked once.
    """
    draws, begun = random.Random(seed), time.monotonic()
    root = folder / "recorded"
    recorder, expected = _recorded(command, root, folder / "replayed")
    total = len(recorder.log)
    seen: set[tuple[str, bool]] = set()
    for number in range(points):
        stop = total if number % 16 == 15 else draws.randint(0, total)
        share = draws.choice([0.0, 1.0, 0.5, 0.5, 0.1, 0.9])
        lost = folder / "lost"
        shutil.rmtree(lost, ignore_errors=True)
        digest = Loss(recorder, stop).make(lost, share, draws)
        if (digest, stop == total) in seen:
            continue
        seen.add((digest, stop == total))
        if problem := _problem(command, lost, expected, stop == total):
            raise SystemExit(f"{command.name}: point {number}, entry {stop} of {total}, share "
                             f"{share}, seed {seed}: {problem}; it is in {lost}")  # fmt: skip
    shutil.rmtree(folder)
    seconds = round(time.monotonic() - begun, 1)
    return {
        "command": command.name, "log": total, "points": points, "different": len(seen),
        "seconds": seconds,
    }  # fmt: skip


def _recorded(command: Command, root: Path, replayed: Path) -> tuple[Recorder, dict[str, str]]:
    """The log of a command, and the digests of the files that it left.

    A snapshot while another thread writes may miss a change.  A log whose replay gives other files
    proves nothing, so the command is recorded again.  Raises SystemExit: three times in vain.
    """
    other: list[str] = []
    for _ in range(3):
        for path in (root, replayed):
            shutil.rmtree(path, ignore_errors=True)
        root.mkdir(parents=True)
        command.prepare(root)
        with Recorder(root) as recorder:
            command.run(root)
        expected = file_digests(root)
        Loss(recorder, len(recorder.log)).make(replayed, 1, random.Random(0))
        other = list(differences(expected, file_digests(replayed)))
        if not other:
            shutil.rmtree(replayed)
            return recorder, expected
    raise SystemExit(f"the log misses writes of {', '.join(other)}")


def _problem(command: Command, root: Path, expected: dict[str, str], ended: bool) -> str:
    """What is wrong with a folder after a loss and a second run of the command; "": nothing."""
    store = root / command.store
    prefix = f"{command.store}/"
    wanted = {name: digest for name, digest in expected.items() if name.startswith(prefix)}
    try:
        was_there = store.exists()
        whole = False
        if was_there:
            verify_store(store)
            found = {f"{prefix}{n}": d for n, d in file_digests(store).items()}
            whole = not [n for n in differences(wanted, found) if n in wanted]
        if ended and not whole:
            return "the command had ended, and its store is not there"
        try:
            command.run(root)
        except (StoreExists, BadInput) as error:
            if not whole:
                return f"the command is refused: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    left = "/.extend/"  # left by a run that had committed its arrays: the next one removes it
    found = {n: d for n, d in file_digests(root).items() if not (whole and left in n)}
    other = differences(expected, found)
    if whole:  # also ignore hidden folders beside the store
        other = [n for n in other if n in expected or not n.split("/")[-2].startswith(".")]
    return f"{', '.join(other[:5])} differ after the command has run again" if other else ""


@dataclass(frozen=True)
class LossOptions:
    points: Annotated[int, "of all commands together"] = 2000
    only: Annotated[str, "the command of this name"] = ""
    folder: Annotated[Path | None, "what a failure leaves stays here"] = None
    seed: int = 0


def main(words: list[str]) -> list[dict[str, Any]]:
    """Print a JSON line per command.  Raises SystemExit: a loss that was not survived."""
    given = parse(LossOptions, words)
    lines = []
    where = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with (
        mock.patch("os.fsync"),
        tempfile.TemporaryDirectory(prefix="lost-writes-", dir=where) as name,
    ):
        folder = given.folder or Path(name)
        every = commands(write_source(folder / "source"))
        chosen = [c for c in every if given.only in ("", c.name)]
        for number, command in enumerate(chosen):
            points = -(-given.points // len(chosen))
            found = lose(command, folder / f"run-{number}", points, given.seed)
            lines.append(put(found, None))
    return lines


if __name__ == "__main__":
    main(sys.argv[1:])
