"""The whole way once, `make demo [DATA=folder]`: raw folder, store, daemon, trained model."""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

DEMO = Path(__file__).resolve().parent.parent / "demo"
GRAPH = ("--nodes", "50000", "--degree", "12", "--features", "64", "--classes", "8")


def say(step: str) -> None:
    """A headline."""
    print(f"\n== {step}", flush=True)


def run(*command: str) -> None:
    """A command of ours, as a user would type it."""
    print("$ python -m " + " ".join(command), flush=True)
    subprocess.run([sys.executable, "-m", *command], check=True)


def main(data: str | None) -> int:
    """Returns the exit code."""
    shutil.rmtree(DEMO, ignore_errors=True)
    DEMO.mkdir()
    graph, store = DEMO / "graph", DEMO / "store"
    if data is None:
        say("generate a labelled power-law graph")
        run("preprocess", "generate", str(graph), *GRAPH)
    else:
        graph = Path(data)
    say("ingest it")
    run("preprocess", "ingest", str(graph), str(store), "--mem", "1G")
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
    print(f"\nThe store stays in {store}; `make clean` removes it.")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else None))
    except subprocess.CalledProcessError as error:
        sys.exit(error.returncode)
