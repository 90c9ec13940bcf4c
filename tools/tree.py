"""Digests of the files of a folder, to compare two stores."""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_THREADS = 4


def file_digests(folder: Path) -> dict[str, str]:
    """sha256 in hex of every file below a folder, by relative path."""
    paths = sorted(p for p in folder.rglob("*") if p.is_file())
    with ThreadPoolExecutor(_THREADS) as pool:
        found = pool.map(_digest, paths)
        return {str(p.relative_to(folder)): d for p, d in zip(paths, found, strict=True)}


def one_digest(digests: dict[str, str]) -> str:
    """One sha256 over names and digests of all files."""
    lines = "".join(f"{digest}  {name}\n" for name, digest in sorted(digests.items()))
    return hashlib.sha256(lines.encode()).hexdigest()


def differences(left: dict[str, str], right: dict[str, str]) -> list[str]:
    """Names of the files that differ, or are in only one of the two."""
    return sorted(n for n in left.keys() | right.keys() if left.get(n) != right.get(n))


def _digest(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()
