"""Sharing in budgets of about one batch: who gets a place, is refused, or waits its turn."""

import re
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from loaderd.api.errors import Refused
from loaderd.api.protocol import Attach
from loaderd.memory.slots import WAIT_S
from loaderd.streams import opener, service
from loaderd.streams.opener import FIRST_S, SETTLE_S, DrainDeadline, allowed_s
from loaderd.streams.registry import StreamKey, StreamRequest
from loaderd.streams.stream import Stream
from tests.loaderd.serving import Serving, Ticks, Trainer
from tests.loaderd.streams.test_sharing import NODES, solo, store

__all__ = ["store"]  # a fixture

LARGE: dict[str, Any] = {"batch_size": 1000}
STEPS = NODES // 1000
TIGHT = 1 << 20  # one batch of these is leased at a time


def streams(serving: Serving) -> int:
    return int(serving.service.status()[2]["streams"])


@pytest.mark.usefixtures("nobody_falls_behind")
@pytest.mark.parametrize("plan", [pytest.param("minibatch", marks=pytest.mark.long), "hyperbatch"])
def test_who_can_have_no_room_is_told_at_once_what_would_do(store: Path, plan: str):
    """Nobody's stream is closed for it; with the number it says, both are served."""
    fields = {"plan": plan, **LARGE}
    serving = Serving(store, 1 << 20)
    ticks = Ticks(serving)
    one = serving.attach(**fields)
    one.start()
    assert one.take(0) is not None
    with pytest.raises(Refused, match=r"serve with at least --mem (\d+)M") as caught:
        serving.attach(**fields, seed=9)
    assert ticks.now == 0
    one.release(0)
    assert [len(one.consume(step)) for step in range(1, STEPS)]
    one.detach()
    serving.close()
    found = re.search(r"--mem (\d+)M", str(caught.value))
    assert found is not None
    serving = Serving(store, int(found[1]) << 20)
    both = [serving.attach(**fields), serving.attach(**fields, seed=9)]
    assert streams(serving) == 2
    for trainer in both:
        trainer.start()
    for step in range(STEPS):
        assert all(trainer.consume(step) for trainer in both)
    for trainer in both:
        trainer.detach()
    serving.close()


@pytest.mark.usefixtures("nobody_falls_behind")
def test_trainers_of_one_plan_share_the_only_batch_there_is_room_for(store: Path):
    expected, read = solo(store, TIGHT, "minibatch", 2, STEPS, **LARGE)
    serving = Serving(store, TIGHT)
    first = serving.attach(**LARGE)
    first.start()
    assert first.take(0) is not None  # and nothing else moves
    others = [serving.attach(**LARGE) for _ in range(3)]
    assert streams(serving) == 1
    for other in others:
        other.start()
    assert [other.consume(0) for other in others] == [expected[0]] * 3
    first.release(0)
    for step in range(1, STEPS):
        assert [t.consume(step) for t in (first, *others)] == [expected[step]] * 4
    for trainer in (first, *others):
        trainer.start(1)
    for step in range(STEPS):
        found = [t.consume(step) for t in (first, *others)]
        assert found == [expected[STEPS + step]] * 4
    assert streams(serving) == 1
    assert serving.engine.reader.bytes_read <= 1.1 * read
    for trainer in (first, *others):
        trainer.detach()
    serving.close()


def consume_all(trainer: Trainer, steps: range, found: list[list[bytes]]) -> threading.Thread:
    thread = threading.Thread(target=lambda: found.extend(trainer.consume(s) for s in steps))
    thread.start()
    return thread


def test_positions_apart_take_turns_where_one_stream_has_room(store: Path, monkeypatch):
    monkeypatch.setattr(opener, "TURN", 2)
    expected = solo(store, TIGHT, "minibatch", 2, STEPS, **LARGE)[0][:STEPS]
    serving = Serving(store, TIGHT)
    one, two = serving.attach(**LARGE), serving.attach(**LARGE)
    found: tuple[list[list[bytes]], list[list[bytes]]] = ([], [])
    one.start()
    threads = [consume_all(one, range(STEPS), found[0])]
    two.start(step=4)
    threads.append(consume_all(two, range(4, STEPS), found[1]))
    for thread in threads:
        thread.join()
    assert found == (expected, expected[4:])
    one.detach()
    two.detach()
    serving.close()


