"""Reads files of torch.save in a process that has no torch, a fork of `tests.zygote`.

    python -m tests.preprocess.reader READER [PATH EXECUTABLE]...

Prints JSON, a pair for each path: what is in it, or the refusal, and whether torch is here after
it.  EXECUTABLE stands for this Python where a process is begun; "" leaves it.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from preprocess.errors import BadInput
from preprocess.files.strided import StridedRows
from preprocess.files.torchfile import read_torch
from preprocess.sources.pyg import PygSource


def values(path: Path) -> Any:
    """Of a dict of integers and arrays."""
    return {
        k: v if isinstance(v, int) else StridedRows(path, v, "a").read(0, v.shape[0]).tolist()
        for k, v in read_torch(path).items()
    }


def graph(path: Path) -> Any:
    """Nodes of each type, edges of all relations."""
    source = PygSource(path)
    edges = [s.size for r in source.relations for s, _ in source.edges(r, 9)]
    return [source.num_nodes, sum(edges)]


READERS: dict[str, Callable[[Path], Any]] = {"values": values, "graph": graph}

if __name__ == "__main__":
    read, python, found = READERS[sys.argv[1]], sys.executable, []
    for name, executable in zip(sys.argv[2::2], sys.argv[3::2], strict=True):
        sys.executable = executable or python
        shown: Any
        try:
            shown = read(Path(name))
        except BadInput as error:
            shown = str(error)
        found.append([shown, "torch" in sys.modules])
    sys.stdout.write(json.dumps(found))
