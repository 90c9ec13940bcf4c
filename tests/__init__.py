"""Tests; kernels with bounds checks are cached apart, as numba's cache takes both for the same."""

import os
from pathlib import Path

if os.environ.get("NUMBA_BOUNDSCHECK", "0") not in ("", "0"):  # before anything imports numba
    os.environ.setdefault("NUMBA_CACHE_DIR", str(Path(__file__).parent / "__pycache__" / "bounds"))
