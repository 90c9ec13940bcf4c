"""Compute what a model gives for all nodes: `python -m clients.infer ENDPOINT CHECKPOINT OUT`.

The model is that of a checkpoint of clients.train; each node is computed with all of its neighbors,
layer by layer, within --mem.  ENDPOINT is that of a daemon of this machine, which tells where its
store lies, or the path of a store.  OUT is FILE.npy (row i: the node of original id i),
FILE.parquet (columns id and rows), or array:NAME, an array of features that the store gets.
Stopped or killed, the same command goes on after the last layer that was finished.
"""

import argparse
import os
import sys
from pathlib import Path

# Read when torch is loaded.  Otherwise its threads spin while they wait for each other, which takes
# sixty times as long if other processes need the cores, too.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from blockstore.errors import StoreError
from blockstore.units import parse_bytes
from clients.inference.model import load_model
from clients.inference.run import layerwise
from clients.inference.source import find_store
from clients.settings import CommandParser
from loaderd.api.errors import DaemonError
from preprocess.errors import BadInput


def main() -> None:
    """Entry point of the command; ends with exit code 2, and a line, if it cannot be done."""
    parser = CommandParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("endpoint", help="ipc:///path/of/the/socket, or the path of a store")
    parser.add_argument("checkpoint", type=Path, help="of clients.train")
    parser.add_argument("out", help="FILE.npy, FILE.parquet or array:NAME")
    parser.add_argument("--split", default="", help="rows of its nodes alone, with FILE.parquet")
    parser.add_argument("--input-type", default="", help="node type whose rows are wanted")
    parser.add_argument("--store", default="", help="its name, if the daemon serves several")
    parser.add_argument("--mem", default="2G", help="memory of this process (2G)")
    given = parser.parse_args()
    try:
        manifest = find_store(given.endpoint, given.store).manifest
        result = layerwise(
            load_model(given.checkpoint, manifest), given.endpoint, given.out, split=given.split,
            node_type=given.input_type, store=given.store, mem_bytes=parse_bytes(given.mem),
        )  # fmt: skip
    except (StoreError, DaemonError, BadInput, ValueError, OSError) as error:
        sys.stderr.write(f"error: {' '.join(str(error).split())}\n")
        sys.exit(2)
    sys.stdout.write(f"{result}\n")


if __name__ == "__main__":
    main()
