"""How much of the arena macro-batches take."""

from collections.abc import Sequence
from typing import NamedTuple

from blockstore.format import Manifest
from loaderd.api.protocol import Resolved
from loaderd.memory.ledger import EngineSettings, ServedRows, edge_record
from loaderd.memory.workspace import Carver
from loaderd.sampling.macrobatch.copies import carve_slots
from loaderd.sampling.macrobatch.files import Bounds, MacroFiles, bound, bound_hubs
from loaderd.sampling.macrobatch.graph import MacroChoice, carve_macro, hub_bytes

_TRANSIT_BYTES = 1 << 16  # of a buffer that blocks pass through, at least


class MacroSizing(NamedTuple):
    """Slots for each part, each of them contiguous."""

    choice: MacroChoice
    bounds: Bounds
    macro: int  # of one macro-batch
    memories: int  # how many: with two, one is read while the other is served
    hubs: int
    tables: int  # of the slots of copies
    places: int  # of seeds, by partition
    run: int  # of a buffer that blocks pass through
    transit: int  # how many of these

    @property
    def minimum(self) -> int:
        """Slots with one macro-batch."""
        return self.slots - (self.memories - 1) * self.macro

    @property
    def slots(self) -> int:
        other = self.hubs + self.tables + self.places + self.run * self.transit
        return self.memories * self.macro + other

    def basis(self) -> str:
        return (
            f"; macro-batches: {self.memories} x {self.macro} slots, {self.hubs} of hubs, "
            f"{self.tables} of tables of copies, {self.places} of seeds by partition, "
            f"{self.transit} x {self.run} to read through"
        )


def size_macrobatches(
    manifest: Manifest,
    files: MacroFiles,
    served: Sequence[ServedRows],
    resolved: Resolved,
    settings: EngineSettings,
    slot_bytes: int,
    available: int,
) -> MacroSizing:
    """Size the memory of macro-batches: of two if `available` slots hold them, else of one."""
    macro = resolved.macro
    assert macro is not None
    record = edge_record(manifest, resolved)
    weights = max(record.weights, int(resolved.weighted))
    choice = MacroChoice(macro.hubs, macro.halos, record._replace(weights=weights))
    bounds = bound(files, served, macro.partitions, macro.halos, macro.hubs)
    carver = Carver(None)
    carve_macro(carver, manifest, served, bounds, choice)
    tables = Carver(None)
    carve_slots(tables, manifest, record.items > 0)

    def slots(num_bytes: int) -> int:
        return -(-num_bytes // slot_bytes)

    hubs = hub_bytes(manifest, bound_hubs(files, served)) if macro.hubs else 0
    sizing = MacroSizing(
        choice, bounds, slots(carver.used), 2, slots(hubs), slots(tables.used),
        slots(8 * resolved.num_seeds), slots(max(_TRANSIT_BYTES, slot_bytes)), settings.readers,
    )  # fmt: skip
    return sizing if sizing.slots <= available else sizing._replace(memories=1)
