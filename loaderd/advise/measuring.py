"""What advice is made of: plans tried with the real engine, over the store's own files."""

import os
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from msgspec import structs

from blockstore.format import PAGE_BYTES, Manifest, row_geometry
from blockstore.store import Store
from blockstore.units import format_bytes
from loaderd.advise.accelerator import free_bytes
from loaderd.advise.trials import Device, Machine, Trials, measure_cores, measure_order
from loaderd.devicecost import FLASH, RUN_BYTES
from loaderd.engine.advice import (
    Advice,
    Line,
    MacroReads,
    Reads,
    Work,
    advise,
    cpu_seconds,
    fill_reads,
    kept_neighbors,
    macro_reads,
)
from loaderd.engine.resolve import has_halos, make_plan, resolve, seed_type
from loaderd.engine.seeds import count_seeds, lookup_items
from loaderd.errors import Refused
from loaderd.hopwise.cut import cut_hops
from loaderd.hopwise.files import HopArray, chosen_arrays
from loaderd.hyper.cut import cut_hyper
from loaderd.hyper.rowcache import rows_by_type
from loaderd.macro.cut import MacroCut, cut_macro
from loaderd.macro.files import MacroFiles
from loaderd.memory.ledger import (
    LEAST_SESSION,
    EngineSettings,
    SessionNeed,
    graph_least,
    make_budget,
    make_sizes,
    mem_of,
    served_rows,
    session_need,
    slot_bytes,
    table_entries,
)
from loaderd.placement import TRAINING_BYTES, HopAdvice, HopFacts, advise_hops
from loaderd.plans.base import Part, Plan
from loaderd.plans.chunks import METHOD_OF, HopPlan, hop_set, resolve_hops
from loaderd.plans.hyperbatch import HyperbatchPlan
from loaderd.plans.macrobatch import MacrobatchPlan
from loaderd.plans.minibatch import MinibatchPlan
from loaderd.protocol import (
    Attach,
    Resolved,
)
from loaderd.sessions.engine import Engine
from loaderd.sessions.hyperbatch import prospect
from loaderd.sessions.lookahead import Prospect

_TRY_S, _BATCHES = 3.0, 16  # of reading that a trial takes, about; batches of it at most
_ROOMY = 3  # times the store: more memory is of no use


@dataclass(frozen=True, slots=True)
class Report:
    """What `loaderd advise` says."""

    machine: Machine | None  # None: nothing could be measured
    steps: int
    advice: Advice


class _Case:
    """One store, one budget, one request: what is known without measuring."""

    def __init__(self, store: Store, settings: EngineSettings, request: Attach) -> None:
        """Raises Refused: no such split, fanouts, ..."""
        self.store, self.settings, self.request = store, settings, request
        self.manifest: Manifest = store.manifest
        self.served = served_rows(self.manifest)
        self.slot = slot_bytes(self.manifest)
        self.num_seeds = count_seeds(seed_type(self.manifest, request), request.split, None)
        self.plain = self.plan_of(self.resolved(MinibatchPlan.name), MinibatchPlan.name)
        self.needs = [self._need(self.plain, stamp) for stamp in (True, False)]
        self.partitioned = any(t.num_partitions for t in self.manifest.types)

    def resolved(self, plan: str, halos: bool = True) -> Resolved:
        """The request for this plan.  Raises Refused."""
        asked = structs.replace(self.request, plan=plan, halos=halos)
        return resolve(self.manifest, asked, f"split:{self.request.split}", self.num_seeds)

    def plan_of(self, resolved: Resolved, name: str) -> Plan:
        """The same as a plan."""
        return make_plan(self.manifest, resolved, Part(), name)

    def _need(self, plan: Plan, stamp: bool) -> SessionNeed:
        sizes = make_sizes(self.manifest, plan.resolved.edge_ids, stamp)
        lookup = 8 * lookup_items(self.request.split, plan.resolved)
        return session_need(plan.shape(), sizes, self.served, self.num_seeds, lookup, self.slot)

    @property
    def least(self) -> int:
        """Slots of a session of plain minibatches, at least."""
        return min(need.least for need in self.needs)

    def least_bytes(self, more: int = 0) -> int:
        """--mem with which such a session and `more` slots can be had."""
        fixed = sum(e.num_bytes for e in table_entries(self.manifest))
        slots = graph_least(self.manifest, self.settings)
        slots += max(LEAST_SESSION, self.least + more)
        return mem_of(fixed + self.slot * slots)

    def enough(self) -> EngineSettings:
        """The settings with no more memory than is of use."""
        blocks = sum(r.num_blocks for r in self.manifest.relations)
        blocks += sum(
            row_geometry(r.array, self.manifest.block_bytes).num_blocks for r in self.served
        )
        own = self.settings.workers * (max(n.workspace for n in self.needs) + 16)
        mem = self.least_bytes(_ROOMY * (blocks + own)) + (1 << 30)
        return replace(self.settings, mem_bytes=min(self.settings.mem_bytes, mem))


