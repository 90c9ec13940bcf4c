"""Quality of a partition: the edges it cuts, its balance, and the share of neighbours it keeps.

If B of k partitions, chosen at random, are loaded, the source of a loaded node's in-edge is loaded
too with probability w + (1 - w) (B - 1) / (k - 1), where w is the share of in-edges that come from
the node's own partition.
"""

from contextlib import closing
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockstore.format import Partitioning
from preprocess.kernels.partition import count_inside, count_members
from preprocess.partition.partition import PartitionOptions
from preprocess.pipeline.progress import Progress
from preprocess.stages.columns import ColumnFile, scan_columns
from preprocess.stages.labels import NodeClasses


class KeptEdges(NamedTuple):
    """Shares of the edges that a partition cuts, and keeps together."""

    cut: float
    inside: float  # of edges into training nodes; of all edges if there are no training nodes


def count_kept(
    columns: ColumnFile,
    partition: NDArray[Any],
    classes: NodeClasses,
    share: int,
    progress: Progress,
) -> KeptEdges:
    """Measure in one read of all columns, with `share` bytes; nodes are numbered like columns.

    partition  uint16 or uint32 (num_nodes,)
    """
    totals = np.zeros(3, np.int64)
    node, skip = 0, 0
    with closing(scan_columns(columns, "kept edges", share, progress)) as pieces:
        for sources in pieces:
            node, skip = count_inside(
                node, skip, columns.degrees, sources, partition, classes.of_node,
                classes.num_classes, totals,
            )  # fmt: skip
    inside, train, train_inside = totals.tolist()
    cut = 1 - inside / columns.num_edges if columns.num_edges else 0.0
    return KeptEdges(cut, train_inside / train if train else 1 - cut)


def kept_share(inside: float, num_partitions: int, part: int) -> float:
    """Expected share of in-edges kept if one in `part` partitions, at least one, is loaded."""
    loaded = max(1, num_partitions // part)
    return inside + (1 - inside) * (loaded - 1) / max(1, num_partitions - 1)


def label_divergence(table: NDArray[np.int64]) -> tuple[float, float]:
    """(mean, maximum) over partitions of KL(labels of the partition, all labels), in nats.

    table   int64 (classes, k)   numbers of training nodes; partitions without any are ignored
    """
    total = table.sum()
    if not total:
        return 0.0, 0.0
    sizes = table.sum(axis=0)
    found = np.zeros(table.shape[1])
    for row in table:
        share = row / np.maximum(sizes, 1)
        mean = row.sum() / total
        here = row > 0
        found[here] += share[here] * np.log(share[here] / mean)
    found = found[sizes > 0]
    return max(0.0, float(found.mean())), max(0.0, float(found.max()))


def make_report(
    settings: PartitionOptions,
    classes: NodeClasses,
    partition: NDArray[Any],
    kept: KeptEdges,
    evaluations: int,
) -> Partitioning:
    """All figures of a partition, rounded to nine digits so that stores do not vary by machine."""
    k = settings.num_partitions
    table = np.zeros((classes.num_classes + 1, k), np.int64)
    count_members(partition, classes.of_node, table)
    train = table[:-1]
    num_train, num_classes = int(train.sum()), int((train.sum(axis=1) > 0).sum())
    mean, worst = label_divergence(train)
    return Partitioning(
        method=settings.method,
        num_partitions=k,
        slack=float(settings.slack),
        gamma=float(settings.gamma),
        passes=settings.passes if settings.is_streamed else 0,
        num_train=num_train,
        num_classes=num_classes,
        cut=_rounded(kept.cut),
        inside=_rounded(kept.inside),
        kept_8=_rounded(kept_share(kept.inside, k, 8)),
        kept_16=_rounded(kept_share(kept.inside, k, 16)),
        node_balance=_rounded(greatest_over_mean(table.sum(axis=0))),
        train_balance=_rounded(greatest_over_mean(train.sum(axis=0))),
        kl_mean=_rounded(mean),
        kl_max=_rounded(worst),
        kl_random=_rounded(max(0, num_classes - 1) * k / (2 * num_train) if num_train else 0.0),
        evaluations=evaluations,
    )


def _rounded(value: float) -> float:
    return float(f"{value:.9g}")


def greatest_over_mean(sizes: NDArray[Any], empty: float = 0.0) -> float:
    """The greatest size over the mean; `empty`: the result if there is nothing."""
    total = float(sizes.sum())
    return float(sizes.max()) * sizes.size / total if total else empty


def partition_lines(found: Partitioning) -> list[str]:
    passes = f", {found.passes} passes, {found.evaluations:,} scores" if found.passes else ""
    lines = [
        f"{found.num_partitions:,} by {found.method}{passes}",
        f"cut {found.cut:.3f} of the edges; largest {found.node_balance:.2f} of the mean",
    ]
    whose = "neighbours"
    if found.num_train:
        whose = "training nodes' neighbours"
        lines.append(
            f"training nodes: at most {found.train_balance:.2f} of the mean; divergence of labels "
            f"{found.kl_mean:.2g} on average, {found.kl_max:.2g} at most (random: "
            f"{found.kl_random:.2g})"
        )
    lines.append(
        f"{whose} kept: {found.kept_8:.3f} with 1/8 of the partitions, {found.kept_16:.3f} "
        "with 1/16"
    )
    return lines
