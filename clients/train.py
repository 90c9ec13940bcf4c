"""Train GraphSAGE, GAT or GCN from a daemon: `python -m clients.train ENDPOINT --model gat`.

Under `torchrun --nproc-per-node 2 -m clients.train ENDPOINT` the processes share each batch.  With
`--plan split --owners NAME` each computes the nodes that it owns by a map of the store; if there
are D times as many processes as owners, they share each batch D ways, and split each share.  With
`--placement home --owners NAME --frontier layer` each trains the seeds that it owns.  With
`--checkpoint FILE` a run that was stopped goes on at the next step, to the same weights as if it
had not been.  `--dropout keyed` gives a node the same mask for any number of processes; otherwise
masks depend on (seed, epoch, step, rank).
"""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from clients.dataset import SteppedDataset
from clients.large.batch import PLACE, FirstLayerRows, FusedBatch, PartitionDraws
from clients.large.dataset import LargeDataset
from clients.large.history import HistoricalEmbeddings, HistoryTables, TableSpec
from clients.large.order import Order, measure_order
from clients.large.padding import PaddedBatch, Padding, ReplayedStep, check_recordable
from clients.micrograph.dataset import HomeBatch, HomeDataset
from clients.micrograph.training import HomeTraining
from clients.models import (
    LAYERS,
    DropoutKeys,
    Layered,
    OrderedLayer,
    RelationalModel,
    RowExchange,
)
from clients.ranks import FlatGradients, Ranks, SplitPlace, joined
from clients.settings import (
    NotTrainable,
    Settings,
    check_settings,
    home_options,
    parse_fanouts,
    run_command,
)
from clients.shuffle import Shuffle
from clients.split import SplitBatch, SplitDataset
from clients.torch import Batch, HeteroBatch, HeteroDataset, NeighborDataset, Prefetcher, prefetch

UNLABELLED = -1

AnyBatch = Batch | HeteroBatch
AnyDataset = NeighborDataset | HeteroDataset | LargeDataset | SplitDataset | HomeDataset


@dataclass(slots=True)
class Clock:
    """Seconds spent waiting for batches, and in total."""

    waiting_s: float = 0.0
    total_s: float = 0.0

    def report(self, epoch: int, loss: float, accuracy: float) -> str:
        """The line that is printed after an epoch."""
        return (
            f"epoch {epoch}: loss {loss:.4f}, valid accuracy {accuracy:.4f}, {self.total_s:.2f} s, "
            f"{self.waiting_s / self.total_s:.0%} of it waiting for data"
        )


class Classes(nn.Module):
    """Logits (batch_size, classes) of a batch's seeds, of one node type or several."""

    def __init__(self, net: nn.Module, compiles: bool = False) -> None:
        super().__init__()
        self.net = net
        self.compiled = torch.compile(net.forward, dynamic=False) if compiles else net.forward

    def forward(
        self,
        batch: AnyBatch,
        keys: DropoutKeys | None = None,
        exchange: RowExchange | None = None,
        history: HistoricalEmbeddings | None = None,
    ) -> torch.Tensor:
        """`exchange`: for a `SplitBatch` of several owners; `history`: for large batches' steps."""
        logits: torch.Tensor
        if isinstance(batch, HeteroBatch):
            logits = self.net(batch, keys)
        else:
            assert batch.x is not None
            counts = (batch.num_sampled_nodes, batch.num_sampled_edges)
            x, rule = batch.x.float(), batch.frontier
            if isinstance(batch, FusedBatch):
                exchange = FirstLayerRows(batch)
            seen = None if history is None else partial(history, places=batch.features[PLACE])
            net = self.compiled if isinstance(batch, PaddedBatch) else self.net
            logits = net(x, batch.edge_index, *counts, rule, exchange, keys, seen)
        return logits


def seed_labels(batch: AnyBatch) -> torch.Tensor:
    """Labels of the seeds.  Raises NotTrainable."""
    y = batch.y.get(batch.input_type) if isinstance(batch, HeteroBatch) else batch.y
    if y is None or y.dim() != 1:
        raise NotTrainable("the store has not one label a node; ingest a graph that has")
    if y.is_floating_point():
        raise NotTrainable(f"labels are {y.dtype}, expected integers: classes")
    return y[: batch.batch_size]


