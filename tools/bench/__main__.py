"""`python -m tools.bench NAME [options]`: run one bench."""

import signal
import sys

from tools.bench.harness import BENCHES, run


def main() -> int:
    if len(sys.argv) < 2 or sys.argv[1] not in BENCHES:
        print(f"usage: python -m tools.bench {{{','.join(BENCHES)}}} [--help]", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # daemons end with it
    run(sys.argv[1], sys.argv[2:])
    return 0


if __name__ == "__main__":
    sys.exit(main())
