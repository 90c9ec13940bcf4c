"""The daemon's log: events, one a line, as text or JSON, on stderr; callers never wait."""

import json
import logging
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Literal

Format = Literal["text", "json"]
LOGGERS = ("loaderd", "blockstore.io", "asyncio")
QUEUED = 10_000  # lines that wait for a reader; later ones are dropped and counted
CLOSE_S = 1.0  # for what is queued at the end
_STDERR = 2


class EventFormatter(logging.Formatter):
    """Lines with a time in UTC, a level, an event and its fields."""

    def __init__(self, how: Format) -> None:
        """`how`: "text", or "json" for one object a line."""
        super().__init__()
        self._how = how

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        event = record.getMessage()
        fields: dict[str, object] = dict(getattr(record, "fields", {}))
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        if self._how == "json":
            line = {"time": moment, "level": record.levelname.lower(), "event": event} | fields
            return json.dumps(line, default=str)
        words = "".join(f" {name}={_word(value)}" for name, value in fields.items())
        return f"{moment} {record.levelname:7} {event}{words}"


def _word(value: object) -> str:
    text = str(value)
    plain = text.isprintable() and text and not set(text) & set(" =\"'")
    return text if plain else json.dumps(text)


class _Lines(logging.Handler):
    """Puts lines into a queue; a thread writes them.  A pipe that nobody reads stops nothing."""

    def __init__(self, how: Format) -> None:
        super().__init__()
        self.setFormatter(EventFormatter(how))
        self._queue: queue.Queue[bytes | None] = queue.Queue(QUEUED)
        self._dropped = 0
        self._thread = threading.Thread(target=self._write, name="log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        line = f"{self.format(record)}\n".encode("utf-8", "backslashreplace")
        try:
            if self._dropped:
                lost = f"{self._dropped} lines of this log were dropped: nobody read them\n"
                self._queue.put_nowait(lost.encode())
                self._dropped = 0
            self._queue.put_nowait(line)
        except queue.Full:
            self._dropped += 1

    def finish(self) -> None:
        """Write what is queued, as far as somebody takes it."""
        try:
            self._queue.put_nowait(None)
        except queue.Full:
            return
        self._thread.join(CLOSE_S)

    def _write(self) -> None:
        while (line := self._queue.get()) is not None:
            try:
                while line:
                    line = line[os.write(_STDERR, line) :]
            except OSError:  # stderr is closed: the log ends, the daemon does not
                return


@contextmanager
def logging_to_stderr(how: Format, level: str) -> Iterator[None]:
    """Inside the `with`, events of our own and of the event loop go to stderr.

    level   "debug", "info", "warning" or "error"
    """
    lines = _Lines(how)
    loggers = [logging.getLogger(name) for name in LOGGERS]
    before = [(log.level, log.propagate) for log in loggers]
    for log in loggers:
        log.addHandler(lines)
        log.propagate = False
        log.setLevel(level.upper())
    try:
        yield
    finally:
        for log, (old, propagate) in zip(loggers, before, strict=True):
            log.removeHandler(lines)
            log.propagate = propagate
            log.setLevel(old)
        lines.finish()


def log_event(log: logging.Logger, level: int, event: str, **fields: object) -> None:
    if log.isEnabledFor(level):
        log.log(level, event, extra={"fields": fields})


class Throttle:
    """Lets so many events a second through, and counts those that it does not."""

    def __init__(self, maximum: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._maximum, self._clock = maximum, clock
        self._second = -math.inf  # when it began
        self._seen = self._left_out = 0

    def admit(self) -> int | None:
        """How many were left out since the last that was let through; None: leave this one out."""
        now = self._clock()
        if now - self._second >= 1:
            self._second, self._seen = now, 0
        self._seen += 1
        if self._seen > self._maximum:
            self._left_out += 1
            return None
        left_out, self._left_out = self._left_out, 0
        return left_out