def seed_classes(data: SteppedDataset[Any]) -> int:
    """Classes of the labels of the seeds' type."""
    found = data.num_classes
    return found if isinstance(found, int) else found[data.attached().resolved.seed_type]


def sum_of_losses(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum of the cross entropy over the labelled rows, and their number; both 0-d."""
    loss = functional.cross_entropy(logits, labels, ignore_index=UNLABELLED, reduction="sum")
    return loss, (labels != UNLABELLED).sum()


def say(line: str) -> None:
    """Print a line of the command's output, unbuffered."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def optimize(
    batches: Iterable[Any],
    update: Callable[[Any], tuple[float, int]],
    goes_on: Callable[[], bool] = lambda: True,
) -> tuple[float, Clock]:
    """Take a step for each batch; returns the mean loss over labelled seeds, and the times.

    update    takes a step; returns the sum of the losses and their number, over all ranks
    goes_on   called after each step; False ends the loop
    """
    clock, total, seeds = Clock(), 0.0, 0
    begun = asked = time.perf_counter()
    for batch in batches:
        clock.waiting_s += time.perf_counter() - asked
        loss, labelled = update(batch)
        total += loss
        seeds += labelled
        if not goes_on():
            break
        asked = time.perf_counter()
    clock.total_s = time.perf_counter() - begun
    return total / max(seeds, 1), clock


