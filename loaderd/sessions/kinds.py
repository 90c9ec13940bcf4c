"""The kinds of session, by the plan that a client asks for.

A further kind is a module beside this one, the pure part of its plan in `loaderd/plans`, and a line
here.
"""

from loaderd.api.errors import Refused
from loaderd.plans.chunks import METHOD_OF
from loaderd.sessions.base import Kind
from loaderd.sessions.hyperbatch import HYPERBATCH
from loaderd.sessions.macrobatch import MACROBATCH
from loaderd.sessions.partitions import PARTITIONS
from loaderd.sessions.propagated import PROPAGATED
from loaderd.sessions.sampled import SAMPLED

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
    if plan not in KINDS:
        raise Refused(f"plan {plan!r} is not known: choose among {', '.join(KINDS)}")
    return KINDS[plan]
