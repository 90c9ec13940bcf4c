"""Hop-wise batches end to end against plain numpy: order, rows, ranks, resume, memory."""

from collections.abc import Collection
from contextlib import ExitStack
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from msgspec import structs
from torch.utils.data import DataLoader

from blockstore.store import open_store
from clients.connection.position import StateMismatch
from clients.hopwise import advice as hopadvice
from clients.hopwise import dataset as hopdataset
from clients.torch import HopDataset
from loaderd.api.endpoint import Endpoint
from loaderd.api.errors import BatchFailed, Refused
from loaderd.api.placement import HopAdvice, HopFacts, parse_advice
from loaderd.api.protocol import StatusReply
from loaderd.server.transport import ask_status
from tests.daemons import daemon
from tests.hopstores import Hops, make_hops, write_hop_store
from tests.reference import hop_order

ROWS, WIDTH, BATCH, SEED = 4001, 25, 400, 5
ROOM, TIGHT = "16M", "1792K"  # for all arrays, which take 2 MB, or for some batches
OPERATORS = {"sym": 3, "ppr": 2}


@pytest.fixture(scope="module")
def splits() -> dict[str, Hops]:
    """Rows of 100 bytes: their ranges begin and end inside pages."""
    return {
        "train": make_hops(ROWS, WIDTH, OPERATORS, 1),
        "valid": make_hops(7, WIDTH, OPERATORS, 2),
        "test": make_hops(50, WIDTH, {"sym": 1}, 3, labels=False),
    }


@pytest.fixture(scope="module")
def store(tmp_path_factory, splits):
    path = tmp_path_factory.mktemp("hops") / "store"
    write_hop_store(path, splits)
    return path


@pytest.fixture(scope="module")
def endpoint_of(store):
    """Of a daemon with so much memory: with room for all arrays, or for some batches."""
    with ExitStack() as daemons:

        @cache
        def endpoint(mem: str) -> str:
            return daemons.enter_context(daemon(store, mem, 2))

        yield endpoint


@pytest.fixture(params=[ROOM, TIGHT], ids=["held", "passing"])
def endpoint(request, endpoint_of):
    """With room for all arrays, and for some batches."""
    return endpoint_of(request.param)


def pairs(cases: Collection[Any], held: Collection[Any], passing: Collection[Any]) -> list[Any]:
    """(memory, case): those named run always, the others with --long."""
    return [
        pytest.param(mem, case, id=f"{name}-{case}", marks=() if case in some else pytest.mark.long)
        for mem, name, some in ((ROOM, "held", held), (TIGHT, "passing", passing))
        for case in cases
    ]


@cache
def order_of(*arguments: Any) -> list[int]:
    """The reference's, which both budgets are compared with."""
    return list(hop_order(*arguments))


@pytest.fixture(scope="module")
def other(store):
    """A daemon that knows nothing of the first."""
    with daemon(store, "4M", 1) as endpoint:
        yield endpoint


def status(endpoint: str) -> StatusReply:
    """What the daemon says of itself."""
    return ask_status(Endpoint(Path(endpoint.removeprefix("ipc://"))))


def names(endpoint: str) -> list[str]:
    """Lines of the ledger."""
    return [line.name for line in status(endpoint).ledger]


def expected(name: str, data: HopDataset, hops: Hops, index: np.ndarray, batch) -> None:
    """The batch holds these rows of all arrays, in this order."""
    assert batch.input_id.tolist() == index.tolist(), name
    assert batch.n_id.tolist() == hops.n_id[index].tolist()
    assert batch.y.tolist() == hops.y[index].tolist()
    assert len(batch.x) == len(data.arrays)
    for x, pair in zip(batch.x, data.arrays, strict=True):
        assert np.array_equal(x.numpy(), hops.x[pair][index])


def check_all(data: HopDataset, hops: Hops) -> None:
    """The rows of an epoch."""
    for batch in data:
        for x, pair in zip(batch.x, data.arrays, strict=True):
            assert np.array_equal(x, hops.x[pair][batch.input_id])


CASES = {
    "rr": {"method": "rr"},
    "chunk is batch": {},
    "small chunks": {"chunk": 100},
    "single rows": {"chunk": 1},
    "large chunks": {"chunk": 1170},
    "one chunk": {"chunk": ROWS},
    "in order": {"shuffle": False},
    "rr in order": {"method": "rr", "shuffle": False},
    "dealt again": {"redeal": 2},
    "small chunks dealt again": {"redeal": 1, "chunk": 300},
    "views": {"views": True},
    "views of chunks": {"views": True, "chunk": 400},
    "views of rows": {"views": True, "method": "rr"},
    "one operator": {"operators": "ppr", "hops": 1},
    "features alone": {"hops": 0},
    "other order of operators": {"operators": ("ppr", "sym")},
}


