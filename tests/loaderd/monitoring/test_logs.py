"""Lines of the log, and a log that nobody reads."""

import json
import logging
import os
import subprocess
import sys

from loaderd.monitoring.logs import EventFormatter, Throttle
from tests.daemons import ROOT

FLOOD = """
import logging
from loaderd.monitoring.logs import logging_to_stderr, log_event
log = logging.getLogger("loaderd.x")
with logging_to_stderr("text", "info"):
    for i in range(30000):
        log_event(log, logging.INFO, "line", number=i)
    print("done", flush=True)
"""


def record(**fields):
    made = logging.LogRecord("loaderd", logging.WARNING, "", 0, "session refused", None, None)
    made.created = 0.0
    made.fields = fields
    return made


def test_text_quotes_what_would_be_ambiguous():
    line = EventFormatter("text").format(record(session=3, error='a "b"\nc', none=""))
    fields = r'session=3 error="a \"b\"\nc" none=""'
    assert line == f"1970-01-01T00:00:00.000+00:00 WARNING session refused {fields}"


def test_json_is_one_object_a_line():
    line = EventFormatter("json").format(record(session=3, error="a\nb"))
    assert "\n" not in line
    assert json.loads(line) == {
        "time": "1970-01-01T00:00:00.000+00:00", "level": "warning", "event": "session refused",
        "session": 3, "error": "a\nb",
    }  # fmt: skip


def test_an_exception_is_a_field():
    made = record()
    try:
        raise ValueError("no")
    except ValueError:
        made.exc_info = sys.exc_info()
    assert "ValueError: no" in json.loads(EventFormatter("json").format(made))["exception"]


def test_a_log_that_nobody_reads_stops_nothing():
    """The pipe holds 64 KiB, the queue 10,000 lines: the rest is dropped."""
    reading, writing = os.pipe()
    try:
        with subprocess.Popen(
            [sys.executable, "-c", FLOOD], cwd=ROOT, stdout=subprocess.PIPE, stderr=writing
        ) as process:
            assert process.communicate(timeout=60)[0] == b"done\n"
        assert process.returncode == 0
    finally:
        os.close(reading)
        os.close(writing)


def test_a_throttle_lets_some_through_and_counts_the_others():
    now = 5.0
    throttle = Throttle(2, lambda: now)
    assert [throttle.admit() for _ in range(5)] == [0, 0, None, None, None]
    now = 6.5
    assert [throttle.admit() for _ in range(3)] == [3, 0, None]
    now = 9.0
    assert throttle.admit() == 1
