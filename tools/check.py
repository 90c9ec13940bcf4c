"""Everything that must hold before a commit: `python -m tools.check [NAME ...]`."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
KERNELS = "tests/blockstore/kernels"


class CheckCommand(NamedTuple):
    """A command of this interpreter's environment."""

    name: str
    module: tuple[str, ...]
    environment: tuple[tuple[str, str], ...] = ()


CHECKS = (
    CheckCommand("format", ("ruff", "format", "--check", ".")),
    CheckCommand("lint", ("ruff", "check", ".")),
    CheckCommand("types", ("mypy",)),
    CheckCommand("tests", ("pytest",)),
    # kernels again, with every index checked, and as plain Python
    CheckCommand("bounds", ("pytest", KERNELS), (("NUMBA_BOUNDSCHECK", "1"),)),
    CheckCommand("nojit", ("pytest", KERNELS), (("NUMBA_DISABLE_JIT", "1"),)),
)


def run(check: CheckCommand) -> bool:
    """Run it, say how it went, and whether it passed."""
    begun = time.perf_counter()
    command = [sys.executable, "-m", *check.module]
    environment = os.environ | dict(check.environment)
    code = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
    seconds = time.perf_counter() - begun
    print(f"{check.name}: {'passed' if code == 0 else 'FAILED'}, {seconds:.0f} s", flush=True)
    return code == 0


def main(names: list[str]) -> int:
    """Returns the exit code: 0 where all passed, 2 where a name is unknown."""
    known = [check.name for check in CHECKS]
    if unknown := sorted(set(names) - set(known)):
        print(f"error: no check {', '.join(unknown)}; there are {', '.join(known)}")
        return 2
    passed = [run(check) for check in CHECKS if not names or check.name in names]
    return int(not all(passed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
