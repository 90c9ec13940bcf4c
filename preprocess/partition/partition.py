"""Options of partitioning: caps, costs and memory.  Also options of hubs and halos.  Pure.

Cost of one more node of class l in a partition that holds s of them (thesis, Eq. 4.2):
`alpha_l * gamma * (s / mu_l) ** (gamma - 1)`, mu_l the share of the class among all nodes,
`alpha_l = alpha * m * sqrt(k) / n ** 1.5 * min(1, sqrt(n_l / (soften * k)))`.  The first factors
are FENNEL's; the last is ours: if a partition gets few nodes of a class, balancing them is not
worth giving up many neighbours.
"""

import math
from dataclasses import MISSING, dataclass
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from blockstore.flags import flag
from blockstore.units import parse_bytes
from preprocess.errors import BadInput

Partitioner = Literal["gap", "fennel", "ldg", "random", "metis"]
Visit = Literal["degree", "random", "source"]
Neighbors = Literal["auto", "in", "both"]
MAX_PARTITIONS = 1 << 24
NARROW_PARTITIONS = (1 << 16) - 1  # numbers up to here, and the one that means none, fit in uint16
_FEW, _MANY = 20.0, 50.0  # nodes of a class in a partition
_NODE_BYTES = 22  # degrees twice, classes twice, place, partition
_SIZE_BYTES = 12  # for each possible size of a class in a partition: its first place, its cost
_CELL_BYTES = 20  # for each class in each partition: its size, two places, its cost
HubScore = Literal["walk", "degree"]
DEFAULT_HUBS = 0.01


@dataclass(frozen=True, slots=True)
class PartitionOptions:
    """Everything that decides a partition, besides the graph, training nodes and the seed."""

    panel: ClassVar = "Partitions, hubs and halos"
    num_partitions: int = flag(MISSING, "of the nodes of the new store", "--partitions")
    method: Partitioner = flag("gap", "gap balances labels of training nodes too", "--partitioner")
    slack: float = flag(1.1, "a partition holds so many times the mean")
    gamma: float = flag(1.5, "exponent of the cost of nodes")
    passes: int = flag(5, "over all edges")
    alpha: float = flag(1.0, "times the cost of FENNEL")
    soften: float = flag(50.0, "nodes of a class a partition below which it costs less; 0: none")
    # whether sizes are divided by the share of the class, as in the printed Eq. 4.2
    relative: bool = flag(True, "sizes count relative to the share of the class")
    deviations: float = flag(  # see `class_limits`
        2.0, "of a random partition, that a class may exceed its mean by; 0: any"
    )
    visit: Visit = flag("degree", "in which order nodes are placed")  # the highest degree first
    neighbors: Neighbors = flag("auto", "edges that draw a node; auto: both ways, unless symmetric")

    @property
    def is_streamed(self) -> bool:
        """Whether nodes are placed in passes over the edges."""
        return self.method not in ("random", "metis") and self.num_partitions > 1

    @property
    def knows_classes(self) -> bool:
        return self.method == "gap"

    @property
    def dtype(self) -> type[np.uint16] | type[np.uint32]:
        """Dtype of a node's partition while partitions are being found."""
        return np.uint16 if self.num_partitions < NARROW_PARTITIONS else np.uint32

    @property
    def node_bytes(self) -> int:
        """Bytes of tables for each node."""
        sizes = _SIZE_BYTES * min(1.0, max(1.0, self.slack) / max(1, self.num_partitions))
        return _NODE_BYTES + math.ceil(sizes)

    def check(self) -> None:
        """Raises BadInput if no graph can be partitioned with these options."""
        for name, value, minimum, maximum in (
            ("--partitions", self.num_partitions, 1, MAX_PARTITIONS),
            ("--passes", self.passes, 1, 1000),
            ("--slack", self.slack, 1, 1000),
            ("--gamma", self.gamma, 1, 10),
            ("--alpha", self.alpha, 0, 1e9),
            ("--soften", self.soften, 0, 1e9),
            ("--deviations", self.deviations, 0, 1e9),
        ):
            if not minimum <= value <= maximum:
                raise BadInput.at(
                    name,
                    f"{value:,.10g}",
                    f"{minimum:g} to {maximum:,.10g}",
                    "the defaults are a good choice",
                )


