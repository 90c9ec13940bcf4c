"""Use a mutated store in every way, and record what refuses it, serves it or fails."""

import io
import os
import queue
import shutil
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from blockstore.errors import StoreError
from blockstore.format import OWNERS_FOLDER
from blockstore.kernels.rows import NO_ROW
from blockstore.owners import list_owners, write_owners
from blockstore.store import Store, open_store
from blockstore.verify import verify_store
from loaderd.api.errors import DaemonError
from loaderd.api.protocol import (
    Attach,
    BatchReady,
    ChunkReady,
    ErrorReply,
    Labor,
    Release,
    RowGroup,
    SeedEdges,
    Start,
    Temporal,
)
from loaderd.memory.ledger import EngineSettings
from loaderd.sessions.engine import Engine
from preprocess.errors import BadInput
from preprocess.export.export import export
from preprocess.pipeline.progress import Progress
from tools.fuzz.frames import UNFORESEEN
from tools.fuzz.mutations import StoreDraft

WAIT_S = 100.0  # for a batch, which takes milliseconds if the machine is not busy
_BATCHES = 3
_MAX_OWNED = 1 << 16  # most nodes of a store that gets an owner map, with its fingerprint
_FORESEEN = (StoreError, DaemonError, BadInput, OSError)  # commands report these in one line


class Outside:
    """An audit hook that records opened files which are no part of the mutated store."""

    def __init__(self) -> None:
        self._allowed: tuple[str, ...] = ()
        self.watching, self.found = False, list[str]()
        sys.addaudithook(self._hook)

    def allow(self, folder: Path) -> None:
        """Allow all files in a folder, except those in a folder `outside`."""
        real, code = folder.resolve(), Path(__file__).resolve().parents[2]
        me = f"/proc/{os.getpid()}"  # read by progress reports
        self._allowed = (
            f"{real}/", f"{code}/", sys.prefix, sys.base_prefix, "/usr/", "/lib", "/sys/",
            f"{me}/status", f"{me}/io", f"{me}/cgroup", "/proc/meminfo",
        )  # fmt: skip

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.watching or event not in ("open", "os.listdir", "os.mkdir", "os.remove",
                                              "os.rename", "shutil.rmtree"):  # fmt: skip
            return
        path = arguments[0]
        if isinstance(path, str | bytes | os.PathLike):
            real = os.path.realpath(path := Path(os.fsdecode(path))) + "/"
            if event not in ("open", "os.listdir"):  # these act on a link itself
                real = f"{os.path.realpath(path.parent)}/{path.name}/"
            if "/outside/" in real or not real.startswith(self._allowed):
                self.found.append(f"{event} {real}")


def requests(store: Store, random: Random) -> list[Attach]:
    """A request for every plan that the manifest allows."""
    manifest = store.manifest
    labelled = [t for t in manifest.types if "train" in t.splits]
    node_type = random.choice(labelled or manifest.types)
    has_times = all(r.has_times for r in manifest.relations)
    has_weights = all(r.has_weights for r in manifest.relations)
    usual: dict[str, Any] = {
        "token": 0, "request": 1, "num_neighbors": random.choice(((5, 4), (-1, 3), (300, 2))),
        "batch_size": random.choice((16, 64)), "window": 2, "seed_type": node_type.name,
        "split": random.choice(("train", "train", "all")) if labelled else "all",
    }  # fmt: skip
    drawn = random.choice((
        {}, {"weighted": has_weights}, {"replace": True}, {"frontier": "layer"},
        {"labor": Labor(batch_dependency=2)},
    ))  # fmt: skip
    if drawn.get("replace"):
        usual["num_neighbors"] = (6, 4)
    edge_ids = all(r.edge_id_dtype for r in manifest.relations) and random.random() < 0.5
    usual |= {**drawn, "return_e_id": edge_ids}
    if not manifest.relations:  # such a store can only be opened
        return []
    relation = random.choice(manifest.relations)
    named = "__".join((relation.src, relation.name, relation.dst))
    links = SeedEdges(named, "binary", 1.0, random.choice(("none", "self")))
    asked = [
        Attach(plan="minibatch", edge_features=random.random() < 0.5, **usual),
        Attach(plan="hyperbatch", hyperbatch=2, **usual),
    ]
    asked += [Attach(plan="minibatch", owners=name, **usual) for name in list_owners(store)]
    linked = usual | {"edges": links, "split": random.choice(("all", *relation.splits))}
    asked.append(Attach(plan=random.choice(("minibatch", "hyperbatch")), **linked))
    if has_times:
        timed = {**usual, "num_neighbors": (5, 4), "replace": False, "weighted": False}
        timed["labor"] = None
        timed |= {"split": "all", "edges": SeedEdges(named), "temporal": Temporal(times="edges")}
        asked.append(Attach(plan="minibatch", **timed))
    if any(t.num_partitions for t in manifest.types):
        asked.append(Attach(plan="macrobatch", macro_partitions=2, **usual))
    for t in manifest.types:
        for split in t.hops:
            plan = random.choice(("chunks", "rows"))
            asked.append(
                Attach(token=0, request=1, plan=plan, split=split, seed_type=t.name, batch_size=32)
            )
    return asked


