"""The layout of MAG240M, as OGB-LSC unpacks it: docs/layouts.md."""

from pathlib import Path

from preprocess.errors import BadInput
from preprocess.files.npy import NpyFile
from preprocess.sources.arrays import ArrayRows, EdgeArray, read_dict, torch_ids
from preprocess.sources.source import Source, split_ends

FOLDER = "mag240m_kddcup2021"
META, SPLITS, PROCESSED, EDGES = "meta.pt", "split_dict.pt", "processed", "edge_index.npy"
_PAPER, _CLASSES, _BETWEEN = "paper", "num_classes", "___"
_WHOLE, _PARTS = ("test-whole", "test"), ("test-dev", "test-challenge")


class Mag240mSource(Source):
    """The folder itself, or its parent.  Raises BadInput."""

    layout = "mag240m"

    @classmethod
    def recognise(cls, path: Path) -> str | None:
        """`meta.pt` and a folder of a relation."""
        for folder, prefix in ((path, ""), (path / FOLDER, f"{FOLDER}/")):
            names = _relation_names(folder)
            if names and (folder / META).is_file():
                return f"{prefix}{META} and {prefix}{PROCESSED}/{names[0]}"
        return None

    def __init__(self, path: Path) -> None:
        folder = path / FOLDER if (path / FOLDER).is_dir() else path
        super().__init__(path, _count_nodes(folder / META))
        self.add_files(folder / META, folder / SPLITS)
        names = _relation_names(folder)
        if not names:
            raise BadInput.at(
                folder / PROCESSED, "no relations", "folders source___relation___target",
                "is it whole?",
            )  # fmt: skip
        for name in names:
            file = folder / PROCESSED / name / EDGES
            ends = split_ends(name, _BETWEEN, file.parent)
            for end in (ends[0], ends[2]):
                if end not in self.num_nodes:
                    raise BadInput.at(
                        file, f"a relation of node type {end!r}",
                        f"one of {', '.join(self.num_nodes)}, as in {META}",
                        f"correct {META}, or move the relation away",
                    )  # fmt: skip
            self.add_edges(ends, EdgeArray(NpyFile(file)))
        features, label, year = (
            ArrayRows(name, NpyFile(folder / PROCESSED / _PAPER / file), self.num_nodes[_PAPER])
            for name, file in (
                ("x", "node_feat.npy"), ("label", "node_label.npy"), ("year", "node_year.npy"),
            )
        )  # fmt: skip
        self.add_array(_PAPER, features)
        self.add_array(_PAPER, year)
        self.add_label(_PAPER, label)
        self._add_splits(folder / SPLITS)

    def _add_splits(self, path: Path) -> None:
        held = read_dict(path)
        # the whole test split contains its two parts, and splits must not overlap
        whole = next((name for name in _WHOLE if name in held), None)
        if all(part in held for part in _PARTS):
            left_out = set(_WHOLE)
        else:
            left_out = {*_WHOLE, *_PARTS} - {whole} if whole else set()
        for name in held:
            if name not in left_out:
                split = "test" if name in _WHOLE else name
                self.add_split(_PAPER, torch_ids(split, path, name, held))


def _relation_names(folder: Path) -> list[str]:
    found = (folder / PROCESSED).glob(f"*{_BETWEEN}*")
    return sorted(p.name for p in found if p.is_dir())


def _count_nodes(path: Path) -> dict[str, int]:
    """Nodes of each type, in the order of `meta.pt`."""
    counts = read_dict(path)
    counts.pop(_CLASSES, None)
    for name, count in counts.items():
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise BadInput.at(f"{path}: {name}", repr(count), "a number of nodes", "correct it")
    if _PAPER not in counts:
        raise BadInput.at(
            path, f"counts of {', '.join(counts) or 'nothing'}", f"one of {_PAPER} among them",
            "is it of MAG240M?",
        )  # fmt: skip
    return counts
