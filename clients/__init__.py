"""The client library for training scripts: datasets, adapters and reference models."""

import sys
from importlib.util import find_spec

if find_spec("torch") is None:
    _found = (
        "clients: found no torch, expected it for batches of tensors: "
        'pip install "blockstore[torch]"'
    )
    if sys.argv[:1] == ["-m"]:  # while Python looks for the module of `python -m clients.train`
        sys.stderr.write(f"error: {_found}\n")
        sys.exit(2)
    raise ModuleNotFoundError(_found, name="torch")