class StoreTrial:
    def __init__(self, path: Path, out: Path, random: Random) -> None:
        self._path, self._out, self._random = path, out, random
        self.said: dict[str, str] = {}  # action -> how it ended
        self.defects: list[str] = []

    def run(self) -> None:
        store = self._try("open", lambda: open_store(self._path))
        self._try("verify", lambda: verify_store(self._path))
        if store is None:
            return
        if store.manifest.num_nodes <= _MAX_OWNED:
            owner = np.arange(store.manifest.num_nodes) % 3
            self._try("owners", lambda: write_owners(store, "three", owner, 3, {}))
        self._try("export", lambda: self._export(store))
        self._try("serve", lambda: self._serve(store))

    def _try(self, name: str, work: Callable[[], Any]) -> Any:
        try:
            found = work()
        except _FORESEEN as error:
            self._refused(name, f"{type(error).__name__}: {error}")
            return None
        except BaseException as error:
            self.said[name] = "defect"
            self.defects.append(f"{name}: {type(error).__name__}: {error}")
            return None
        self.said.setdefault(name, "done")
        return found

    def _refused(self, name: str, text: str) -> None:
        self.said[name] = text.split(":")[0]
        if "\n" in text.strip() or len(text) > 9000:
            self.defects.append(f"{name}: more than a line: {text!r:.300}")

    def _export(self, store: Store) -> None:
        folder = self._out / "exported"
        try:
            export(store, folder, Progress(io.StringIO()), 256 << 20)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _serve(self, store: Store) -> None:
        mem = self._random.choice((2 << 20, 16 << 20))
        asked = requests(store, self._random)
        with Engine(store, EngineSettings(mem, workers=2, readers=2)) as engine:
            for request in asked:
                self._try(f"plan {request.plan}", partial(self._attend, engine, request))

    def _attend(self, engine: Engine, request: Attach) -> None:
        ready: queue.SimpleQueue[Any] = queue.SimpleQueue()
        engine.deliver = lambda _session, message: ready.put(message)
        attached = engine.attach(request, None)
        widths = {f"address:{spec.name}": spec.row_bytes for spec in attached.rows}
        try:
            engine.start(Start(session=attached.session, run=1, epoch=0, step=0))
            left = min(_BATCHES, attached.num_steps)
            while left:
                message = ready.get(timeout=WAIT_S)
                if isinstance(message, ErrorReply):
                    if UNFORESEEN.search(message.message):
                        raise RuntimeError(message.message)
                    self._refused(f"plan {request.plan}", f"{message.error}: {message.message}")
                    return
                group: RowGroup | None = None
                if isinstance(message, BatchReady):
                    group = message.rows
                elif isinstance(message, RowGroup):
                    group = message
                if group is not None:
                    _check_addresses(engine, group, widths)
                else:
                    assert isinstance(message, ChunkReady)
                last = group is None or group.last
                number = 0 if group is None else group.group
                engine.release(
                    Release(session=attached.session, run=1, step=message.step, group=number)
                )
                left -= last
        finally:
            engine.detach(attached.session)


def _check_addresses(engine: Engine, group: RowGroup, widths: dict[str, int]) -> None:
    """Raises RuntimeError: a row that a client would read lies beyond the arena."""
    arena, slot = engine.arena.data, engine.arena.slot_bytes
    for array in group.blob.arrays:
        if array.name in widths:
            laid = np.concatenate([arena[s * slot : (s + 1) * slot] for s in group.blob.slots])
            raw = laid[array.offset : array.offset + 8 * array.length].view(np.uint64)
            raw = raw[raw < NO_ROW]
            if raw.size and int(raw.max()) > arena.size - widths[array.name]:
                raise RuntimeError(f"{array.name}: row at byte {int(raw.max())} of {arena.size}")


def lay_out(folder: Path, files: dict[str, bytes]) -> None:
    for name, raw in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(raw)


class Bench:
    """A folder with one store, whose files are changed for an attempt and then restored."""

    def __init__(self, folder: Path, base: StoreDraft) -> None:
        self._store, self._base, self._out = folder / "store", base, folder
        self._files = base.sign()
        lay_out(self._store, self._files)
        lay_out(folder / "outside", self._files)

    def attempt(self, draft: StoreDraft, random: Random) -> StoreTrial:
        files = draft.sign()
        changed = [n for n in {*files, *self._files} if files.get(n) != self._files.get(n)]
        for name in changed:
            if name in files:
                lay_out(self._store, {name: files[name]})
            else:
                (self._store / name).unlink()
        for name, to in draft.links.items():
            (path := self._store / name).unlink(missing_ok=True)
            path.parent.mkdir(parents=True, exist_ok=True)  # its folder may have had no other file
            path.symlink_to(to)
        trial = StoreTrial(self._store, self._out, random)
        try:
            trial.run()
        finally:
            shutil.rmtree(self._store / OWNERS_FOLDER, ignore_errors=True)
            for name in {*changed, *draft.links}:
                (self._store / name).unlink(missing_ok=True)
                if name in self._files:
                    lay_out(self._store, {name: self._files[name]})
        if extra := [t.name for t in threading.enumerate() if t.name.startswith("macro")]:
            trial.defects.append(f"threads left: {extra}")
        return trial
