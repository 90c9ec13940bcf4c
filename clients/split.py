"""The piece of each batch that one owner computes, for trainers of plan "split".

The daemon builds each batch once for all owners, and says which owner each node has.  Every trainer
takes its own piece: the edges into its nodes, its nodes' rows, and the exchanges with other owners.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple, Unpack

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from blockstore.kernels.split import WORD_BITS, OwnedNodes, split_hop
from clients.batch import BatchReader, ItemOrder
from clients.connection.buffers import BufferPool, Memory
from clients.connection.session import Session
from clients.dataset import gather_threads
from clients.records import TensorRecord
from clients.torch import Batch, Fanouts, NodeSampledDataset, SeededOptions, only_type
from loaderd.api.errors import Refused
from loaderd.api.protocol import BatchReady
from loaderd.api.tcp import SCHEME


@dataclass(slots=True, repr=False)
class Exchange(TensorRecord):
    """The rows that an owner sends and receives for the edges of one hop."""

    send: Tensor  # int64: own nodes, grouped by receiving owner, each group in that owner's order
    recv: Tensor  # int64: places of received rows among the remote nodes, grouped by sending owner
    send_counts: list[int]  # by owner
    recv_counts: list[int]


@dataclass(slots=True, repr=False, kw_only=True)
class SplitBatch(Batch):
    """The nodes of a batch that belong to one owner, and the edges into them.

    Local ids: own nodes first, seeds before the nodes found by each hop, in the order of the batch;
    then remote nodes, by the first hop that needs them, by owner, and in the order in which that
    hop's edges name them.  The fields of a `Batch` describe own nodes, seeds and edges, of which
    there may be none; with `mixed_rows`, `x` and `features` have remote nodes, too.
    """

    owner: int
    num_owners: int
    step_seeds: int  # seeds of all owners
    num_remote_nodes: list[int]  # by hop: those that no earlier hop needs
    # by hop: frontier "new": rows that no earlier hop needs; "layer": all that its edges need
    exchanges: list[Exchange]


class BatchStructure(NamedTuple):
    """The sampled structure of a whole batch; nodes are places in the batch."""

    owner: NDArray[Any]  # uint8 or uint16 (nodes,)
    nodes_per_hop: Sequence[int]  # the seeds, then those found by each hop
    src: NDArray[np.uint32]  # (edges,) hop by hop
    counts: Sequence[NDArray[np.uint32]]  # by hop: edges of each node that it expands
    layers: bool  # a hop expands all nodes found so far; False: those found by the previous hop


class OwnedPiece(NamedTuple):
    """One owner's piece of a batch."""

    own: NDArray[np.int64]  # places of its nodes in the batch
    remote: NDArray[np.int64]  # places of other owners' nodes that its edges need
    local: NDArray[np.int64]  # (nodes,) local id of each of these; -1 for all others
    edges: NDArray[np.int64]  # (2, own edges) local ids
    nodes_per_hop: list[int]
    remote_per_hop: list[int]
    edges_per_hop: list[int]
    exchanges: list[Exchange]


