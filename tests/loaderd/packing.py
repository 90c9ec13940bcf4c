"""Packs of stores."""

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clients.connection.request import fanout_fields
from clients.torch import sampling_request
from loaderd.api.protocol import Attach
from loaderd.streams.service import StreamService
from preprocess.packs.packs import PackResult, pack_epochs
from preprocess.packs.plan import PackOptions
from tests.golden_cases import update
from tests.preprocess.quiet import QUIET


def request_of(options: Mapping[str, Any]) -> Attach:
    """What a dataset with these options asks for."""
    own = dict(options)
    own.pop("plan", None)
    fields = fanout_fields(own.pop("num_neighbors"))
    names = {"split": own.pop("split", "train"), "seed_type": own.pop("input_type", "")}
    return sampling_request(own, "", **fields, **names, batch_size=own.pop("batch_size"))


def pack(
    store: Path, options: Mapping[str, Any], epochs: int = 2, hot: int = 20_000,
    group: int = 16_000, mem: int = 64 << 20, threads: int = 2,
) -> PackResult:  # fmt: skip
    """Pack what a dataset with these options would be sent."""
    asked = PackOptions(request_of(options), epochs, hot, group, mem, threads)
    return pack_epochs(store, asked, QUIET)


def digests(data: Any, epoch: int, first: int = 0) -> list[str]:
    """sha256 of every field of the batches of an epoch, from a step on."""
    data.set_epoch(epoch)
    if first:
        data.load_state_dict(data.state_dict() | {"epoch": epoch, "step": first - 1})
    found = []
    for batch in data:
        assert batch.epoch == epoch
        total = hashlib.sha256()
        batch.epoch = 0  # those of a cycle are equal but for it
        update(total, "batch", batch)
        found.append(total.hexdigest())
    return found


def is_packed(streams: StreamService) -> bool:
    """Whether a session that is open reads a pack."""
    ledger, _, _ = streams.status()
    return any("packed epochs" in entry.basis for entry in ledger)


def areas_of_groups(streams: StreamService) -> int | None:
    """How many groups of a pack have room in the session that is open; None: it reads no pack."""
    found = (re.search(r"(\d+) x \d+ of rows of groups", e.basis) for e in streams.status()[0])
    return next((int(one[1]) for one in found if one), None)


def counters(streams: StreamService) -> dict[str, int]:
    return streams.status()[2]
