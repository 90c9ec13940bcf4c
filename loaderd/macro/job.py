"""Macro-batches of one job: read once, sampled for all of its sessions, the next read meanwhile.

    rank 0  rank 1  rank 2   rank 3 (behind)   sessions: `loaderd.sessions.macrobatch`
        \\    |    /            |
         cache: m + 1, m + 2   cache: m        `loaderd.macro.cache`; a reading thread each
              \\                /
        hubs, ids of copies, seeds by partition, buffers to read through: one for all

Ranks of a job deal partitions out equally, so each macro-batch is one for all of them.  It is held
until no rank needs it now or next, and none has a batch of it.  A rank that keeps others from going
on leaves with the memory it needs, to a cache of its own, and comes back where what it wants is, or
where nobody's run goes on any more: nobody is left without a memory, so that ranks that wait for
each other's steps come to an end.  With room for one memory only, ranks stay together.
"""

from collections.abc import Hashable, Sequence
from typing import Protocol

from blockstore import concurrency
from loaderd.macro.cache import Key, MacroCache, MacroMemory, MacroReader
from loaderd.plans.macrobatch import MacrobatchPlan, SeedGroups
from loaderd.trace import READ_MACRO, SERVE_MACRO

_PATIENCE_S = 0.25  # that sessions wait for one that is behind


class Supply(Protocol):
    """Where memories come from."""

    def take(self) -> MacroMemory | None:
        """One more, where there is room right now."""

    def give(self, memories: Sequence[MacroMemory], last: bool) -> None:
        """These are not needed any more; `last`: nor is what all of them shared."""

    def num_slots(self, memories: int) -> int:
        """Slots of so many, with what they share."""

    def basis(self, memories: int) -> str:
        """The same in words."""