def report_on(store: Store, settings: EngineSettings, request: Attach) -> Report:
    """Estimate every plan; a trial of each that can run.

    Raises Refused, StoreError: no such split, fanouts that cannot be, a corrupt block.
    """
    case = _Case(store, settings, request)
    macros = _macro_cases(case)
    if case.least_bytes() > settings.mem_bytes:
        least = case.least_bytes()
        lines = [
            Line(plan.name, "", True, least, False) for plan in (MinibatchPlan, HyperbatchPlan)
        ]
        lines += [macro.refused() for macro in macros] or [_not_partitioned(case)]
        return Report(None, case.plain.num_steps, advise(lines, ""))
    with Engine(store, case.enough()) as engine:
        order_s, byte_s = measure_order(engine.reader)
        seen = prospect(engine.resources, request)
        cost = seen.ahead.cost if seen.ahead else FLASH
        if cost is not FLASH:  # what is read in order is read no slower than long runs are
            order_s = min(order_s, cost.run_s / RUN_BYTES + cost.page_s / PAGE_BYTES)
        machine = Machine(
            Device(engine.io_mode, order_s, *cost, byte_s), len(os.sched_getaffinity(0)),
            settings.workers, measure_cores(settings.workers), settings.mem_bytes,
        )  # fmt: skip
        lines = [_plain_line(case, machine, engine, seen), _hyper_line(case, machine, engine, seen)]
        work: tuple[Work, str] | None = None
        for macro in macros:
            if macro.least > settings.mem_bytes:
                lines.append(macro.refused())
                continue
            work = work or _macro_work(case, macro, machine, engine, seen)
            lines.append(macro.line(case, machine, *work))
        lines += [] if macros else [_not_partitioned(case)]
        hops = _hop_lines(case, machine, engine)
        advice = replace(advise([*lines, *hops], seen.choice()), hops=_hop_advice(case, hops))
        return Report(machine, case.plain.num_steps, advice)


# -- batches equal to those of plan minibatch ---------------------------------------------------


def _work(case: _Case, machine: Machine, engine: Engine, plan: str, step_s: float) -> Work:
    """CPU of a batch of this plan, by some batches that are served; one before warms up."""
    request = structs.replace(case.request, plan=plan)
    trials = Trials(engine, request)
    try:
        trials.serve(1)
        count = int(np.clip(_TRY_S / max(1e-3, step_s), 1, _BATCHES))
        trial = trials.serve(count)
    finally:
        trials.close()
    byte_s = machine.device.byte_s
    return Work(max(0.0, trial.cpu_s - trial.num_bytes * byte_s) / trial.batches, byte_s)


def _equal_line(
    case: _Case, machine: Machine, engine: Engine, seen: Prospect, step: Reads, line: Line,
    fill: Reads,
) -> Line:  # fmt: skip
    cost, steps = machine.device.cost, seen.num_steps
    work = _work(case, machine, engine, line.plan, step.seconds(cost))
    num_bytes = step.num_bytes * steps
    return replace(
        line, epoch_bytes=num_bytes, io_s=step.seconds(cost) * steps, fill_bytes=fill.num_bytes,
        fill_s=fill.seconds(cost),
        cpu_s=cpu_seconds(work, steps, num_bytes, machine.granted, machine.cores),
    )  # fmt: skip


