"""The kinds of session, by the plan that a client asks for.

To add a kind, add a module beside this one, the pure part of its plan in `loaderd/plans`, and a
line here; a plan of subgraphs needs only a sampler in `loaderd/plans`.
"""

from loaderd.api.errors import Refused
from loaderd.plans.chunks import METHOD_OF
from loaderd.plans.samplers import SAMPLERS
from loaderd.sessions.base import Kind
from loaderd.sessions.hyperbatch import HYPERBATCH
from loaderd.sessions.macrobatch import MACROBATCH
from loaderd.sessions.partitions import PARTITIONS
from loaderd.sessions.propagated import PROPAGATED
from loaderd.sessions.sampled import SAMPLED
from loaderd.sessions.subgraph import SUBGRAPH

KINDS: dict[str, Kind] = {
    "auto": HYPERBATCH,  # or plain minibatches: the batches are equal
    "minibatch": SAMPLED,
    "hyperbatch": HYPERBATCH,
    "macrobatch": MACROBATCH,
    "partitions": PARTITIONS,
    **dict.fromkeys(METHOD_OF, PROPAGATED),
}


def find_kind(plan: str) -> Kind:
    """Raises Refused: there is no such plan."""
    kinds = KINDS | dict.fromkeys(SAMPLERS, SUBGRAPH)
    if plan not in kinds:
        raise Refused(f"plan {plan!r} is not known: choose among {', '.join(kinds)}")
    return kinds[plan]
