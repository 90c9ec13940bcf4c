"""A model as inference computes it: input projections, layers by relation, output projection."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from blockstore.format import Manifest, NodeType
from blockstore.format import Relation as StoredRelation
from clients.models import LAYERS, Layered, OrderedLayer, RelationalModel
from loaderd.api.errors import Refused

Relation = tuple[str, str, str]
_FEATURES = "x"  # the array that batches have as `x`


class Step(NamedTuple):
    """One layer: computes rows of the targets of its relations; rows of other types stay."""

    layers: Mapping[Relation, OrderedLayer]
    activate: nn.Module  # applied to its result


class ModelSteps(NamedTuple):
    """A model as a sequence of steps, with the types and relations of the store."""

    enter: Mapping[str, nn.Module]  # by type: applied to the features
    widths: Mapping[str, int]  # of the features of each type; 0: none
    steps: Sequence[Step]
    leave: nn.Module
    num_out: int
    output_type: NodeType
    dtype: torch.dtype

    @property
    def adds(self) -> bool:
        """Whether all layers add up contributions, which may then come in any order."""
        return all(layer.adds for step in self.steps for layer in step.layers.values())

    @property
    def entered(self) -> Mapping[str, int]:
        """Width of projected features, for the types whose features are projected."""
        return {n: e.out_features for n, e in self.enter.items() if isinstance(e, nn.Linear)}

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        return torch.empty(0, dtype=self.dtype).numpy().dtype


def steps_of(model: nn.Module, manifest: Manifest, node_type: str = "") -> ModelSteps:
    """The steps of a model of `clients.models`, even if wrapped by `clients.train`.

    node_type   whose rows are wanted, if the store has several; "": the only one with labels

    Raises Refused: a model of another kind, or one that does not fit the store.
    """
    net = getattr(model, "net", model)
    widths, relations = _feature_widths(manifest), list(by_relation(manifest))
    output = _output_type(manifest, node_type)
    enter: dict[str, nn.Module] = {output.name: nn.Identity()}
    leave: nn.Module = nn.Identity()
    if isinstance(net, Layered):
        if len(widths) != 1 or len(relations) != 1:
            raise Refused(
                f"model: found one of one relation, expected one of the store's {len(relations)}: "
                "train a RelationalModel (clients.train --input-type)"
            )
        of_steps = [[_checked(layer)] for layer in net.layers]
        num_in = next(m.in_features for m in net.layers[0].modules() if isinstance(m, nn.Linear))
        _check_width("the first layer", num_in, widths[output.name])
        activations = [nn.ReLU()] * (len(of_steps) - 1) + [nn.Identity()]
        num_out = of_steps[-1][0].num_out
    elif isinstance(net, RelationalModel):
        if (net.types, net.relations) != (tuple(widths), tuple(relations)):
            raise Refused(
                f"model: found types {', '.join(net.types)} and {len(net.relations)} relations, "
                f"expected those of the store: {', '.join(widths)} and {len(relations)}; give the "
                "model of this store"
            )
        enter, leave, num_out = (
            dict(zip(widths, net.enter, strict=True)),
            net.out,
            net.out.out_features,
        )
        for (name, width), entering in zip(widths.items(), net.enter, strict=True):
            assert isinstance(entering, nn.Linear)
            _check_width(f"what rows of {name} enter by", entering.in_features, max(1, width))
        of_steps = [[_checked(layer) for layer in layers.children()] for layers in net.layers]
        activations = [nn.ReLU()] * len(of_steps)
    else:
        raise Refused(
            f"model: found a {type(net).__name__}, expected one of clients.models (Layered, "
            "GraphSage, RelationalModel), whose layers can be computed apart; for another one "
            "iterate over NeighborLoader(endpoint, [-1], input_nodes=None), a layer at a time"
        )
    steps = [
        Step(dict(zip(relations, layers, strict=True)), activate)
        for layers, activate in zip(of_steps, activations, strict=True)
    ]
    dtype = next((p.dtype for p in net.parameters()), torch.float32)
    return ModelSteps(enter, widths, steps, leave, num_out, output, dtype)


def load_model(path: Path, manifest: Manifest) -> nn.Module:
    """Load the model in a checkpoint of `clients.train`, from the names and shapes in it.

    Raises Refused: no such checkpoint, or one that does not fit the store.
    """
    try:
        state = torch.load(path, weights_only=True, map_location="cpu")
        held = {str(name).removeprefix("net."): value for name, value in state["model"].items()}
        net = _made_of(held, manifest)
        net.load_state_dict(held)
    except FileNotFoundError as error:
        raise Refused(f"{path}: no such file, expected a checkpoint of clients.train") from error
    except (
        UnpicklingError, EOFError, KeyError, TypeError, ValueError, RuntimeError, AttributeError,
    ) as error:  # fmt: skip
        opened = not isinstance(error, UnpicklingError | EOFError)
        text = " ".join(str(error).split())[:200] if opened else "a file that torch does not read"
        raise Refused(
            f"{path}: found {text or type(error).__name__}, expected a checkpoint of clients.train "
            "for a model of this store"
        ) from error
    dtype = next(iter(held.values())).dtype
    return net.to(dtype).eval()


def _made_of(state: Mapping[str, Tensor], manifest: Manifest) -> nn.Module:
    """A model of the kind and sizes implied by its parameters.  Raises KeyError."""
    several = "out.weight" in state
    first = "layers.0.0." if several else "layers.0."
    marks = {"gat": "from_source", "sage": "own.weight", "gcn": "linear.weight"}
    kind = next((kind for kind, mark in marks.items() if first + mark in state), "gcn")
    depth = 1 + max((int(n.split(".")[1]) for n in state if n.startswith("layers.")), default=-1)
    if several:
        num_out, num_hidden = state["out.weight"].shape
        widths, relations = _feature_widths(manifest), list(by_relation(manifest))
        return RelationalModel(LAYERS[kind], widths, relations, num_hidden, num_out, depth)
    weight = "own.weight" if kind == "sage" else "linear.weight"
    num_hidden, num_in = state[f"{first}{weight}"].shape
    num_out = state[f"layers.{depth - 1}.{weight}"].shape[0]
    return Layered(LAYERS[kind], num_in, num_hidden, num_out, depth)


def by_relation(manifest: Manifest) -> dict[Relation, StoredRelation]:
    """The relations of a store by (source type, name, target type)."""
    return {(r.src, r.name, r.dst): r for r in manifest.relations}


def _feature_widths(manifest: Manifest) -> dict[str, int]:
    return {
        t.name: t.features[_FEATURES].row_items if _FEATURES in t.features else 0
        for t in manifest.types
    }


def _output_type(manifest: Manifest, name: str) -> NodeType:
    """The type that is named.  Raises Refused: no such type; none named, and several possible."""
    types = {t.name: t for t in manifest.types}
    labelled = [t for t in manifest.types if t.label is not None]
    found = types.get(name) if name else None
    if not name:
        candidates = list(types.values()) if len(types) == 1 else labelled
        found = candidates[0] if len(candidates) == 1 else None
    if found is None:
        raise Refused(
            f"node type: found {name!r}, expected one of {', '.join(types)}; give --input-type"
        )
    return found


def _checked(layer: nn.Module) -> OrderedLayer:
    if not isinstance(layer, OrderedLayer):
        raise Refused(
            f"model: found a layer {type(layer).__name__}, expected one of clients.models: "
            f"{', '.join(LAYERS)}"
        )
    return layer


def _check_width(what: str, found: int, expected: int) -> None:
    if found != expected:
        raise Refused(
            f"model: {what} takes {found} numbers, expected the store's {expected} features x; "
            "give the model of this store"
        )