def _graph_held(seen: Prospect) -> str:
    total = seen.ahead.look.hop_blocks[0].total if seen.ahead and seen.ahead.look.hop_blocks else 0
    return "graph" if seen.rooms.graph >= total else f"{seen.rooms.graph / total:.0%} of the graph"


def _plain_line(case: _Case, machine: Machine, engine: Engine, seen: Prospect) -> Line:
    line = Line(MinibatchPlan.name, "", True, case.least_bytes(), True)
    if seen.ahead is None or seen.plain is None:
        return replace(line, note="there is no memory to sample ahead: not measured")
    look = seen.ahead.look
    total = look.row_blocks.total
    rows = min(seen.rooms.rows, look.row_blocks.of(seen.num_steps))
    share = min(1.0, seen.rooms.rows / max(1, total))
    held = f"{_graph_held(seen)}, {share:.0%} of the rows' blocks"
    reads = f"blocks of {format_bytes(case.slot)}, some"
    fill = fill_reads(look, seen.rooms, case.manifest.block_bytes) + Reads(rows * case.slot, 0)
    line = replace(line, held=held, reads=reads)
    return _equal_line(case, machine, engine, seen, seen.plain, line, fill)


def _hyper_line(case: _Case, machine: Machine, engine: Engine, seen: Prospect) -> Line:
    line = Line(HyperbatchPlan.name, "", True, _hyper_least(case, seen), False)
    cut = seen.cut
    if seen.ahead is None or seen.hyper is None or cut is None:
        return replace(line, note="has no room: plan minibatch serves in its place")
    look = seen.ahead.look
    held = f"{_graph_held(seen)}, {cut.size} batches"
    fill = fill_reads(look, seen.rooms, case.manifest.block_bytes)
    if cut.entries:
        counts = zip(cut.entries, look.rows, strict=True)
        nodes = sum(growth.total for growth in look.rows)
        held += f", {min(sum(cut.entries), nodes) / max(1, nodes):.0%} of the rows"
        each = [min(room, growth.of(seen.num_steps)) for room, growth in counts]
        widths = [sum(t.row_bytes) for t in rows_by_type(case.served)]
        fill += Reads(float(sum(n * w for n, w in zip(each, widths, strict=True))), 0)
    line = replace(line, runs=True, held=held, reads="runs of pages, the graph in order")
    return _equal_line(case, machine, engine, seen, seen.hyper, line, fill)


