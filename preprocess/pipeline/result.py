"""Records of what an ingest will cost and of what it did, for commands, benches and tests."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from blockstore.format import Manifest
from blockstore.units import format_bytes


@dataclass(frozen=True, slots=True)
class MemoryLine:
    """One line of the memory table."""

    what: str
    bytes: int


@dataclass(frozen=True, slots=True)
class StagePlan:
    """A planned stage: bytes that it reads and writes, reads of the source included."""

    name: str
    read_bytes: int
    written_bytes: int


@dataclass(frozen=True, slots=True)
class StageResult(StagePlan):
    """A finished stage, and the bytes that it read and wrote."""

    elapsed_s: float
    resumed: bool = False  # an earlier run did it
    peak_bytes: int = 0  # of memory


class Ran:
    """Base of the results of runs; `stages` includes those that earlier runs finished."""

    __slots__ = ()
    stages: Sequence[StageResult]

    @property
    def read_bytes(self) -> int:
        return sum(s.read_bytes for s in self.stages)

    @property
    def written_bytes(self) -> int:
        return sum(s.written_bytes for s in self.stages)

    @property
    def elapsed_s(self) -> float:
        return sum(s.elapsed_s for s in self.stages)

    @property
    def peak_bytes(self) -> int:
        return max(s.peak_bytes for s in self.stages)

    @property
    def moved(self) -> str:
        """Bytes read and written, and peak memory, as text."""
        return (
            f"{format_bytes(self.read_bytes)} read, {format_bytes(self.written_bytes)} written, "
            f"at most {format_bytes(self.peak_bytes)} of memory"
        )


@dataclass(frozen=True, slots=True)
class IngestPlan:
    """The estimated cost of an ingest: a function of the source's headers and the options."""

    num_nodes: Mapping[str, int]  # by type
    num_edges: Mapping[str, int]  # by "src-name-dst": upper bounds of the stored edges
    store_bytes: int
    temporary_bytes: int  # beside the store, at most, at any time
    mem_bytes: int
    memory: tuple[MemoryLine, ...]  # sums to `mem_bytes`
    stages: tuple[StagePlan, ...]


@dataclass(frozen=True, slots=True)
class QuantizationError:
    """The error that quantization to int8 made in one array."""

    path: str  # of the array in the store
    largest: float  # largest difference of a value to what is stored
    rms: float


@dataclass(frozen=True, slots=True)
class IngestResult(Ran):
    manifest: Manifest
    stages: tuple[StageResult, ...]  # in the order of the plan
    quantization: tuple[QuantizationError, ...] = ()
