"""A store in the form of a PyG data set and its `Data`; rows are read on first access."""

import os
from collections.abc import Mapping
from contextlib import closing
from typing import Any

import torch
from torch import Tensor

from clients.connection.place import find_endpoint
from clients.torch import NeighborDataset, SamplingOptions
from loaderd.api.errors import Refused

_STEP_NODES = 1 << 12  # rows requested at a time
_SPLITS = {"val": ("val", "valid")}  # PyG's name of a mask -> names that a store may use
_ROWS = ("x", "y")
_COUNTS = ("num_nodes", "num_edges", "num_features", "num_classes")


def stored_data(data: object, options: Mapping[str, Any]) -> "StoreData":
    """A loader's argument as `StoreData`: an endpoint or a store's path is wrapped.

    Raises TypeError: it is none of these; Refused, NoDaemon, NotAStore: nothing is there.
    """
    if isinstance(data, StoreData):
        return data
    if not isinstance(data, str | os.PathLike):
        raise TypeError(
            f"data: {type(data).__name__}, expected a daemon's endpoint, ipc:///..., or the path "
            "of a store"
        )
    return StoreData(data, options.get("store", ""), options.get("reconnect_s") or 0.0)


class StoreDataset:
    """A store in place of a data set of PyG, such as `Reddit(path)`: `dataset[0]` is its data.

    A script that trains by `NeighborLoader` and evaluates by loops over layers keeps all other
    lines.
    """

    def __init__(self, endpoint: str | os.PathLike[str], store: str = "") -> None:
        """`endpoint`: of a daemon, or the path of a store; `store`: which one, if several."""
        self._data = StoreData(endpoint, store)
        self.num_features = self.num_node_features = self._data.num_features
        self.num_classes = self._data.num_classes

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> "StoreData":
        if index not in (0, -1):  # this also ends a loop over it
            raise IndexError(f"found {index}, expected 0: a store is one graph")
        return self._data


class StoreData:
    """The nodes of a store with one node type in the form of PyG's `Data`, by original id.

    `x`, `y` and `train_mask`, `val_mask`, `test_mask` (or `NAME_mask` of any split) are read
    through the daemon when they are first asked for, all rows of them into this process.  Edges
    stay in the store.  `NeighborLoader` takes it in place of an endpoint.
    """

    def __init__(
        self, endpoint: str | os.PathLike[str], store: str = "", wait_s: float = 0.0
    ) -> None:
        """`wait_s`: how long to wait for a daemon, if there is none yet."""
        self.endpoint, self.store = os.fspath(endpoint), store
        self._daemon = find_endpoint(endpoint, wait_s)  # keeps a daemon started here alive
        self._devices: dict[str, Any] = {}

    def to(self, device: Any, *names: str) -> "StoreData":
        """Move these fields, or all, to a device, also when read later; in place, as in PyG."""
        self._devices |= dict.fromkeys(names or ("",), device)
        for name, value in vars(self).items():
            if isinstance(value, Tensor) and (not names or name in names):
                setattr(self, name, value.to(device))
        return self

    def __delattr__(self, name: str) -> None:
        """`del data.x` frees the memory; the next access reads it again."""
        self.__dict__.pop(name, None)

    def __getattr__(self, name: str) -> Any:
        """Raises AttributeError: the store has no such field, or it is not loaded here."""
        if name.startswith("_") or "endpoint" not in self.__dict__:
            raise AttributeError(name)
        if name in ("edge_index", "adj_t"):
            raise AttributeError(
                f"{name}: edges stay in the store at {self.endpoint}; sample them: "
                "NeighborLoader(data, num_neighbors=[-1], ...), or write them: blockstore export"
            )
        if name in _COUNTS or name == "num_node_features":
            name = name.replace("node_features", "features")
            with self._nodes() as nodes:
                found = {count: getattr(nodes, count) for count in _COUNTS}
            if any(isinstance(count, dict) for count in found.values()):
                raise Refused(
                    f"{self.endpoint}: the store has several node types or relations, expected one "
                    "of each; give the endpoint and (type, split) to NeighborLoader"
                )
            self.__dict__ |= found
            return found[name]
        value = self._read_mask(name) if name.endswith("_mask") else self._read_rows(name)
        value = value.to(self._devices.get(name, self._devices.get("", "cpu")))
        self.__dict__[name] = value
        return value

    def _read_rows(self, name: str) -> Tensor:
        whole: Tensor | None = None
        with self._nodes(features=("x",) if name == "x" else (), labels=name == "y") as nodes:
            if name not in _ROWS or name not in nodes.features:
                found = ", ".join([*nodes.features, *(f"{s}_mask" for s in nodes.splits)])
                raise AttributeError(
                    f"{name}: the store at {self.endpoint} has {found}; ask for one of these, or "
                    "take it from batches: NeighborLoader(..., features=...)"
                )
            for batch in nodes:
                rows = getattr(batch, name)[: batch.batch_size]
                if whole is None:
                    whole = rows.new_empty(self.num_nodes, *rows.shape[1:])
                whole[batch.input_id] = rows
        assert whole is not None
        return whole

    def _read_mask(self, name: str) -> Tensor:
        asked = name.removesuffix("_mask")
        with self._nodes() as nodes:
            splits = nodes.splits
        split = next((s for s in _SPLITS.get(asked, (asked,)) if s in splits), None)
        if split is None:
            found = ", ".join(f"{s}_mask" for s in splits) or "no masks"
            raise AttributeError(f"{name}: the store at {self.endpoint} has {found}; ask for these")
        mask = torch.zeros(self.num_nodes, dtype=torch.bool)
        with self._nodes(split) as nodes:
            for batch in nodes:
                mask[batch.n_id[: batch.batch_size]] = True
        return mask

    def _nodes(
        self, split: str = "all", features: tuple[str, ...] = (), labels: bool = False
    ) -> "closing[NeighborDataset]":
        """Nodes in the order of the split, with one neighbor each, the minimum fanout."""
        rows: SamplingOptions = {"features": features, "labels": labels, "plan": "minibatch"}
        rows["shuffle"] = False
        if self.store:
            rows["store"] = self.store
        return closing(NeighborDataset(self.endpoint, split, [1], _STEP_NODES, **rows))