@pytest.mark.parametrize(
    ("mem", "case"),
    pairs(
        CASES,
        held=("rr", "small chunks", "views", "views of rows", "one operator"),
        passing=CASES.keys() - {"views of chunks", "small chunks", "in order"},
    ),
)
def test_batches_are_the_references(endpoint_of, splits, mem, case):
    options, hops = CASES[case], splits["train"]
    data = HopDataset(endpoint_of(mem), batch_size=BATCH, seed=SEED, **options)
    for epoch in (0, 3):
        data.set_epoch(epoch)
        order = order_of(
            ROWS, SEED, epoch, options.get("method", "cr"), options.get("chunk", BATCH),
            options.get("shuffle", True), options.get("redeal", 0),
        )  # fmt: skip
        assert sorted(order) == list(range(ROWS))
        count = 0
        for i, batch in enumerate(data):
            index = np.array(order[i * BATCH : (i + 1) * BATCH])
            assert (batch.epoch, batch.step, batch.batch_size) == (epoch, i, index.size)
            expected(case, data, hops, index, batch)
            count += batch.batch_size
        assert count == ROWS
        assert len(data) == -(-ROWS // BATCH)
    data.close()


def test_arrays_are_named_hop_0_once(other):
    data = HopDataset(other)
    pairs = [("sym", 0), ("sym", 1), ("sym", 2), ("ppr", 1), ("ppr", 2)]
    assert data.arrays == pairs
    data.close()
    data = HopDataset(other, operators="sym")
    assert data.arrays == [("sym", hop) for hop in range(4)]
    resolved = data.attached().resolved
    assert (resolved.family, resolved.hops.operators, resolved.hops.hops) == ("hops", ("sym",), 3)
    assert (resolved.hops.method, resolved.hops.chunk) == ("cr", ROWS)  # of 8000
    data.close()


RANKS = {"cr": {}, "rr": {"method": "rr"}, "small chunks": {"chunk": 10}}


@pytest.mark.parametrize(("mem", "case"), pairs(RANKS, held=["rr"], passing=["cr", "small chunks"]))
def test_ranks_share_each_step(endpoint_of, mem, case):
    endpoint, options = endpoint_of(mem), RANKS[case]
    whole = HopDataset(endpoint, batch_size=80, seed=SEED, **options)
    four = [
        HopDataset(endpoint, batch_size=80, seed=SEED, rank=r, world_size=4, **options)
        for r in range(4)
    ]
    assert len(whole) == 51
    assert {len(part) for part in four} == {50}  # the tail of one row joins the batch before
    shares = []
    for batches in zip(*four, strict=True):
        sizes = [b.batch_size for b in batches]
        assert max(sizes) - min(sizes) <= 1
        assert sum(sizes) == 80 + (batches[0].step == 49)
        shares += [i for b in batches for i in b.input_id.tolist()]
    assert shares == [i for b in whole for i in b.input_id.tolist()]
    for data in (whole, *four):
        data.close()


LEFT = {"cr": {}, "rr": {"method": "rr"}, "views": {"views": True, "chunk": 500}}


@pytest.mark.parametrize(("mem", "case"), pairs(LEFT, held=["rr"], passing=["cr", "views"]))
def test_a_run_left_anywhere_goes_on_as_if_it_had_not_been(endpoint_of, other, mem, case):
    endpoint, options = endpoint_of(mem), LEFT[case]
    data = HopDataset(endpoint, batch_size=BATCH, **options)
    whole = [b.input_id.tolist() for b in data] + [b.input_id.tolist() for b in data]
    steps = len(data)
    for left in (1, 5, steps - 1, steps):
        data.set_epoch(0)
        batches = iter(data)
        for _ in range(left):
            next(batches)
        state = data.state_dict()
        again = HopDataset(other, batch_size=BATCH, **options)
        again.load_state_dict(state)
        rest = whole[left:steps] or whole[steps:]
        assert [b.input_id.tolist() for b in again] == rest
        again.close()
    other_plan = HopDataset(endpoint, batch_size=BATCH, seed=1, **options)
    other_plan.load_state_dict(state)
    with pytest.raises(StateMismatch, match="seed 0"):
        len(other_plan)
    data.close()


METHODS = ("cr", "rr")


@pytest.mark.parametrize(("mem", "method"), pairs(METHODS, held=["cr"], passing=["rr"]))
def test_workers_serve_the_same_batches(endpoint_of, mem, method):
    data = HopDataset(endpoint_of(mem), batch_size=BATCH, method=method)
    alone = [b.input_id.tolist() for b in data]
    data.close()
    data.set_epoch(0)
    loader = DataLoader(data, batch_size=None, num_workers=2)
    assert [b.input_id.tolist() for b in loader] == alone


def test_small_and_unlabelled_splits(endpoint, splits):
    data = HopDataset(endpoint, "valid", method="rr", shuffle=False)
    (batch,) = data
    expected("valid", data, splits["valid"], np.arange(7), batch)
    data.close()
    data = HopDataset(endpoint, "test", labels=False, shuffle=False, batch_size=20)
    assert [b.y for b in data] == [None] * 3
    data.close()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"split": "dev"}, "hop-wise features of train, valid, test; name one"),
        ({"operators": ("sym", "heat")}, "operator 'heat' is not among .* it has sym, ppr"),
        ({"operators": ("sym", "sym")}, "one is named twice"),
        ({"hops": 3}, "hops is 3: operator 'ppr' of split 'train' has hops 0 to 2"),
        ({"hops": -2}, "hops is -2, expected -1 to"),
        ({"chunk": ROWS + 1}, f"chunk is {ROWS + 1}, expected 1 to the {ROWS} rows"),
        ({"chunk": 5, "method": "rr"}, "belong to plan 'chunks'"),
        ({"redeal": 1, "shuffle": False}, "redeal needs shuffle"),
        ({"split": "test"}, "split 'test' has no labels: ask for labels=False"),
        ({"split": "valid", "world_size": 8}, "7 seeds cannot be shared by 8 ranks"),
        ({"batch_size": 2, "world_size": 3}, "must be at least world_size 3"),
        ({"method": "sgd"}, "method 'sgd': expected 'cr' or 'rr'"),
    ],
)
def test_what_cannot_be_is_refused(endpoint, options, words):
    with pytest.raises(Refused, match=words):
        len(HopDataset(endpoint, **options))


