"""Features of a type propagated through a relation: hops of operators into a store, out of core.

A matrix acts on each column of the features alone.  So columns are cut into slices, of which all
nodes fit memory; the graph's blocks pass by once for each product and slice, and rows that are
kept go to files, a slice and hop each, which are put together at the end.  Each sum is made in the
order of the store's blocks, in float32: neither memory nor threads show.
"""

import shutil
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from blockstore.errors import OutOfSpace
from blockstore.extend import StoreExtender
from blockstore.format import HopSet, Manifest, RowArray
from blockstore.store import numpy_dtype, open_store
from blockstore.units import format_bytes
from preprocess.contents import as_path
from preprocess.derive.derive import to_floats
from preprocess.errors import BadInput
from preprocess.hops.forecast import (
    ARRAYS,
    DEGREES,
    ROWS,
    SLICES,
    TAKE_LABELS,
    default_threads,
    slice_stage,
)
from preprocess.hops.plan import (
    HopsPlan,
    Operator,
    Resolved,
    gapless,
    plan_hops,
    resolve_hops,
)
from preprocess.hops.rows import LABELS, NODES, PLACES, RowTaker, choose_rows, take_labels
from preprocess.kernels.hops import scale_rows
from preprocess.kernels.rows import quantize
from preprocess.memory import give_back_freed
from preprocess.options import HopsRequest
from preprocess.progress import Progress
from preprocess.result import OfStages, StageResult
from preprocess.stages.array_file import ArrayFile, load_array, save_array
from preprocess.stages.product import Product, Step, count_degrees, new_columns
from preprocess.stages.rows import convert
from preprocess.stored import rows_ahead
from preprocess.work import StageRecord, WorkFolder, sign

Facts = dict[str, Any]

_INTO, _OUT, _CARRIED = "into", "out", "carried"  # temporary files
_PIPELINE = 1  # goes up when stages or their files change: nothing older is taken over
_NONE = np.empty(0, np.float32)


@dataclass(frozen=True, slots=True)
class HopsResult(OfStages):
    """What has been added to a store."""

    manifest: Manifest
    resolved: Resolved
    plan: HopsPlan
    rows: dict[str, int]  # of each split
    without_label: dict[str, int]  # nodes of each split that were left out
    without_edges: int  # nodes to which no edge leads
    largest_error: float  # of int8, over its column's scale; else 0
    array_bytes: int  # of features, as files
    stages: tuple[StageResult, ...]  # those of earlier runs included

    @property
    def elapsed_s(self) -> float:
        """Of all stages."""
        return sum(s.elapsed_s for s in self.stages)

    @property
    def peak_bytes(self) -> int:
        """Of memory, in any stage."""
        return max(s.peak_bytes for s in self.stages)

    @property
    def resumed(self) -> int:
        """Stages that an earlier run did."""
        return sum(s.resumed for s in self.stages)

    def text(self, path: Path) -> str:
        """For a person."""
        found, plan = self.resolved, self.plan
        names = ", ".join(operator.name for operator in found.operators)
        splits = ", ".join(f"{rows:,} {split}" for split, rows in self.rows.items())
        left = sum(self.without_label.values())
        lines = [
            f"{path}: {found.hops} hops of {names} over {found.relation.name}, "
            f"{found.feature.row_items} {found.dtype} each, fingerprint "
            f"{self.manifest.fingerprint}",
            f"rows        {splits}" + (f"; {left:,} without a label left out" if left else ""),
            f"no in-edge  {self.without_edges:,} of {found.nodes.num_nodes:,} nodes",
            f"arrays      {format_bytes(self.array_bytes)} in {found.num_arrays} arrays a split",
            f"took        {self.elapsed_s:.1f} s: {plan.num_slices} slices of {plan.width}, "
            f"{plan.num_products} products each; {plan.graph_reads} reads of the graph for them",
            f"moved       {format_bytes(self.read_bytes)} read, {format_bytes(self.written_bytes)} "
            f"written, at most {format_bytes(self.peak_bytes)} of memory",
        ]
        return "\n".join(lines)


