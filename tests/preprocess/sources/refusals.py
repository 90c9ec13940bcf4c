"""What a malformed source must say: one line that names file and place."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from preprocess.errors import BadInput
from preprocess.sources.source import Source
from preprocess.stages.scan import check_edge_splits, check_splits

_ROWS = 1000


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


@contextmanager
def refused(folder: Path, words: str) -> Iterator[None]:
    """What is done raises BadInput, whose one line begins with a file of the folder."""
    with pytest.raises(BadInput) as caught:
        yield
    message = str(caught.value)
    assert words in message
    assert message.startswith(str(folder))
    assert ": found " in message
    assert ", expected " in message
    assert "\n" not in message


def assert_refused(folder: Path, attempt: Callable[[], Source], words: str) -> None:
    """Opening or reading a source fails with one such line."""
    with refused(folder, words):
        read_whole(attempt())
