"""The samplers of subgraphs, by the plan that a client asks for.

A further one is a class derived from `Sampler`: a line here, or `loaderd serve --sampler
MODULE:CLASS` for one that is not part of the daemon.
"""

import importlib
from typing import Any

from loaderd.plans.cluster import Cluster
from loaderd.plans.layerwise import FastGcn, Ladies
from loaderd.plans.saint import SaintEdge, SaintNode, SaintWalk
from loaderd.plans.shadow import Induced, Shadow
from loaderd.plans.subgraph import Sampler

SAMPLERS: dict[str, type[Sampler]] = {
    sampler.name: sampler
    for sampler in (Cluster, SaintNode, SaintEdge, SaintWalk, Shadow, Induced, Ladies, FastGcn)
}


def register(sampler: type[Sampler]) -> None:
    """Serve plan `sampler.name`, too, in this process.  Raises ValueError: there is one."""
    if SAMPLERS.setdefault(sampler.name, sampler) is not sampler:
        raise ValueError(
            f"sampler {sampler.name!r}: found another one of this name, expected a new name"
        )


def load_sampler(place: str) -> None:
    """Register "module:class".  Raises ValueError: there is no such sampler."""
    module, _, name = place.partition(":")
    try:
        found: Any = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"sampler {place!r}: expected MODULE:CLASS: {error}") from error
    if not (isinstance(found, type) and issubclass(found, Sampler)):
        raise ValueError(
            f"sampler {place!r}: found {found!r}, expected a class derived from "
            "loaderd.plans.subgraph.Sampler"
        )
    register(found)
