"""How many classes labels have: one pass over them, the first time that a session asks."""

from msgspec import structs

from blockstore.format import NodeType, RowArray
from blockstore.store import Store, scan_rows
from loaderd.api.contents import TypeInfo
from loaderd.api.protocol import Attach
from loaderd.memory.ledger import arrays_of
from loaderd.sessions.seeds import SCAN_BYTES


class ClassCounts:
    """Of the labels of one store.  One thread at a time asks."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._found: dict[str, int] = {}  # by path of the array

    def told(self, request: Attach, info: tuple[TypeInfo, ...]) -> tuple[TypeInfo, ...]:
        """With the classes of each type's labels.  Raises CorruptBlock, AbsentRows."""
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
        """Columns, or 1 and the greatest label, of which negative ones are none; 0 of floats."""
        if array.row_shape:
            return array.row_items
        if not array.dtype.startswith(("int", "uint")):
            return 0
        most = -1
        for _, rows in scan_rows(self._store, array, SCAN_BYTES):
            most = max(most, int(rows.max()))
        return most + 1
