"""Count label classes in one pass, when a session first needs the number."""

from msgspec import structs

from blockstore.format import NodeType, RowArray
from blockstore.store import Store, scan_rows
from loaderd.api.contents import TypeInfo
from loaderd.api.protocol import Attach
from loaderd.memory.ledger import arrays_of
from loaderd.sessions.seeds import SCAN_BYTES


class ClassCounts:
    """Numbers of classes of one store's labels.  For one thread at a time."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._found: dict[str, int] = {}  # by path of the array

    def fill(self, request: Attach, info: tuple[TypeInfo, ...]) -> tuple[TypeInfo, ...]:
        """Add the number of classes of each type's labels.  Raises CorruptBlock, AbsentRows."""
        return tuple(
            structs.replace(one, num_classes=self._count(request, t))
            for one, t in zip(info, self._store.manifest.types, strict=True)
        )

    def _count(self, request: Attach, t: NodeType) -> int:
        chosen = request.rows.label if request.rows is not None else ""
        array = arrays_of(t).get(chosen or "y")
        if array is None:
            return 0
        if array.path not in self._found:
            self._found[array.path] = self._pass_over(array)
        return self._found[array.path]

    def _pass_over(self, array: RowArray) -> int:
        """The columns, or the greatest label plus 1, without negative ones; 0 for floats."""
        if array.row_shape:
            return array.row_items
        if not array.dtype.startswith(("int", "uint")):
            return 0
        maximum = -1
        for _, rows in scan_rows(self._store, array, SCAN_BYTES):
            maximum = max(maximum, int(rows.max()))
        return maximum + 1
