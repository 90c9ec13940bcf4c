"""A status as Prometheus reads it: docs/metrics.md says what each name means."""

from collections.abc import Iterator
from typing import NamedTuple

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from loaderd.api.protocol import StatusReply
from loaderd.memory.ledger import is_session_entry
from loaderd.monitoring.rates import STAGES, since_start

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
NS = 1e-9


class _Counter(NamedTuple):
    """A counter of the daemon and its metric, without the `_total` that the format adds."""

    name: str
    counter: str
    scale: float
    help: str


COUNTERS = (
    _Counter("loaderd_read_bytes", "bytes_read", 1, "Bytes read from the store."),
    _Counter("loaderd_read_blocks", "blocks_read", 1, "Blocks read from the store."),
    _Counter("loaderd_reads", "reads", 1, "Calls that read from the store."),
    _Counter("loaderd_read_errors", "read_errors", 1, "Reads that failed, checksums included."),
    _Counter("loaderd_read_wait_seconds", "read_wait_ns", NS, "Time threads waited for reads."),
    _Counter("loaderd_written_bytes", "bytes_written", 1, "Bytes written while serving."),
    _Counter("loaderd_batches", "batches", 1, "Batches built."),
    _Counter("loaderd_rows", "rows", 1, "Rows of these batches."),
    _Counter("loaderd_edges", "edges", 1, "Edges of these batches."),
    _Counter("loaderd_rows_copied", "rows_copied", 1, "Rows copied within the daemon."),
    _Counter("loaderd_cache_rows_wanted", "hyper_rows_wanted", 1, "Rows wanted of row caches."),
    _Counter("loaderd_cache_rows_read", "hyper_rows_read", 1, "Of these, rows that were read."),
    _Counter("loaderd_cache_stay_rows", "hyper_stay_rows", 1, "Rows that are to stay in them."),
    _Counter("loaderd_cache_stay_read", "hyper_stay_read", 1, "Of these, rows that were read."),
    _Counter("loaderd_macro_batches_loaded", "macro_loaded", 1, "Macro-batches read."),
    _Counter(
        "loaderd_macro_wait_seconds", "macro_wait_ns", NS, "Time sessions waited for macro-batches."
    ),
    _Counter("loaderd_peer_requests", "peer_requests", 1, "Requests for rows of other servers."),
    _Counter("loaderd_peer_retries", "peer_retries", 1, "Attempts that a peer did not answer."),
    _Counter("loaderd_peer_rows_asked", "peer_rows_asked", 1, "Rows that peers gave."),
    _Counter("loaderd_peer_bytes_asked", "peer_bytes_asked", 1, "Bytes of these."),
    _Counter("loaderd_peer_rows_given", "peer_rows_given", 1, "Rows given to peers."),
    _Counter("loaderd_peer_bytes_given", "peer_bytes_given", 1, "Bytes of these."),
    _Counter("loaderd_object_requests", "object_requests", 1, "Requests to object storage."),
    _Counter("loaderd_object_retries", "object_retries", 1, "Of these, ones that had failed."),
    _Counter("loaderd_object_read_bytes", "object_bytes_read", 1, "Bytes that objects gave."),
    _Counter("loaderd_object_pages_evicted", "object_pages_evicted", 1, "Pages that left."),
    _Counter("loaderd_object_pages_torn", "object_pages_torn", 1, "Pages fetched once more."),
    _Counter("loaderd_sessions_attached", "sessions_attached", 1, "Sessions opened."),
    _Counter("loaderd_sessions_refused", "sessions_refused", 1, "Sessions refused."),
    _Counter(
        "loaderd_sessions_left_behind",
        "sessions_left_behind",
        1,
        "Sessions that left others they had shared batches with.",
    ),
    _Counter(
        "loaderd_reloads",
        "reloads",
        1,
        "Times that stores were opened again, or that this was tried.",
    ),
    _Counter("loaderd_sessions_failed", "sessions_failed", 1, "Runs that ended in an error."),
    _Counter("loaderd_requests_refused", "requests_refused", 1, "Other messages refused."),
)
POOLS = ("graph", "row")
SESSION = ("session", "plan", "store")