def split_structure(
    whole: BatchStructure, mine: int, num_owners: int, memory: Memory, scratch: Memory
) -> OwnedPiece:
    """The piece of owner `mine`, in time linear in the nodes and edges of the whole batch.

    memory    for `edges`
    scratch   for temporary arrays, and for `local`
    """
    owner, num = whole.owner, whole.owner.size
    own = np.flatnonzero(owner == mine)
    local = scratch.empty((num,), np.int64)
    local.fill(-1)
    local[own] = np.arange(own.size)
    needed_by = scratch.empty((num, -(-num_owners // WORD_BITS)), np.uint64)
    nodes = OwnedNodes(mine, owner, local, needed_by)
    starts = [0, *accumulate(whole.nodes_per_hop)]
    lows = [0 if whole.layers else start for start in starts[: len(whole.counts)]]
    edges_per_hop = [
        int(counts[owner[low : low + counts.size] == mine].sum(dtype=np.int64))
        for low, counts in zip(lows, whole.counts, strict=True)
    ]
    edges = memory.empty((2 * sum(edges_per_hop),), np.int64).reshape(2, -1)
    remote, exchanges, edge, at = [np.empty(0, np.int64)], list[Exchange](), 0, 0
    num_local = own.size
    for hop, counts in enumerate(whole.counts):
        # "new": rows received for earlier hops are still there; "layer": each layer exchanges all
        if whole.layers or hop == 0:
            needed_by.fill(0)
        num_edges, num_own = int(counts.sum(dtype=np.int64)), edges_per_hop[hop]
        others = num_edges - num_own
        needed, sent = (scratch.empty((n,), np.uint32) for n in (num_own, others))
        sent_to = scratch.empty((others,), np.uint16)
        sources, targets = edges[:, at : at + num_own]
        num_needed, num_sent = split_hop(
            whole.src[edge : edge + num_edges], counts, lows[hop], nodes, sources, targets,
            needed, sent, sent_to,
        )  # fmt: skip
        came, recv_counts = _group_by_owner(
            needed[:num_needed], owner[needed[:num_needed]], num_owners
        )
        send, send_counts = _group_by_owner(sent[:num_sent], sent_to[:num_sent], num_owners)
        # numbered only now, as the order of edges differs from that of owners
        new = came[local[came] < 0]
        local[new] = np.arange(num_local, num_local + new.size)
        remote.append(new)
        num_local += new.size
        exchanges.append(
            Exchange(
                torch.from_numpy(send), torch.from_numpy(local[came] - own.size), send_counts,
                recv_counts,
            )
        )  # fmt: skip
        sources[:] = local[sources]
        edge, at = edge + num_edges, at + num_own
    return OwnedPiece(
        own, np.concatenate(remote), local, edges, np.diff(np.searchsorted(own, starts)).tolist(),
        [new.size for new in remote[1:]], edges_per_hop, exchanges,
    )  # fmt: skip


def _group_by_owner(
    items: NDArray[np.uint32], owner: NDArray[Any], num_owners: int
) -> tuple[NDArray[np.int64], list[int]]:
    """Items grouped by owner, each group in the given order, and their number by owner."""
    order = np.argsort(owner, kind="stable")
    return items[order].astype(np.int64), np.bincount(owner, minlength=num_owners).tolist()


class SplitReader(BatchReader):
    """Reads one owner's pieces of the batches of a session: the fields of a `SplitBatch`."""

    def __init__(
        self, session: Session, pool: Memory, threads: int, owner: int, mixed_rows: bool
    ) -> None:
        super().__init__(session, pool, threads)
        self._owner, self._mixed_rows = owner, mixed_rows
        self._scratch = BufferPool()

    def read(self, step: int) -> dict[str, Any]:
        """The piece of the batch of `step`, all of it copied and released; waits for the daemon."""
        ready = self._session.receive(BatchReady, step)
        blob, attached = ready.structure, self._session.attached
        named = {array.name: array for array in blob.arrays}
        src = self._scratch.empty((named["src"].length,), np.uint32)
        whole = BatchStructure(
            self._writable(blob, named["owner"]),
            ready.nodes_per_hop,
            self._copy(blob, named["src"], src),
            [self._writable(blob, named[f"counts:{h}:0"]) for h in range(len(ready.edges_per_hop))],
            attached.resolved.frontier == "layer",
        )
        piece = split_structure(whole, self._owner, attached.num_owners, self._pool, self._scratch)
        own, num_seeds = piece.own, piece.nodes_per_hop[0]
        n_id = self._pool.empty((own.size,), np.int64)
        n_id[:] = self._narrow(blob, named["n_id"])[own]
        input_id = self._narrow(blob, named["input_id"])[own[:num_seeds]]
        items = self._items(whole, piece)
        counts = [items.count(0)] * len(attached.rows)
        if self._mixed_rows:  # a device's cache looks rows up by `n_id`, which lacks remote nodes
            self._pool.received(self._session.attachment.data, [])
        else:
            self._announce(ready, counts)
        rows = self._rooms(self._pool, counts)
        self._gather_groups(ready, items, rows)
        if "y" in rows:  # no loss is computed for remote nodes
            rows["y"] = rows["y"][: own.size]
        return dict(
            epoch=ready.epoch,
            step=step,
            owner=self._owner,
            num_owners=attached.num_owners,
            batch_size=num_seeds,
            step_seeds=ready.num_seeds,
            n_id=torch.from_numpy(n_id),
            input_id=torch.from_numpy(input_id.astype(np.int64, copy=False)),
            edge_index=torch.from_numpy(piece.edges),
            e_id=None,
            num_sampled_nodes=piece.nodes_per_hop,
            num_remote_nodes=piece.remote_per_hop,
            num_sampled_edges=piece.edges_per_hop,
            exchanges=piece.exchanges,
            frontier=attached.resolved.frontier,
            **only_type(self._row_fields(rows)),
        )

    def _items(self, whole: BatchStructure, piece: OwnedPiece) -> ItemOrder:
        """The nodes whose rows are wanted, as the only type; all others have no type."""
        if not self._mixed_rows:
            own, others = piece.own, whole.owner != self._owner
            return ItemOrder([0, own.size], others, own, piece.local, some=True)
        mixed = np.concatenate([piece.own, piece.remote])
        return ItemOrder([0, mixed.size], piece.local < 0, mixed, piece.local, some=True)


class SplitDataset(NodeSampledDataset[SplitBatch]):
    """One owner's pieces of the batches of a store of one node type and one relation.

    The owners' trainers iterate the same epochs at the same time; each batch is built once for all.
    With `world_size`, it is each rank's share of a batch that is split.
    """

    batch_type = SplitBatch

    def __init__(
        self,
        endpoint: str,
        split: str = "train",
        num_neighbors: Fanouts = (15, 10, 5),
        batch_size: int = 1000,
        *,
        owners: str,
        owner: int,
        num_owners: int = 0,
        mixed_rows: bool = False,
        **options: Unpack[SeededOptions],
    ) -> None:
        """As `NeighborDataset`; the daemon refuses options that cannot be combined with splitting.

        owners       name of an owner map of the store
        owner        which of its owners this trainer is
        num_owners   number of owners that the map must have; 0: any number
        mixed_rows   also read feature rows of remote nodes, instead of exchanging them; needs a
                     daemon on this host
        """
        if not owners:
            raise Refused("owners: found '', expected the name of an owner map of the store")
        if mixed_rows and endpoint.startswith(SCHEME):
            raise Refused(
                f"{endpoint}: mixed_rows takes rows out of the memory of a daemon on this host, "
                "expected an endpoint ipc://; leave mixed_rows out"
            )
        super().__init__(endpoint, split, num_neighbors, batch_size, **options)
        self._ask_for(owners=owners)
        self._owner, self._num_owners, self._mixed_rows = owner, num_owners, mixed_rows

    def _make_reader(self, session: Session) -> SplitReader:
        name, found = self._request.owners, session.attached.num_owners
        if self._num_owners not in (0, found):
            raise Refused(
                f"{self.endpoint}: wrong number of owners: the map {name!r} has {found}, expected "
                f"{self._num_owners}, one for each trainer; make another map by `blockstore owners`"
            )
        if not 0 <= self._owner < found:
            raise Refused(
                f"{self.endpoint}: owner {self._owner}: the map {name!r} has {found} owners, "
                f"expected one from 0 to {found - 1}"
            )
        return SplitReader(session, self.memory, gather_threads(), self._owner, self._mixed_rows)
