"""Advise where to keep hop-wise features while models train on them, and in what order; pure.

Source: PP-GNN, section 5.  Unlike there, rows in any order must be shown to cost no more than
chunks, whenever they are read from a host or a disk.
"""

from typing import Any, Literal

import msgspec

from blockstore.units import format_bytes

NEXT_TO = 1.1  # rows in any order are advised up to so many times the chunks' time
TRAINING_BYTES = 2 << 30  # of an accelerator, for a model and its batches, if nothing else is known


class HopFacts(msgspec.Struct, frozen=True):
    num_rows: int  # of the split: labelled ones, no others are stored
    row_bytes: int  # of all arrays that a batch has
    device_bytes: int  # free on the accelerator; 0: there is none
    training_bytes: int  # of these, what models and batches take
    held: bool  # whether the daemon holds the whole arrays in memory
    chunks_s: float | None  # to load an epoch; None: not measured
    rows_s: float | None

    @property
    def num_bytes(self) -> int:
        return self.num_rows * self.row_bytes

    @property
    def on_device(self) -> bool:
        """Whether all rows have room on the accelerator."""
        return self.num_bytes <= self.device_bytes - self.training_bytes


class HopAdvice(msgspec.Struct, frozen=True):
    """What is advised, and why."""

    # "device": all rows lie in the memory of the accelerator; "host": in that of the daemon;
    # "storage": they are read as needed
    place: Literal["device", "host", "storage"]
    method: Literal["cr", "rr"]  # "rr": rows in any order; "cr": chunks
    reason: str
    facts: HopFacts

    @property
    def text(self) -> str:
        order = "rows in any order" if self.method == "rr" else "whole chunks"
        return f'place "{self.place}", method "{self.method}" ({order}): {self.reason}'


def advise_hops(facts: HopFacts) -> HopAdvice:
    """The fastest place that has room, and rows in any order if they cost next to nothing."""
    size = f"{facts.num_rows:,} rows of {facts.row_bytes} bytes, {format_bytes(facts.num_bytes)}"
    if facts.on_device:
        reason = (
            f"{size}, have room in {format_bytes(facts.device_bytes)} free on the accelerator, "
            f"beside {format_bytes(facts.training_bytes)} to train in: there rows in any order "
            "cost as much as chunks"
        )
        return HopAdvice("device", "rr", reason, facts)
    place: Literal["host", "storage"] = "host" if facts.held else "storage"
    why = "the daemon holds them in memory" if facts.held else "they are more than --mem holds"
    if facts.device_bytes:
        why += f", and more than {format_bytes(facts.device_bytes)} free on the accelerator"
    rows_s, chunks_s = facts.rows_s, facts.chunks_s
    if rows_s is None:
        return HopAdvice(place, "cr", f"{size}: {why}; rows one by one have no room", facts)
    if chunks_s is None:
        return HopAdvice(place, "rr", f"{size}: {why}; chunks have no room", facts)
    method: Literal["cr", "rr"] = "cr" if chunks_s * NEXT_TO < rows_s else "rr"
    pace = f"an epoch of chunks takes {chunks_s:.3g} s to load, of rows {rows_s:.3g} s"
    return HopAdvice(place, method, f"{size}: {why}; {pace}", facts)


def parse_advice(advice: Any) -> HopAdvice:
    """Convert the advice in a checkpoint.  Raises ValueError: it is none."""
    if isinstance(advice, HopAdvice):
        return advice
    try:
        return msgspec.convert(advice, HopAdvice)
    except msgspec.ValidationError as error:
        raise ValueError(f"advice: {error}, expected that of HopDataset.advised") from error