class _Snapshot(Collector):
    """One status, collected once."""

    def __init__(self, status: StatusReply) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        yield from self._daemon()
        yield from self._counters()
        yield from self._hits()
        yield from self._sessions()
        yield from self._ledger()

    def _daemon(self) -> Iterator[Metric]:
        s = self._status
        info = GaugeMetricFamily(
            "loaderd_info", "What is served; always 1.", labels=("store", "fingerprint", "io_mode")
        )
        used = GaugeMetricFamily(
            "loaderd_store_sessions", "Open sessions of a store.", labels=("store", "fingerprint")
        )
        for store in s.stores:
            info.add_metric((store.path, store.fingerprint, store.io_mode), 1)
            used.add_metric((store.path, store.fingerprint), store.sessions)
        yield info
        yield used
        yield GaugeMetricFamily("loaderd_uptime_seconds", "Since the start.", value=s.uptime_s)
        yield GaugeMetricFamily("loaderd_draining", "1 after a signal.", value=int(s.draining))
        yield GaugeMetricFamily("loaderd_workers", "Threads that build.", value=s.workers)
        yield GaugeMetricFamily("loaderd_readers", "Threads that read.", value=s.readers)

    def _counters(self) -> Iterator[Metric]:
        counts = self._status.counters
        for c in COUNTERS:
            yield CounterMetricFamily(c.name, c.help, value=counts.get(c.counter, 0) * c.scale)
        busy = CounterMetricFamily(
            "loaderd_stage_busy_seconds", "Time of threads at work.", labels=("stage",)
        )
        for stage, name in STAGES.items():
            busy.add_metric((stage,), counts.get(name, 0) * NS)
        yield busy

    def _hits(self) -> Iterator[Metric]:
        counts = self._status.counters
        for what, text in (
            ("hit", "Blocks wanted that were in memory."),
            ("missed", "Blocks wanted that were not."),
        ):
            family = CounterMetricFamily(f"loaderd_blocks_{what}", text, labels=("pool",))
            for pool in POOLS:
                family.add_metric((pool,), counts.get(f"{pool}_blocks_{what}", 0))
            yield family
        present = GaugeMetricFamily("loaderd_blocks_present", "Blocks in memory.", labels=("pool",))
        for pool in POOLS:
            present.add_metric((pool,), counts.get(f"{pool}_blocks_present", 0))
        yield present
        life = since_start(self._status)
        ratio = GaugeMetricFamily(
            "loaderd_hit_ratio", "Since the start; absent while nothing was wanted.", labels=("of",)
        )
        for of, value in zip(POOLS, (life.graph_hit, life.row_hit), strict=True):
            if value is not None:
                ratio.add_metric((of,), value)
        yield ratio

    def _sessions(self) -> Iterator[Metric]:
        sessions = self._status.sessions
        number = GaugeMetricFamily("loaderd_sessions", "Open sessions.", labels=("plan",))
        for plan in sorted({s.plan for s in sessions}):
            number.add_metric((plan,), sum(s.plan == plan for s in sessions))
        yield number
        yield GaugeMetricFamily(
            "loaderd_lines",
            "Streams of batches that are built; sessions of equal parameters share one.",
            value=self._status.counters.get("streams", 0),
        )
        yield GaugeMetricFamily(
            "loaderd_in_flight_batches",
            "Batches begun and not wholly released.",
            value=sum(s.in_flight for s in sessions),
        )
        for kind, name, field, scale, text in (
            (CounterMetricFamily, "batches", "batches", 1, "Batches released by the client."),
            (CounterMetricFamily, "rows", "rows", 1, "Rows handed over."),
            (CounterMetricFamily, "edges", "edges", 1, "Edges handed over."),
            (CounterMetricFamily, "ready_seconds", "ready_ns", NS, "Time with a finished batch."),
            (CounterMetricFamily, "starved_seconds", "starved_ns", NS, "Time without one."),
            (GaugeMetricFamily, "epoch", "epoch", 1, "Epoch of the newest run."),
            (GaugeMetricFamily, "step", "step", 1, "Next step to be begun."),
            (GaugeMetricFamily, "steps", "num_steps", 1, "Steps of an epoch."),
            (GaugeMetricFamily, "in_flight", "in_flight", 1, "Batches not wholly released."),
            (GaugeMetricFamily, "window", "window", 1, "Batches in flight at most."),
        ):
            family = kind(f"loaderd_session_{name}", text, labels=SESSION)
            for s in sessions:
                family.add_metric((str(s.session), s.plan, s.store), getattr(s, field) * scale)
            yield family

    def _ledger(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(
            "loaderd_budget_bytes", "The budget, --mem.", value=self._status.budget_bytes
        )
        ledger = GaugeMetricFamily(
            "loaderd_ledger_bytes", "Where the budget goes.", labels=("line", "of")
        )
        for entry in self._status.ledger:
            of = "pools" if is_session_entry(entry) else "budget"
            ledger.add_metric((entry.name, of), entry.num_bytes)
        yield ledger


def metrics_text(status: StatusReply) -> bytes:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Snapshot(status))
    return generate_latest(registry)
