"""Several stores in one daemon: sessions choose, memory goes round, stores come and go."""

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from blockstore.store import open_store
from loaderd.api.endpoint import parse_endpoint
from loaderd.api.errors import Refused
from loaderd.api.protocol import Attach, Attached, Start
from loaderd.memory.ledger import table_entries
from loaderd.server.transport import ask_status
from tests.daemons import ROOT, stop
from tests.graphs import make_csc
from tests.loaderd.harness import Client
from tests.loaderd.serving import Serving, Trainer
from tests.stores import write_store

NODES, BATCH, STEPS, WAIT_S = 3000, 200, 15, 30


def make_store(path: Path, seed: int) -> Path:
    graph = make_csc(np.random.default_rng(seed).integers(0, 30, NODES), seed)
    write_store(path, graph, np.arange(NODES))
    return path


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three stores."""
    folder = tmp_path_factory.mktemp("stores")
    return [make_store(folder / name, seed) for seed, name in enumerate("abc")]


class Daemon(Serving):
    """Stores behind a stream service, whose sessions are named by number."""

    def attach_to(self, store: str, **fields: Any) -> Attached:
        usual = {"num_neighbors": (5, 5), "batch_size": BATCH, "plan": "hyperbatch"}
        request = Attach(token=0, request=1, store=store, **(usual | fields))
        return self.service.attach(request, None)

    def take(self, session: int, step: int, run: int = 1) -> int:
        """Seeds of a batch, which is released."""
        trainer = Trainer(self, session)
        trainer.run = run
        batch = trainer.take(step)
        assert batch is not None
        trainer.release(step)
        return batch.nodes_per_hop[0]

    def epoch(self, store: str) -> int:
        """A session that takes an epoch; returns the most bytes it held."""
        session = self.attach_to(store).session
        self.service.start(Start(session=session, run=1, epoch=0, step=0))
        assert sum(self.take(session, step) for step in range(STEPS)) == NODES
        held = max(s.held_bytes for s in self.service.status()[1])
        self.service.detach(session)
        return held

    def names(self) -> dict[str, bool]:
        """Stores, and whether they are retired."""
        return {s.name: s.retired for s in self.service.stores()}


def test_sessions_choose_a_store_by_its_name(folders):
    with Daemon(folders[:2], 24 << 20) as daemon:
        prints = {s.name: s.fingerprint for s in daemon.service.stores()}
        for name in "ab":
            attached = daemon.attach_to(name)
            assert attached.resolved.fingerprint == prints[name]
        (first, second) = daemon.service.status()[1]
        assert (first.store, second.store) == ("a", "b")
        for name, said in (("", "no store was named"), ("z", "store 'z' is not served")):
            with pytest.raises(Refused, match=f"{said}: expected one of a, b"):
                daemon.attach_to(name)


def test_memory_goes_where_sessions_are(folders):
    """What a session may take does not depend on how many stores there are beside its own."""
    with Daemon(folders[:1], 12 << 20) as daemon:
        alone = daemon.epoch("a")
    with Daemon(folders, 12 << 20) as daemon:
        slots = sum(e.broker.num_slots for e in daemon.stores.all())
        for name in "abca":
            assert daemon.epoch(name) > 0.8 * alone
        assert sum(e.broker.num_slots for e in daemon.stores.all()) == slots


def test_a_reload_leaves_sessions_at_work_undisturbed(folders, tmp_path):
    changed = make_store(tmp_path / "b", 7)
    with Daemon(folders[:2], 24 << 20, reserve=4 << 20) as daemon:
        session = daemon.attach_to("b").session
        daemon.service.start(Start(session=session, run=1, epoch=0, step=0))
        assert daemon.take(session, 0) == BATCH
        daemon.paths = [folders[0], changed, folders[2]]
        said = daemon.service.reload()
        assert [line.partition(":")[0] for line in said] == ["b", "c"]
        assert daemon.service.reload() == []
        for name in "abc":
            daemon.epoch(name)
        for step in range(1, STEPS):
            daemon.take(session, step)
        listed = [(s.name, s.retired) for s in daemon.service.stores()]
        assert sorted(listed) == [("a", False), ("b", False), ("b", True), ("c", False)]
        daemon.service.detach(session)
        end = time.monotonic() + WAIT_S
        while daemon.stores.retired:
            assert time.monotonic() < end
        owned = sum(e.broker.num_slots for e in daemon.stores.all())
        assert owned == daemon.stores.arena.num_slots
        daemon.paths = [folders[0]]
        assert daemon.service.reload() == ["b: dropped", "c: dropped"]
        assert daemon.epoch("") > 0


def test_a_reload_takes_tables_out_of_free_slots_if_nothing_is_set_aside(folders, tmp_path):
    changed = make_store(tmp_path / "b", 7)
    with Daemon(folders[:2], 24 << 20) as daemon:
        arena, maximum = daemon.stores.arena, 0
        for paths in ([folders[0], changed], [folders[0], folders[1], folders[2]], folders[:2]):
            daemon.paths = paths
            assert daemon.service.reload()
            for name in daemon.stores.engines:
                daemon.epoch(name)
            for engine, run in dict(daemon.stores._tables).items():  # one may end meanwhile
                first_node = engine.resources.topology.relations[0].view.first_node
                assert np.shares_memory(first_node, arena.data) == bool(run)
            tables = sum(len(run) for run in daemon.stores._tables.values())
            owned = sum(e.broker.num_slots for e in daemon.stores.all())
            assert owned + tables == arena.num_slots
            maximum = max(maximum, tables)
            assert sum(e.num_bytes for e in daemon.service.status()[0]) <= 24 << 20
        assert maximum
        daemon.paths = folders[:1]
        daemon.service.reload()
        assert sum(e.broker.num_slots for e in daemon.stores.all()) == arena.num_slots


def test_a_reload_that_cannot_be_changes_nothing(folders, tmp_path):
    with Daemon(folders[:2], 24 << 20) as daemon:
        taken = {e: e.broker.take(e.broker.available() - 1) for e in daemon.stores.all()}
        daemon.paths = [folders[0], folders[2]]
        with pytest.raises(Refused, match=r"c: its tables take .* serve with --reserve"):
            daemon.service.reload()
        for engine, slots in taken.items():
            engine.broker.give(slots)
        for paths, said in (
            ([tmp_path / "none"], "no zarr.json"),
            ([folders[0], make_store(tmp_path / "x" / "a", 3)], "both are named a"),
        ):
            daemon.paths = paths
            with pytest.raises(Exception, match=said):
                daemon.service.reload()
            assert daemon.service.reload_error
            assert daemon.names() == {"a": False, "b": False}
            assert daemon.epoch("a") > 0


def test_a_store_that_nobody_uses_is_closed_although_no_session_ends(folders):
    """It cannot be closed at the reload, as a slot of it is still held."""
    with Daemon(folders[:2], 24 << 20, reserve=4 << 20) as daemon:
        broker = daemon.stores.find("b").broker
        held = broker.take(1)
        daemon.paths = folders[:1]
        assert daemon.service.reload() == ["b: dropped"]
        assert daemon.stores.retired
        broker.give(held)
        end = time.monotonic() + WAIT_S
        while daemon.stores.retired:
            assert time.monotonic() < end


def test_a_reload_leaves_what_sessions_without_a_stream_need(folders):
    """A session that rests between two epochs; it would wait for ever when it begins."""
    with Daemon(folders[:1], 24 << 20, reserve=4 << 20) as daemon:
        service, broker = daemon.service, daemon.stores.find("a").broker
        session = daemon.attach_to("a").session
        with service._registry.lock:
            (stream,) = service._registry.streams
        assert service._registry.unserved() == 0
        service._opener._end(stream)
        daemon.stores.find("a").wait_ended(WAIT_S)
        needed = service._registry.unserved()
        taken = broker.take(broker.free() - needed - 1)
        daemon.paths = folders[:2]
        with pytest.raises(Refused, match=f"sessions without any need {needed}: try again later"):
            service.reload()
        assert daemon.names() == {"a": False}
        service.start(Start(session=session, run=1, epoch=0, step=0))
        assert sum(daemon.take(session, step) for step in range(STEPS)) == NODES
        broker.give(taken)
        assert service.reload()
        service.detach(session)


def test_a_reload_takes_nothing_that_a_session_waits_for(folders):
    """One that was cut down, or fell behind: it would wait for ever."""
    with Daemon(folders[:1], 24 << 20, reserve=4 << 20) as daemon:
        service, session = daemon.service, daemon.attach_to("a").session
        with service._registry.lock:
            cursor, _ = service._registry.sessions[session]
            cursor.waits = True
        daemon.paths = folders[:2]
        with pytest.raises(Refused, match="1 sessions wait for memory that another store would"):
            service.reload()
        assert daemon.names() == {"a": False}
        daemon.paths = folders[:1]
        assert service.reload() == []  # which opens none
        with service._registry.lock:
            cursor.waits = False
        daemon.paths = folders[:2]
        assert service.reload()
        service.detach(session)


def test_a_daemon_of_two_stores_is_reloaded_by_its_owner(folders, tmp_path):
    config, endpoint = tmp_path / "c.toml", f"ipc://{tmp_path}/d"
    config.write_text(f'store = ["{folders[0]}", "{folders[1]}"]\nendpoint = "{endpoint}"\n')
    words = [sys.executable, "-m", "loaderd"]
    process = subprocess.Popen(
        [*words, "serve", "--config", str(config), "--mem", "32M", "--reserve", "4M"],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert "serving" in process.stdout.readline()
        client = Client(parse_endpoint(endpoint))
        assert sorted(client.welcome.stores) == ["a", "b"]
        assert isinstance(client.attach(store="b", num_neighbors=(5, 5)), Attached)
        config.write_text(f'store = ["{folders[2]}", "{folders[1]}"]\nendpoint = "{endpoint}"\n')
        ask = [*words, "reload", "--endpoint", endpoint]
        told = subprocess.run(ask, cwd=ROOT, capture_output=True, text=True, check=True)
        assert "(store c," in told.stdout
        config.write_text(f'store = ["{tmp_path}/none"]\nendpoint = "{endpoint}"\n')
        told = subprocess.run(ask, cwd=ROOT, capture_output=True, text=True, check=False)
        assert (told.returncode, told.stdout) == (2, "")
        assert "no zarr.json" in told.stderr
        served = {s.name for s in ask_status(parse_endpoint(endpoint)).stores}
        assert served == {"b", "c"}
        client.close()
    finally:
        assert stop(process) == 0


def test_what_is_set_aside_is_there_again_when_a_store_has_gone(tmp_path):
    """A store that is replaced again and again takes its tables out of the reserve once."""
    paths = [make_store(tmp_path / folder / "a", seed) for seed, folder in enumerate("xyz")]
    tables = [sum(e.num_bytes for e in table_entries(open_store(p).manifest)) for p in paths]
    reserve = max(tables) + min(tables) // 2
    with Daemon(paths[:1], 24 << 20, reserve=reserve) as daemon:
        for turn in range(1, 7):
            daemon.paths = [paths[turn % 3]]
            assert len(daemon.service.reload()) == 1
            assert daemon.names() == {"a": False}
            left = sum(e.num_bytes for e in daemon.stores.reserve_entries())
            assert left == reserve + tables[0] - tables[turn % 3]
