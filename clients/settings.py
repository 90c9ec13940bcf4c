"""Options of training commands, and whether they go together."""

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, NoReturn

import torch

from blockstore.errors import StoreError
from clients.large.dataset import DRAWS
from clients.large.history import DTYPES
from clients.micrograph.training import MERGES, MIGRATE
from clients.models import LAYERS
from clients.ranks import TIMEOUT_S, RankLost
from loaderd.api.errors import DaemonError

PLANS = ("auto", "minibatch", "hyperbatch", "macrobatch", "split", "large")
HOME_ONLY = ("parts", "merge", "migrate", "sync_every")  # settings of placement "home"


class NotTrainable(ValueError):
    """The store does not hold what a classifier is trained on."""


@dataclass(frozen=True, slots=True)
class Settings:
    endpoint: str
    model: str = "sage"
    epochs: int = 5
    num_neighbors: tuple[int, ...] = (15, 10)
    frontier: str = "new"
    plan: str = "auto"
    owners: str = ""  # of plan "split" and placement "home": name of an owner map of the store
    mixed_rows: bool = False  # of plan "split": gather rows of remote nodes, too
    placement: str = ""  # "home": each rank trains the seeds that it owns by map `owners`
    parts: str = "1"  # of placement "home": time steps of an iteration; "auto": as is fastest
    merge: str = "server"  # how there get to be fewer than ranks; or "model"
    migrate: str = "never"  # whether models travel between time steps; or "always"
    sync_every: int = 1  # steps between two averages of the ranks' models
    macro_partitions: int = 0  # of plan "macrobatch" and draws "partitions"; 0: an eighth of all
    draws: str = "own"  # of plan "large": or "shared", or "partitions"
    history: str = ""  # of draws "partitions": file of the tables of historical embeddings
    history_dtype: str = "float32"  # of their rows; or "float16"
    large_batches: int = 0  # of plan "large": steps of a large batch; 0: a twelfth of an epoch's
    second_fanout: tuple[int, ...] = ()  # of shared draws: those that a step keeps, by hop
    order: str = "widths"  # of plan "large": or "measured"
    compile: bool = False  # of plan "large": batches of one shape, from the second epoch on
    cuda_graph: bool = False  # likewise: replay each step of these as one CUDA graph
    batch_size: int = 1000
    hidden: int = 128
    dropout: str = "random"  # or "keyed": by (seed, epoch, step, layer, node)
    learning_rate: float = 0.003
    seed: int = 0
    input_type: str = ""  # node type that is classified, of a store of several
    checkpoint: str = ""  # file to go on from and to save to
    save_every: int = 0  # steps; 0: at the end of each epoch
    max_steps: int = 0  # stop, and save, after so many in all; 0: never
    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    store: str = ""  # its name, where the daemon serves several
    timeout: float = TIMEOUT_S  # seconds that a rank waits for the others


def check_settings(settings: Settings) -> None:
    """Raises ValueError: options that do not go together."""
    _check_owners(settings)
    _check_large(settings)


def _check_owners(settings: Settings) -> None:
    """Raises ValueError: options that do not go together."""
    split, home = settings.plan == "split", settings.placement == "home"
    found = f"plan {settings.plan!r}, owners {settings.owners!r}"
    if split + home != bool(settings.owners) or home != bool(settings.placement):
        raise ValueError(
            f"{found}, placement {settings.placement!r}: expected owners with either plan 'split' "
            "or placement 'home', and none without; give --owners NAME with one of them, or neither"
        )
    usual = Settings("")
    own = [name for name in HOME_ONLY if getattr(settings, name) != getattr(usual, name)]
    if own and not home:
        raise ValueError(
            f"{own[0]} {getattr(settings, own[0])!r}: found no placement 'home', expected it; give "
            f"--placement home --owners NAME, or leave {own[0]} out"
        )
    if settings.mixed_rows and not split:
        raise ValueError(f"mixed_rows: found {found}, expected plan 'split'; leave mixed_rows out")
    if settings.input_type and settings.owners:
        raise ValueError(
            f"input_type {settings.input_type!r}: found {found}, expected a store of one node type "
            "and no input_type"
        )


def _check_large(settings: Settings) -> None:
    """Raises ValueError: options of large batches without them."""
    measured = settings.order != "widths"
    if settings.plan == "large" and settings.placement:
        raise ValueError(
            f"placement {settings.placement!r}: found plan 'large', expected 'auto', 'minibatch' "
            "or 'hyperbatch'; leave one of them out"
        )
    partitions = settings.draws == "partitions"
    if settings.macro_partitions and settings.plan != "macrobatch" and not partitions:
        raise ValueError(
            f"macro_partitions {settings.macro_partitions}: found plan {settings.plan!r}, draws "
            f"{settings.draws!r}, expected plan 'macrobatch' or draws 'partitions'; leave it out"
        )
    if partitions != bool(settings.history):
        raise ValueError(
            f"history {settings.history!r}: found draws {settings.draws!r}, expected a file with "
            "draws 'partitions', and none without; give --draws partitions --history FILE"
        )
    if settings.history_dtype not in DTYPES:
        raise ValueError(
            f"history_dtype {settings.history_dtype!r}: expected {' or '.join(DTYPES)}"
        )
    for option in ("compile", "cuda_graph"):
        for found, is_so in (
            ("draws 'partitions', whose large batches are of many sizes", partitions),
            ("order 'measured'", measured),
            ("dropout 'keyed', whose keys are others in each step", settings.dropout == "keyed"),
            ("compile with cuda_graph", settings.compile and settings.cuda_graph),
        ):
            if getattr(settings, option) and is_so:
                raise ValueError(
                    f"{option}: found {found}, expected batches of one shape that one of compile "
                    "and cuda_graph takes; leave one of them out"
                )
    given = (
        settings.draws != "own", settings.large_batches, settings.second_fanout, measured,
        settings.compile, settings.cuda_graph,
    )  # fmt: skip
    if any(given) and settings.plan != "large":
        raise ValueError(
            "draws, large_batches, second_fanout, order, compile and cuda_graph: found "
            f"plan {settings.plan!r}, expected 'large'; leave them out, or give --plan large"
        )


