"""`python -m tools.bench NAME [options]`: run one bench."""

import signal
import sys
from importlib import import_module

BENCHES = (
    "adapters", "csc", "disk", "gpu", "handover", "hops", "hyperbatch", "ingest", "kernels",
    "loaders", "macro", "remote", "spmm", "trainers",
)  # fmt: skip


def main() -> int:
    """Returns the exit code."""
    if len(sys.argv) < 2 or sys.argv[1] not in BENCHES:
        print(f"usage: python -m tools.bench {{{','.join(BENCHES)}}} [--help]", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # daemons end with it
    import_module(f"tools.bench.{sys.argv[1]}").main(sys.argv[2:])  # what it alone needs
    return 0


if __name__ == "__main__":
    sys.exit(main())
