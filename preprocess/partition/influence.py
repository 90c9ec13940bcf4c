"""Which nodes are kept beside partitions, as asked for: hubs and halos.  Pure."""

from dataclasses import dataclass
from typing import Literal

from blockstore.units import parse_bytes
from preprocess.errors import BadInput

HubScore = Literal["walk", "degree"]
DEFAULT_HUBS = 0.01


@dataclass(frozen=True, slots=True)
class InfluenceOptions:
    """Semantic: all of it decides the store's bytes."""

    hubs: float | None = None  # share of all nodes; None: the default, where there are partitions
    hub_bytes: int = 0  # else: what hubs take at most, their rows and in-edges
    hub_score: HubScore = "walk"
    halo: float = 0.0  # nodes of a halo, as a share of those of its partition

    @property
    def finds_hubs(self) -> bool:
        return self.hub_bytes > 0 or self.hub_share > 0

    @property
    def hub_share(self) -> float:
        """Of all nodes, at most."""
        if self.hub_bytes:
            return 1.0
        return DEFAULT_HUBS if self.hubs is None else self.hubs

    def check(self, in_partitions: bool) -> None:
        """Raises BadInput: shares out of range, or hubs and halos without partitions."""
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


NO_WISHES = InfluenceOptions()  # hubs as usual, no halos, where there are partitions


def parse_hubs(text: str) -> tuple[float | None, int]:
    """(share, bytes) of an option: "0.01", "64M" or nothing.  Raises BadInput."""
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
