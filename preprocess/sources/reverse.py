"""A source with the reverses of relations between two types, as relations of their own."""

from collections.abc import Sequence

from preprocess.errors import BadInput
from preprocess.ingest.options import IngestOptions
from preprocess.sources.source import EdgePieces, Source, SourceRelation, SourceRows

PREFIX = "rev_"


def with_reverses(source: Source, options: IngestOptions) -> Source:
    """The source as the options want it: its own relations, and those that are to be added."""
    between = any(r.src != r.dst for r in source.relations)
    return WithReverses(source) if options.undirected and between else source


class WithReverses:
    """A `Source` that has, for each relation (a, name, b) with a != b, (b, rev_name, a) too.

    The edges of an added relation have the ids, and the arrays, of those that they reverse.
    Raises BadInput: the source has a relation of that name itself.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self.layout, self.where, self.undirected = source.layout, source.where, source.undirected
        self.files, self.num_nodes, self.rows = source.files, source.num_nodes, source.rows
        self.features, self.label, self.splits = source.features, source.label, source.splits
        self._original: dict[SourceRelation, SourceRelation] = {}
        names = {(r.src, r.name, r.dst) for r in source.relations}
        for r in source.relations:
            if r.src == r.dst:
                continue
            added = r._replace(src=r.dst, name=PREFIX + r.name, dst=r.src)
            if (added.src, added.name, added.dst) in names:
                raise BadInput.at(
                    r.where, f"a relation {added.name} from {added.src} to {added.dst}",
                    "none where reverses are to be added", "leave --undirected out",
                )  # fmt: skip
            self._original[added] = r

    def reverse_of(self, relation: SourceRelation) -> str:
        """Name of the relation that an added one reverses; "" for one of the source."""
        original = self._original.get(relation)
        return original.name if original else ""

    @property
    def relations(self) -> Sequence[SourceRelation]:
        """Those of the source, then those that are added."""
        return [*self._source.relations, *self._original]

    def divides(self, of: SourceRelation | SourceRows) -> bool:
        """Whether the source's own can be read from anywhere."""
        return self._source.divides(
            self._original.get(of, of) if isinstance(of, SourceRelation) else of
        )

    def edges(self, relation: SourceRelation, count: int, span: range | None = None) -> EdgePieces:
        """(src, dst), exchanged where the relation is an added one."""
        original = self._original.get(relation, relation)
        for src, dst in self._source.edges(original, count, span):
            yield (src, dst) if original is relation else (dst, src)

    def edge_rows(self, relation: SourceRelation) -> Sequence[SourceRows]:
        """Arrays of a relation, or of the one that it reverses."""
        return self._source.edge_rows(self._original.get(relation, relation))

    def edge_splits(self, relation: SourceRelation) -> Sequence[SourceRows]:
        """None for an added relation."""
        return [] if relation in self._original else self._source.edge_splits(relation)