_OF_HOPS = "of each hop, seeds outward: 15 10, or 15,10"
OPTIONS: dict[str, dict[str, Any]] = {
    "model": {"choices": LAYERS},
    "num_neighbors": {"nargs": "+", "type": str, "help": _OF_HOPS},
    "frontier": {"choices": ("new", "layer"), "help": "which nodes a hop expands"},
    "plan": {"choices": PLANS},
    "owners": {"help": "of plan split: name of an owner map of the store"},
    "mixed_rows": {"help": "of plan split: gather input rows of all nodes, exchange none"},
    "placement": {"choices": ("home",), "help": "home: each rank trains the seeds it owns"},
    "parts": {"help": "of placement home: time steps of an iteration, or auto"},
    "merge": {"choices": MERGES, "help": "where seeds go if there are fewer than ranks"},
    "migrate": {"choices": MIGRATE, "help": "whether models travel between time steps"},
    "sync_every": {"help": "steps between two averages of models that travel"},
    "macro_partitions": {"help": "partitions at a time, of draws partitions or plan macrobatch"},
    "draws": {"choices": DRAWS, "help": "of plan large: of each step, shared, or of partitions"},
    "history": {"help": "of draws partitions: file of historical embeddings, one for all ranks"},
    "history_dtype": {"choices": DTYPES},
    "large_batches": {"help": "of plan large: steps of a large batch; 0: a twelfth of all"},
    "second_fanout": {"nargs": "+", "type": str, "help": "draws that a step keeps, by hop"},
    "order": {"choices": ("widths", "measured"), "help": "of plan large: of each layer"},
    "dropout": {"choices": ("random", "keyed")},
    "input_type": {"help": "node type that is classified"},
    "store": {"help": "its name, if the daemon serves several"},
    "device": {"help": "cpu, cuda, cuda:1"},
    "checkpoint": {"help": "file to go on from and to save to"},
    "save_every": {"help": "steps between two checkpoints; 0: at the end of each epoch"},
    "max_steps": {"help": "stop, and save, after so many steps in all; 0: never"},
    "timeout": {"help": "seconds that a process waits for the others"},
}


def parse_fanouts(words: Iterable[object], option: str = "num_neighbors") -> tuple[int, ...]:
    """Numbers with commas or spaces between them.  Raises ValueError, which names the option."""
    text = " ".join(map(str, words))
    try:
        return tuple(int(word) for word in text.replace(",", " ").split())
    except ValueError:
        name = option.replace("_", "-")
        raise ValueError(f"--{name} {text!r}: expected numbers such as 15 10") from None


class CommandParser(argparse.ArgumentParser):
    """The words of `python -m clients...`: what they get wrong is said in one line."""

    def __init__(self, **given: Any) -> None:
        spec = sys.modules["__main__"].__spec__
        super().__init__(prog=None if spec is None else f"python -m {spec.name}", **given)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {self.prog}: {message}; see: {self.prog} --help\n")


def run_command(
    make: Callable[[str], Any],
    doc: str | None,
    run: Callable[[dict[str, Any]], object],
    special: Mapping[str, Mapping[str, Any]],
) -> None:
    """Run a training command: an endpoint, and an option for each further field of its settings.

    make      settings for an endpoint: gives the names and the defaults
    special   further arguments of `add_argument`, by field

    Ends with exit code 2, and a line, if the settings or the store cannot be used, or if another
    rank has ended.
    """
    default = make("")
    parser = CommandParser(description=doc)
    parser.add_argument("endpoint", help="ipc:///path/of/the/socket, or the path of a store")
    for field in fields(default)[1:]:
        value = getattr(default, field.name)
        usual: dict[str, Any] = {"type": type(value), "default": value}
        if isinstance(value, bool):
            usual = {"action": "store_true"}
        option = "--" + field.name.replace("_", "-")
        more = {**special.get(field.name, {})}
        shown = "" if value in ("", (), False) else "(%(default)s)"
        more["help"] = f"{more.get('help', '')} {shown}".strip()
        parser.add_argument(option, **(usual | more))
    try:
        run(vars(parser.parse_args()))
    except (DaemonError, StoreError, NotTrainable, RankLost, ValueError) as error:
        sys.stderr.write(f"error: {' '.join(str(error).split())}\n")
        sys.exit(2)
