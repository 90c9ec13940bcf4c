"""Followers that fall behind: a line that waits for its slowest one loses it."""

from blockstore import concurrency
from loaderd.sharing.errands import do_all
from loaderd.sharing.line import Line
from loaderd.sharing.linebook import Book
from loaderd.sharing.linemaking import LineMaker
from loaderd.sharing.seating import Seating, Todo

LOOK_S = 0.01  # between two looks at a line that has nothing for one of its followers
PATIENCE_S = 0.25  # that a line waits for the slowest of its followers, before that one leaves
LAST_S = 2.0  # the same, where that one keeps the only batch that can be lent: all have to leave


class LineWatch:
    """A thread that looks at lines while one of their followers has nothing."""

    def __init__(self, book: Book, seating: Seating, maker: LineMaker) -> None:
        self._book, self._seating, self._maker = book, seating, maker
        self._starved, self._closed = seating.starved, False
        self._thread = concurrency.Thread(target=self._watch, name="share-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Nobody is parted any more."""
        self._closed = True
        self._starved.set()
        self._thread.join()

    def _watch(self) -> None:
        pause = concurrency.Event()
        while self._starved.wait():
            self._starved.clear()
            if self._closed:  # only now: an end that comes before must not be cleared away
                return
            since: dict[int, float] = {}  # that each line has waited for releases
            while lines := self._held_up():
                pause.wait(LOOK_S)
                for line in lines:
                    with self._book.lock:
                        engine = self._book.at.get(line.number)
                    if engine is None or not engine.waits(line.number):
                        since.pop(line.number, None)
                        continue
                    now, depth = concurrency.monotonic(), engine.depth(line.number)
                    patience_s = PATIENCE_S if depth > 1 else LAST_S
                    if now - since.setdefault(line.number, now) >= patience_s:
                        self._part(line, depth, engine.waits(line.number))

    def _held_up(self) -> list[Line]:
        """Lines that have nothing for one follower, and something that another one holds up."""
        with self._book.lock:
            return [
                line
                for line in self._book.lines.values()
                if not self._closed and line.starved and (line.blocked or line.last() is not None)
            ]

    def _part(self, line: Line, depth: int, waits: bool) -> None:
        with self._book.lock:
            line.depth = max(1, depth)
            if not waits or not line.starved or line.number not in self._book.lines:
                return
            if line.closing:  # nothing is sent: whoever left would have nothing to release either,
                return  # and is heard of again only by that
            slowest = line.last()
            if slowest is not None:
                todo = self._seating.leave(self._book.sessions[slowest.number], line)
            else:
                todo = self._desert(line) if line.blocked else []
        do_all(todo)

    def _desert(self, line: Line) -> Todo:
        """Those who have left it hold all that a line can lend: the others go on elsewhere."""
        line.stuck = True
        todo: Todo = []
        for follower in line.hungry:
            session = self._book.sessions[follower.number]
            session.step = follower.next
            todo += self._seating.move(session, None)
            self._maker.want(session)
        return todo
