"""Apply operators to a slice of the columns of all nodes, in memory, and write the rows to keep.

Also selects the rows to keep, in a random order: their nodes, positions in the store, and labels.
"""

import hashlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from blockstore.errors import CorruptBlock
from blockstore.extend import StoreExtender
from blockstore.format import Manifest, NodeType, RowArray
from blockstore.io.buffers import byte_view
from blockstore.io.files import write_exact
from blockstore.kernels.random import make_key, permute_range
from blockstore.store import Store, read_rows, scan_rows
from preprocess.errors import BadInput
from preprocess.files.array_file import ArrayFile, load_array
from preprocess.hops.plan import ALL, HopsPlan, Operator, ResolvedHops
from preprocess.kernels.hops import Product, take_rows
from preprocess.kernels.rows import quantize
from preprocess.pipeline.stage import Facts, PipelineRun
from preprocess.stages.labels import have_labels
from preprocess.stages.product import RelationProduct, new_columns
from preprocess.stages.rows import Emit, checked_sums
from preprocess.stages.slots import SlotCopies

NODES, PLACES = "nodes", "places"  # temporary files
_PURPOSE = 0x486F_7073  # part of the random key that no other draw uses
_STEP = 1 << 16  # rows
_SLOT_BYTES = 40  # memory of a row while its label is copied
INTO, OUT, CARRIED = "into", "out", "carried"  # temporary files
_NONE = np.empty(0, np.float32)

Change = Callable[[NDArray[np.float32], int], NDArray[Any]]  # (rows, first row)


def choose_rows(store: Store, resolved: ResolvedHops, folder: Path) -> dict[str, list[int]]:
    """Write nodes and positions of all rows; returns [rows, nodes left out] of each split.

    Raises BadInput: no node of a split has a label; CorruptBlock.
    """
    nodes, found = resolved.nodes, {}
    ids = read_rows(store, nodes.store_id)
    ids -= ids.dtype.type(nodes.first)  # positions in the type, by original id
    if ids.size and int(ids.max()) >= nodes.num_nodes:
        raise CorruptBlock(f"{store.path / nodes.store_id.path}: ids of another type; ingest again")
    flags = np.empty(0, np.bool_) if ALL in resolved.sizes else labelled(store, nodes)
    with (
        ArrayFile(folder / NODES, np.int64) as kept_nodes,
        ArrayFile(folder / PLACES, ids.dtype) as kept_places,
    ):
        for split in resolved.sizes:
            name = hashlib.blake2b(f"{nodes.name}/{split}".encode(), digest_size=8).digest()
            key = make_key(resolved.seed, _PURPOSE, int.from_bytes(name, "little"), 0, 0)
            originals: NDArray[Any] | None = None
            size, left = nodes.num_nodes, 0
            if split != ALL:
                originals, left = _labelled_ids(store, nodes, split, ids, flags)
                size = originals.size
            for first in range(0, size, _STEP):
                order = np.empty(min(_STEP, size - first), np.int64)
                permute_range(first, first + order.size, size, np.uint64(key), order)
                chosen = order if originals is None else originals[order]
                kept_nodes.append(chosen)
                kept_places.append(ids[chosen])
            found[split] = [size, left]
    return found


def labelled(store: Store, nodes: NodeType) -> NDArray[np.bool_]:
    """Whether each node has a label (in a row, at least one), in the order of the store."""
    assert nodes.label is not None
    flags = np.empty(nodes.num_nodes, np.bool_)
    for first, rows in scan_rows(store, nodes.label):
        flags[first : first + rows.shape[0]] = have_labels(rows)
    return flags


def _labelled_ids(
    store: Store, nodes: NodeType, split: str, places: NDArray[Any], flags: NDArray[np.bool_]
) -> tuple[NDArray[Any], int]:
    """Original ids of a split's nodes with a label, in its order, and the number without one."""
    array = nodes.splits[split]
    out, size = np.empty(array.num_rows, np.int64), 0
    for _, ids in scan_rows(store, array):
        if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < nodes.num_nodes:
            raise CorruptBlock(
                f"{store.path / array.path}: ids {ids.min()} to {ids.max()}, expected 0 to "
                f"{nodes.num_nodes - 1}; ingest again"
            )
        good = ids[flags[places[ids]]]
        out[size : size + good.size] = good
        size += good.size
    if size == 0:
        raise BadInput.at(
            f"{store.path}: split {split!r} of {nodes.name}",
            f"no label among its {array.num_rows:,} nodes", "some that have one",
            "choose other splits by --split, or --rows all",
        )  # fmt: skip
    return out[:size], array.num_rows - size


