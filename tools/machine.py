"""What a result was measured on, and when."""

import datetime
import os
import platform
from pathlib import Path


def machine() -> str:
    """CPU model, cores, memory and kernel in one line."""
    model = platform.processor()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    cores = len(os.sched_getaffinity(0))
    return f"{model}, {cores} cores, {memory:.0f} GiB, Linux {platform.release()}"


def today() -> str:
    return datetime.datetime.now(datetime.UTC).date().isoformat()
