"""Stores of all features, and every way in which one of their files may not be what was written."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

from preprocess.hops.hops import make_hops
from preprocess.ingest.ingest import ingest
from preprocess.ingest.options import HopsRequest, IngestOptions
from preprocess.partition.partition import InfluenceOptions, PartitionOptions
from tests.preprocess.naive import Graph
from tests.preprocess.quiet import QUIET

NUM_NODES, NUM_EDGES = 300, 3000
OPTIONS = IngestOptions(
    block_bytes=4096, edge_ids=True, dtype="int8", partition=PartitionOptions(3),
    influence=InfluenceOptions(hubs=0.02, halo=0.3),
)  # fmt: skip


def make_one(path: Path, content: int = 0, graph_seed: int = 0) -> None:
    """A store of one type: partitions, hubs, halos, hops, weights, times, edge ids, int8 rows.

    content, graph_seed   stores of one graph have arrays of the same shapes
    """
    shape, rng = np.random.default_rng(graph_seed), np.random.default_rng(content)
    nodes, edges = NUM_NODES + graph_seed, NUM_EDGES + graph_seed
    pairs = (nodes * shape.random((edges, 2)) ** 2).astype(np.int64)
    label, train = shape.integers(0, 4, nodes), shape.permutation(nodes)[:200]
    rows = rng.standard_normal((nodes, 40)).astype(np.float32)
    graph = Graph().add_type("n", nodes, x=rows, y=label, train=train)
    graph.add_relation(
        "n", "to", "n", pairs, {"train": rng.integers(0, edges, 50)},
        weight=rng.random(edges), time=rng.integers(0, 2**40, edges),
        msg=rng.standard_normal((edges, 3)).astype(np.float32),
    )  # fmt: skip
    ingest(graph, path, OPTIONS, QUIET)
    make_hops(path, HopsRequest(("sym", "row"), hops=2), QUIET)


def make_many(path: Path, content: int = 0, graph_seed: int = 0) -> None:
    """A store of two types and three relations, with partitions, hubs, halos, edge ids."""
    shape, rng = np.random.default_rng(graph_seed), np.random.default_rng(content)
    half = NUM_NODES // 2 + graph_seed
    label, train = shape.integers(0, 4, half), shape.permutation(half)[:100]
    graph = Graph().add_type(
        "a", half, x=rng.standard_normal((half, 40)).astype(np.float32), y=label, train=train
    )
    graph.add_type("b", half, x=rng.standard_normal((half, 9)).astype(np.float32))
    for src, dst in (("a", "a"), ("a", "b"), ("b", "a")):
        pairs = (half * shape.random((NUM_EDGES // 3 + graph_seed, 2)) ** 2).astype(np.int64)
        graph.add_relation(src, "to", dst, pairs, weight=rng.random(len(pairs)))
    ingest(graph, path, OPTIONS, QUIET)


KINDS = ("flip", "truncate", "delete", "swap", "array")
MAKERS = {"one": make_one, "many": make_many}


class Damage(NamedTuple):
    """What is done to a file, or to the folder of an array, of a store."""

    kind: str
    name: str  # inside the store
    at: int = 0  # bit of a flip; bytes left by a truncation
    other: Path | None = None  # store that a swap takes the file or the array from

    def __str__(self) -> str:
        return f"{self.kind} {self.name} {self.at} {self.other.name if self.other else ''}"

    @property
    def parts(self) -> list[str]:
        """Files or folders that are touched: of an array its checksums and its scale too."""
        return (
            [self.name + s for s in ("", ".crc", ".scale")] if self.kind == "array" else [self.name]
        )

    def apply(self, store: Path) -> bool:
        """Whether any byte differs afterwards."""
        path = store / self.name
        if self.kind == "flip":
            raw = bytearray(path.read_bytes())
            raw[self.at // 8] ^= 1 << self.at % 8
            path.write_bytes(raw)
        elif self.kind == "truncate":
            path.write_bytes(path.read_bytes()[: self.at])
        elif self.kind == "delete":
            path.unlink()
        elif self.kind == "swap":
            assert self.other is not None
            raw, fresh = path.read_bytes(), (self.other / self.name).read_bytes()
            path.write_bytes(fresh)
            return bool(raw != fresh)
        else:
            assert self.other is not None
            before = {n: files_of(store / n) for n in self.parts}
            for name in self.parts:
                if (store / name).exists():
                    shutil.rmtree(store / name)
                    shutil.copytree(self.other / name, store / name)
            return before != {n: files_of(store / n) for n in self.parts}
        return True


def files_of(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, by path in it."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@contextmanager
def damaged(store: Path, damage: Damage, whole: dict[str, bytes]) -> Iterator[bool]:
    """The store, damaged; it is mended behind.  `whole`: its files as they were written."""
    try:
        yield damage.apply(store)
    finally:
        touched = [n for n in whole if any(n == p or n.startswith(f"{p}/") for p in damage.parts)]
        if damage.kind == "array":
            for part in damage.parts:
                shutil.rmtree(store / part, ignore_errors=True)
        for name in touched:
            (store / name).parent.mkdir(parents=True, exist_ok=True)
            (store / name).write_bytes(whole[name])


def spoils_pages(damage: Damage) -> bool:
    """Whether it may change nothing but pages of blocks, which are looked at when they are read."""
    return damage.kind in ("flip", "swap") and kind_of(damage.name).endswith("shard")


def kind_of(name: str) -> str:
    """What a file of a store is, for counts by kind."""
    if name == "zarr.json":
        return "root"
    if name.endswith("zarr.json"):
        return "metadata"
    array = name.partition("/c/")[0]
    for side in (".crc", ".scale", "first_node", "first_edge", "offsets"):
        if array.endswith(side):
            return side.strip(".")
    if array.endswith("blocks"):
        return "graph shard"
    return "hops shard" if "/hops/" in array else "row shard"


def random_damage(
    rng: np.random.Generator, kind: str, name: str, whole: dict[str, bytes], stores: list[Path]
) -> Damage:
    """One damage to this file, of this kind where the file can have it; else a flipped bit.

    stores   the store, and those that files and arrays are taken from
    """
    array = name.removesuffix("/zarr.json").partition("/c/")[0].removesuffix(".crc")
    other = stores[int(rng.integers(1, len(stores)))]
    if kind == "swap" and (other / name).exists():
        return Damage(kind, name, 0, other)
    if kind == "array" and (stores[0] / array / "c").exists() and (other / array / "c").exists():
        return Damage(kind, array, 0, other)
    if kind in ("swap", "array"):
        kind = "flip"
    size = len(whole[name])
    return Damage(kind, name, int(rng.integers({"flip": 8 * size, "truncate": size}.get(kind, 1))))


def random_flips(rng: np.random.Generator, whole: dict[str, bytes], count: int) -> list[Damage]:
    """Bits anywhere in the files of a store, each as likely as any other."""
    names, ends = list(whole), np.cumsum([len(raw) for raw in whole.values()])
    damages = []
    for at in rng.integers(0, 8 * int(ends[-1]), count).tolist():
        i = int(np.searchsorted(ends, at // 8, side="right"))
        damages.append(Damage("flip", names[i], at - 8 * (int(ends[i]) - len(whole[names[i]]))))
    return damages
