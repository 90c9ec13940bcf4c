"""GraphSAGE on features looked up by node id, so that wide sparse ones need no dense rows.

The model is that of `clients.models`; its operations are made for one thread, where torch's own
embedding bag and dropout take most of a step's time.
"""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from tools.sparse_rows import edge_means, edge_means_gradient, sparse_gradient, sparse_times


class _SparseTimes(torch.autograd.Function):
    """Rows of a sparse matrix times a weight."""

    @staticmethod
    def forward(context: Any, weight: Tensor, nodes: Any, matrix: tuple[Any, ...]) -> Tensor:
        context.nodes, context.matrix, context.rows = nodes, matrix, weight.size(0)
        out = torch.empty(nodes.size, weight.size(1))
        sparse_times(nodes, *matrix, weight.detach().numpy(), out.numpy())
        return out

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        out = torch.empty(context.rows, gradients[0].size(1))
        gradient = gradients[0].contiguous().numpy()
        sparse_gradient(context.nodes, *context.matrix, gradient, out.numpy())
        return out, None, None


class _EdgeMeans(torch.autograd.Function):
    """Mean of rows over the edges of each target; targets ascend."""

    @staticmethod
    def forward(context: Any, rows: Tensor, edge_index: Tensor, targets: int) -> Tensor:
        context.ends, context.rows = edge_index.numpy(), rows.size(0)
        out = torch.empty(targets, rows.size(1))
        edge_means(*context.ends, rows.detach().contiguous().numpy(), out.numpy())
        return out

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        out = torch.empty(context.rows, gradients[0].size(1))
        edge_means_gradient(*context.ends, gradients[0].contiguous().numpy(), out.numpy())
        return out, None, None


class Features:
    """Features of all nodes of a folder in the plain layout, dense or sparse."""

    def __init__(self, folder: Path, noise: float) -> None:
        """`noise`: of standard deviation `noise` times that of the (dense) features."""
        self._dense: Tensor | None = None
        if (folder / "node_feat.npy").exists():
            x = np.load(folder / "node_feat.npy").astype(np.float32)
            if noise:
                rng = np.random.default_rng(0)
                x += noise * x.std() * rng.standard_normal(x.shape, np.float32)
            self._dense, self.width = torch.from_numpy(x), x.shape[1]
            return
        names = ("indptr", "indices", "data")
        self._matrix = tuple(np.load(folder / f"node_feat_{n}.npy") for n in names)
        self.width = json.loads((folder / "node_feat_csr.json").read_text())["shape"][1]

    def times(self, nodes: Tensor | None, weight: Tensor) -> Tensor:
        """(nodes, width) @ weight (width, columns); None: of all nodes."""
        if self._dense is not None:
            return (self._dense if nodes is None else self._dense[nodes]) @ weight
        own = np.arange(self._matrix[0].size - 1) if nodes is None else nodes.numpy()
        product: Tensor = _SparseTimes.apply(weight, own, self._matrix)  # type: ignore[no-untyped-call]
        return product


class WideSage(nn.Module):
    """GraphSAGE with mean aggregation, ReLU and dropout between layers."""

    def __init__(
        self, features: Features, hidden: int, classes: int, num_layers: int, dropout: float
    ) -> None:
        super().__init__()
        self._features, self._dropout = features, dropout
        self._coins = np.random.default_rng(int(torch.randint(1 << 62, (1,))))
        widths = [features.width, *[hidden] * (num_layers - 1), classes]
        self.neighbor, self.own, self.bias = (nn.ParameterList() for _ in range(3))
        for num_in, num_out in pairwise(widths):
            bound = num_in**-0.5
            for weights in (self.neighbor, self.own):
                weights.append(torch.empty(num_in, num_out).uniform_(-bound, bound))
            self.bias.append(torch.empty(num_out).uniform_(-bound, bound))

    def forward(
        self, nodes: Tensor | None, edge_index: Tensor, targets: list[int], edges: list[int]
    ) -> Tensor:
        """Logits of the first targets[-1] nodes.

        nodes       ids (num_nodes,), or None: all of the graph
        edge_index  int64 (2, num_edges)    targets ascending
        targets     nodes that each layer gives, the first of those before
        edges       edges of each layer, the first of all
        """
        h = torch.empty(0)
        for i, (num_targets, num_edges) in enumerate(zip(targets, edges, strict=True)):
            if i == 0:
                message = self._features.times(nodes, self.neighbor[0])
                inner = None if nodes is None else nodes[:num_targets]
                own = self._features.times(inner, self.own[0])
            else:
                h = self._drop(functional.relu(h))
                message, own = h @ self.neighbor[i], h[:num_targets] @ self.own[i]
            part = edge_index[:, :num_edges]
            mean: Tensor = _EdgeMeans.apply(message, part, num_targets)  # type: ignore[no-untyped-call]
            h = mean + own + self.bias[i]
        return h

    def _drop(self, h: Tensor) -> Tensor:
        """Dropout with a probability in 256ths."""
        limit = round(self._dropout * 256)
        if not self.training or not limit:
            return h
        kept = np.frombuffer(self._coins.bytes(h.numel()), np.uint8) >= limit
        return h * (torch.from_numpy(kept).view(h.shape) * (256 / (256 - limit)))
