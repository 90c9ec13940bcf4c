"""`blockstore pack` after its options are parsed, and descriptions of existing packs."""

import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from blockstore.errors import StoreError
from blockstore.format import crc_path, row_geometry
from blockstore.store import BlockedFile, find_shards, open_store, scan_blocks
from blockstore.units import format_bytes
from loaderd.api.protocol import Attach, Labor
from loaderd.sampling.packed.files import check_bound
from loaderd.sampling.packed.format import pack_path, packs_folder, read_pack
from preprocess.cli.flags import IngestResources, PackedSampling, PackFlags, PackShow
from preprocess.errors import BadInput
from preprocess.hops.hops import default_threads
from preprocess.packs.packs import PackStages, open_sampler, pack_epochs
from preprocess.packs.plan import PackJob, PackOptions, estimate_pack
from preprocess.pipeline.disk import existing_folder, measure_disk
from preprocess.pipeline.progress import Progress
from preprocess.pipeline.renderings import Events, format_seconds, write_line
from preprocess.pipeline.stage import RunPlan

_PAYS_AFTER = (1, 3, 10)  # epochs


def run_pack(
    store: Path,
    epochs: PackFlags,
    sampling: PackedSampling,
    show: PackShow,
    resources: IngestResources,
) -> None:
    """Pack, or print the estimated cost.  Raises what `pack_epochs` does."""
    options = PackOptions(
        _request(sampling), epochs.epochs, epochs.hot_bytes,
        epochs.group_bytes, resources.mem_bytes, default_threads(),
    )  # fmt: skip
    if show.dry_run:
        found = dry_run(store, options)
        write_line(sys.stdout, msgspec.json.encode(found).decode() if show.json else found.text())
        return
    rendering = Events(sys.stdout) if show.json else None
    result = pack_epochs(store, options, Progress(rendering=rendering), resources.fresh)
    if rendering is not None:
        rendering.emit("end", {"pack": str(result.path), "epoch_bytes": result.epoch_bytes})
        return
    write_line(sys.stdout, result.text())


def _request(flags: PackedSampling) -> Attach:
    """The request that sessions with these parameters send.  Raises BadInput."""
    if flags.sampler not in ("neighbor", "labor"):
        raise BadInput.at(
            "--sampler", repr(flags.sampler), "neighbor or labor", "name one of them"
        )  # fmt: skip
    labor = None
    if flags.sampler == "labor":
        labor = Labor(flags.layer_dependency, flags.batch_dependency)
    elif flags.layer_dependency or flags.batch_dependency != 1:
        raise BadInput.at(
            "--layer-dependency, --batch-dependency", "--sampler neighbor", "labor",
            "say --sampler labor, or leave them out",
        )  # fmt: skip
    fanouts = dict[str, tuple[int, ...]]()
    for word in flags.fanout or ():
        name, _, numbers = word.partition("=")
        fanouts[name] = _numbers("--fanout", numbers)
    return Attach(
        token=0, request=0, num_neighbors=_numbers("--num-neighbors", flags.num_neighbors),
        fanouts=fanouts, batch_size=flags.batch_size, seed=flags.seed, split=flags.split,
        seed_type=flags.seed_type, world_size=flags.world_size, shuffle=flags.shuffle,
        replace=flags.replace, weighted=flags.weighted, frontier=flags.frontier,
        return_e_id=flags.return_e_id, labor=labor,
    )  # fmt: skip


def _numbers(option: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in text.replace(",", " ").split())
    except ValueError:
        raise BadInput.at(option, repr(text), "numbers such as 10,10,10", "give them") from None


