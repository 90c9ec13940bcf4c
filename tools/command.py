"""Command lines of tools, derived from dataclasses of options, and their output lines."""

import argparse
import datetime
import json
import os
import platform
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, fields
from pathlib import Path
from types import UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

from blockstore.units import parse_bytes

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")
TALLY_S = 60.0


def byte_size(text: str) -> str:
    """Check a size such as 512M, and return it unchanged.  Raises ValueError if it is none."""
    parse_bytes(text)
    return text


def parse(
    kind: type[T],
    words: Sequence[str],
    prog: str = "",
    doc: str | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> T:
    """Parse command-line words.  `defaults` replace those of the dataclass.

    kind       a dataclass.  A field without a default is positional, a bool is a switch, a tuple
               takes several words, a Literal its values; `Annotated[int, "help"]` gives a help
               text.  A function in the annotation converts the word.
    prog, doc  of the command; by default the name and the docstring of the dataclass's module
    """
    module = sys.modules[kind.__module__]
    name = module.__spec__.name if module.__spec__ else kind.__module__
    parser = argparse.ArgumentParser(
        prog=prog or name.removesuffix(".__main__"),
        description=doc or module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    hints = get_type_hints(kind, include_extras=True)
    tuples = []
    for field in fields(kind):
        hint, help_text, convert = hints[field.name], "", None
        if get_origin(hint) is Annotated:
            hint, *notes = get_args(hint)
            help_text = " ".join(n for n in notes if isinstance(n, str))
            convert = next((n for n in notes if callable(n)), None)
        if get_origin(hint) is UnionType:  # Path | None
            hint = get_args(hint)[0]
        given: dict[str, Any] = {"help": help_text}
        default = (defaults or {}).get(field.name, field.default)
        if default is not MISSING:
            given |= {"default": default, "help": f"{help_text} [{default}]".strip()}
        if get_origin(hint) is tuple:
            tuples.append(field.name)
            hint = get_args(hint)[0]
            given["nargs"] = "*"
        if hint is bool:
            given["action"] = "store_true"
        elif get_origin(hint) is Literal:
            given |= {"choices": get_args(hint), "type": type(get_args(hint)[0])}
        else:
            given["type"] = convert or hint
        option = field.name if default is MISSING else "--" + field.name.replace("_", "-")
        parser.add_argument(option, **given)
    found = vars(parser.parse_args(words))
    return kind(**found | {name: tuple(found[name]) for name in tuples})


def split_options(words: list[str]) -> tuple[list[str], list[str]]:
    """Split words into a tool's own, and those after `--`, for the command that it runs."""
    at = words.index("--") if "--" in words else len(words)
    return words[:at], words[at + 1 :]


def machine() -> str:
    """CPU model, cores, memory and kernel in one line."""
    models = [x for x in Path("/proc/cpuinfo").read_text().splitlines() if x.startswith("model n")]
    model = models[0].partition(":")[2].strip() if models else platform.processor()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    cores = len(os.sched_getaffinity(0))
    return f"{model}, {cores} cores, {memory:.0f} GiB, Linux {platform.release()}"


def stamped(bench: str, **figures: Any) -> dict[str, Any]:
    """A line of results in JSON types: figures, date and machine."""
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    line = {"bench": bench, "date": today, "machine": machine(), **figures}
    found: dict[str, Any] = json.loads(json.dumps(line, default=str))
    return found


def append(lines: Sequence[Mapping[str, Any]], out: Path | None) -> None:
    """Append lines of JSON to the file `out`, if one is named."""
    if out:
        with out.open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)


def put(line: dict[str, Any], out: Path | None) -> dict[str, Any]:
    """Print a line of JSON and append it to `out`; returns it."""
    print(json.dumps(line), flush=True)
    append([line], out)
    return line


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Lines of JSON; none if there is no such file."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


@contextmanager
def running_tally(
    figures: Callable[[], Mapping[str, Any]], out: Path | None
) -> Iterator[Callable[[], None]]:
    """For long runs: yields a function to call often, which prints `figures` once a minute.

    A run that fails, or is stopped by SIGTERM or SIGINT (which then raise SystemExit), prints them
    a last time and appends them to `out`.
    """
    due = time.monotonic() + TALLY_S

    def look() -> None:
        nonlocal due
        if time.monotonic() >= due:
            due += TALLY_S
            print(json.dumps(figures()), flush=True)

    def stop(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield look
    except BaseException:
        put({**figures(), "stopped": True}, out)
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def table(rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first row is its header."""
    head, *rest = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([head, f"| {' | '.join(['---'] * len(rows[0]))} |", *rest])