def group_caps(settings: PartitionOptions, group_sizes: list[int]) -> NDArray[np.int64]:
    """Maximum number of nodes of each group in a partition; int64.

    All partitions together can hold the group; if slack is less than a node, the mean is rounded
    up.
    """
    k = settings.num_partitions
    return np.array([max(-(-n // k), math.floor(settings.slack * n / k)) for n in group_sizes])


def class_limits(settings: PartitionOptions, class_sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Nodes of each class in a partition beyond which no more follow their neighbours; int64.

    class_sizes  int64 (classes,)   nodes; the last class is that of other nodes, without a limit

    A hub has so many neighbours that they outweigh any cost, so hubs of one class would fill a
    partition.  A class may exceed its mean by `deviations` standard deviations of a random
    partition; if a partition has few nodes of the class, by up to six times that, because balancing
    these is not worth giving up many neighbours.
    """
    found = np.full(class_sizes.size, np.iinfo(np.int64).max)
    if not (settings.knows_classes and settings.deviations):
        return found
    mean = class_sizes[:-1] / settings.num_partitions
    few = np.sqrt(np.minimum(mean, _FEW)) * np.minimum(1, _MANY / np.maximum(mean, 1))
    maximum = mean + settings.deviations * (np.sqrt(mean) + 5 * few)
    found[:-1] = np.maximum(np.ceil(mean), np.floor(maximum))
    return found


def class_costs(
    settings: PartitionOptions,
    class_sizes: NDArray[np.int64],
    num_edges: int,
    maximum: NDArray[np.int64],
) -> list[NDArray[np.float64]]:
    """Costs of each class for sizes 0, 1, ..., up to one above the greatest in a partition.

    class_sizes  int64 (classes,)   nodes
    maximum      int64 (classes,)   maximum nodes of the class in a partition
    """
    k, n = settings.num_partitions, max(1, int(class_sizes.sum()))
    alpha = settings.alpha * num_edges * math.sqrt(k) / (n * math.sqrt(n))
    found = []
    for size, cap in zip(class_sizes.tolist(), maximum.tolist(), strict=True):
        softened = 1.0
        if settings.knows_classes and settings.soften:
            softened = min(1.0, math.sqrt(size / (settings.soften * k)))
        sizes = np.arange(min(size, cap) + 2, dtype=np.float64)
        if settings.relative:
            sizes *= n / max(1, size)
        raised = np.sqrt(sizes) if settings.gamma == 1.5 else sizes ** (settings.gamma - 1)
        found.append(alpha * softened * settings.gamma * raised)
    return found


def table_bytes(settings: PartitionOptions, num_classes: int) -> int:
    """Bytes of tables for each class in each partition."""
    return settings.num_partitions * (_CELL_BYTES * num_classes + 32)


def visited_fits(num_edges: int, share: int, in_memory: bool) -> bool:
    """Whether columns in visit order fit in memory; `in_memory`: whether those by id are there."""
    return in_memory and 4 * num_edges <= share // 4


@dataclass(frozen=True, slots=True)
class InfluenceOptions:
    """Options of hubs and halos, all of which affect the store's bytes."""

    hubs: float | None = None  # share of all nodes; None: the default if there are partitions
    hub_bytes: int = 0  # instead of `hubs`: maximum bytes of rows and in-edges of hubs
    hub_score: HubScore = "walk"
    halo: float = 0.0  # nodes of a halo, relative to those of its partition

    @property
    def finds_hubs(self) -> bool:
        return self.hub_bytes > 0 or self.hub_share > 0

    @property
    def hub_share(self) -> float:
        """Maximum share of all nodes that are hubs."""
        if self.hub_bytes:
            return 1.0
        return DEFAULT_HUBS if self.hubs is None else self.hubs

    def check(self, in_partitions: bool) -> None:
        """Raises BadInput if shares are out of range, or given without partitions."""
        if not 0 <= self.hub_share <= 1:
            raise BadInput.at(
                "--hubs", f"{self.hubs:g}", "a share of all nodes, 0 to 1, or a size such as 64M",
                "0.01 is usual",
            )  # fmt: skip
        if not 0 <= self.halo <= 1:
            raise BadInput.at(
                "--halo", f"{self.halo:g}", "a share of the nodes of a partition, 0 to 1",
                "0.3 is usual",
            )  # fmt: skip
        if in_partitions:
            return
        for name, given in (("--hubs", self.hubs or self.hub_bytes), ("--halo", self.halo)):
            if given:
                raise BadInput.at(
                    name, f"{given:g} without --partitions", "partitions, to which they belong",
                    "add --partitions 64, or leave it out",
                )  # fmt: skip


NO_WISHES = InfluenceOptions()  # if there are partitions: the default hubs, no halos


def parse_hubs(text: str) -> tuple[float | None, int]:
    """Parse an option to (share, bytes): "0.01", "64M" or nothing.  Raises BadInput."""
    if not text:
        return None, 0
    try:
        return float(text), 0
    except ValueError:
        pass
    try:
        return None, parse_bytes(text)
    except ValueError as error:
        raise BadInput.at(
            "--hubs", text, "a share of all nodes, 0 to 1, or a size such as 64M", "0.01 is usual"
        ) from error