def test_views_are_refused_in_workers(endpoint):
    loader = DataLoader(HopDataset(endpoint, views=True), batch_size=None, num_workers=1)
    with pytest.raises(Refused, match="in a DataLoader worker"):
        next(iter(loader))


def test_too_little_memory_names_what_would_do(store):
    with daemon(store, "1M", 1) as endpoint, pytest.raises(Refused) as caught:
        len(HopDataset(endpoint, batch_size=1700))
    enough = str(caught.value).split("--mem ")[1].split(",")[0].replace(" ", "").replace("iB", "")
    with daemon(store, enough, 1) as endpoint:
        data = HopDataset(endpoint, batch_size=1700)
        assert sum(b.batch_size for b in data) == ROWS
        data.close()


def test_held_arrays_are_read_once_and_shared_and_given_back(store):
    with daemon(store, ROOM, 2) as endpoint:
        before = names(endpoint)
        first, second = (HopDataset(endpoint, batch_size=BATCH, method=m) for m in ("cr", "rr"))
        for _ in range(2):
            assert sum(b.batch_size for b in first) == ROWS
        once = status(endpoint).counters["bytes_read"]
        assert once == 4096 * (-(-ROWS * 100 // 4096) * 5 + 2 * -(-ROWS * 8 // 4096))
        assert sum(b.batch_size for b in second) == ROWS
        first.close()
        assert sum(b.batch_size for b in second) == ROWS
        assert status(endpoint).counters["bytes_read"] == once
        assert len(names(endpoint)) > len(before)
        second.close()
        for _ in range(1000):
            if names(endpoint) == before:
                break
        assert names(endpoint) == before


def test_passing_chunks_are_read_in_ranges(store):
    """A range of pages of each array a chunk, at most a page more than its bytes at each end."""
    with daemon(store, TIGHT, 2) as endpoint:
        data = HopDataset(endpoint, batch_size=BATCH)
        steps, start = len(data), status(endpoint).counters
        assert sum(b.batch_size for b in data) == ROWS
        counters = status(endpoint).counters
        data.close()
    arrays, page = 7, 4096
    assert counters["reads"] - start["reads"] == arrays * steps
    rows = ROWS * (5 * 100 + 16)
    read = counters["bytes_read"] - start["bytes_read"]
    assert rows <= read <= rows + 2 * page * arrays * steps


@pytest.mark.parametrize("mem", [ROOM, "1M"])
def test_a_wrong_bit_is_an_error_and_no_batch(tmp_path, mem):
    hops = make_hops(3000, WIDTH, {"sym": 1}, 4)
    write_hop_store(tmp_path / "store", {"train": hops})
    array = open_store(tmp_path / "store").manifest.types[0].hops["train"].operators["sym"][1]
    shard = next((tmp_path / "store" / array.path).rglob("c/0/0"))
    with shard.open("r+b") as f:
        f.seek(150_000)
        byte = f.read(1)
        f.seek(150_000)
        f.write(bytes([byte[0] ^ 1]))
    with daemon(tmp_path / "store", mem, 1) as endpoint:
        for method in ("cr", "rr"):
            data = HopDataset(endpoint, batch_size=100, method=method)
            for _ in range(2):  # the session goes on
                with pytest.raises(BatchFailed, match="crc32c of the page"):
                    check_all(data, hops)
            data.close()


def test_dtypes_come_as_they_are_stored(tmp_path):
    dtypes = ("bfloat16", "float16", "int8")
    splits = {dtype: make_hops(500, 6, {"sym": 2}, 4, dtype) for dtype in dtypes}
    write_hop_store(tmp_path / "store", splits)
    with daemon(tmp_path / "store", "16M", 1) as endpoint:
        for dtype, views in product(dtypes, (False, True)):
            data = HopDataset(endpoint, dtype, batch_size=77, views=views)
            for batch in data:
                for x, pair in zip(batch.x, data.arrays, strict=True):
                    assert x.dtype == getattr(torch, dtype)
                    raw = x.view(torch.int16).numpy().view("uint16") if dtype == "bfloat16" else x
                    assert np.array_equal(raw, splits[dtype].x[pair][batch.input_id])
            data.close()


def test_a_store_without_hops_says_how_to_make_them(tmp_path):
    write_hop_store(tmp_path / "store", {})
    with (
        daemon(tmp_path / "store", "16M", 1) as endpoint,
        pytest.raises(Refused, match="by `blockstore hops`"),
    ):
        len(HopDataset(endpoint))


def test_state_is_plain(endpoint):
    data = HopDataset(endpoint, batch_size=BATCH)
    state = data.state_dict()
    assert msgspec.json.decode(msgspec.json.encode(state)) == state
    data.close()


RESIDENT = {
    "cr": {},
    "small chunks dealt again": {"chunk": 300, "redeal": 1},
    "rr": {"method": "rr"},
    "in order": {"shuffle": False},
    "no labels": {"split": "test", "labels": False, "batch_size": 20},
    "second of three ranks": {"rank": 1, "world_size": 3},
}


@pytest.mark.parametrize(
    ("mem", "case"),
    pairs(
        RESIDENT, held=["rr", "no labels"],
        passing=["cr", "small chunks dealt again", "in order", "second of three ranks"],
    ),
)  # fmt: skip
def test_rows_on_a_device_give_the_same_batches(endpoint_of, mem, case):
    endpoint = endpoint_of(mem)
    options = {"batch_size": BATCH, "seed": SEED} | RESIDENT[case]
    told = HopDataset(endpoint, **options)
    held = HopDataset(endpoint, resident="cpu", **options)
    for epoch in (0, 3):
        told.set_epoch(epoch)
        held.set_epoch(epoch)
        for a, b in zip(told, held, strict=True):
            assert (a.epoch, a.step) == (b.epoch, b.step)
            assert torch.equal(a.input_id, b.input_id)
            assert torch.equal(a.n_id, b.n_id)
            assert (a.y is b.y is None) or torch.equal(a.y, b.y)
            assert all(torch.equal(x, y) for x, y in zip(a.x, b.x, strict=True))
    state = held.state_dict()
    told.load_state_dict(state)
    assert next(iter(told)).epoch == 4
    told.close()
    held.close()


def test_rows_on_a_device_are_fetched_once(store):
    with daemon(store, ROOM, 2) as endpoint:
        data = HopDataset(endpoint, batch_size=BATCH, resident="cpu")
        for _ in range(3):
            assert sum(b.batch_size for b in data) == ROWS
        assert status(endpoint).counters["rows"] == ROWS
        data.close()


def free(monkeypatch, num_bytes: int) -> None:
    monkeypatch.setattr(hopdataset, "device_bytes", lambda device: num_bytes)


@pytest.mark.parametrize(("mem", "place"), [(ROOM, "host"), (TIGHT, "storage")])
def test_advice_is_taken_once_and_recorded(store, monkeypatch, mem, place):
    monkeypatch.setattr(hopadvice, "_TRY_S", 0.02)
    with daemon(store, mem, 2) as endpoint:
        data = HopDataset.advised(endpoint, batch_size=BATCH, chunk=500, seed=SEED)
        advice = data.advice
        assert advice.place == place
        assert advice.facts.num_bytes == ROWS * (5 * 100 + 16)
        assert min(advice.facts.rows_s, advice.facts.chunks_s) > 0
        assert data.attached().plan == {"cr": "chunks", "rr": "rows"}[advice.method]
        state = data.state_dict()
        assert parse_advice(state["advice"]) == advice
        monkeypatch.setattr(hopdataset, "take_advice", None)  # it is not taken again
        again = HopDataset.advised(
            endpoint, batch_size=BATCH, chunk=500, seed=SEED, advice=state["advice"]
        )
        again.load_state_dict(state)
        for a, b in zip(data, again, strict=True):
            assert torch.equal(a.n_id, b.n_id)
        data.close()
        again.close()


@pytest.mark.parametrize(("mem", "method"), pairs(METHODS, held=["rr"], passing=["cr"]))
def test_a_resumed_run_keeps_the_method_it_was_advised(endpoint_of, store, mem, method):
    """Another machine may advise another."""
    endpoint = endpoint_of(mem)
    facts = HopFacts(1, 1, 0, 0, True, 1.0, 1.0)
    own = HopAdvice("host", method, "", facts)
    other = HopAdvice("host", "rr" if method == "cr" else "cr", "", facts)
    options = {"batch_size": BATCH, "chunk": 70, "redeal": 2}
    first = HopDataset.advised(endpoint, advice=own, **options)
    whole = [b.n_id.tolist() for b in first]
    first.set_epoch(0)
    next(iter(first))
    for resident, files in ((None, None), ("cpu", None), (None, store)):
        place = "device" if resident else "host"
        later = HopDataset.advised(
            endpoint, advice=structs.replace(other, place=place), device=resident, files=files,
            **options,
        )  # fmt: skip
        len(later)  # it has connected before it learns better
        later.load_state_dict(first.state_dict())
        assert later.advice == own
        assert [b.n_id.tolist() for b in later] == whole[1:]
        later.close()
    first.close()


def test_what_has_room_on_the_device_is_put_there(endpoint, monkeypatch):
    free(monkeypatch, ROWS * (5 * 100 + 16) + 7)
    options = {"batch_size": BATCH, "device": "cpu", "training_bytes": 7, "views": True}
    data = HopDataset.advised(endpoint, **options)
    assert (data.advice.place, data.advice.method) == ("device", "rr")
    assert data.advice.facts.rows_s is None  # nothing was tried
    assert sum(b.batch_size for b in data) == ROWS
    data.close()
    free(monkeypatch, ROWS * (5 * 100 + 16) + 6)
    monkeypatch.setattr(hopadvice, "_TRY_S", 0.01)
    data = HopDataset.advised(endpoint, **options)
    assert data.advice.place in ("host", "storage")
    data.close()


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"world_size": 2, "rank": 1}, Refused, "on one rank, and hand its dataset.advice"),
        ({"split": "dev"}, Refused, "hop-wise features of train, valid, test"),
        ({"chunk": ROWS + 1}, Refused, "expected 1 to the"),
        ({"advice": {"place": "moon"}}, ValueError, "expected that of HopDataset.advised"),
    ],
)
def test_advice_that_cannot_be_taken(endpoint, options, error, words):
    with pytest.raises(error, match=words):
        HopDataset.advised(endpoint, **options)


def test_resident_rows_are_refused_in_workers_and_with_views(endpoint):
    data = HopDataset(endpoint, resident="cpu")
    with pytest.raises(Refused, match="in a DataLoader worker"):
        next(iter(DataLoader(data, batch_size=None, num_workers=1)))
    with pytest.raises(Refused, match="expected no views"):
        HopDataset(endpoint, resident="cpu", views=True)
