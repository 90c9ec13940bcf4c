"""One number for an epoch: sha256 over every array served, `python -m tools.digest ENDPOINT`.

Two daemons whose digests agree serve the same batches, whatever their budget, workers or order.
"""

import argparse
import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor

from clients.torch import Batch, NeighborDataset


def epoch_digest(batches: Iterable[Batch]) -> str:
    """sha256, in hex, over names, dtypes, shapes and bytes of all arrays, batch by batch."""
    found = hashlib.sha256()
    for batch in batches:
        fields = ("x", "y", "edge_index", "n_id", "e_id", "input_id")
        arrays = {name: getattr(batch, name) for name in fields} | batch.features
        found.update(repr((batch.epoch, batch.step, batch.batch_size)).encode())
        found.update(repr((batch.num_sampled_nodes, batch.num_sampled_edges)).encode())
        for name, tensor in arrays.items():
            if tensor is not None:
                found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
                found.update(_bytes(tensor))
    return found.hexdigest()


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data


def main(words: list[str] | None = None) -> str:
    """Print the digest, and return it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("endpoint", help="ipc:///path/of/the/socket")
    parser.add_argument("--split", default="train")
    parser.add_argument("--num-neighbors", type=int, nargs="+", default=(15, 10, 5))
    parser.add_argument("--batch-size", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epoch", type=int, default=0)
    parser.add_argument("--edge-ids", action="store_true")
    given = parser.parse_args(words)
    data = NeighborDataset(
        given.endpoint,
        given.split,
        given.num_neighbors,
        given.batch_size,
        seed=given.seed,
        return_e_id=given.edge_ids,
    )
    data.set_epoch(given.epoch)
    digest = epoch_digest(data)
    data.close()
    print(digest)
    return digest


if __name__ == "__main__":
    main()
