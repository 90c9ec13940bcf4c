"""Choose place and order of hop-wise batches by sizes, device memory and a short trial."""

import time
from collections.abc import Callable
from typing import Any, Literal

import torch
from msgspec import structs

from loaderd.api.errors import Refused
from loaderd.api.placement import HopAdvice, HopFacts, advise_hops

_TRY_S = 0.5  # trial of each order, after its first batch


def device_bytes(device: torch.device | str | None) -> int:
    """Free memory of a CUDA device; 0 for any other device, or None."""
    if device is None or torch.device(device).type != "cuda":
        return 0
    free: int = torch.cuda.mem_get_info(torch.device(device))[0]
    return free


def take_advice(
    make: Callable[[Literal["cr", "rr"]], Any], free_bytes: int, training_bytes: int
) -> HopAdvice:
    """Find the best place for the rows, and the best order to read them in.

    make   returns the `HopDataset` of method "cr" or "rr"

    Raises Refused: the daemon cannot serve the request by chunks.
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
        except Refused:  # too little memory to read rows one by one
            rows_s = None
        held = rows_s is not None and rows.held
        chunks_s = _epoch_seconds(chunks, facts.num_rows)  # while `rows` keeps its arrays held
        return advise_hops(structs.replace(facts, held=held, chunks_s=chunks_s, rows_s=rows_s))
    finally:
        chunks.close()
        rows.close()


def _epoch_seconds(data: Any, num_rows: int) -> float:
    """Time that a client waits for an epoch, estimated from some batches after the first."""
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