def _hyper_least(case: _Case, seen: Prospect) -> int:
    """--mem with which hyperbatches are built, about."""
    least = case.least_bytes()
    if seen.estimate is None:
        return least
    need, settings = seen.need, case.settings

    def room_for(mem: int) -> bool:
        assert seen.estimate is not None
        budget = make_budget(case.manifest, replace(settings, mem_bytes=mem))
        together = budget.graph_slots < budget.graph_blocks
        estimate = seen.estimate._replace(scratch_bytes=seen.estimate.scratch_bytes * together)
        taken = 2 * (need.workspace + 2) + need.seeds
        room = int((budget.num_slots - budget.graph_slots - taken) * settings.session_share)
        return room > 0 and cut_hyper(
            room, case.slot, need, estimate, case.served, case.manifest.id_dtype, settings.readers,
            2 * settings.workers, 0, seen.num_steps,
        ) is not None  # fmt: skip

    high = least
    while not room_for(high) and high < least << 20:
        high *= 2
    low = high // 2
    while high - low > max(case.slot, high // 64) and high > least:
        middle = (low + high) // 2
        low, high = (low, middle) if middle >= least and room_for(middle) else (middle, high)
    return max(least, high)


# -- macro-batches ------------------------------------------------------------------------------


class _Macro(NamedTuple):
    """Macro-batches with or without halos."""

    resolved: Resolved
    options: str
    cut: MacroCut
    reads: MacroReads
    least: int  # --mem
    kept: float
    note: str

    def refused(self) -> Line:
        """There is too little memory."""
        return Line(
            MacrobatchPlan.name,
            self.options,
            False,
            self.least,
            False,
            note=self.note,
            kept=self.kept,
        )

    def line(self, case: _Case, machine: Machine, work: Work, basis: str) -> Line:
        """With the CPU seconds of its batches."""
        macro = self.resolved.macro
        assert macro is not None
        passes = -(-case.num_seeds // case.request.batch_size) * macro.reuse
        order_s, reads = machine.device.order_s, self.reads
        first = reads.hubs + reads.first
        at_once = "two" if self.cut.memories == 2 else "one"
        return Line(
            MacrobatchPlan.name, self.options, False, self.least, True,
            held=f"{at_once} x {macro.partitions} of {macro.num_partitions} partitions",
            reads="in order", epoch_bytes=float(reads.epoch), fill_bytes=float(reads.hubs),
            io_s=reads.epoch * order_s,
            cpu_s=cpu_seconds(work, passes, reads.epoch, machine.granted, machine.cores),
            fill_s=max(first * order_s, first * work.byte_s / machine.cores),
            note=f"{self.note}{basis}", kept=self.kept,
        )  # fmt: skip


def _macro_cases(case: _Case) -> list[_Macro]:
    """With all that the store has, and without halos where it has any."""
    if not case.partitioned:
        return []
    files = MacroFiles(case.store, case.served, 0)
    halos = [True, False] if has_halos(case.manifest) else [False]
    return [_macro_case(case, files, with_halos) for with_halos in halos]


def _macro_case(case: _Case, files: MacroFiles, halos: bool) -> _Macro:
    manifest = case.manifest
    resolved = case.resolved(MacrobatchPlan.name, halos)
    macro = resolved.macro
    assert macro is not None
    cut = cut_macro(manifest, files, case.served, resolved, case.settings, case.slot, 1 << 60)
    least = case.least_bytes(cut.least)
    room = case.settings.mem_bytes - case.least_bytes(cut.slots)
    cut = cut if room >= 0 else cut._replace(memories=1)
    parts = [name for name, there in (("hubs", macro.hubs), ("halos", macro.halos)) if there]
    kept, note = kept_neighbors(manifest, macro.partitions, macro.hubs, macro.halos)
    reads = macro_reads(manifest, case.served, files, resolved)
    return _Macro(resolved, " + ".join(parts) or "partitions alone", cut, reads, least, kept, note)


def _macro_work(
    case: _Case, macro: _Macro, machine: Machine, engine: Engine, seen: Prospect
) -> tuple[Work, str]:
    """CPU of a batch and of a byte, from as many partitions as are read in a short time."""
    resolved = macro.resolved.macro
    assert resolved is not None
    seconds = macro.reads.first * machine.device.order_s
    size = max(1, min(resolved.partitions, int(resolved.partitions * _TRY_S / max(1e-3, seconds))))
    request = structs.replace(
        case.request, plan=MacrobatchPlan.name, halos=resolved.halos, macro_partitions=size
    )
    trials = Trials(engine, request)
    try:
        trials.serve(1)  # warms up
        load = trials.serve(1, epoch=1)
        trial = trials.serve(_BATCHES, epoch=1)
    finally:
        trials.close()
    work = solve_work(load.cpu_s, load.num_bytes, trial.cpu_s, trial.num_bytes, trial.batches)
    if size == resolved.partitions:
        return work, ""
    edges = seen.ahead.look.edges if seen.ahead else trial.edges / trial.batches
    more = max(1.0, edges * trial.batches / max(1, trial.edges))  # as if none were left out
    return (
        Work(work.batch_s * more, work.byte_s),
        f"; cores measured with {size} partitions",
    )


def solve_work(
    load_s: float, load_bytes: int, trial_s: float, trial_bytes: int, batches: int
) -> Work:
    """CPU of a batch and of a byte, from a trial of one batch and one of several."""
    system = np.array([[1.0, load_bytes], [batches, trial_bytes]])
    if abs(np.linalg.det(system)) < 1:
        return Work(trial_s / batches, 0.0)
    batch_s, byte_s = np.linalg.solve(system, np.array([load_s, trial_s])).tolist()
    return Work(max(0.0, batch_s), max(0.0, byte_s))


def _not_partitioned(case: _Case) -> Line:
    note = (
        f"the store is not partitioned: `blockstore repartition {case.store.path} NEW "
        "--partitions 64` makes one that is"
    )
    return Line(MacrobatchPlan.name, "", False, case.least_bytes(), False, note=note)


# -- hop-wise batches ---------------------------------------------------------------------------


def _hop_lines(case: _Case, machine: Machine, engine: Engine) -> list[Line]:
    """Where hops were worked out for the split: chunks in order, and rows one by one."""
    return [_hop_line(case, machine, engine, plan) for plan in METHOD_OF if _has_hops(case)]


def _has_hops(case: _Case) -> bool:
    name = case.resolved(MinibatchPlan.name).seed_type
    node_type = next(t for t in case.manifest.types if t.name == name)
    return case.request.split in node_type.hops


def _hop_advice(case: _Case, lines: list[Line]) -> HopAdvice | None:
    """Where their rows had best lie, given what memory an accelerator has free now."""
    if not lines:
        return None
    seconds = {line.plan: line.epoch_s if line.runs else None for line in lines}
    _, plan, arrays = _hop_case(case, "rows")
    facts = HopFacts(
        num_rows=plan.resolved.num_seeds, row_bytes=sum(a.row_bytes for a in arrays),
        device_bytes=free_bytes(), training_bytes=TRAINING_BYTES,
        held=any(line.runs and line.epoch_bytes == 0 for line in lines),
        chunks_s=seconds["chunks"], rows_s=seconds["rows"],
    )  # fmt: skip
    return advise_hops(facts)


def _hop_case(case: _Case, name: str) -> tuple[Attach, HopPlan, list[HopArray]]:
    """All operators and hops of the split by this plan, with labels where there are any."""
    asked = structs.replace(case.request, plan=name)
    hops = hop_set(case.manifest, asked)[1]
    request = structs.replace(asked, labels=hops.label is not None)
    resolved = resolve_hops(case.manifest, request)
    of = resolved.hops
    assert of is not None
    arrays = chosen_arrays(case.manifest, hops, of.operators, of.hops, of.labels, 0)
    return request, HopPlan(resolved, Part()), arrays


def _hop_line(case: _Case, machine: Machine, engine: Engine, name: str) -> Line:
    request, plan, arrays = _hop_case(case, name)
    cut = cut_hops(plan, arrays, case.settings, case.slot, 1 << 40, 0, 0, 0, held=False)
    least = case.least_bytes(max(0, cut.buffer + min(2, cut.transit) * cut.run - case.least))
    options = f"{len(arrays)} arrays"
    line = Line(name, options, False, least, True, sampled=False)
    try:
        trials = Trials(engine, request)
    except Refused as error:
        return replace(line, runs=False, note=str(error))
    try:
        trials.serve(_BATCHES)  # arrays that stay are there then
        trial = trials.serve(_BATCHES)
    finally:
        trials.close()
    device, times = machine.device, plan.num_steps / trial.batches
    num_bytes = trial.num_bytes * times
    whole = float(sum(a.num_pages * PAGE_BYTES for a in arrays))
    in_order = name == "chunks"
    reads = Reads(num_bytes, trial.reads * times)
    build = max(0.0, trial.cpu_s - trial.num_bytes * device.byte_s) / trial.batches
    return replace(
        line, held="the arrays" if not num_bytes else "what is on its way",
        reads="in order, by chunks" if in_order else "runs of pages", epoch_bytes=num_bytes,
        fill_bytes=0.0 if num_bytes else whole,
        fill_s=0.0 if num_bytes else whole * device.order_s,
        io_s=num_bytes * device.order_s if in_order else reads.seconds(device.cost),
        cpu_s=cpu_seconds(
            Work(build, device.byte_s), plan.num_steps, num_bytes, machine.granted, machine.cores
        ),
    )  # fmt: skip