def copy_labels(
    run: PipelineRun,
    store: Store,
    nodes: NodeType,
    label: RowArray,
    first: int,
    copy_bytes: int,
    emit: Emit,
) -> None:
    """Copy labels of the rows from `first` on, as many as `label` has, some slots at a time."""
    assert nodes.label is not None
    share = copy_bytes // 4
    step = max(1, share // _SLOT_BYTES)
    with ArrayFile(run.path(PLACES), store.manifest.id_dtype) as places:
        for low in range(0, label.num_rows, step):
            size = min(step, label.num_rows - low)
            kept = places.read(first + low, size).astype(np.uint64) + np.uint64(nodes.first)
            slots = SlotCopies(store, kept, share, run.folder, run.progress)
            some = msgspec.structs.replace(label, num_rows=size)
            slots.rows(nodes.label, nodes.first, some, emit)


@dataclass(eq=False)
class HopsRun(PipelineRun):
    """The run of propagation: the extended store, and memory that is kept between stages."""

    extender: StoreExtender
    store: Store
    resolved: ResolvedHops
    plan: HopsPlan
    pool: ThreadPoolExecutor
    manifest: Manifest = field(init=False)  # with the hops

    def __post_init__(self) -> None:
        self.release()  # memory is allocated at the first use

    def release(self) -> None:
        """Free the memory of columns and blocks."""
        self._columns: list[NDArray[np.float32]] = []
        self._product: RelationProduct | None = None
        self._made_for: Operator | None = None
        self._factor = self._scale = _NONE

    def propagate(self, number: int, at: int, operator: Operator | None) -> Facts:
        """Compute and write rows of hop 0, or of operator `at`'s hops; returns int8 scales."""
        plan = self.plan
        if not self._columns:
            size = self.resolved.nodes.num_nodes * plan.width
            self._columns = [new_columns(size) for _ in range(plan.arrays)]
        rows, *spare = self._columns
        with ArrayFile(self.path(f"x.{number}"), np.float32) as file:
            file.read_into(0, rows)
        scales = dict[str, list[float]]()
        if operator is None:
            name = hop_file(at, 0, number)
            scales[name] = self._keep(name, rows, _NONE, number, "hop 0")
            return {"scales": scales}
        if operator != self._made_for:
            self._factor, self._scale = self._norms(operator)
            self._made_for = operator
        if self._scale.size:
            table, scale = rows.reshape(-1, plan.width), self._scale[:, None]
            parts = (np.array_split(each, plan.threads) for each in (table, scale))
            list(self.pool.map(lambda rows, by: np.multiply(rows, by, out=rows), *parts))
        missing = self.resolved.missing(operator)
        for hop in range(1, self.resolved.hops + 1):
            rows, spare = self._multiply(operator, hop, rows, spare)
            if hop in missing:
                name = hop_file(at, hop, number)
                title = f"hop {hop} of {operator.name}"
                scales[name] = self._keep(name, rows, self._scale, number, title)
        return {"scales": scales}

    def _multiply(
        self, operator: Operator, hop: int, x: NDArray[np.float32], spare: list[NDArray[np.float32]]
    ) -> tuple[NDArray[np.float32], list[NDArray[np.float32]]]:
        """The next hop, and the arrays that are free afterwards."""
        steps, plan = operator.steps(), self.plan
        if self._product is None:  # shared by operators, which agree on relation and weights
            self._product = RelationProduct(
                self.store, self.resolved.relation, load_array(self.path(CARRIED), np.uint8),
                weighted=operator.weighted, threads=plan.threads, scan_bytes=plan.scan_bytes,
                resident=plan.resident,
            )  # fmt: skip
        total = len(steps) * self._product.graph_bytes
        with self.progress.stage(f"hop {hop}", total, "B") as stage:
            rows = x
            for scale, share in steps:
                out = next(each for each in spare if each is not rows)
                product = Product(
                    self._factor, np.float32(scale), np.float32(share), x, operator.loops
                )
                self._product.run(product, rows, plan.width, out, self.pool, stage)
                rows = out
        return rows, [each for each in (x, *spare) if each is not rows]

    def _norms(self, operator: Operator) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """(factor, scale): the multiplier of each sum, and the one contained in each row.

        For `row`, factor is 1 / in-degree, and there is no scale.  For other kinds, the row of node
        v is stored times 1 / sqrt(out-degree), as its out-edges need it; so its sum is multiplied
        by 1 / sqrt(in-degree * out-degree).
        """
        num_nodes = self.resolved.nodes.num_nodes
        factor = np.empty(num_nodes, np.float32)
        scale = np.empty(num_nodes if operator.kind != "row" else 0, np.float32)
        with (
            ArrayFile(self.path(INTO), np.float64) as into_file,
            ArrayFile(self.path(OUT), np.float64) as out_file,
            np.errstate(divide="ignore"),
        ):
            for low in range(0, num_nodes, 1 << 14):
                part = slice(low, min(low + (1 << 14), num_nodes))
                into = into_file.read(low, part.stop - low) + operator.loops
                inverse = np.where(into > 0, 1 / into, 0.0)
                if operator.kind == "row":
                    factor[part] = inverse
                    continue
                out = out_file.read(low, part.stop - low) + operator.loops
                beside = np.where(out > 0, 1 / np.sqrt(out), 1.0)
                factor[part], scale[part] = np.sqrt(inverse) * beside, beside
        return factor, scale

    def _keep(
        self,
        name: str,
        columns: NDArray[np.float32],
        scale: NDArray[np.float32],
        number: int,
        title: str,
    ) -> list[float]:
        """Write the kept rows of a slice to a file, in the stored dtype; returns int8 scales.

        Raises BadInput: the dtype cannot hold a number.
        """
        dtype, unit = self.resolved.dtype, _NONE
        count = self.plan.columns(number, self.resolved.feature.row_items)
        with (
            ArrayFile(self.path(PLACES), self.store.manifest.id_dtype) as places,
            self.path(name).open("wb", buffering=0) as file,
            self.progress.stage(f"keep {title}", places.size, "rows") as stage,
        ):
            taken = partial(self._rows, places, columns, scale, count)
            if dtype == "int8":
                unit = np.zeros(count, np.float32)
                for maximum in taken(lambda rows, _: np.abs(rows).max(0)):
                    np.maximum(unit, maximum, out=unit)
                unit /= np.float32(127)

            def put(rows: NDArray[np.float32], first: int) -> NDArray[Any]:
                stage.advance(rows.shape[0])
                if dtype == "int8":
                    out: NDArray[Any] = np.empty(rows.shape, np.int8)
                    quantize(rows, unit, out, np.zeros(2))
                else:
                    out = checked_sums(rows, dtype, f"{self.store.path}: {title}", first)
                out = np.ascontiguousarray(out)
                write_exact(file.fileno(), byte_view(out), first * count * out.itemsize, file.name)
                return out[:0]

            for _ in taken(put):
                pass
        return [float(value) for value in unit]

    def _rows(
        self,
        places: ArrayFile,
        columns: NDArray[np.float32],
        scale: NDArray[np.float32],
        count: int,
        work: Change,
    ) -> Iterator[NDArray[Any]]:
        """Apply `work` to the kept rows, with their first `count` columns, in order."""
        width, together = self.plan.width, 4 * self.plan.threads
        step = max(1, self.plan.piece_bytes // (4 * width))

        def take(first: int) -> NDArray[Any]:
            some = places.read(first, min(step, places.size - first))
            out = np.empty((some.size, count), np.float32)
            take_rows(columns, width, scale, some, out)
            return work(out, first)

        for low in range(0, places.size, together * step):
            stop = min(low + together * step, places.size)
            yield from self.pool.map(take, range(low, stop, step))


def hop_file(operator: int, hop: int, number: int) -> str:
    """Temporary file of the rows of a hop in one slice; operator -1: hop 0, shared by all."""
    return f"hop.{operator}.{hop}.{number}"
