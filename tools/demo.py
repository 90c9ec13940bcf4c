"""The whole way once, `make demo [DATA=folder]`: raw folder, store, daemon, trained model.

A folder of the demo says in `demo.json` what its store was made of.  The same data again uses that
store; other data, or a folder that the demo did not make, stays, and the store goes beside it.
"""

import hashlib
import shutil
import subprocess
import sys
import tempfile
from itertools import count
from pathlib import Path
from typing import Any

import msgspec

from blockstore.format import FORMAT_VERSION
from preprocess.sources.sourcefiles import stats_below

MADE, MEM = "demo.json", "1G"
DEMO = Path(__file__).resolve().parent.parent / "demo"
GRAPH = ("--nodes", "50000", "--degree", "12", "--features", "64", "--classes", "8")


def say(step: str) -> None:
    print(f"\n== {step}", flush=True)


def run(*command: str) -> None:
    """A command of ours, as a user would type it."""
    print("$ python -m " + " ".join(command), flush=True)
    subprocess.run([sys.executable, "-m", *command], check=True)


def describe(data: Path | None) -> dict[str, Any]:
    """What decides the bytes of a demo's store, plain values."""
    made: dict[str, Any] = {"format": FORMAT_VERSION, "mem": MEM}
    if data is None:
        return {**made, "generated": list(GRAPH)}
    files = sorted((str(path), *stat) for path, stat in stats_below(data.absolute()).items())
    digest = hashlib.blake2b(msgspec.json.encode(files), digest_size=16).hexdigest()
    return {**made, "data": str(data.absolute()), "files": digest}


def choose_folder(made: dict[str, Any]) -> Path:
    """The first of demo, demo-2, ... that is free, or that the demo has made in the same way."""
    for number in count(1):
        folder = DEMO if number == 1 else DEMO.with_name(f"{DEMO.name}-{number}")
        if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
            folder.mkdir(exist_ok=True)
            (folder / MADE).write_bytes(msgspec.json.encode(made))
            return folder
        try:
            held = msgspec.json.decode((folder / MADE).read_bytes())
        except (OSError, msgspec.DecodeError):
            held = None
        if held == made:
            return folder
        what = "not a folder of the demo" if held is None else "made of other data"
        print(f"{folder} is {what}: it stays as it is", flush=True)
    raise AssertionError


def make_store(data: Path | None) -> Path:
    """Make the store, or use the one that is there."""
    folder = choose_folder(describe(data))
    graph, store = data or folder / "graph", folder / "store"
    if store.exists():
        print(f"{store} was made of the same data: it is used again", flush=True)
        return store
    if data is None and not graph.exists():
        say("generate a labelled power-law graph")
        begun = folder / "graph.begun"  # of a run that was stopped
        shutil.rmtree(begun, ignore_errors=True)
        run("preprocess", "generate", str(begun), *GRAPH)
        begun.rename(graph)
    say("ingest it")
    run("preprocess", "ingest", str(graph), str(store), "--mem", MEM)
    return store


def main(data: str | None) -> int:
    store = make_store(Path(data) if data is not None else None)
    run("preprocess", "info", str(store))
    with tempfile.TemporaryDirectory(prefix="loaderd-") as folder:
        endpoint = f"ipc://{folder}/demo.sock"
        say("serve it")
        command = ["loaderd", "serve", str(store), "--mem", "1G", "--endpoint", endpoint]
        print("$ python -m " + " ".join(command), flush=True)
        daemon = subprocess.Popen(
            [sys.executable, "-m", *command], stdout=subprocess.PIPE, text=True
        )
        try:
            assert daemon.stdout is not None
            line = daemon.stdout.readline()
            print(line, end="", flush=True)
            if not line:
                return daemon.wait()
            say("train GraphSAGE on it")
            run("clients.train", endpoint, "--epochs", "3")
        finally:
            daemon.terminate()
            daemon.wait()
    print(f"\nThe store stays in {store}; `make clean` removes what the demo made.")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else None))
    except subprocess.CalledProcessError as error:
        sys.exit(error.returncode)