def test_one_who_keeps_the_only_batch_leaves_when_it_goes_on(store: Path, monkeypatch):
    monkeypatch.setattr(service, "LAST_S", 0.01)
    expected = solo(store, TIGHT, "minibatch", 2, STEPS, **LARGE)[0][:STEPS]
    serving = Serving(store, TIGHT)
    quick, slow = serving.attach(**LARGE), serving.attach(**LARGE)
    quick.start()
    slow.start()
    assert slow.take(0) is not None
    assert quick.consume(0) == expected[0]
    while not serving.service.status()[2]["sessions_left_behind"]:
        pass
    slow.release(0)
    found: tuple[list[list[bytes]], list[list[bytes]]] = ([], [])
    threads = [
        consume_all(t, range(1, STEPS), f) for t, f in zip((quick, slow), found, strict=True)
    ]
    for thread in threads:
        thread.join()
    assert found == (expected[1:], expected[1:])
    quick.detach()
    slow.detach()
    serving.close()


def test_who_has_gone_on_between_two_looks_stays(store, monkeypatch):
    """Found waiting both times: it is the newest release that is waited after."""
    serving = Serving(store, TIGHT)
    watch, since, now = serving.service._watch, {}, 0.0
    watch.close()
    clock = SimpleNamespace(monotonic=lambda: now)
    quick, slow = serving.attach(**LARGE), serving.attach(**LARGE)
    quick.start()
    slow.start()

    def look() -> int:
        """Sessions that have left, after a look at the stream."""
        registry, waits = serving.service._registry, False
        while not waits:
            with registry.lock:
                (stream,) = registry.streams
                waits = bool(stream.idle_cursors) and stream.session.waits()
        with monkeypatch.context() as patched:
            patched.setattr(service, "concurrency", clock)
            watch._check(stream, since)
        return registry.left_behind

    for step in range(2):
        quick.consume(step)
        assert slow.take(step) is not None
        assert look() == 0
        now += 1.5 * service.LAST_S
        if step == 0:
            slow.release(step)
    assert look() == 1
    slow.release(1)
    quick.detach()
    slow.detach()
    serving.close()


def test_a_stream_is_not_waited_for_where_nothing_moves(store: Path):
    """It would be cut down; but its subscriber, which has had batches before, keeps one."""
    serving = Serving(store, 7 << 18)
    one = serving.attach("hyperbatch", **LARGE)
    one.start()
    one.consume(0)
    assert one.take(1) is not None
    with one.serving.service._registry.lock:
        meter = one.serving.service._registry.sessions[one.session][0].meter
    meter.times = lambda: {"ready_ns": 0}
    ticks = Ticks(serving)
    with pytest.raises(Refused, match="serve with at least --mem"):
        serving.attach("hyperbatch", **LARGE, seed=9)
    assert 0 < ticks.now <= SETTLE_S + 0.1
    one.release(1)
    assert [one.consume(step) for step in range(2, STEPS)]
    del meter.times
    one.detach()
    serving.close()


def wait_leased(trainer: Trainer, stream: Stream) -> None:
    """Until a batch of a stream has been delivered to its only session."""
    with trainer.serving.came:
        assert trainer.serving.came.wait_for(lambda: bool(stream.leased), WAIT_S)


def release_all(trainer: Trainer, stream: Stream) -> int:
    """Give back what is leased of a stream, which sends no more; returns the next step."""
    with trainer.serving.service._registry.lock:
        stream.closing = True
        steps = sorted(stream.cursors[trainer.session].held)
    for step in steps:
        trainer.consume(step)
    assert not stream.leased
    return steps[-1] + 1


def test_a_stream_that_cannot_do_with_its_share_gets_back_what_it_had(store: Path):
    """Its sessions would else look for a stream, and take the one that this was ended for."""
    serving = Serving(store, 8 * TIGHT)
    trainer = serving.attach()
    opener, registry = serving.service._opener, serving.service._registry
    with registry.lock:
        ((stream,),) = (list(group.streams) for group in registry.groups.values())
    trainer.start()
    wait_leased(trainer, stream)
    step = release_all(trainer, stream)
    with opener.opening:
        opener._replace(opener._end(stream), share=1)  # no session can do with a slot
    with registry.lock:
        ((other,),) = (list(group.streams) for group in registry.groups.values())
        assert other is not stream
        assert registry.sessions[trainer.session][0].stream is other
    trainer.consume(step)
    trainer.detach()
    serving.close()


