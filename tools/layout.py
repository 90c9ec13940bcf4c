"""What a minibatch touches, for each order of nodes: `python -m tools.layout STORE...`.

The same seeds are sampled from every store, of one node type: graph blocks in which the columns of
the frontiers begin, feature blocks and pages with a row that is needed, and what reading these by
runs of pages costs, for single minibatches and for `--together` of them.  Prints a Markdown table,
and a JSON line a store to `--out`.
"""

import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockstore.format import PAGE_BYTES, row_geometry
from blockstore.kernels.rowcache import plan_extents
from blockstore.kernels.rows import row_layout
from blockstore.store import Store, open_store, read_rows
from clients.torch import NeighborDataset
from loaderd.devicecost import FLASH, RUN_BYTES
from loaderd.memory.ledger import ServedRows, served_rows
from tools import command
from tools.bench.harness import spread
from tools.bench.setup import serving


@dataclass(frozen=True)
class Options:
    stores: tuple[Path, ...]
    fanouts: tuple[int, ...] = (10, 10, 10)
    batch_size: int = 1000
    batches: int = 16
    together: Annotated[int, "batches whose rows are one read"] = 16
    split: str = "train"
    seed: int = 0
    mem: Annotated[str, "of the daemon that samples"] = "2G"
    out: Annotated[Path | None, "append a line of JSON for each store"] = None


class Extents(NamedTuple):
    """Rows of a type as they lie on disk, all served arrays together."""

    blocks: int
    pages: int
    runs: int  # that are read, near ones in one
    read_bytes: int  # by these runs


def extents_of(
    store: Store, served: ServedRows, nodes: NDArray[Any], gap_pages: int = FLASH.gap_pages
) -> Extents:
    """Where the rows of ascending store ids lie, read in runs with gaps of so many pages.

    nodes   id_dtype (num_nodes,)   of all types
    """
    geometry = row_geometry(served.array, store.manifest.block_bytes)
    layout = row_layout(geometry, served.array.row_bytes)
    first = served.node_type.first
    low, high = np.searchsorted(nodes, [first, first + served.node_type.num_nodes])
    rows = nodes[low:high] - nodes.dtype.type(first)
    runs = np.empty((rows.size, 5), np.int64)

    def plan(gap: int) -> tuple[int, int]:
        count = plan_extents(rows, 0, rows.size, layout, gap, RUN_BYTES // PAGE_BYTES, runs)
        return int(count), int(runs[:count, 2].sum())

    blocks = np.unique(rows // rows.dtype.type(geometry.rows_per_block)).size
    _, pages = plan(0)
    num_runs, read = plan(gap_pages)
    return Extents(blocks, pages, num_runs, read * PAGE_BYTES)


def touched(store: Store, nodes: NDArray[Any], gap_pages: int = FLASH.gap_pages) -> Extents:
    """Where rows of all served arrays lie: `nodes` ascending store ids."""
    parts = [extents_of(store, s, nodes, gap_pages) for s in served_rows(store.manifest)]
    return Extents(*(sum(figures) for figures in zip(*parts, strict=True)))


def seeds_of(store: Store, given: Options) -> NDArray[np.int64]:
    """Original ids of the first seeds of an order that is alike in every store.

    Raises ValueError: the split is too small.
    """
    (node_type,) = store.manifest.types
    original = np.sort(read_rows(store, node_type.splits[given.split]).astype(np.int64))
    wanted = given.batches * given.batch_size
    if original.size < wanted:
        raise ValueError(
            f"{store.path}: split {given.split!r} has {original.size} nodes, {wanted} are asked for"
        )
    return np.random.default_rng(given.seed).permutation(original)[:wanted]


def sample_batches(
    store: Store, given: Options
) -> Iterator[tuple[NDArray[Any], list[NDArray[np.int64]]]]:
    """(nodes by store id, graph blocks of each hop) of batch after batch."""
    seeds = seeds_of(store, given)
    (node_type,), (relation,) = store.manifest.types, store.manifest.relations
    stored, first_node = read_rows(store, node_type.store_id), store.first_node(relation)
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(store.path, Path(folder), given.mem, "--log-level", "error") as endpoint,
    ):
        data = NeighborDataset(
            endpoint, input_nodes=seeds, num_neighbors=given.fanouts, shuffle=False,
            batch_size=given.batch_size, seed=given.seed, plan="minibatch",
        )  # fmt: skip
        for batch in data:
            nodes = stored[batch.n_id.numpy()]
            heads = np.searchsorted(first_node, nodes.astype(np.uint64), side="right") - 1
            cuts = accumulate(batch.num_sampled_nodes[:-1], initial=0)
            yield nodes, [np.unique(heads[low:high]) for low, high in pairwise(cuts)]
        data.close()


def look(path: Path, given: Options) -> dict[str, Any]:
    store = open_store(path)
    manifest = store.manifest
    batches = list(sample_batches(store, given))
    alone = [touched(store, np.sort(nodes)) for nodes, _ in batches]
    several = [
        touched(store, np.unique(np.concatenate([n for n, _ in batches[i : i + given.together]])))
        for i in range(0, len(batches) - given.together + 1, given.together)
    ]
    files = [row_geometry(s.array, manifest.block_bytes) for s in served_rows(manifest)]
    settings = {k: v for k, v in asdict(given).items() if k not in ("stores", "out")}
    line = command.stamped(
        "layout", store=path.name, order=manifest.order, block_bytes=manifest.block_bytes,
        **settings,
        all_graph_blocks=sum(r.num_blocks for r in manifest.relations),
        all_row_blocks=sum(f.num_blocks for f in files),
        rows=spread([nodes.size for nodes, _ in batches]),
        graph_blocks=spread([np.unique(np.concatenate(hops)).size for _, hops in batches]),
        graph_reads=spread([sum(part.size for part in hops) for _, hops in batches]),
    )  # fmt: skip
    for name, found in (("", alone), ("together_", several)):
        for figure in Extents._fields if found else ():
            line[f"{name}row_{figure}"] = spread([getattr(e, figure) for e in found])
    return line


def table(lines: Sequence[dict[str, Any]]) -> str:
    """Markdown: a row for each store, medians of a minibatch."""
    together = lines[0]["together"] if lines else 1
    rows = [[
        "order, block", "graph blocks", "blocks a hop, summed", "row blocks", "row pages",
        "MB read", f"{together} together: row blocks", "row pages", "MB read",
    ]]  # fmt: skip
    figures = [("graph_blocks", "all_graph_blocks"), ("graph_reads", "")]
    for name in ("", "together_"):
        figures += [(f"{name}row_blocks", "all_row_blocks"), (f"{name}row_pages", "")]
        figures += [(f"{name}row_read_bytes", "")]
    for line in lines:
        cells = [f"{line['order']}, {line['block_bytes'] >> 10} KiB"]
        for name, of in figures:
            value = line[name]["median"] if name in line else float("nan")
            share = f" ({value / line[of]:.0%})" if of else ""
            whole = f"{value / 1e6:,.1f}" if name.endswith("bytes") else f"{value:,.0f}{share}"
            cells.append(whole if name in line else "")
        rows.append(cells)
    return command.table(rows)


def main(words: Sequence[str]) -> list[dict[str, Any]]:
    """Look at the stores; returns their lines."""
    given = command.parse(Options, words, __doc__, "tools.layout")
    lines = [look(path, given) for path in given.stores]
    print(table(lines))
    command.append(lines, given.out)
    return lines


if __name__ == "__main__":
    main(sys.argv[1:])
