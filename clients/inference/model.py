"""A model as inference computes it: what enters, layers by relation, what leaves."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from blockstore.format import Manifest, NodeType
from clients.models import LAYERS, Layered, OrderedLayer, RelationalModel
from loaderd.api.errors import Refused

Relation = tuple[str, str, str]
_FEATURES = "x"  # what batches bring as `x`


class Step(NamedTuple):
    """One layer: rows of targets of its relations are computed, those of other types stay."""

    layers: Mapping[Relation, OrderedLayer]
    activates: bool  # ReLU after it


class ModelSteps(NamedTuple):
    """What of a model is asked of nodes, and in which order; types and relations of the store."""

    enter: Mapping[str, nn.Module | None]  # by type: what features pass through; None: as they are
    widths: Mapping[str, int]  # of the features of each type; 0: it has none
    steps: Sequence[Step]
    leave: nn.Module | None
    num_out: int
    output_type: NodeType
    dtype: torch.dtype

    def activated(self, step: int, h: Tensor) -> Tensor:
        return functional.relu(h) if self.steps[step].activates else h


def steps_of(model: nn.Module, manifest: Manifest, node_type: str = "") -> ModelSteps:
    """The steps of a model of `clients.models`, also one that `clients.train` has wrapped.

    node_type   whose rows are wanted, of a store of several types; "": the only one with labels

    Raises Refused: a model of another kind, or one that does not fit the store.
    """
    net = getattr(model, "net", model)
    widths = {t.name: _feature_width(t) for t in manifest.types}
    relations = [(r.src, r.name, r.dst) for r in manifest.relations]
    output = _output_type(manifest, node_type)
    dtype = next((p.dtype for p in net.parameters()), torch.float32)
    if isinstance(net, Layered):
        if len(widths) != 1 or len(relations) != 1:
            raise Refused(
                f"model: found one of one relation, expected one of the store's {len(relations)}: "
                "train a RelationalModel (clients.train --input-type)"
            )
        layers = [_checked(layer) for layer in net.layers]
        _check_width("the first layer", _num_in(layers[0]), widths[output.name])
        steps = [
            Step({relations[0]: layer}, number < len(layers) - 1)
            for number, layer in enumerate(layers)
        ]
        enter: dict[str, nn.Module | None] = {output.name: None}
        return ModelSteps(enter, widths, steps, None, layers[-1].num_out, output, dtype)
    if isinstance(net, RelationalModel):
        if (net.types, net.relations) != (tuple(widths), tuple(relations)):
            raise Refused(
                f"model: found types {', '.join(net.types)} and {len(net.relations)} relations, "
                f"expected those of the store: {', '.join(widths)} and {len(relations)}; give the "
                "model of this store"
            )
        for (name, width), entering in zip(widths.items(), net.enter, strict=True):
            assert isinstance(entering, nn.Linear)
            _check_width(f"what rows of {name} enter by", entering.in_features, max(1, width))
        steps = []
        for layers_of in net.layers:
            assert isinstance(layers_of, nn.ModuleList)
            layers = [_checked(layer) for layer in layers_of]
            steps.append(Step(dict(zip(relations, layers, strict=True)), True))
        enter = dict(zip(widths, net.enter, strict=True))
        return ModelSteps(enter, widths, steps, net.out, net.out.out_features, output, dtype)
    raise Refused(
        f"model: found a {type(net).__name__}, expected one of clients.models (Layered, GraphSage, "
        "RelationalModel), whose layers can be computed apart; for another one iterate over "
        "NeighborLoader(endpoint, [-1], input_nodes=None), a layer at a time"
    )


def load_model(path: Path, manifest: Manifest) -> nn.Module:
    """The model that a checkpoint of `clients.train` holds, by the names and shapes in it.

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
    """A model of the kind and the sizes that its parameters show.  Raises KeyError."""
    several = "out.weight" in state
    first = "layers.0.0." if several else "layers.0."
    names = {name.removeprefix(first) for name in state if name.startswith(first)}
    kind = "gat" if "from_source" in names else "sage" if "own.weight" in names else "gcn"
    numbers = [int(name.split(".")[1]) for name in state if name.startswith("layers.")]
    depth = 1 + max(numbers, default=-1)
    weight = {"sage": "own.weight"}.get(kind, "linear.weight")
    if not several:
        num_hidden, num_in = state[f"{first}{weight}"].shape
        num_out = state[f"layers.{depth - 1}.{weight}"].shape[0]
        return Layered(LAYERS[kind], num_in, num_hidden, num_out, depth)
    relations = [(r.src, r.name, r.dst) for r in manifest.relations]
    widths = {t.name: _feature_width(t) for t in manifest.types}
    num_out, num_hidden = state["out.weight"].shape
    return RelationalModel(LAYERS[kind], widths, relations, num_hidden, num_out, depth)


def _feature_width(t: NodeType) -> int:
    return t.features[_FEATURES].row_items if _FEATURES in t.features else 0


def _output_type(manifest: Manifest, name: str) -> NodeType:
    """Raises Refused: no such type, or none is named and it is not plain which."""
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


def _num_in(layer: OrderedLayer) -> int:
    return next(m.in_features for m in layer.modules() if isinstance(m, nn.Linear))


def _check_width(what: str, found: int, expected: int) -> None:
    if found != expected:
        raise Refused(
            f"model: {what} takes {found} numbers, expected the store's {expected} features x; "
            "give the model of this store"
        )
