"""Products of a normalised adjacency matrix with features: ours beside torch's sparse CSR product.

Both have the same graph in the order of the store, all in memory, and as many threads.  One is
`preprocess.stages.product`, over blocks as they are on disk; the other multiplies a CSR tensor of
int64 indices and float32 values, as libraries make it, with a dense one.  Two more peers add up as
many rows as there are edges by the same instructions: in the order in which they lie in memory, and
at random, which is what memory gives a product whose edges have no locality: `share_of_random`.
"""

import io
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np

from blockstore.store import open_store, read_rows
from preprocess.hops.hops import default_threads
from preprocess.kernels.hops import sum_edges
from preprocess.kernels.rowsum import Edges, RowTable
from preprocess.progress import Progress
from preprocess.stages.product import Product, Step, count_degrees, new_columns
from preprocess.stored import stored_edges
from tools.bench.harness import GraphOptions, Plan, Ratio, Run, Side, best

TORCH = "torch, sparse CSR"
IN_ORDER, AT_RANDOM = "rows in order, added up", "rows at random, added up"


@dataclass(frozen=True)
class Options(GraphOptions):
    degree: int = 16
    path: Annotated[Path | None, "a store of one type and relation; else one is made"] = None
    widths: tuple[int, ...] = (128, 64, 32, 16)
    threads: int = default_threads()
    rounds: int = 5


def rates(seconds: float, num_edges: int, columns: int) -> dict[str, float]:
    """What a product of so many seconds is."""
    return {"seconds": seconds, "gathered_GB_per_s": 4 * num_edges * columns / seconds / 1e9}


@contextmanager
def open_ours(path: Path, threads: int, width: int) -> Iterator[Run]:
    """Row-normalised products, slice by slice of `width` columns."""
    store = open_store(path)
    (relation,), (nodes,) = store.manifest.relations, store.manifest.types
    degrees = count_degrees(store, relation, nodes, False, Progress(io.StringIO()))
    product = Product(
        store, relation, nodes, degrees.carried, weighted=False, threads=threads,
        scan_bytes=1 << 20, resident=True,
    )  # fmt: skip
    x = read_rows(store, nodes.features["x"])
    columns = [new_columns(nodes.num_nodes * width) for _ in range(x.shape[1] // width)]
    for number, part in enumerate(columns):
        part.reshape(-1, width)[:] = x[:, number * width : (number + 1) * width]
    out = new_columns(nodes.num_nodes * width)
    with np.errstate(divide="ignore"):
        factor = np.where(degrees.into > 0, 1 / degrees.into, 0).astype(np.float32)
    step = Step(factor, 1.0, 0.0, False)
    with ThreadPoolExecutor(threads) as pool:

        def multiply() -> None:
            for part in columns:
                product.run(step, part, part, width, out, pool)

        yield lambda: rates(best(multiply), relation.num_edges, x.shape[1])


@contextmanager
def open_torch(path: Path, threads: int) -> Iterator[Run]:
    """The same product by a sparse CSR tensor of torch."""
    import torch  # the other peers do without

    store = open_store(path)
    (relation,), (nodes,) = store.manifest.relations, store.manifest.types
    pieces = [
        (e.targets.astype(np.int64), e.sources.astype(np.int64))
        for e in stored_edges(store, relation, 1 << 22)
    ]
    counts = np.bincount(np.concatenate([t for t, _ in pieces]), minlength=nodes.num_nodes)
    indptr = np.concatenate([[0], np.cumsum(counts)])
    values = np.repeat((1 / np.maximum(counts, 1)).astype(np.float32), counts)
    torch.set_num_threads(threads)
    matrix = torch.sparse_csr_tensor(
        torch.from_numpy(indptr), torch.from_numpy(np.concatenate([s for _, s in pieces])),
        torch.from_numpy(values), (nodes.num_nodes, nodes.num_nodes), check_invariants=False,
    )  # fmt: skip
    x = torch.from_numpy(read_rows(store, nodes.features["x"]))
    yield lambda: rates(best(lambda: matrix @ x), relation.num_edges, x.shape[1])


@contextmanager
def open_rows(path: Path, threads: int, at_random: bool) -> Iterator[Run]:
    """As many rows as there are edges, added up: one after the other, or drawn evenly."""
    store = open_store(path)
    (relation,), (nodes,) = store.manifest.relations, store.manifest.types
    x = read_rows(store, nodes.features["x"])
    rows, width = new_columns(x.size), x.shape[1]
    rows[:] = x.reshape(-1)
    edges = relation.num_edges
    ids = (np.arange(edges) % nodes.num_nodes).astype(np.uint32)
    if at_random:
        ids = np.random.default_rng(0).integers(0, nodes.num_nodes, edges, np.uint32)
    table, drawn = RowTable(rows, width, 0), Edges(ids, None, edges)
    cuts = [edges * i // threads for i in range(threads + 1)]
    out = new_columns(threads * -(-width // 16) * 16)
    with ThreadPoolExecutor(threads) as pool:

        def add(part: int) -> None:
            sum_edges(
                table, drawn, cuts[part], cuts[part + 1], 0, out, part * (out.size // threads), -1,
                np.float32(1),
            )  # fmt: skip

        yield lambda: rates(best(lambda: list(pool.map(add, range(threads)))), edges, width)


def plans(given: Options) -> Iterator[Plan]:
    """Ours by widths of slices, rows added up, and torch."""
    path, threads = given.path or given.store(), given.threads
    sides = [
        Side(f"ours, {width} columns at a time", open_ours, (path, threads, width))
        for width in given.widths
    ]
    orders = (IN_ORDER, AT_RANDOM)
    sides += [Side(name, open_rows, (path, threads, name == AT_RANDOM)) for name in orders]
    ratios = [
        Ratio(figure, side.name, "seconds", other, inverse=True)
        for side in sides
        for figure, other in (("times_torch", TORCH), ("share_of_random", AT_RANDOM))
    ]
    relation = open_store(path).manifest.relations[0]
    setting = {"store": path.name, "edges": relation.num_edges, "cache": "all in memory"}
    yield Plan([*sides, Side(TORCH, open_torch, (path, threads))], setting, ratios)
