"""`python -m tools.bench NAME [options]`: run one bench."""

import sys

from tools.bench import (
    adapters,
    csc,
    disk,
    gpu,
    handover,
    hops,
    hyperbatch,
    ingest,
    kernels,
    loaders,
    macro,
    remote,
    spmm,
    trainers,
)

BENCHES = {
    "adapters": adapters.main,
    "csc": csc.main,
    "disk": disk.main,
    "gpu": gpu.main,
    "handover": handover.main,
    "hops": hops.main,
    "hyperbatch": hyperbatch.main,
    "ingest": ingest.main,
    "kernels": kernels.main,
    "loaders": loaders.main,
    "macro": macro.main,
    "remote": remote.main,
    "spmm": spmm.main,
    "trainers": trainers.main,
}


def main() -> int:
    """Returns the exit code."""
    if len(sys.argv) < 2 or sys.argv[1] not in BENCHES:
        print(f"usage: python -m tools.bench {{{','.join(BENCHES)}}} [--help]", file=sys.stderr)
        return 2
    BENCHES[sys.argv[1]](sys.argv[2:])
    return 0


if __name__ == "__main__":
    sys.exit(main())
