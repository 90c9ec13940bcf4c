"""Mean over the in-neighbors of each node, by several kernels."""

import warnings
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

# (rows of nodes, sources, targets, edges of each target) -> mean over the sources of each target
Kernel = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def mean_of_neighbors(
    h: Tensor, edge_index: Tensor, num_targets: int, kernel: str = "embedding_bag"
) -> Tensor:
    """Mean of h over the sources of each target's edges; 0 for a target without edges.

    h           (num_nodes, width)
    edge_index  int64 (2, num_edges)    targets below `num_targets`, ascending in sampled batches
    kernel      of `KERNELS`; the same up to rounding

    When compiled or captured, targets must be ascending: a check would break the graph.
    """
    src, dst = edge_index[0], edge_index[1]
    looks = kernel != "index_add" and not torch.compiler.is_compiling()
    if looks and bool((dst[1:] < dst[:-1]).any()):
        dst, order = torch.sort(dst, stable=True)
        src = src[order]
    return KERNELS[kernel](h, src, dst, count_edges(dst, num_targets))


def count_edges(targets: Tensor, num_targets: int) -> Tensor:
    """int64 (num_targets,): edges of each; unlike `bincount`, of a shape known beforehand."""
    return targets.new_zeros(num_targets).scatter_add_(0, targets, torch.ones_like(targets))


def _by_bags(h: Tensor, src: Tensor, _: Tensor, counts: Tensor) -> Tensor:
    """One embedding bag per target: never materializes a row per edge."""
    return functional.embedding_bag(src, h, counts.cumsum(0) - counts, mode="mean")


def _by_adding(h: Tensor, src: Tensor, dst: Tensor, counts: Tensor) -> Tensor:
    """The only kernel that takes targets in any order and never makes the host wait."""
    total = h.new_zeros(counts.numel(), h.size(1)).index_add(0, dst, h[src])
    return total / counts.clamp(min=1)[:, None]


def _by_segments(h: Tensor, src: Tensor, _: Tensor, counts: Tensor) -> Tensor:
    total: Tensor = torch.segment_reduce(h[src], "sum", lengths=counts, axis=0, unsafe=True)
    return total / counts.clamp(min=1)[:, None]


def _by_product(h: Tensor, src: Tensor, dst: Tensor, counts: Tensor) -> Tensor:
    """Product of a sparse CSR matrix, whose rows add up to 1, and h."""
    starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    weights = (1 / counts.to(h.dtype))[dst]
    with warnings.catch_warnings():  # torch says that CSR is in beta state
        warnings.simplefilter("ignore", UserWarning)
        matrix = torch.sparse_csr_tensor(
            starts, src, weights, size=(counts.numel(), h.size(0)), check_invariants=False
        )
        product: Tensor = matrix @ h
    return product


KERNELS: dict[str, Kernel] = {
    "embedding_bag": _by_bags,
    "index_add": _by_adding,
    "segment_reduce": _by_segments,
    "csr": _by_product,
}