@dataclass(frozen=True)
class PackDryRun:
    """The estimated cost of packing, from 16 batches of its first epoch; bytes and seconds."""

    pack: str
    batches: int  # of an epoch
    seeds: int  # of an epoch
    epochs: int
    result_bytes: int
    temporary_bytes: int
    free_bytes: int
    fits_disk: bool
    rows_read_bytes: int  # bytes of rows read from the store while packing
    epoch_bytes: int  # bytes that a session reads in an epoch
    hot_bytes: int  # bytes that a session reads once, when it begins
    batch_rows_bytes: int  # bytes of all rows that a batch wants
    mem_bytes: int
    serve_bytes: int  # memory of a session's rows: those that stay, and two groups
    read_rate: float  # of the disk, bytes a second
    write_rate: float
    elapsed_s: float
    pays: dict[str, float]  # epochs -> seeds a second without the pack below which it pays off

    def text(self) -> str:
        seed = self.epoch_bytes / self.seeds / 1e3
        whole = self.batch_rows_bytes * self.batches / self.seeds / 1e3
        pays = ", ".join(f"{rate:,.0f} after {n}" for n, rate in self.pays.items())
        room = "" if self.fits_disk else ": too little"
        return "\n".join([
            f"{self.pack}",
            f"epochs      {self.epochs} of {self.batches:,} batches, {self.seeds:,} seeds",
            f"disk        {format_bytes(self.result_bytes)}, and "
            f"{format_bytes(self.temporary_bytes)} while it is made; "
            f"{format_bytes(self.free_bytes)} are free{room}",
            f"memory      {format_bytes(self.mem_bytes)} to pack; sessions keep "
            f"{format_bytes(self.serve_bytes)} of rows",
            f"an epoch    reads {format_bytes(self.epoch_bytes)}, {seed:.1f} KB a seed, of "
            f"{whole:.1f} KB that batches want; and once {format_bytes(self.hot_bytes)}",
            f"takes       {format_seconds(self.elapsed_s)}: rows of "
            f"{format_bytes(self.rows_read_bytes)} pass by, the disk reads "
            f"{format_bytes(int(self.read_rate))}/s and writes "
            f"{format_bytes(int(self.write_rate))}/s",
            f"pays        if sessions without it get fewer seeds/s than {pays} epochs",
        ])  # fmt: skip


def dry_run(path: Path, options: PackOptions) -> PackDryRun:
    """Sample some batches, and measure the disk.  Raises what `pack_epochs` raises at first."""
    job = PackJob.of(open_store(path), options)
    target = pack_path(job.store.path, job.resolved, options.request.world_size)
    with open_sampler(job) as sampler:
        e = estimate_pack(job, sampler)
    made = PackStages(job, e)
    plan = RunPlan.of(made.stages(), made.result_bytes)
    folder = existing_folder(target)
    disk, free = measure_disk(folder), shutil.disk_usage(folder).free
    read, written = (
        sum(getattr(s, n) for s in plan.stages) for n in ("read_bytes", "written_bytes")
    )
    sampled = options.epochs * e.batches * e.sample_s
    took = sampled + read / disk.read + written / disk.write
    epoch_s = e.epoch_bytes / disk.read
    return PackDryRun(
        str(target), e.batches, e.seeds, options.epochs, plan.result, plan.temporary, free,
        plan.result + plan.temporary <= free, made.passing_bytes, e.epoch_bytes, e.hot_bytes,
        e.batch_bytes, options.mem_bytes, e.hot_bytes + 2 * max(options.group, e.cold_bytes),
        disk.read, disk.write, took, {str(n): e.seeds / (took / n + epoch_s) for n in _PAYS_AFTER},
    )  # fmt: skip


def _folders(store: Path) -> list[Path]:
    """Folders of packs, also of earlier versions of the store, but not of unfinished ones."""
    folder = packs_folder(store)
    if not folder.is_dir():
        return []
    return sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))


def pack_lines(store: Path) -> list[str]:
    """A line for each pack; for one that cannot be read, the reason."""
    lines = []
    for folder in _folders(store):
        try:
            pack = read_pack(folder)
        except StoreError as error:
            lines.append(f"  pack          {error}")
            continue
        size = sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
        r, hops = pack.resolved, ";".join(",".join(map(str, hop)) for hop in pack.resolved.fanouts)
        lines.append(
            f"  pack          {folder.name}: {len(pack.epochs)} epochs of {r.seeds}, fanouts "
            f"{hops}, batches of {r.batch_size:,}, seed {r.seed}, {format_bytes(size)}, of "
            f"fingerprint {r.fingerprint}"
        )
    return lines


def verify_packs(store: Path) -> Iterator[tuple[Path, int]]:
    """Verify every checksum of every pack; yields (its folder, bytes of blocks read).

    Raises CorruptBlock: the first fault, with its file; NotAStore, UnsupportedVersion.
    """
    for folder in _folders(store):
        pack, total = read_pack(folder), 0
        for name, expected in pack.files.items():
            check_bound(folder / name, expected)
        for array in pack.arrays():
            geometry = row_geometry(array, pack.block_bytes)
            shards = find_shards(
                os.path.realpath(folder), array.path, geometry, 1 + len(array.row_shape)
            )
            crcs = np.empty(0, np.uint32)
            if geometry.num_pages:
                crcs = np.fromfile(folder / crc_path(array.path) / "c/0", np.uint32)
            file = BlockedFile(array.path, geometry, shards, crcs[: geometry.num_pages])
            total += sum(blocks.size for _, blocks in scan_blocks(file))
        yield folder, total
