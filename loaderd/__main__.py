"""The `loaderd` command: takes signals first, then imports what it needs."""

import importlib
import os
import signal
import sys


def main() -> None:
    if sys.argv[1:2] == ["serve"]:
        # The imports take a second or more.  Until `Signals` takes over there is nothing to clean
        # up, and an exception that a handler raised inside an import might end as a traceback, or
        # be swallowed: so the process just ends, with the exit code of a daemon that was stopped.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda _number, _frame: os._exit(0))
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # no store is open that could be opened again
    run_app = importlib.import_module("blockstore.flags").run_app
    run_app(importlib.import_module("loaderd.cli.commands").app, "loaderd")


if __name__ == "__main__":
    main()
