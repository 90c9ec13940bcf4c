"""Taking advice on hop-wise batches: sizes, the device's memory, a short trial of each order."""

import time
from collections.abc import Callable
from typing import Any, Literal

import torch
from msgspec import structs

from loaderd.api.errors import Refused
from loaderd.api.placement import HopAdvice, HopFacts, advise_hops

_TRY_S = 0.5  # of an order, once its first batch is there


def device_bytes(device: torch.device | str | None) -> int:
    """Free memory of an accelerator; 0 where it is none, or there is none."""
    if device is None or torch.device(device).type != "cuda":
        return 0
    free: int = torch.cuda.mem_get_info(torch.device(device))[0]
    return free


def take_advice(
    make: Callable[[Literal["cr", "rr"]], Any], free_bytes: int, training_bytes: int
) -> HopAdvice:
    """Where the rows had best lie, and in what order they had best come.

    make   gives the `HopDataset` of method "cr" or "rr"

    Raises Refused: what is asked for cannot be had by chunks.
    """
    chunks, rows = make("cr"), make("rr")
    try:
        attached = chunks.attached()
        facts = HopFacts(
            num_rows=attached.resolved.num_seeds,
            row_bytes=sum(spec.row_bytes for spec in attached.rows),
            device_bytes=free_bytes, training_bytes=training_bytes, held=False, chunks_s=None,
            rows_s=None,
        )  # fmt: skip
        if facts.on_device:
            return advise_hops(facts)
        try:
            rows_s = _epoch_seconds(rows, facts.num_rows)
        except Refused:  # there is no memory to take rows one by one
            rows_s = None
        held = rows_s is not None and rows.held
        chunks_s = _epoch_seconds(chunks, facts.num_rows)  # while `rows` keeps arrays held
        return advise_hops(structs.replace(facts, held=held, chunks_s=chunks_s, rows_s=rows_s))
    finally:
        chunks.close()
        rows.close()


def _epoch_seconds(data: Any, num_rows: int) -> float:
    """Time that a client waits for an epoch, by some batches behind the first."""
    begun, count = 0.0, 0
    while True:
        for batch in data:
            if begun == 0:
                begun = time.perf_counter()
                continue
            count += int(batch.batch_size)
            spent = time.perf_counter() - begun
            if spent >= _TRY_S:
                return spent * num_rows / count
