"""`make demo [DATA=folder]`: from a raw folder to a store, a daemon and a trained model.

The folder of a store is named by a digest of what determines its bytes: the same data reuses it,
and other data gets another folder.
"""

import hashlib
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from blockstore.format import FORMAT_VERSION
from preprocess.sources.sourcefiles import stats_below
from tools.bench.setup import serving

MEM = "1G"
DEMO = Path(__file__).resolve().parent.parent / "build" / "demo"
GRAPH = ("--nodes", "50000", "--degree", "12", "--features", "64", "--classes", "8")


def say(step: str) -> None:
    print(f"\n== {step}", flush=True)


def run(*command: str) -> None:
    """Run one of our commands, as a user would type it."""
    print("$ python -m " + " ".join(command), flush=True)
    subprocess.run([sys.executable, "-m", *command], check=True)


def folder_of(data: Path | None) -> Path:
    """The folder of the store of a raw folder, or of a generated graph."""
    files = stats_below(data.absolute()) if data else {}
    made = [*GRAPH] if data is None else [str(data.absolute()), sorted(map(str, files.items()))]
    said = msgspec.json.encode([FORMAT_VERSION, MEM, made])
    name = data.absolute().name if data else "generated"
    return DEMO / f"{name}-{hashlib.blake2b(said, digest_size=4).hexdigest()}"


def make_store(data: Path | None) -> Path:
    """Make the store, or reuse an existing one."""
    folder = folder_of(data)
    graph, store = data or folder / "graph", folder / "store"
    if store.exists():
        print(f"{store} was made of the same data: it is used again", flush=True)
        return store
    folder.mkdir(parents=True, exist_ok=True)
    if data is None and not graph.exists():
        say("generate a labelled power-law graph")
        begun = folder / "graph.begun"  # may be left by a run that was stopped
        shutil.rmtree(begun, ignore_errors=True)
        run("preprocess", "generate", str(begun), *GRAPH)
        begun.rename(graph)
    say("ingest it")
    run("preprocess", "ingest", str(graph), str(store), "--mem", MEM)
    return store


def main(data: str | None) -> None:
    store = make_store(Path(data) if data is not None else None)
    run("preprocess", "info", str(store))
    with tempfile.TemporaryDirectory(prefix="loaderd-") as folder:
        say("serve it")
        print(f"$ python -m loaderd serve {store} --mem {MEM}", flush=True)
        with serving(store, Path(folder), MEM) as endpoint:
            say("train GraphSAGE on it")
            run("clients.train", endpoint, "--epochs", "3")
    print(f"\nThe store stays in {store}; `make clean` removes what the demo made.")


if __name__ == "__main__":
    try:
        main(sys.argv[1] if len(sys.argv) > 1 else None)
    except subprocess.CalledProcessError as error:
        sys.exit(error.returncode)
