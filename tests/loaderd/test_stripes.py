"""Batches of a store whose blocks are dealt over disks: those that were recorded, of every plan."""

import json
from pathlib import Path

import pytest

from blockstore import make_stripes
from blockstore.make_stripes import deal_store
from blockstore.store import open_store
from tests.golden_cases import (
    FILE,
    HETERO,
    PLAIN,
    STORES,
    Case,
    epochs,
    made,
    make_store,
    store_digest,
)

RECORDED = json.loads(FILE.read_text())


# every plan, edges that have rows, and links; `--long`: all that are recorded
SOME = {
    "plain": ("edge-features", "hyperbatch", "macrobatch", "links-binary", "hops-chunks",
              "hops-rows"),
    "hetero": ("hetero-weighted", "hetero-macrobatch"),
}  # fmt: skip
EVERY = {"plain": PLAIN, "hetero": HETERO}


@pytest.mark.parametrize(
    ("name", "cases"),
    [
        *((name, {case: EVERY[name][case] for case in some}) for name, some in SOME.items()),
        *(pytest.param(name, all_of, marks=pytest.mark.long) for name, all_of in EVERY.items()),
    ],
    ids=["plain", "hetero", "all-plain", "all-hetero"],
)
def test_batches_of_a_dealt_store_are_those_that_were_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, cases: dict[str, Case]
) -> None:
    monkeypatch.setattr(make_stripes, "UNIT_BYTES", 16 << 10)
    kind, options = STORES[name]
    store = make_store(made(tmp_path, kind), tmp_path / "store", options)
    fingerprint = open_store(store).manifest.fingerprint
    disks = [tmp_path / f"disk{i}" for i in range(3)]
    dealt = deal_store(store, disks, lambda _count: None)
    assert dealt.manifest.fingerprint == fingerprint
    assert len([path for disk in disks for path in disk.rglob("features/*")]) >= len(disks)
    assert store_digest(store) == RECORDED[f"store/{name}"]
    found = dict(epochs(store, cases))
    assert found == {case: RECORDED[f"{name}/{case}"] for case in cases}