def test_a_session_that_lost_its_stream_has_no_other_one_cut_down(store: Path, monkeypatch):
    """Two sessions that need most of the arena would take it from each other for ever."""
    serving, shrinks = Serving(store, 8 * TIGHT), list[bool]()
    trainer = serving.attach()
    opener, registry = serving.service._opener, serving.service._registry
    open_stream = opener.open_stream

    def opened(key: StreamKey, order: StreamRequest, shrink: bool = True) -> Stream:
        shrinks.append(shrink)
        return open_stream(key, order)

    monkeypatch.setattr(opener, "_instead", lambda *_: None)
    monkeypatch.setattr(opener, "open_stream", opened)
    with registry.lock:
        ((stream,),) = (list(group.streams) for group in registry.groups.values())
    trainer.start()
    wait_leased(trainer, stream)
    step = release_all(trainer, stream)
    with opener.opening:
        opener._replace(opener._end(stream), share=1)
    trainer.consume(step)
    assert shrinks == [False]
    trainer.detach()
    serving.close()


def test_streams_whose_seeds_are_not_kept_stay(store: Path, monkeypatch):
    """They could not be opened again."""
    monkeypatch.setattr(service, "_KEPT", 1 << 20)
    serving = Serving(store, 7 << 18)
    seeds = np.arange(NODES)
    request = Attach(token=0, request=1, plan="hyperbatch", split="", num_neighbors=(5, 5), **LARGE)
    own = Trainer(serving, serving.service.attach(request, seeds).session)
    own.start()
    with serving.service._registry.lock:
        (stream,) = serving.service._registry.streams
    with pytest.raises(Refused, match="serve with at least --mem"):
        serving.attach("hyperbatch", **LARGE, seed=4)
    with serving.service._registry.lock:
        assert stream in serving.service._registry.streams
    assert all(own.consume(step) for step in range(STEPS))
    own.detach()
    serving.close()


def test_a_stream_whose_seeds_are_not_kept_is_not_left_for_a_larger_one(store: Path, monkeypatch):
    """It could not be opened: the session would wait for ever."""
    monkeypatch.setattr(service, "_KEPT", 1 << 20)
    serving = Serving(store, 8 << 20)
    other = serving.attach(seed=9)
    request = Attach(token=0, request=1, plan="minibatch", split="", num_neighbors=(5, 5), **LARGE)
    own = Trainer(serving, serving.service.attach(request, np.arange(NODES)).session)
    other.detach()
    own.start()
    assert all(own.consume(step) for step in range(STEPS))
    own.detach()
    serving.close()


def held_stream(*held: int) -> Any:
    """A stream whose cursors hold so many batches each."""
    live = [SimpleNamespace(held=range(count)) for count in held]
    return SimpleNamespace(leased=sum(held), live=live)


@pytest.mark.parametrize(
    ("held", "batches", "ready_s", "waited_s"),
    [
        ((2,), 100, 10.0, SETTLE_S),  # 0.1 s a batch
        ((2,), 10, 30.0, 6.0),  # 3 s a batch
        ((2,), 1, 300.0, WAIT_S),
        ((2,), 0, 0.0, FIRST_S),
        ((1,), 0, 60.0, SETTLE_S),  # its first batch, for a minute: it has stopped
        ((2, 0), 10, 30.0, SETTLE_S),  # another one has to wait for it
    ],
)
def test_the_deadline_is_that_of_a_trainer_at_work(held, batches, ready_s, waited_s):
    stream = held_stream(*held)
    deadline = DrainDeadline(stream, 0.0, allowed_s(batches, ready_s))
    assert not deadline.is_over(stream, waited_s - 0.01)
    assert deadline.is_over(stream, waited_s)


def test_the_deadline_starts_again_with_a_release_and_ends():
    stream = held_stream(2)
    deadline = DrainDeadline(stream, 0.0, 0.5)
    assert not deadline.is_over(stream, 0.9)
    stream.leased -= 1
    assert not deadline.is_over(stream, 1.5)
    assert not deadline.is_over(stream, 2.4)
    assert deadline.is_over(stream, 2.5)
    stream.leased += 1
    assert deadline.is_over(stream, WAIT_S)
