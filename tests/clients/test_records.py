"""Records of tensors: moved as a whole."""

from dataclasses import dataclass, field

import pytest

torch = pytest.importorskip("torch")

from clients.records import TensorRecord  # noqa: E402


@dataclass(slots=True, repr=False)
class Inner(TensorRecord):
    """A record in a record."""

    ids: torch.Tensor


@dataclass(slots=True, repr=False)
class Outer(TensorRecord):
    """All that a batch may hold."""

    x: torch.Tensor | None
    pairs: dict[tuple[str, str], torch.Tensor]
    hops: list[torch.Tensor]
    inner: Inner
    count: int
    sizes: list[int] = field(default_factory=list)
    features: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)


def record():
    shared = torch.arange(12, dtype=torch.int32)
    return Outer(
        x=torch.randn(7, 3).T,
        pairs={("a", "b"): shared, ("b", "a"): shared[3:7]},
        hops=[torch.empty(0, 4), torch.tensor(3.5), torch.arange(5).to(torch.bfloat16)],
        inner=Inner(shared),
        count=3,
        sizes=[1, 2],
        features={"a": {"z": torch.tensor([True, False])}},
    )


def assert_same(a, b):
    assert (a.count, a.sizes, list(a.pairs)) == (b.count, b.sizes, list(b.pairs))
    for x, y in zip(a.tensors(), b.tensors(), strict=True):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        assert torch.equal(x, y)


def test_every_tensor_is_mapped_once():
    given = record()
    assert len(given.tensors()) == 8
    assert_same(given.map(torch.clone), given)
    moved = given.to("meta")
    assert all(t.device.type == "meta" for t in moved.tensors())
    assert moved.sizes == [1, 2]


def test_a_record_shows_shapes():
    assert repr(record()) == (
        "Outer(x=[3, 7], pairs={('a', 'b'): [12], ('b', 'a'): [4]}, hops=[[0, 4], [], [5]], "
        "inner=Inner(ids=[12]), count=3, sizes=[1, 2], features={'a': {'z': [2]}})"
    )