class Trainer:
    """One training run: a model, its data and its progress."""

    def __init__(
        self, settings: Settings, ranks: Ranks, observe: Callable[[AnyBatch], None] | None = None
    ) -> None:
        """`observe`: called with each batch that is trained on."""
        self._settings, self._ranks, self._observe = settings, ranks, observe
        check_settings(settings)
        home = home_options(settings, ranks.world_size) if settings.placement else None
        torch.manual_seed(settings.seed)
        self._device = ranks.device(settings.device)
        folder = Path(settings.checkpoint).parent
        if settings.checkpoint and not (folder.is_dir() and os.access(folder, os.W_OK)):
            raise ValueError(
                f"checkpoint {settings.checkpoint}: {folder} is no folder that can be written to; "
                "make it, or choose another one"
            )
        self._place = SplitPlace(ranks.rank, ranks.world_size)
        if settings.plan == "split":
            with contextlib.closing(self.open_split("train")) as data:
                attached = data.attached()
            ranks.refuse_different(f"owner map {settings.owners!r}", attached.owners)
            self._place = ranks.split_place(attached.num_owners)
        self.model = Classes(self._make_net(), settings.compile).to(self._device)
        self._gradients = FlatGradients(self.model, ranks)
        self._replayed = self._make_replayed() if settings.cuda_graph else None
        on_device = self._replayed is not None and self._device.type == "cuda"
        self._optimizer = torch.optim.Adam(
            self.model.parameters(), settings.learning_rate, capturable=on_device
        )
        data = self._open_training()
        self._data = self.ahead(data)
        self._home: HomeTraining | None = None
        if home is not None:
            assert isinstance(data, HomeDataset)
            ranks.refuse_different(f"owner map {settings.owners!r}", data.attached().owners)
            self._home = HomeTraining(home, data, self._gradients, self._optimizer, ranks)
        self._steps = 0  # taken, in all epochs
        self._due = False  # whether a checkpoint is to be saved
        self._first_epoch = 0
        self._order: Order | None = None
        self.padding = Padding() if settings.compile or settings.cuda_graph else None
        self.history = self._open_history(data) if settings.history else None
        if settings.checkpoint and Path(settings.checkpoint).exists():
            self._load(settings.checkpoint)
        self._set_order()

    def open_split(self, split: str, **options: Any) -> AnyDataset:
        """The dataset of this rank's part of a split."""
        settings, place = self._settings, self._place
        names = ("num_neighbors", "frontier", "batch_size", "seed", "store")
        wanted: dict[str, Any] = {name: getattr(settings, name) for name in names}
        wanted |= {"rank": place.share, "world_size": place.shares, "shuffle": split == "train"}
        make: Any = options.pop("make", HeteroDataset if settings.input_type else NeighborDataset)
        owners = options.pop("owners", settings.owners)
        if owners and settings.placement:
            make = HomeDataset
            wanted |= {"plan": settings.plan, "owners": owners}
        elif owners:
            make = SplitDataset
            wanted |= {"owners": owners, "owner": place.owner, "num_owners": place.owners}
            wanted |= {"mixed_rows": settings.mixed_rows}
        else:
            wanted["plan"] = "auto" if settings.plan in ("split", "large") else settings.plan
            wanted["input_type"] = settings.input_type
            wanted["macro_partitions"] = settings.macro_partitions
        data: AnyDataset = make(settings.endpoint, split=split, **(wanted | options))
        return data

    def _open_training(self) -> AnyDataset:
        """The dataset of this rank's part of the training split, for the plan."""
        settings = self._settings
        if settings.plan != "large":
            return self.open_split("train")
        names = ("draws", "large_batches", "second_fanout")
        large = {name: getattr(settings, name) for name in names}
        return self.open_split("train", make=LargeDataset, **large)

    def _make_replayed(self) -> ReplayedStep:
        """Training steps that are replayed as one CUDA graph.  Raises ValueError."""
        check_recordable(self._device, self._ranks.world_size)
        for layer in self.model.modules():
            if isinstance(layer, OrderedLayer):
                layer.kernel = "index_add"  # others make the host wait

        def backward(batch: PaddedBatch) -> torch.Tensor:
            self._gradients.clear()
            self._gradients.add(*self._loss_of(batch))
            return self._gradients.mean_on_device(everywhere=False)

        return ReplayedStep(backward, lambda: self._optimizer.step())

    def _open_history(self, data: AnyDataset) -> HistoricalEmbeddings:
        """Tables of historical embeddings for this model and store.  Raises ValueError."""
        settings, attached = self._settings, data.attached()
        assert attached.partitions is not None
        spec = TableSpec(
            attached.resolved.fingerprint, settings.model, len(settings.num_neighbors) - 1,
            attached.partitions.first[-1], settings.hidden, settings.history_dtype,
        )  # fmt: skip
        return HistoricalEmbeddings(HistoryTables(settings.history, spec, self._ranks), self._ranks)

    def _set_order(self) -> None:
        """Use the order of each layer that rank 0 measures as the fastest, or had measured."""
        data = self._data.dataset
        if self._settings.order != "measured" or not isinstance(data, LargeDataset):
            return
        net = self.model.net
        assert isinstance(net, Layered)
        if self._order is None:
            measured = None
            if self._ranks.rank == 0:
                first = self._open_training()
                assert isinstance(first, LargeDataset)
                measured = measure_order(net, first.first_large_batch().to(self._device))
                first.close()
            self._order = Order(*self._ranks.of_first(measured))
        self._order.apply(net)
        data.fused = self._order.fused

    def ahead(self, data: AnyDataset) -> Prefetcher[Any]:
        """The dataset's batches on the device; the next ones are gathered while one is trained on.

        All ranks attach before any of them begins: a later one may find no place in their stream.
        """
        # only one large batch is read ahead: each takes as much memory as many batches
        ahead = prefetch(data, self._device, depth=1 if isinstance(data, LargeDataset) else 2)
        data.attached()
        self._ranks.barrier()
        return ahead

    def run(self) -> float:
        """Train, print a line per epoch, and return the accuracy on the test split."""
        settings = self._settings
        for epoch in range(self._first_epoch, settings.epochs):
            if self._home is not None:
                self._home.begin_epoch()
            self._data.set_epoch(epoch)
            loss, clock = self._train_epoch()
            if self.padding is not None and not self.padding.settled and not self._ended:
                self.padding.settle(self._ranks.maximum(self.padding.maxima))
            if self._ended:
                saved = self._settings.checkpoint
                where = f"saved to {saved}" if saved else "not saved: give --checkpoint FILE"
                self._say(f"stopped after {self._steps} steps in all, {where}")
                break
            self._say(clock.report(epoch, loss, self.accuracy("valid")))
        self._data.close()
        if self.history is not None:
            self.history.tables.close()
        if self.padding is not None:
            self._say(f"{self.padding.larger} batches were too large to be padded")
        result = self.accuracy("test")
        self._say(f"test accuracy {result:.4f}")
        return result

    @torch.no_grad()
    def accuracy(self, split: str) -> float:
        """Share of labelled seeds whose label is the most likely class, over all ranks."""
        self.model.eval()
        right = seeds = 0
        with self.ahead(self.open_split(split)) as data:  # takes no memory while the model trains
            for batch in data:
                label = seed_labels(batch)
                if isinstance(batch, HomeBatch) and not label.numel():
                    continue  # but owners of split batches must exchange rows, even without seeds
                right += int((self._logits(batch).argmax(dim=1) == label).sum())
                seeds += int((label != UNLABELLED).sum())
        total_right, total_seeds = self._ranks.total(right, seeds)
        return total_right / max(total_seeds, 1)

    def _logits(self, batch: AnyBatch, keys: DropoutKeys | None = None) -> torch.Tensor:
        """Logits of this rank's seeds; owners of a split batch exchange rows."""
        exchange = None
        if isinstance(batch, SplitBatch) and batch.num_owners > 1:
            exchange = Shuffle(batch, self._place.group, self._settings.mixed_rows)
        history = self.history if self.model.training else None
        logits: torch.Tensor = self.model(batch, keys, exchange, history)
        return logits

    @property
    def _is_whole(self) -> bool:
        """Whether rank 0 has all that a checkpoint needs, such as the averaged model."""
        averaged = self._home is None or self._home.averaged
        return averaged and (self.history is None or self.history.complete)

    @property
    def _ended(self) -> bool:
        return 0 < self._settings.max_steps <= self._steps

    def _say(self, line: str) -> None:
        if self._ranks.rank == 0:
            say(line)

    def _make_net(self) -> nn.Module:
        """A model for the classes of the store and the features of a first batch."""
        settings = self._settings
        whole = {"rank": 0, "world_size": 1, "owners": ""}
        data = self.open_split("train", num_neighbors=(1,), shuffle=False, **whole)
        num_classes = seed_classes(data)
        batch: Any = next(iter(data))
        seed_labels(batch)
        data.close()
        self._ranks.barrier()  # frees the memory of all these sessions before training begins
        layer, depth = LAYERS[settings.model], len(settings.num_neighbors)
        if isinstance(batch, HeteroBatch):
            widths = {t: batch.x[t].size(1) if t in batch.x else 0 for t in batch.n_id}
            relations = list(batch.edge_index)
            return RelationalModel(layer, widths, relations, settings.hidden, num_classes, depth)
        if batch.x is None or batch.x.dim() != 2:
            raise NotTrainable("the store has no features, a vector a node; ingest them")
        return Layered(layer, batch.x.size(1), settings.hidden, num_classes, depth)

    def _train_epoch(self) -> tuple[float, Clock]:
        """Train the rest of an epoch; the mean loss over all ranks' seeds, and the times."""
        save_every = self._settings.save_every
        self.model.train()

        def goes_on() -> bool:
            self._steps += 1
            self._due |= self._ended or (save_every > 0 and self._steps % save_every == 0)
            if not self._is_whole:
                return True
            if self._due:
                self._save()
                self._due = False
            return not self._ended

        loss, clock = optimize(self._data, self._update, goes_on)
        if not self._ended and not save_every:
            self._save()
        return loss, clock

    def _update(self, batch: AnyBatch) -> tuple[float, int]:
        """Take one step; returns the sum of the losses and the labelled seeds, over all ranks."""
        if self._observe is not None:
            self._observe(batch)
        if self.padding is not None and isinstance(batch, Batch):
            if self.padding.settled:
                batch = self.padding(batch)
            else:
                self.padding.observe(batch)
        if self._settings.dropout != "keyed":
            place = (self._settings.seed, batch.epoch, batch.step, self._ranks.rank)
            torch.manual_seed(hash(place) & (2**63 - 1))
        if self._home is not None:
            assert isinstance(batch, HomeBatch)
            return self._home.update(batch, self._loss_of)
        if self.history is not None and self.history.complete:
            data = self._data.dataset
            assert isinstance(data, LargeDataset)
            assert isinstance(data.current, PartitionDraws)
            self.history.begin(data.current)
        if self._replayed is not None and isinstance(batch, PaddedBatch):
            total, labelled = self._replayed(batch).tolist()
            return total, int(labelled)
        found = self._gradients.of_mean(*self._loss_of(batch))
        self._optimizer.step()
        if self.history is not None and self.history.ends_with(batch.step):
            self.history.end()
        return found

    def _loss_of(self, batch: AnyBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """The `sum_of_losses` of a batch, and the number of its labelled seeds."""
        keys = None
        if self._settings.dropout == "keyed":
            ids = batch.n_id if isinstance(batch, HeteroBatch) else {"": batch.n_id}
            keys = DropoutKeys(self._settings.seed, batch.epoch, batch.step, ids)
        return sum_of_losses(self._logits(batch, keys), seed_labels(batch))

    def _parts(self) -> dict[str, Any]:
        """The objects whose states a checkpoint holds, by name; it also holds history tables."""
        found = {
            "model": self.model, "optimizer": self._optimizer, "data": self._data,
            "padding": self.padding, "home": self._home,
        }  # fmt: skip
        return {name: part for name, part in found.items() if part is not None}

    def _save(self) -> None:
        """Rank 0 writes the state of all ranks, atomically."""
        path = self._settings.checkpoint
        if not path or self._ranks.rank:
            return
        state = {name: part.state_dict() for name, part in self._parts().items()}
        state |= {"steps": self._steps, "order": self._order and tuple(self._order)}
        if self.history is not None:
            state["history"] = self.history.tables.state_dict()
        torch.save(state, f"{path}.new")
        Path(f"{path}.new").replace(path)

    def _load(self, path: str) -> None:
        """Raises StateMismatch, ValueError: the state of another store, model, or parameters."""
        try:
            # historical embeddings may exceed free memory: only rank 0 reads the mapped ones
            state = torch.load(path, weights_only=True, mmap=self.history is not None)
            if self.history is not None:
                if "history" not in state:
                    raise ValueError(
                        f"checkpoint {path}: found no historical embeddings, expected those of "
                        "draws 'partitions'; go on with the draws it was saved with"
                    )
                self.history.tables.load_state_dict(state["history"], self._ranks)
            parts = self._parts()
            parts.pop("model").load_state_dict(state["model"])
        except (UnpicklingError, EOFError, KeyError, TypeError, RuntimeError) as error:
            found = "another model" if "state_dict" in str(error) else "no checkpoint"
            raise ValueError(
                f"checkpoint {path}: found {found}, expected one of this command with the same "
                "--model, --hidden and store; give these, or another --checkpoint"
            ) from error
        for name, part in parts.items():
            if state.get(name):
                part.load_state_dict(state[name])
        self._steps, self._first_epoch = state["steps"], state["data"]["epoch"]
        self._order = Order(*state["order"]) if state.get("order") else None


def train(
    settings: Settings, ranks: Ranks, observe: Callable[[AnyBatch], None] | None = None
) -> Trainer:
    """Train to the end, or to `max_steps`, and print a line per epoch."""
    trainer = Trainer(settings, ranks, observe)
    trainer.run()
    return trainer


def main() -> None:
    def run(arguments: dict[str, Any]) -> None:
        for name in ("num_neighbors", "second_fanout"):
            arguments[name] = parse_fanouts(arguments[name], name)
        with joined(arguments["timeout"]) as ranks:
            train(Settings(**arguments), ranks)

    run_command(Settings, __doc__, run)


if __name__ == "__main__":
    main()