class Job:
    """The memories of some sessions with equal macro-batches, and the threads that fill them."""

    def __init__(
        self, plan: MacrobatchPlan, groups: SeedGroups, supply: Supply, memories: list[MacroMemory]
    ) -> None:
        """`memories`: with two of them one is loaded while the other is served."""
        self.groups = groups
        self.changed = concurrency.Condition()
        self._plan, self._supply, self._depth = plan, supply, len(memories)
        self._readers: list[MacroReader] = []
        self._present = 0  # sessions that have not left
        self._closing = False
        self._threads: list[concurrency.Thread] = []
        self._caches: list[MacroCache] = []
        self._put_up(MacroCache(memories, [], self._depth))

    def _put_up(self, cache: MacroCache) -> None:
        """Raises RuntimeError: the system has no more threads; nothing has changed then."""
        thread = concurrency.Thread(target=self._run, args=(cache,), name="macro-read", daemon=True)
        with self.changed:
            thread.start()
            self._caches.append(cache)
            self._threads = [t for t in self._threads if t.is_alive()] + [thread]

    # -- sessions ---------------------------------------------------------------------------------

    def join(self, reader: MacroReader) -> bool:
        """One more session; False where the job has ended."""
        with self.changed:
            if self._closing:
                return False
            self._readers.append(reader)
            self._caches[0].readers.append(reader)
            self._present += 1
            return True

    def stop(self, reader: MacroReader) -> None:
        """A session needs nothing more, but for what it holds."""
        with self.changed:
            if reader not in self._readers:
                return
            self._readers.remove(reader)
            self._cache(reader).readers.remove(reader)
            reader.live, reader.wanted = False, []
            self._closing = not self._readers
            self._settle()

    def close(self, reader: MacroReader) -> None:
        """The same; behind the last session it is waited for what is being read."""
        self.stop(reader)
        with self.changed:
            threads = self._threads if self._closing else []
        for thread in threads:
            thread.join()

    def leave(self) -> None:
        """A session that is closed holds nothing any more."""
        with self.changed:
            self._present -= 1
            if self._present == 0 and self._closing:
                memories = [m for cache in self._caches for m in cache.memories]
                self._supply.give(memories, last=True)

    def narrow(self, wait_s: float) -> None:
        """Go on with one memory, once another one is free; return then, or after so long."""
        with self.changed:
            self._depth = 1
            for cache in self._caches:
                cache.depth = 1
            self.changed.wait_for(self._is_narrow, wait_s)

    def _is_narrow(self) -> bool:
        self._settle()
        return all(len(cache.memories) == 1 for cache in self._caches)

    @property
    def num_sessions(self) -> int:
        """Sessions that are open."""
        return len(self._readers)

    def counts(self, reader: MacroReader) -> bool:
        """Whether a ledger shows the job's memory with this session."""
        with self.changed:
            return reader in self._readers[:1]

    @property
    def num_slots(self) -> int:
        """Slots of it all."""
        return self._supply.num_slots(self._num_memories())

    def basis(self) -> str:
        """What these are for, as a line of the ledger says it."""
        return self._supply.basis(self._num_memories())

    def _num_memories(self) -> int:
        with self.changed:
            return sum(len(cache.memories) for cache in self._caches)

    # -- under the lock of `changed` --------------------------------------------------------------

    def _cache(self, reader: MacroReader) -> MacroCache:
        return next(cache for cache in self._caches if reader in cache.readers)

    def want(self, reader: MacroReader, wanted: list[Key], live: bool) -> None:
        """What a session needs from now on; what of it is not there is read."""
        reader.wanted, reader.live = wanted, live
        self._settle()

    def find(self, reader: MacroReader) -> MacroMemory | None:
        """The memory of what a session wants first; it goes where that is."""
        key = reader.wanted[0]
        if (hold := reader.held.get(key)) is not None:
            return hold.memory
        here = self._cache(reader)
        if here.find(key) is None:
            for cache in self._caches:
                if cache.find(key) is not None:
                    here.readers.remove(reader)
                    cache.readers.append(reader)
                    self._settle()
                    break
        return self._cache(reader).find(key)

    def is_ready(self, reader: MacroReader, key: Key) -> bool:
        """Whether a macro-batch has been read, at a session's cache."""
        memory = self._cache(reader).find(key)
        return memory is not None and memory.ready

    def freed(self) -> None:
        """Nobody has a batch of some macro-batch any more."""
        self._settle()

    def is_held_up(self, reader: MacroReader) -> bool:
        """Whether nothing of what it needs is read before its client releases batches."""
        if reader not in self._readers or not reader.held:
            return False
        cache = self._cache(reader)
        missing = any(cache.find(key) is None for key in cache.near(reader))
        return missing and cache.next() is None

    def _settle(self) -> None:
        """Shelves where no run goes on are another one's; memories beyond need are given back."""
        for cache in list(self._caches):
            if len(self._caches) > 1 and not cache.live:
                self._caches.remove(cache)
                self._caches[0].readers += cache.readers
                self._caches[0].memories += cache.memories
        for cache in self._caches:
            while (memory := cache.surplus()) is not None:
                cache.memories.remove(memory)
                self._supply.give([memory], last=False)
        self.changed.notify_all()

    def _grow(self, cache: MacroCache) -> bool:
        memory = self._supply.take()
        if memory is not None:
            cache.memories.append(memory)
        return memory is not None

    def _part(self, cache: MacroCache, reader: MacroReader) -> bool:
        """Have a session go on without those that keep it from that; False: there is no room."""
        for memory, needed_by in cache.obstacles(reader):
            if not needed_by:  # batches that are lent: their memory is missed until they are back
                if self._grow(cache):
                    return True
                continue
            if len(cache.memories) == 1 and not self._grow(cache):
                return False
            behind = MacroCache([memory], needed_by, self._depth)
            try:
                self._put_up(behind)
            except RuntimeError:  # the system has no more threads: as without room
                return False
            cache.memories.remove(memory)
            for other in needed_by:
                cache.readers.remove(other)
            for each in (cache, behind):
                if len(each.memories) < self._depth:
                    self._grow(each)
            self.changed.notify_all()
            return True
        return False

    def _patience(self, cache: MacroCache) -> float | None:
        """Seconds until a cache is looked at again, after those who wait too long are helped."""
        now, soonest = concurrency.monotonic(), None
        for reader in list(cache.live):
            if reader not in cache.readers or not cache.obstacles(reader):
                reader.blocked_since = 0.0
                continue
            reader.blocked_since = reader.blocked_since or now
            left = reader.blocked_since + _PATIENCE_S - now
            if left <= 0:
                reader.blocked_since = 0.0 if self._part(cache, reader) else now
                left = 0.0 if reader.blocked_since == 0.0 else _PATIENCE_S
            soonest = left if soonest is None else min(soonest, left)
        return soonest

    # -- the threads ------------------------------------------------------------------------------

    def _run(self, cache: MacroCache) -> None:
        while (chosen := self._choose(cache)) is not None:
            self._load(*chosen)

    def _choose(self, cache: MacroCache) -> tuple[MacroMemory, Key] | None:
        """Wait for what is to be loaded; None: the cache is no more."""
        with self.changed:
            while True:
                if self._closing or cache not in self._caches:
                    return None
                if (chosen := cache.next()) is not None:
                    break
                self.changed.wait(self._patience(cache))
            memory, key = chosen
            served = memory.first_use, memory.last_use
            memory.key, memory.ready, memory.loading, memory.first_use = key, False, True, 0
            memory.runs = {reader: reader.run for reader in self._readers}
            reader = cache.readers[0]
        if served[0]:
            reader.announce.stage(SERVE_MACRO, *served)
        return chosen

    def _load(self, memory: MacroMemory, key: Key) -> None:
        begun = concurrency.perf_counter_ns()
        try:
            memory.graph.load(self._plan.epoch_layout(key[0]).members[key[1]])
        except BaseException as error:
            self._fail(memory, key, error)
            return
        now = concurrency.perf_counter_ns()
        with self.changed:
            memory.ready, memory.loading = True, False
            waiting = [r for r in self._readers if r.waiting_since]
            for reader in (waiting or self._readers)[:1]:
                reader.counters["macro_loaded"] += 1
                reader.counters["macro_read_ns"] += now - begun
                reader.counters["macro_members"] += memory.graph.num_members
                tell = reader.announce
            told = bool(self._readers)
            self._settle()
        if told:
            tell.stage(READ_MACRO, begun, now)
        for reader in waiting:
            reader.announce.ready()

    def _fail(self, memory: MacroMemory, key: Key, error: BaseException) -> None:
        """Whoever needs what could not be read is told, and may begin again.

        A run that began after the reading did has not been failed: it has the same read again.
        """
        with self.changed:
            cache = next(cache for cache in self._caches if memory in cache.memories)
            known = [r for r in cache.readers if memory.runs.get(r) == r.run]
            needed_by = [r for r in cache.live if r in known and key in cache.near(r)]
            failed = [(r, r.run) for r in needed_by if r.wanted[0][0] == key[0]]
            for reader, _ in failed:
                reader.live, reader.wanted, reader.waiting_since = False, [], 0
            for reader in known:  # what it only was about to need is tried when it does
                if key in reader.wanted and (reader in needed_by or not reader.live):
                    reader.wanted.remove(key)
            memory.key, memory.loading = None, False
            self._settle()
        for reader, run in failed:
            reader.announce.failed(run, error)


class Jobs:
    """Jobs of one store that are under way, by what their sessions have in common."""

    def __init__(self) -> None:
        self._lock = concurrency.Lock()
        self._found: dict[Hashable, Job] = {}

    def join(self, key: Hashable, reader: MacroReader) -> Job | None:
        """Have a session join the job of its kind, where there is one."""
        with self._lock:
            job = self._found.get(key)
            if job is not None and not job.join(reader):
                del self._found[key]
                job = None
            return job

    def add(self, key: Hashable, job: Job) -> None:
        """One more, which others may join."""
        with self._lock:
            self._found = {k: j for k, j in self._found.items() if j.num_sessions}
            self._found[key] = job