def make_hops(
    path: Path,
    request: HopsRequest,
    progress: Progress,
    mem_bytes: int = 2 << 30,
    threads: int = 0,
    fresh: bool = False,
) -> HopsResult:
    """Add hops to the store at `path`.

    threads   0: one a core
    fresh     begin anew, whatever an earlier run has left

    Raises BadInput, BudgetTooSmall, OutOfSpace, StoreBusy, StoreExists, NotAStore, CorruptBlock;
    the store is as it was then.  Where the disk fills up, or the run is stopped, finished stages
    stay beside the store, and the same call goes on behind them.
    """
    give_back_freed()
    path, threads = path.resolve(), threads or default_threads()
    manifest = open_store(path).manifest
    plan = plan_hops(manifest, resolve_hops(manifest, request, str(path)), mem_bytes, threads)
    with StoreExtender(path, plan.buffer) as extender:
        manifest = extender.store.manifest  # now that it is locked
        resolved = resolve_hops(manifest, request, str(path))
        plan = plan_hops(manifest, resolved, mem_bytes, threads)
        facts = {
            "hops": _PIPELINE, "store": manifest.fingerprint, "request": asdict(request),
            "slices": [plan.width, plan.label_bytes],
        }  # fmt: skip
        folder = path.with_name(f"{path.name}.hops")
        with WorkFolder(folder, sign(facts, b""), fresh) as work:
            return _Run(extender, resolved, plan, work, progress).run()


