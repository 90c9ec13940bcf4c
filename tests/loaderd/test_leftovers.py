"""Sessions that have ended leave nothing behind, not even for Python's collector of cycles."""

import gc
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from blockstore.store import open_store
from loaderd.api.errors import Refused
from loaderd.api.protocol import Attach, ErrorReply, Release, Start
from loaderd.sessions.engine import default_settings
from loaderd.sessions.stores import Stores
from loaderd.streams.service import StreamService
from tests.graphs import make_csc
from tests.hopstores import make_hops, write_hop_store
from tests.loaderd.harness import Shell, client_of
from tests.stores import write_store

OURS = ("loaderd.", "blockstore.")
WARM_UP, SESSIONS, WAIT_S = 3, 20, 30
NODES, BATCH = 400, 20
SAMPLED = {"num_neighbors": (3, 2), "batch_size": BATCH, "window": 2}
HOPS = {"num_neighbors": (), "batch_size": BATCH}
PLANS = {
    "minibatch": SAMPLED,
    "hyperbatch": SAMPLED | {"hyperbatch": 4},
    "macrobatch": SAMPLED | {"macro_partitions": 2},
    "chunks": HOPS | {"chunk": 8},
    "rows": HOPS,
}


def living() -> dict[str, int]:
    """Objects of our classes, of which there are as many as if half of the sessions were there."""
    found = Counter(type(o).__qualname__ for o in gc.get_objects() if _is_ours(type(o)))
    return {name: n for name, n in found.items() if n >= SESSIONS // 2}


@contextmanager
def nothing_left(idle: Callable[[], bool]) -> Iterator[None]:
    """Of `SESSIONS` sessions no objects stay, nor any that wait for a collection.

    idle   whether nothing is on its way
    """
    gc.collect()
    gc.disable()
    gc.freeze()
    found: dict[str, int] = {}
    try:
        yield
        end = time.monotonic() + WAIT_S
        while not idle() or (found := living()):
            assert time.monotonic() < end, found
            time.sleep(0.05)
        assert gc.collect() < SESSIONS // 2
    finally:
        gc.enable()  # what was there before stays frozen: the next test need not walk through it


def _is_ours(kind: type[Any]) -> bool:
    module = kind.__module__
    return (isinstance(module, str) and module.startswith(OURS)) or kind is threading.Thread


class Serving:
    """An engine of both stores behind a stream service."""

    def __init__(self, *paths: Any) -> None:
        self.stores = Stores([open_store(path) for path in paths], default_settings(8 << 20, 2, 2))
        self.service = StreamService(self.stores)
        self.service.deliver = self._deliver
        self._came = threading.Condition()
        self._sent: set[int] = set()

    def _deliver(self, session: int, message: Any) -> None:
        assert not isinstance(message, ErrorReply), message
        with self._came:
            self._sent.add(session)
            self._came.notify_all()

    def idle(self) -> bool:
        """Whether sessions that have ended hold nothing any more."""
        return not any(engine.ending for engine in self.stores.all())

    def read_one(self, plan: str) -> None:
        """A session that reads one batch and goes."""
        store = "hops" if plan in ("chunks", "rows") else "graph"
        request = Attach(token=0, request=1, store=store, plan=plan, **PLANS[plan])
        session = self.service.attach(request, None).session
        self.service.start(Start(session=session, run=1, epoch=0, step=0))
        with self._came:
            assert self._came.wait_for(lambda: session in self._sent, WAIT_S)
            self._sent.remove(session)
        self.service.release(Release(session=session, run=1, step=0, group=0))
        self.service.detach(session)


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A graph in four partitions, and hop-wise rows."""
    folder = tmp_path_factory.mktemp("leftovers")
    graph = make_csc(np.random.default_rng(1).integers(0, 9, NODES), 2)
    write_store(folder / "graph", graph, np.arange(NODES), offsets=(0, 100, 200, 300, NODES))
    write_hop_store(folder / "hops", {"train": make_hops(NODES, 4, {"sym": 1}, 1)})
    found = Serving(folder / "graph", folder / "hops")
    with found.stores, found.service:
        yield found


@pytest.mark.parametrize("plan", PLANS)
def test_a_session_is_freed_when_it_ends(serving, plan):
    for _ in range(WARM_UP):
        serving.read_one(plan)
    with nothing_left(serving.idle):
        for _ in range(SESSIONS):
            serving.read_one(plan)


def test_one_that_is_refused_leaves_nothing(serving):
    request = Attach(token=0, request=1, store="graph", split="none", **SAMPLED)
    with nothing_left(serving.idle):
        for _ in range(SESSIONS):
            with pytest.raises(Refused):
                serving.service.attach(request, None)


def come_and_go(shell: Shell) -> None:
    """Two sessions that are ended by their connection, and a message that is none."""
    with client_of(shell) as client:
        client.attach(num_neighbors=(2,), batch_size=5)
        client.dealer.send(b"\xc1")
        assert client.receive().error == "BadMessage"
        client.attach(num_neighbors=(2,), batch_size=5)
    names = [shell.engine.seen()[0] for _ in range(4)]
    assert names == ["attach", "attach", "detach", "detach"]


def test_the_shell_forgets_clients_that_have_gone(tmp_path):
    with Shell(tmp_path) as shell:
        for _ in range(WARM_UP):
            come_and_go(shell)
        with nothing_left(shell.engine.events.empty):
            for _ in range(SESSIONS):
                come_and_go(shell)
