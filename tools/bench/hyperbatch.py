"""Hyperbatches against minibatches, daemon and client in a control group of one size.

Interpreter, arena, page cache and the gather into torch tensors are all inside.  Caches are emptied
before each run, and the disk's limit is measured before and after (the greater counts).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated

from blockstore.store import open_store
from tools.bench import harness
from tools.bench.epochs import MOST, ServedEpochs, open_fresh
from tools.bench.harness import BenchPlan, Side
from tools.bench.setup import drop_cache


@dataclass(frozen=True)
class Options(harness.Options):
    """What is served, and within what."""

    stores: Annotated[tuple[Path, ...], "of one graph, of several orders or block sizes"] = ()
    limits: Annotated[tuple[str, ...], "of control groups"] = ("4G", "2G", "1G")
    mem: Annotated[tuple[str, ...], "of the daemon, by limit"] = ("3200M", "1300M", "256M")
    sizes: Annotated[tuple[int, ...], "minibatches of a hyperbatch; 0: as many as fit"] = (0,)
    plans: tuple[str, ...] = ("auto",)
    steps: Annotated[int, "batches timed; 0: to the end of the epoch"] = 0
    before: Annotated[int, "batches before these"] = 8
    fanouts: tuple[int, ...] = (10, 10, 10)
    batch_size: int = 1000


def plans(given: Options) -> Iterator[BenchPlan]:
    for store in given.stores:
        manifest = open_store(store).manifest
        setting = {
            "store": store.name, "order": manifest.order, "block_bytes": manifest.block_bytes,
            "store_bytes": sum(p.stat().st_size for p in store.rglob("*") if p.is_file()),
        }  # fmt: skip
        sides = []
        budgets = zip(given.limits, given.mem, strict=True)
        for (limit, mem), plan, size in product(budgets, given.plans, given.sizes):
            name = f"{plan}{f' H={size}' if size else ''}, --mem {mem} in {limit}"
            options = {"num_neighbors": given.fanouts, "batch_size": given.batch_size}
            served = ServedEpochs(
                store, mem, options | {"plan": plan, "hyperbatch": size},
                ("--workers", "4", "--session-share", "1"), given.before, given.steps or MOST,
            )  # fmt: skip
            own = {"limit": limit, "mem": mem, "plan": plan, "size": size}
            sides.append(Side(name, open_fresh, (served,), own, limit))
        yield BenchPlan(sides, setting, before=partial(drop_cache, store), warm=False)
