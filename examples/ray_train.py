"""Train GraphSAGE with Ray Train: a daemon on each node, shared by the ranks of that node.

    python examples/ray_train.py /data/store --workers 8 --gpu --mem 64G --storage /shared/runs

The store must be at the same path on every node: a local copy (`blockstore pull`), or a folder that
the nodes share.  The first rank of a node starts the daemon, with LOADERD_MEM of memory, and the
daemon ends with the last one; with an endpoint in place of the path the ranks use a daemon that
runs already, as under Slurm or Kubernetes (docs/launching.md).  After a failure Ray starts the
ranks again, from the checkpoint of the newest whole epoch.  Needs `pip install "ray[train]"`.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import ray
import torch
from ray import train
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, get_device, prepare_model
from torch.nn import functional

from clients.models import LAYERS, Layered
from clients.torch import NeighborDataset

STATE = "state.pt"
FANOUTS = (15, 10)


def train_rank(options: dict[str, Any]) -> None:
    """What each rank does.  All ranks have the same steps, so that gradients meet at each."""
    context = train.get_context()
    ranks, device = context.get_world_size(), get_device()
    data = NeighborDataset(
        options["store"], "train", FANOUTS, options["batch_size"],
        rank=context.get_world_rank(), world_size=ranks, reconnect_s=600.0,
    )  # fmt: skip
    torch.manual_seed(0)
    net = Layered(LAYERS["sage"], data.num_features, 256, data.num_classes, len(FANOUTS))
    model = prepare_model(net)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    first = 0
    if (newest := train.get_checkpoint()) is not None:
        with newest.as_directory() as folder:
            state = torch.load(Path(folder) / STATE, map_location=device)
        net.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["epoch"] + 1
    for epoch in range(first, options["epochs"]):
        data.set_epoch(epoch)
        total, seeds = 0.0, 0
        for batch in data:
            labels = batch.y[: batch.batch_size].to(device)
            logits = model(
                batch.x.float().to(device), batch.edge_index.to(device),
                batch.num_sampled_nodes, batch.num_sampled_edges,
            )  # fmt: skip
            # DistributedDataParallel takes the mean over ranks, whose last shares may be smaller
            loss = functional.cross_entropy(logits, labels, reduction="sum")
            optimizer.zero_grad()
            (loss * ranks / options["batch_size"]).backward()
            optimizer.step()
            total, seeds = total + loss.item(), seeds + len(labels)
        metrics = {"epoch": epoch, "loss": total / max(1, seeds), "seeds": seeds}
        if context.get_world_rank():
            train.report(metrics)
            continue
        with tempfile.TemporaryDirectory() as folder:
            state = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
            torch.save(state, Path(folder) / STATE)
            train.report(metrics, checkpoint=Checkpoint.from_directory(folder))


def main() -> None:
    """Start the ranks, and print what rank 0 said last."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("store", help="path on every node, or the endpoint of a daemon on each")
    parser.add_argument("--workers", type=int, default=2, help="ranks, on all nodes together")
    parser.add_argument("--gpu", action="store_true", help="a GPU for each rank")
    parser.add_argument("--cpus", type=int, default=1, help="processors for each rank")
    parser.add_argument("--mem", default="2G", help="memory of the daemon of a node")
    parser.add_argument("--batch-size", type=int, default=1000, help="of all ranks together")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--storage", help="folder that all nodes share, for checkpoints")
    given = parser.parse_args()
    ray.init(runtime_env={"env_vars": {"LOADERD_MEM": given.mem}})
    trainer = TorchTrainer(
        train_rank,
        train_loop_config={
            "store": given.store, "batch_size": given.batch_size, "epochs": given.epochs,
        },
        scaling_config=ScalingConfig(
            num_workers=given.workers, use_gpu=given.gpu,
            resources_per_worker={"CPU": given.cpus} | ({"GPU": 1} if given.gpu else {}),
            placement_strategy="PACK",  # few nodes: each needs a daemon and its memory
        ),
        run_config=RunConfig(
            storage_path=given.storage, failure_config=FailureConfig(max_failures=3)
        ),
    )  # fmt: skip
    print(trainer.fit().metrics)


if __name__ == "__main__":
    main()
