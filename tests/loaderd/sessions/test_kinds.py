"""The tables of plans: what a client may ask for, and what serves it."""

import pytest

from loaderd.api.errors import Refused
from loaderd.plans.chunks import METHOD_OF
from loaderd.plans.samplers import SAMPLERS
from loaderd.sessions.kinds import KINDS, find_kind
from loaderd.sessions.resolve import PLANS


def test_every_plan_that_samples_has_a_pure_part():
    assert PLANS.keys() == KINDS.keys() - METHOD_OF.keys()


def test_what_is_no_plan_is_refused_with_those_that_are():
    for name in (*KINDS, *SAMPLERS):
        assert find_kind(name).resolve
    with pytest.raises(Refused, match=r"plan 'minibatches' is not known: .*minibatch"):
        find_kind("minibatches")
