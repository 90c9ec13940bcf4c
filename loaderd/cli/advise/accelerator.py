"""What memory the accelerators of this machine have free, by their driver's own tool."""

import shutil
import subprocess

_WAIT_S = 20.0


def free_bytes() -> int:
    """Of the emptiest accelerator, in bytes; 0: there is none, or its driver does not answer."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return 0
    words = [tool, "--query-gpu=memory.free", "--format=csv,noheader,nounits"]
    try:
        found = subprocess.run(  # noqa: S603 the driver's own, words of ours
            words, capture_output=True, text=True, timeout=_WAIT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return 0
    lines = [line.strip() for line in found.stdout.splitlines()]
    return max((int(line) << 20 for line in lines if line.isdecimal()), default=0)
