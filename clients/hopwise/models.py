"""Reference models on propagated features: one row per node and hop, nothing is sampled.

Each takes `x`, tensors (batch, width) as `clients.torch.HopDataset` yields them (hop 0 first, then
the hops of one operator after the other), and returns logits (batch, num_out).
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

ALONE = frozenset({"linear", "features"})  # models that take hop 0 and no other


class Sgc(nn.Module):
    """One linear layer on the last hop.

    Source: Wu et al., Simplifying Graph Convolutional Networks, ICML 2019.
    """

    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__()
        self.linear = nn.Linear(num_in, num_out)

    def forward(self, x: Sequence[Tensor]) -> Tensor:
        out: Tensor = self.linear(x[-1])
        return out


class Mlp(nn.Module):
    """Linear layers with PReLU and dropout between them."""

    def __init__(
        self, num_in: int, num_hidden: int, num_out: int, num_layers: int, dropout: float
    ) -> None:
        super().__init__()
        widths = [num_in, *[num_hidden] * (num_layers - 1), num_out]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))
        self.activations = nn.ModuleList(nn.PReLU() for _ in widths[2:])
        self.dropout = dropout

    def forward(self, h: Tensor) -> Tensor:
        """(batch, num_in) -> (batch, num_out)."""
        for layer, activation in zip(self.layers[:-1], self.activations, strict=True):
            h = functional.dropout(activation(layer(h)), self.dropout, self.training)
        out: Tensor = self.layers[-1](h)
        return out


class Sign(nn.Module):
    """A linear layer per hop, concatenated, then an MLP; or one MLP on all hops concatenated.

    Source: Frasca et al., SIGN: Scalable Inception Graph Neural Networks, 2020.
    """

    def __init__(
        self,
        num_in: int,
        num_arrays: int,
        num_out: int,
        num_hidden: int = 512,
        num_layers: int = 3,
        dropout: float = 0.5,
        inception: bool = True,
    ) -> None:
        """num_arrays   tensors of a batch; `num_layers` counts the layer per hop, if there is one

        inception    False: the MLP alone, as in the authors' later code
        """
        super().__init__()
        self.dropout = dropout
        wide = num_arrays * (num_hidden if inception else num_in)
        self.hops = nn.ModuleList(
            nn.Linear(num_in, num_hidden) for _ in range(num_arrays * inception)
        )
        self.activation = nn.PReLU() if inception else nn.Identity()
        self.mlp = Mlp(wide, num_hidden, num_out, num_layers - inception, dropout)

    def forward(self, x: Sequence[Tensor]) -> Tensor:
        h = torch.cat(list(x), dim=1)
        if self.hops:
            h = torch.cat([layer(hop) for layer, hop in zip(self.hops, x, strict=True)], dim=1)
            h = functional.dropout(self.activation(h), self.dropout, self.training)
        out: Tensor = self.mlp(h)
        return out


class Hoga(nn.Module):
    """Hops as tokens: one layer of gated attention among them, then a readout queried by hop 0.

    Tokens U, Q, K, V are linear in the projected hops; softmax(Q K') V is multiplied by the gate U,
    added to the hops and normalised.  The readout adds to hop 0 the others, weighted by attention.
    Source: Deng et al., Less is More: Hop-Wise Graph Attention for Scalable and Generalizable
    Learning on Circuits, DAC 2024.
    """

    def __init__(
        self,
        num_in: int,
        num_out: int,
        num_hidden: int = 256,
        dropout: float = 0.5,
    ) -> None:
        super().__init__()
        self.dropout = dropout
        self.project = nn.Linear(num_in, num_hidden)
        self.tokens = nn.Linear(num_hidden, 4 * num_hidden, bias=False)
        self.norm = nn.LayerNorm(num_hidden)
        self.ask = nn.Linear(2 * num_hidden, 1)
        self.out = nn.Sequential(
            nn.Linear(num_hidden, num_hidden), nn.LayerNorm(num_hidden), nn.ReLU(),
            nn.Dropout(dropout), nn.Linear(num_hidden, num_out),
        )  # fmt: skip

    def forward(self, x: Sequence[Tensor]) -> Tensor:
        h = self.project(torch.stack(list(x), dim=1))  # (batch, hops, hidden)
        gate, query, key, value = self.tokens(h).chunk(4, dim=2)
        mixed = functional.scaled_dot_product_attention(query, key, value)
        h = functional.relu(self.norm(h + gate * mixed))
        h = functional.dropout(h, self.dropout, self.training)
        root, others = h[:, :1], h[:, 1:]
        if others.size(1):
            pairs = torch.cat([root.expand_as(others), others], dim=2)
            weights = torch.softmax(functional.leaky_relu(self.ask(pairs)), dim=1)
            root = root + (weights * others).sum(dim=1, keepdim=True)
        out: Tensor = self.out(root[:, 0])
        return out


def make_model(
    name: str, num_in: int, num_arrays: int, num_out: int, hidden: int = 0, dropout: float = 0.5
) -> nn.Module:
    """ "sgc", "sign", "sign-mlp" or "hoga", as in the papers; on hop 0 alone, "linear" (one layer)
    or "features" (an MLP).

    hidden   0: 512, and 256 for hoga

    Raises ValueError: another name.
    """
    wide, narrow = hidden or 512, hidden or 256
    if name == "features":
        return Sign(num_in, 1, num_out, wide, 3, dropout, inception=False)
    if name in ("linear", "sgc"):
        return Sgc(num_in, num_out)
    if name in ("sign", "sign-mlp"):
        return Sign(num_in, num_arrays, num_out, wide, 3, dropout, name == "sign")
    if name == "hoga":
        return Hoga(num_in, num_out, narrow, dropout)
    raise ValueError(f"model {name!r}: expected linear, features, sgc, sign, sign-mlp or hoga")
