"""Models on propagated features: shapes, gradients, what each sees, and that they learn."""

import pytest
import torch
from torch.nn import functional

from clients.hopwise.models import ALONE, Hoga, Sgc, Sign, make_model

NAMES = ["linear", "features", "sgc", "sign", "sign-mlp", "hoga"]


def hops_of(rows: int, hops: int, width: int) -> list[torch.Tensor]:
    return [torch.randn(rows, width, requires_grad=True) for _ in range(hops)]


def arrays(name: str, x: list[torch.Tensor]) -> list[torch.Tensor]:
    """What a model takes: hop 0 alone, or all."""
    return x[:1] if name in ALONE else x


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("hops", [1, 4])
def test_shapes_and_gradients(name: str, hops: int):
    torch.manual_seed(0)
    x = hops_of(7, hops, 5)
    model = make_model(name, 5, hops, 3, hidden=8)
    out = model(arrays(name, x))
    assert out.shape == (7, 3)
    out.square().sum().backward()
    unused = set(model.ask.parameters()) if name == "hoga" and hops == 1 else set()
    for parameter in set(model.parameters()) - unused:
        assert parameter.grad is not None
        assert parameter.grad.isfinite().all()
    seen = [x[-1]] if name == "sgc" else arrays(name, x)
    for hop in seen:
        assert hop.grad is not None
        assert hop.grad.abs().sum() > 0
    for hop in x:
        if not any(hop is s for s in seen):
            assert hop.grad is None


@pytest.mark.parametrize("name", NAMES)
def test_a_row_depends_on_its_own_rows_alone(name: str):
    torch.manual_seed(1)
    x = hops_of(6, 3, 5)
    model = make_model(name, 5, 3, 2, hidden=8).eval()
    with torch.no_grad():
        whole = model(arrays(name, x))
        part = model(arrays(name, [hop[2:4] for hop in x]))
    assert torch.allclose(whole[2:4], part, atol=1e-6)


def test_attention_is_the_formulas():
    torch.manual_seed(2)
    model, x = Hoga(4, 2, num_hidden=6).eval(), hops_of(3, 3, 4)
    with torch.no_grad():
        h = torch.stack([model.project(hop) for hop in x], dim=1)
        rows = []
        for node in h:
            gate, query, key, value = (node @ w.T for w in model.tokens.weight.chunk(4))
            scores = torch.softmax(query @ key.T / 6**0.5, dim=1)
            mixed = functional.relu(model.norm(node + gate * (scores @ value)))
            asked = [model.ask(torch.cat([mixed[0], other])) for other in mixed[1:]]
            weight = torch.softmax(functional.leaky_relu(torch.cat(asked)), dim=0)
            rows.append(mixed[0] + (weight[:, None] * mixed[1:]).sum(dim=0))
        assert torch.allclose(model.out(torch.stack(rows)), model(x), atol=1e-5)


def test_inception_and_concatenation_differ_in_what_is_learnt():
    inception, plain = Sign(5, 3, 2, 8), Sign(5, 3, 2, 8, inception=False)
    assert len(inception.hops) == 3
    assert len(plain.hops) == 0
    assert plain.mlp.layers[0].in_features == 15
    assert isinstance(make_model("sgc", 5, 3, 2), Sgc)


@pytest.mark.parametrize("name", [n for n in NAMES if n not in ALONE])
def test_what_only_a_hop_tells_is_learnt(name: str):
    """Labels are the sign of a direction of the last hop; hop 0 is noise."""
    torch.manual_seed(3)
    x = [torch.randn(400, 6) for _ in range(3)]
    label = (x[2][:, 0] > 0).long()
    model = make_model(name, 6, 3, 2, hidden=16, dropout=0.0)
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    for _ in range(120):
        loss = functional.cross_entropy(model(x), label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        right = (model(x).argmax(dim=1) == label).double().mean()
    assert right > 0.95


def test_bad_parameters_are_refused():
    with pytest.raises(ValueError, match="expected linear, features"):
        make_model("gcn", 4, 2, 2)
