"""What a malformed source must say: one line that names file and place."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from preprocess.errors import BadInput
from preprocess.ingest.contents import list_contents
from preprocess.ingest.options import IngestOptions
from preprocess.ingest.prepare import prepared
from preprocess.sources.source import Source
from preprocess.sources.sourcefiles import SourceFiles
from preprocess.stages.scan import check_edge_splits, check_splits
from tests.preprocess.quiet import QUIET

MEM = 32 << 20
_ROWS = 1000

Spoiler = Callable[[Path], object]  # changes a folder


def text(name: str, content: str | bytes) -> Spoiler:
    """Replaces a file."""
    raw = content.encode() if isinstance(content, str) else content
    return lambda folder: (folder / name).write_bytes(raw)


def save(name: str, values: Any) -> Spoiler:
    """Replaces an npy file, named with its suffix or without."""
    return lambda folder: np.save(folder / name, np.asarray(values))


def put(name: str, value: Any) -> Spoiler:
    """Replaces a file of torch."""
    return lambda folder: torch.save(value, folder / name)


def moved(old: str, new: str) -> Spoiler:
    """Gives a file or a folder another name."""
    return lambda folder: (folder / old).rename(folder / new)


def drop(name: str) -> Spoiler:
    return lambda folder: (folder / name).unlink()


def cut(name: str, num_bytes: int = 1) -> Spoiler:
    """Leaves out the end of a file."""
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:-num_bytes])


def read_whole(source: Source) -> None:
    """Read all that an ingest reads."""
    for name in source.num_nodes:
        label = source.label(name)
        for rows in (*source.features(name), *source.splits(name), *([label] if label else [])):
            for _ in source.rows(rows, _ROWS):
                pass
        check_splits(source, name)
    for relation in source.relations:
        for _ in source.edges(relation, _ROWS):
            pass
        for rows in (*source.edge_rows(relation), *source.edge_splits(relation)):
            for _ in source.rows(rows, _ROWS):
                pass
        check_edge_splits(source, relation)


def assert_refused(folder: Path, attempt: Callable[[], Source], words: str) -> None:
    """Opening, preparing or reading a source fails with one line that begins with a file of it."""
    target = folder.with_name(f"{folder.name}-store")

    def use() -> None:
        source = attempt()
        with prepared(source, target, MEM, QUIET, False, SourceFiles(source.files)):
            list_contents(source, IngestOptions())
            read_whole(source)

    with pytest.raises(BadInput) as caught:
        use()
    assert not list(target.parent.glob(f"*{target.name}*"))
    message = str(caught.value)
    assert words in message
    assert message.startswith(str(folder))
    assert ": found " in message
    assert ", expected " in message
    assert "\n" not in message
