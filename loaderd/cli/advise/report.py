"""Report what each plan did when it was tried, and which to take, to people and scripts."""

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from msgspec import structs

from blockstore.errors import BudgetTooSmall
from blockstore.format import Manifest
from blockstore.store import Store
from blockstore.units import format_bytes
from loaderd.api.errors import Refused
from loaderd.api.placement import TRAINING_BYTES, HopAdvice, HopFacts, advise_hops
from loaderd.api.protocol import Attach
from loaderd.cli.advise.owners import OwnersQuestion, SplitAdvice, advise_split
from loaderd.cli.advise.trial import PlanTrial, try_plan
from loaderd.memory.ledger import EngineSettings
from loaderd.monitoring.report import table
from loaderd.plans.chunks import METHOD_OF, hop_set, resolve_hops
from loaderd.plans.hyperbatch import HyperbatchPlan
from loaderd.plans.macrobatch import MacrobatchPlan
from loaderd.plans.minibatch import MinibatchPlan
from loaderd.sampling.propagated.files import chosen_arrays
from loaderd.sessions.kinds import find_kind
from loaderd.sessions.resolve import has_halos, seed_type
from loaderd.sessions.seeds import count_seeds

_WORTH = 0.7  # of the time of equal batches: other batches are advised if they take no more
_ENOUGH = 0.8  # of a training node's neighbors: other batches are advised if so many are kept
_FEW = 0.1  # of the bytes of all rows: no more is read of arrays that stay in memory
_DRIVER_S = 20.0  # for an accelerator's driver to answer
_MACRO_BYTES = 64 << 20  # of a macro-batch for each second: a trial has to see several of them
_HEADER = (
    "plan", "batches", "batches/s", "epoch s", "read an epoch", "MB/s", "cores", "first batch s",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Line:
    """What the report says about one plan."""

    plan: str
    options: str = ""  # of macro-batches: what they have
    batches: str = "equal"  # to those of `minibatch`; "others"; "hops": for other models
    refused: str = ""  # why it cannot run
    trial: PlanTrial | None = None  # None: it cannot run
    kept: float = -1.0  # share of a training node's neighbors; -1: not known
    note: str = ""

    @property
    def name(self) -> str:
        return f"{self.plan}, {self.options}" if self.options else self.plan


@dataclass(frozen=True, slots=True)
class Report:
    """Every plan, and the one to take."""

    cores: int
    mem_bytes: int
    seconds: float  # that each plan was tried
    lines: tuple[Line, ...]
    auto: str  # the plan that a session of plan `auto` gets; empty: none has room
    plan: str  # the plan advised; empty: none has room
    options: str
    reason: str
    hops: HopAdvice | None = None  # None: there are none
    split: SplitAdvice | None = None  # None: no owner map was named


def report_on(
    store: Store,
    settings: EngineSettings,
    request: Attach,
    seconds: float,
    owners: OwnersQuestion | None = None,
) -> Report:
    """Try every plan for so many seconds, and sample some steps for an owner map.

    Raises Refused, StoreError: no such split or map, impossible fanouts, a corrupt block.
    """
    manifest = store.manifest
    count_seeds(seed_type(manifest, request), request.split, None)  # refuses for all plans alike
    cases = [
        (line, structs.replace(asked, plan=line.plan))
        for line, asked in _cases(manifest, request, seconds)
    ]
    for _, asked in cases:
        find_kind(asked.plan).resolve(manifest, asked, None)  # raises what no memory would mend
    split = advise_split(store, settings, request, owners) if owners else None
    lines = [_tried(store, settings, line, asked, seconds) for line, asked in cases]
    auto = _tried(store, settings, Line("auto"), request, 0.0).trial
    plan, options, reason = choose(lines)
    hops = _hop_advice(manifest, request, lines)
    return Report(
        len(os.sched_getaffinity(0)), settings.mem_bytes, seconds, tuple(lines),
        auto.plan if auto else "", plan, options, reason, hops, split,
    )  # fmt: skip


def _cases(manifest: Manifest, request: Attach, seconds: float) -> Iterator[tuple[Line, Attach]]:
    yield Line(MinibatchPlan.name), request
    yield Line(HyperbatchPlan.name), request
    if any(t.num_partitions for t in manifest.types):
        hubs = any(t.hubs for t in manifest.types)
        asked, note = _fewer_partitions(manifest, request, seconds)
        for halos in [True, False] if has_halos(manifest) else [False]:
            kept, words = kept_neighbors(manifest, request.macro_partitions, halos)
            parts = [w for w, there in (("hubs", hubs), ("halos", halos)) if there]
            yield (
                Line(
                    MacrobatchPlan.name, " + ".join(parts) or "partitions alone", "others",
                    kept=kept, note=f"{words}{note}",
                ),
                structs.replace(asked, halos=halos),
            )  # fmt: skip
    node_type = seed_type(manifest, request)
    if request.split in node_type.hops:
        labels = hop_set(manifest, structs.replace(request, plan="chunks"))[1].label is not None
        for name in METHOD_OF:
            yield Line(name, "", "hops"), structs.replace(request, labels=labels)


def _fewer_partitions(manifest: Manifest, request: Attach, seconds: float) -> tuple[Attach, str]:
    """A request for macro-batches so small that a trial sees several; and a note on that."""
    total = max(t.num_partitions for t in manifest.types)
    wanted = request.macro_partitions or max(1, total // 8)
    each = sum(r.num_blocks for r in manifest.relations) * manifest.block_bytes
    each += sum(a.num_rows * a.row_bytes for t in manifest.types for a in t.features.values())
    fewer = max(1, min(wanted, int(_MACRO_BYTES * max(1.0, seconds) * total / max(1, each))))
    note = f"; tried with {fewer} of {total} partitions at a time" if fewer < wanted else ""
    return structs.replace(request, macro_partitions=fewer if note else wanted), note


def _tried(
    store: Store, settings: EngineSettings, line: Line, request: Attach, seconds: float
) -> Line:
    try:
        trial = try_plan(store, settings, request, seconds)
        if trial.plan != line.plan and request.plan != "auto":
            no_room = f"has no room: plan {trial.plan} serves in its place"
            return replace(line, refused=no_room)
        return replace(line, trial=trial)
    except (Refused, BudgetTooSmall) as error:
        return replace(line, refused=str(error))


def choose(lines: Sequence[Line]) -> tuple[str, str, str]:
    """The plan, its options, and why; empty names if none can run.

    The fastest plan with equal batches, or one with other batches that is much faster: of these
    the one that keeps most neighbors, if it is known to keep enough of them.
    """
    tried = [(line, line.trial) for line in lines if line.trial]
    equal = [(line, trial) for line, trial in tried if line.batches == "equal"]
    if not equal:
        return "", "", f"no plan can run: {lines[0].refused}"
    best, pace = min(equal, key=lambda found: found[1].epoch_s)
    others = [(line, trial) for line, trial in tried if line.batches == "others"]
    if not others:
        return best.plan, best.options, _why(pace)
    other, its = min(others, key=lambda found: (-found[0].kept, found[1].epoch_s))
    if its.epoch_s > _WORTH * pace.epoch_s:
        more = f"{other.name}, {its.epoch_s:.3g} s, is not worth other batches"
    elif other.kept < _ENOUGH:
        more = (
            f"{other.name} takes {its.epoch_s:.3g} s, but is known to keep "
            f"{max(0.0, other.kept):.0%} of a training node's neighbors only: advised from "
            f"{_ENOUGH:.0%} on"
        )
    else:
        more = f"against {pace.epoch_s:.3g} s of {best.name}; other batches"
        best, pace = other, its
    return best.plan, best.options, f"{_why(pace)}; {more}"


def _why(trial: PlanTrial) -> str:
    pace = f"{trial.epoch_s:.3g} s an epoch"
    if trial.epoch_bytes == 0:
        return f"{pace}: everything stays in memory, nothing is read"
    return f"{pace}, {format_bytes(trial.epoch_bytes)} read"


def kept_neighbors(manifest: Manifest, partitions: int, halos: bool) -> tuple[float, str]:
    """Share of training nodes' neighbors that macro-batches keep.

    partitions   loaded at a time; 0: an eighth

    -1 if the store does not say; also returns the same in words.
    """
    influence, partitioning = manifest.influence, manifest.partitioning
    if influence is not None and influence.kept:
        loaded = partitions or max(t.num_partitions for t in manifest.types) // 8
        kept = min(influence.kept, key=lambda k: abs(k.num_partitions - loaded))
        share = kept.nodes[2 if halos else 1 if influence.num_hubs else 0]
        words = f"with {kept.num_partitions} partitions loaded"
    elif partitioning is not None:
        count = partitioning.num_partitions
        loaded = partitions or count // 8
        near = abs(count / 8 - loaded) <= abs(count / 16 - loaded)
        share = partitioning.kept_8 if near else partitioning.kept_16
        words = f"with {'an 8th' if near else 'a 16th'} of the partitions loaded, without hubs"
    else:
        return -1.0, "the store does not say what share of neighbors is kept"
    return share, f"{share:.1%} of training nodes' neighbors are kept {words}"


def _hop_advice(manifest: Manifest, request: Attach, lines: Sequence[Line]) -> HopAdvice | None:
    """Advise where to keep rows of hops, given the memory that an accelerator has free."""
    tried = {line.plan: line.trial for line in lines if line.batches == "hops"}
    if not tried:
        return None
    asked = structs.replace(request, plan="rows")
    hops = hop_set(manifest, asked)[1]
    resolved = resolve_hops(manifest, structs.replace(asked, labels=hops.label is not None))
    of = resolved.hops
    assert of is not None
    arrays = chosen_arrays(manifest, hops, of.operators, of.hops, of.labels, 0)
    row_bytes = sum(a.row_bytes for a in arrays)
    few = resolved.num_seeds * row_bytes * _FEW  # read while arrays were being loaded
    paces = {plan: trial.epoch_s if trial else None for plan, trial in tried.items()}
    facts = HopFacts(
        num_rows=resolved.num_seeds, row_bytes=row_bytes,
        device_bytes=free_bytes(), training_bytes=TRAINING_BYTES,
        held=any(trial is not None and trial.epoch_bytes <= few for trial in tried.values()),
        chunks_s=paces["chunks"], rows_s=paces["rows"],
    )  # fmt: skip
    return advise_hops(facts)


def free_bytes() -> int:
    """Free bytes of the emptiest accelerator; 0: there is none, or its driver does not answer."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return 0
    words = [tool, "--query-gpu=memory.free", "--format=csv,noheader,nounits"]
    try:
        found = subprocess.run(  # noqa: S603 the driver's own, words of ours
            words, capture_output=True, text=True, timeout=_DRIVER_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return 0
    lines = [line.strip() for line in found.stdout.splitlines()]
    return max((int(line) << 20 for line in lines if line.isdecimal()), default=0)


def advice_text(report: Report) -> str:
    """The advice, how it was measured, a table of the plans, and notes on them."""
    name = f"{report.plan}, {report.options}" if report.options else report.plan
    pages = [f"advice: {name}: {report.reason}" if name else report.reason]
    if report.hops is not None:
        pages.append(f"advice for hop-wise batches: {report.hops.text}")
    rows = [_HEADER, *(_row(line) for line in report.lines)]
    pages += [
        "",
        f"each plan served for {report.seconds:g} s within --mem {format_bytes(report.mem_bytes)}, "
        f"on {report.cores} cores; an epoch at the pace of the second half of that time",
        "", *table(rows, frozenset({2, 3, 4, 5, 6, 7})), "",
    ]  # fmt: skip
    pages += [f"{line.name}: {line.note}" for line in report.lines if line.note]
    pages += [f"{line.name} cannot run: {line.refused}" for line in report.lines if line.refused]
    if not any(line.batches == "others" for line in report.lines):
        pages.append(
            "macrobatch: the store is not partitioned; `blockstore repartition STORE NEW "
            "--partitions 64` makes one that is"
        )
    if report.auto:
        pages.append(f"plan auto takes {report.auto}: the same batches as minibatch")
    if report.split is not None:
        pages += ["", report.split.text]
    return "\n".join(pages)


def _row(line: Line) -> tuple[str, ...]:
    trial = line.trial
    if trial is None:
        return (line.name, line.batches, "cannot run", *["-"] * 5)
    return (
        line.name, line.batches, f"{trial.batches / trial.seconds:.3g}", f"{trial.epoch_s:.3g}",
        format_bytes(trial.epoch_bytes), f"{trial.num_bytes / trial.seconds / 1e6:.0f}",
        f"{trial.cores:.1f}", f"{trial.first_s:.2f}",
    )  # fmt: skip


def advice_json(report: Report) -> str:
    """The same numbers with their names, times in seconds, sizes in bytes."""
    made: dict[str, Any] = msgspec.to_builtins(report)
    for raw, line in zip(made["lines"], report.lines, strict=True):
        if line.trial is not None:
            raw |= {name: getattr(line.trial, name) for name in ("epoch_s", "epoch_bytes", "cores")}
    return msgspec.json.encode(made).decode()
