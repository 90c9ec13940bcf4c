"""Options of training commands, and checks of their combinations."""

import argparse
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from typing import Any, NoReturn

import torch

from blockstore.errors import StoreError
from clients.large.dataset import DRAWS
from clients.large.history import DTYPES
from clients.micrograph.training import MERGES, MIGRATE, HomeOptions
from clients.models import LAYERS
from clients.ranks import TIMEOUT_S, RankLost
from loaderd.api.errors import DaemonError

AUTO = "auto"  # in place of a number of time steps
PLANS = ("auto", "minibatch", "hyperbatch", "macrobatch", "split", "large")
HOME_ONLY = ("parts", "merge", "migrate", "sync_every")  # settings of placement "home"


class NotTrainable(ValueError):
    """The store does not hold what a classifier is trained on."""


def option(default: Any, text: str = "", **given: Any) -> Any:
    """A field of a command's settings that has more than a name and a default.

    text    help text
    given   further arguments of `add_argument`
    """
    return field(default=default, metadata={"help": text, **given})


_DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DEVICE: Any = option(_DEVICE, "cpu, cuda, cuda:1")
STORE: Any = option("", "its name, if the daemon serves several")
OF_HOPS = "of each hop, seeds outward: 15 10, or 15,10"


@dataclass(frozen=True, slots=True)
class Settings:
    endpoint: str
    model: str = option("sage", choices=LAYERS)
    epochs: int = 5
    num_neighbors: tuple[int, ...] = option((15, 10), OF_HOPS, nargs="+", type=str)
    frontier: str = option("new", "which nodes a hop expands", choices=("new", "layer"))
    plan: str = option("auto", choices=PLANS)
    owners: str = option("", "of plan split and placement home: name of an owner map of the store")
    mixed_rows: bool = option(False, "of plan split: gather input rows of all nodes, exchange none")
    placement: str = option("", "home: each rank trains the seeds that it owns", choices=("home",))
    parts: str = option("1", "of placement home: time steps of an iteration, or auto")
    merge: str = option("server", "where seeds go if these are fewer than ranks", choices=MERGES)
    migrate: str = option("never", "whether models travel between time steps", choices=MIGRATE)
    sync_every: int = option(1, "steps between two averages of models that travel")
    macro_partitions: int = option(
        0, "partitions at a time, of plan macrobatch and draws partitions; 0: an eighth of all"
    )
    draws: str = option(
        "own", "of plan large: of each step, shared, or of partitions", choices=DRAWS
    )
    history: str = option(
        "", "of draws partitions: file of historical embeddings, one for all ranks"
    )
    history_dtype: str = option("float32", "of their rows", choices=DTYPES)
    large_batches: int = option(0, "of plan large: steps of a large batch; 0: a twelfth of all")
    second_fanout: tuple[int, ...] = option(
        (), "of draws shared: those that a step keeps, by hop", nargs="+", type=str
    )
    order: str = option("widths", "of plan large: of each layer", choices=("widths", "measured"))
    compile: bool = option(False, "of plan large: from the second epoch on, for one shape")
    cuda_graph: bool = option(False, "of plan large: replay each step of one shape as a graph")
    batch_size: int = 1000
    hidden: int = 128
    dropout: str = option(
        "random", "keyed: by (seed, epoch, step, layer, node)", choices=("random", "keyed")
    )
    learning_rate: float = 0.003
    seed: int = 0
    input_type: str = option("", "node type that is classified, if the store has several")
    checkpoint: str = option("", "file to go on from and to save to")
    save_every: int = option(0, "steps between two checkpoints; 0: at the end of each epoch")
    max_steps: int = option(0, "stop, and save, after so many steps in all; 0: never")
    device: str = DEVICE
    store: str = STORE
    timeout: float = option(TIMEOUT_S, "seconds that a process waits for the others")


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


def home_options(settings: Settings, num_ranks: int) -> HomeOptions:
    """The options of placement "home".  Raises ValueError: they do not go together."""
    parts, merge, migrate = settings.parts, settings.merge, settings.migrate
    steps = 0 if parts == AUTO else int(parts) if parts.isascii() and parts.isdigit() else -1
    if parts != AUTO and not 1 <= steps <= num_ranks:
        raise ValueError(
            f"parts {parts!r}: expected 1 to {num_ranks}, the number of ranks, or {AUTO!r}"
        )
    if settings.sync_every < 1:
        raise ValueError(f"sync_every {settings.sync_every}: expected 1 or more")
    several = f"sync_every {settings.sync_every}"
    if settings.sync_every > 1 and merge != "model":
        raise ValueError(
            f"{several}, merge {merge!r}: expected merge 'model', as each model takes steps on "
            "its own seeds alone; give --merge model"
        )
    if settings.sync_every > 1 and migrate != "always":
        raise ValueError(
            f"{several}, migrate {migrate!r}: expected 'always', as models differ between two "
            "averages; give --migrate always"
        )
    if migrate == "always" and steps == 1:
        raise ValueError(
            "migrate 'always', parts '1': expected several time steps, between which models "
            "travel; give --parts 2 or more, or leave --migrate out"
        )
    return HomeOptions(steps, merge == "model", migrate == "always", settings.sync_every)


def _check_large(settings: Settings) -> None:
    """Raises ValueError: options of plan "large" without it, or that do not go together."""
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


def parse_fanouts(words: Iterable[object], option: str = "num_neighbors") -> tuple[int, ...]:
    """Numbers with commas or spaces between them.  Raises ValueError, which names the option."""
    text = " ".join(map(str, words))
    try:
        return tuple(int(word) for word in text.replace(",", " ").split())
    except ValueError:
        name = option.replace("_", "-")
        raise ValueError(f"--{name} {text!r}: expected numbers such as 15 10") from None


class CommandParser(argparse.ArgumentParser):
    """Parses the command line of `python -m clients...`; reports errors in one line."""

    def __init__(self, **given: Any) -> None:
        spec = sys.modules["__main__"].__spec__
        super().__init__(prog=None if spec is None else f"python -m {spec.name}", **given)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {self.prog}: {message}; see: {self.prog} --help\n")


def run_command(
    kind: Callable[..., Any], doc: str | None, run: Callable[[dict[str, Any]], object]
) -> None:
    """Run a training command: an endpoint, and an option for each further field of its settings.

    kind   dataclass of the settings

    Prints one line and exits with code 2 if the settings or the store cannot be used, or if
    another rank has ended.
    """
    default = kind("")
    parser = CommandParser(description=doc)
    parser.add_argument("endpoint", help="ipc:///path/of/the/socket, or the path of a store")
    for setting in fields(default)[1:]:
        value = setting.default
        usual: dict[str, Any] = {"type": type(value), "default": value}
        if isinstance(value, bool):
            usual = {"action": "store_true"}
        shown = "" if value in ("", (), False) else "(%(default)s)"
        text = f"{setting.metadata.get('help', '')} {shown}".strip()
        name = "--" + setting.name.replace("_", "-")
        parser.add_argument(name, **(usual | setting.metadata | {"help": text}))
    try:
        run(vars(parser.parse_args()))
    except (DaemonError, StoreError, NotTrainable, RankLost, ValueError) as error:
        sys.stderr.write(f"error: {' '.join(str(error).split())}\n")
        sys.exit(2)