class _Run:
    """One run."""

    def __init__(
        self,
        extender: StoreExtender,
        resolved: Resolved,
        plan: HopsPlan,
        work: WorkFolder,
        progress: Progress,
    ) -> None:
        self._extender, self._store = extender, extender.store
        self._resolved, self._plan = resolved, plan
        self._work, self._progress = work, progress
        self._records: list[StageRecord] = []
        self._splits: dict[str, list[int]] = {}
        self._scales: dict[str, list[float]] = {}  # by file: of int8

    def run(self) -> HopsResult:
        """All stages."""
        resolved, plan = self._resolved, self._plan
        self._check_disk()
        degrees = self._stage(DEGREES, self._count, made=[_INTO, _OUT, _CARRIED])
        with_labels = resolved.is_new and resolved.nodes.label is not None
        self._splits = self._stage(ROWS, self._choose, made=[NODES, PLACES])["splits"]
        num_labels = 0
        if with_labels:
            label = resolved.nodes.label
            assert label is not None
            num_labels = -(-label.row_bytes // plan.label_bytes)
            self._stage(TAKE_LABELS, self._take_labels, made=_numbered(LABELS, num_labels))
        self._stage(SLICES, self._cut, made=_numbered("x", plan.num_slices))
        self._propagate()
        with self._progress.recorded(ARRAYS) as took:
            sets = {split: self._write(split, num_labels) for split in self._splits}
            manifest = self._extender.commit(resolved.extended(self._store.manifest, sets))
        last = StageResult(
            ARRAYS, took.read_bytes, took.written_bytes, took.elapsed_s, False, took.peak_bytes
        )
        rows = {split: size for split, (size, _) in self._splits.items()}
        widths = numpy_dtype(resolved.dtype).itemsize * resolved.feature.row_items
        return HopsResult(
            manifest, resolved, plan, rows,
            {split: left for split, (_, left) in self._splits.items()},
            degrees["without_edges"],
            max([r.facts.get("error", 0.0) for r in self._records], default=0.0),
            sum(rows.values()) * widths * resolved.num_arrays,
            (*map(self._result, self._records), last),
        )  # fmt: skip

    def _result(self, r: StageRecord) -> StageResult:
        resumed = r.name in self._work.resumed
        return StageResult(
            r.name, r.read_bytes, r.written_bytes, r.elapsed_s, resumed, r.peak_bytes
        )

    def _check_disk(self) -> None:
        """Raises OutOfSpace."""
        plan, where = self._plan, self._store.path
        there = sum(p.stat().st_size for p in self._work.path.iterdir() if p.is_file())
        free = shutil.disk_usage(where).free
        if plan.array_bytes + plan.temporary_bytes - there > free:
            raise OutOfSpace(
                f"{where}: found {format_bytes(free)} free, expected "
                f"{format_bytes(plan.array_bytes)} for the arrays and "
                f"{format_bytes(plan.temporary_bytes - there)} for their making; free some space, "
                "or move the store to another disk"
            )

    def _stage(
        self,
        name: str,
        body: Callable[[], Facts],
        made: Iterable[str] = (),
        spent: Iterable[str] = (),
    ) -> Facts:
        """Run a stage, unless an earlier run has; returns its facts, plain values."""
        record = self._work.find(name)
        if record is None:
            with self._progress.recorded(name) as took:
                facts = body()
            record = StageRecord(
                name, facts, took.read_bytes, took.written_bytes, took.elapsed_s, took.peak_bytes
            )
            self._work.finish(record, made, spent)
        elif name in self._work.resumed:
            self._progress.resumed(name, record.read_bytes, record.written_bytes, record.elapsed_s)
        self._records.append(record)
        return record.facts

    def _path(self, name: str) -> Path:
        return self._work.path / name

    def _count(self) -> Facts:
        resolved = self._resolved
        weighted = any(operator.weighted for operator in resolved.operators)
        found = count_degrees(
            self._store, resolved.relation, resolved.nodes, weighted, self._progress
        )
        for name, values in ((_INTO, found.into), (_OUT, found.out), (_CARRIED, found.carried)):
            save_array(self._path(name), values)
        return {"without_edges": int(np.count_nonzero(found.into == 0))}

    def _choose(self) -> Facts:
        with self._progress.stage("choose rows", self._resolved.num_rows, "rows") as stage:
            splits = choose_rows(self._store, self._resolved, self._work.path)
            stage.advance(self._resolved.num_rows)
        return {"splits": splits}

    def _take_labels(self) -> Facts:
        with self._progress.stage("take labels", self._resolved.num_rows, "rows") as stage:
            take_labels(self._store, self._resolved.nodes, self._plan, self._work.path)
            stage.advance(self._resolved.num_rows)
        return {}

    def _cut(self) -> Facts:
        """Features to a file for each slice, as float32.  Raises BadInput: NaN or infinity."""
        feature, plan, scale = self._resolved.feature, self._plan, None
        if feature.scale_path:
            scale = self._store.scale(feature)
        done, total = 0, feature.num_rows * feature.row_bytes
        scan = max(1, plan.piece_bytes * feature.row_bytes // (4 * feature.row_items))

        def change(rows: NDArray[Any]) -> NDArray[np.float32]:
            return to_floats(rows.reshape(-1, feature.row_items), feature, scale)

        for number in range(plan.num_slices):
            self._path(f"x.{number}").unlink(missing_ok=True)
            self._path(f"x.{number}").touch()
        with (
            self._progress.stage("cut columns", total, "B") as stage,
            closing(rows_ahead(self._store, feature, scan, 2, change)) as pieces,
        ):
            for rows in pieces:
                self._check_finite(rows, done)
                for number in range(plan.num_slices):
                    low, count = number * plan.width, plan.columns(number, feature.row_items)
                    part = np.zeros((rows.shape[0], plan.width), np.float32)
                    part[:, :count] = rows[:, low : low + count]
                    with ArrayFile(self._path(f"x.{number}"), np.float32) as file:
                        file.append(part)
                done += rows.shape[0]
                stage.advance(rows.shape[0] * feature.row_bytes)
        return {}

    def _check_finite(self, rows: NDArray[np.float32], first: int) -> None:
        bounds = (float(rows.min(initial=0)), float(rows.max(initial=0)))
        if not np.isfinite(bounds).all():
            row, column = np.argwhere(~np.isfinite(rows))[0].tolist()
            raise BadInput.at(
                f"{self._store.path / self._resolved.feature.path}[{first + row}, {column}]",
                f"{rows[row, column]}", "finite features, as every hop would spread it",
                "ingest without it, or choose other features by --feature",
            )  # fmt: skip

    def _propagate(self) -> None:
        """Hop 0 where it is missing, then each operator's, slice by slice."""
        resolved, plan = self._resolved, self._plan
        todo = [
            (number, operator) for number, operator in enumerate(resolved.operators)
            if resolved.missing(operator)
        ]  # fmt: skip
        stages = [
            (slice_number, number, operator)
            for number, operator in [*([(-1, None)] if resolved.is_new else []), *todo]
            for slice_number in range(plan.num_slices)
        ]
        if all(self._work.find(slice_stage(s, o, plan)) for s, _, o in stages):
            columns: list[NDArray[np.float32]] = []
        else:
            size = resolved.nodes.num_nodes * plan.width
            columns = [new_columns(size) for _ in range(plan.arrays)]
        last = max(stages, default=None, key=lambda each: each[1])
        with ThreadPoolExecutor(plan.threads, thread_name_prefix="hops") as pool:
            taker = RowTaker(self._store, self._work.path, plan, pool)
            maker = _Columns(self, columns, taker, pool)
            with closing(taker):
                for slice_number, number, operator in stages:
                    hops = [0] if operator is None else list(resolved.missing(operator))
                    spent = [f"x.{slice_number}"] if last and number == last[1] else []
                    facts = self._stage(
                        slice_stage(slice_number, operator, plan),
                        lambda s=slice_number, n=number, o=operator: maker.run(s, n, o),  # type: ignore[misc]
                        made=[hop_file(number, hop, slice_number) for hop in hops],
                        spent=spent,
                    )  # fmt: skip
                    self._scales |= facts["scales"]

    def _write(self, split: str, num_labels: int) -> HopSet:
        """All arrays of a split; returns its set, with what was there before."""
        resolved, manifest = self._resolved, self._store.manifest
        nodes, rows = resolved.nodes, self._splits[split][0]
        sizes = [size for size, _ in self._splits.values()]
        first = sum(sizes[: list(self._splits).index(split)])
        held = nodes.hops.get(split)
        if held is None:
            ids = gapless(manifest, f"{resolved.folder(split)}/nodes", "int64", rows, ())
            self._assemble(ids, first, [(NODES, 1)], np.int64)
            label = None
            if nodes.label is not None:
                label = gapless(
                    manifest, f"{resolved.folder(split)}/label", nodes.label.dtype, rows,
                    nodes.label.row_shape,
                )  # fmt: skip
                step, total = self._plan.label_bytes, nodes.label.row_bytes
                parts = [
                    (name, min(step, total - step * i))
                    for i, name in enumerate(_numbered(LABELS, num_labels))
                ]
                self._assemble(label, first, parts, np.uint8)
            zero = resolved.array(manifest, split, rows, "0")
            self._assemble_hop(zero, first, -1, 0)
            held = HopSet(split, ids, label, {}, resolved.feature_name, resolved.seed)
        else:
            zero = next(iter(held.operators.values()))[0]
        operators = dict(held.operators)
        for number, operator in enumerate(resolved.operators):
            chain = list(operators.get(operator.name, (zero,)))
            for hop in resolved.missing(operator):
                tail = f"{as_path(operator.name)}/{hop}"
                array = resolved.array(manifest, split, rows, tail)
                self._assemble_hop(array, first, number, hop)
                chain.append(array)
            operators[operator.name] = tuple(chain)
        return msgspec.structs.replace(held, operators=operators)

    def _assemble_hop(self, array: RowArray, first: int, number: int, hop: int) -> None:
        plan, columns = self._plan, array.row_items
        parts = [
            (hop_file(number, hop, i), plan.columns(i, columns)) for i in range(plan.num_slices)
        ]
        if array.scale_path:
            scale = [value for name, _ in parts for value in self._scales[name]]
            self._extender.side(array.scale_path, np.array(scale, np.float32))
        self._assemble(array, first, parts, numpy_dtype(array.dtype))

    def _assemble(
        self, array: RowArray, first: int, parts: list[tuple[str, int]], dtype: Any
    ) -> None:
        """Rows of an array out of files with some columns of each; `parts`: (file, columns)."""
        columns = sum(count for _, count in parts)
        step = max(1, self._plan.buffer // array.row_bytes)
        total = array.num_rows * array.row_bytes
        with (
            self._progress.stage(array.path, total, "B") as stage,
            self._extender.rows(array) as writer,
        ):
            for row in range(0, array.num_rows, step):
                count, at = min(step, array.num_rows - row), 0
                out = np.empty((count, columns), dtype)
                for name, width in parts:
                    with ArrayFile(self._path(name), dtype) as file:
                        piece = file.read((first + row) * width, count * width)
                    out[:, at : at + width] = piece.reshape(count, width)
                    at += width
                writer.append(out.reshape(count, -1))
                stage.advance(out.nbytes)


class _Columns:
    """One slice of the columns of all nodes, and what operators make of it."""

    def __init__(
        self,
        run: _Run,
        columns: list[NDArray[np.float32]],
        taker: RowTaker,
        pool: ThreadPoolExecutor,
    ) -> None:
        self._run, self._columns, self._taker, self._pool = run, columns, taker, pool
        self._product: Product | None = None
        self._made_for: Operator | None = None
        self._factor = self._scale = _NONE

    def run(self, number: int, operator_number: int, operator: Operator | None) -> Facts:
        """Keep rows of hop 0, or of the hops of an operator; returns scales of int8, its error."""
        run = self._run
        if operator is not None and operator != self._made_for:
            self._factor, self._scale = self._norms(operator)
            self._made_for = operator
        with ArrayFile(run._path(f"x.{number}"), np.float32) as file:
            file.read_into(0, self._columns[0])
        count = run._plan.columns(number, run._resolved.feature.row_items)
        facts: Facts = {"scales": {}, "error": 0.0}
        if operator is None:
            name = hop_file(operator_number, 0, number)
            self._keep(name, self._columns[0], _NONE, count, "hop 0", facts)
            return facts
        rows, spare = self._columns[0], self._columns[1:]
        if self._scale.size:
            self._each_range(lambda low, high: scale_rows(
                rows, run._plan.width, self._scale, low, high))  # fmt: skip
        missing = run._resolved.missing(operator)
        for hop in range(1, run._resolved.hops + 1):
            rows, spare = self._multiply(operator, hop, rows, spare)
            if hop in missing:
                name = hop_file(operator_number, hop, number)
                title = f"hop {hop} of {operator.name}"
                self._keep(name, rows, self._scale, count, title, facts)
        return facts

    def _multiply(
        self,
        operator: Operator,
        hop: int,
        x: NDArray[np.float32],
        spare: list[NDArray[np.float32]],
    ) -> tuple[NDArray[np.float32], list[NDArray[np.float32]]]:
        """The next hop, and the columns that are free then."""
        run, steps = self._run, operator.steps()
        product = self._get_product(operator)
        total = len(steps) * product.graph_bytes
        with run._progress.stage(f"hop {hop}", total, "B") as stage:
            rows = x
            for scale, share in steps:
                out = next(each for each in spare if each is not rows)
                step = Step(self._factor, scale, share, operator.loops)
                product.run(step, rows, x, run._plan.width, out, self._pool, stage)
                rows = out
        return rows, [each for each in (x, *spare) if each is not rows]

    def _get_product(self, operator: Operator) -> Product:
        """Made once: all operators have one relation, and weights or not."""
        run, plan = self._run, self._run._plan
        if self._product is None:
            self._product = Product(
                run._store, run._resolved.relation, run._resolved.nodes,
                load_array(run._path(_CARRIED), np.uint8), weighted=operator.weighted,
                threads=plan.threads, scan_bytes=plan.scan_bytes, resident=plan.resident,
            )  # fmt: skip
        return self._product

    def _norms(self, operator: Operator) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """(factor, scale): what each sum is multiplied by; what is in each row beside its value.

        Of `row` they are 1 / in-degree and nothing.  Else rows of node v hold 1 / sqrt(out-degree)
        times their values: what its out-edges need; so a sum is multiplied by
        1 / sqrt(in-degree * out-degree).
        """
        num_nodes, run = self._run._resolved.nodes.num_nodes, self._run
        factor = np.empty(num_nodes, np.float32)
        scale = np.empty(num_nodes if operator.kind != "row" else 0, np.float32)
        with (
            ArrayFile(run._path(_INTO), np.float64) as into_file,
            ArrayFile(run._path(_OUT), np.float64) as out_file,
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

    def _each_range(self, work: Callable[[int, int], None]) -> None:
        """Of nodes, a thread each."""
        total, parts = self._run._resolved.nodes.num_nodes, self._run._plan.threads
        ends = [total * i // parts for i in range(parts + 1)]
        list(self._pool.map(work, ends[:-1], ends[1:]))

    def _keep(
        self,
        name: str,
        columns: NDArray[np.float32],
        scale: NDArray[np.float32],
        count: int,
        title: str,
        facts: Facts,
    ) -> None:
        """Rows to a file, in the dtype of the store.  Raises BadInput: it cannot hold a number."""
        run, dtype = self._run, self._run._resolved.dtype
        unit, errors = _NONE, np.zeros(2)
        with run._progress.stage(f"keep {title}", self._taker.num_rows, "rows") as stage:
            if dtype == "int8":
                unit = self._taker.greatest(columns, scale, count) / np.float32(127)
                facts["scales"][name] = [float(value) for value in unit]

            def change(rows: NDArray[np.float32], first: int) -> NDArray[Any]:
                stage.advance(rows.shape[0])
                if dtype == "int8":
                    out = np.empty(rows.shape, np.int8)
                    own = np.zeros(2)
                    quantize(rows, unit, out, own)
                    errors[0] = max(errors[0], own[0])
                    return out
                made = convert(rows, dtype)
                if dtype == "float16" and np.isinf(made).any():
                    row, column = np.argwhere(np.isinf(made))[0].tolist()
                    raise BadInput.at(
                        f"{run._store.path}: {title}, row {first + row}",
                        f"{rows[row, column]:g}", "less than 65520 for float16",
                        "--dtype bfloat16 or float32 holds it",
                    )  # fmt: skip
                return made

            self._taker.write(name, columns, scale, count, change)
        facts["error"] = max(facts["error"], float(errors[0]))


def hop_file(operator: int, hop: int, number: int) -> str:
    """Temporary file of the rows of a hop in one slice; operator -1: hop 0, of all."""
    return f"hop.{operator}.{hop}.{number}"


def _numbered(name: str, count: int) -> list[str]:
    return [f"{name}.{number}" for number in range(count)]
