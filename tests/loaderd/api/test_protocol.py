"""PROTOCOL.md says what protocol.py does; no frame, however odd, raises anything but BadMessage."""

import contextlib
import doctest
import inspect
import json
import re
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loaderd.api import endpoint, errors, protocol, requests
from loaderd.api.errors import BadMessage
from loaderd.api.protocol import (
    PROTOCOL_VERSION,
    Attach,
    ClientMessage,
    DaemonMessage,
    Message,
    StatusRequest,
    StepMessage,
    encode,
)
from tests.loaderd.samples import SAMPLES

DOCUMENT = (Path(protocol.__file__).parent / "PROTOCOL.md").read_text()
RECORDS = {
    name: cls
    for name, cls in inspect.getmembers(protocol, inspect.isclass)
    if issubclass(cls, msgspec.Struct) and cls not in (Message, StepMessage)
}
ROW = re.compile(r"^\| `(\w+)` \|([^|]+)\|([^|]*)\|", re.MULTILINE)


def section(name: str) -> str:
    """The text under `### name`."""
    found = re.search(rf"^### {name}\n(.*?)(?=^##|\Z)", DOCUMENT, re.MULTILINE | re.DOTALL)
    assert found, f"PROTOCOL.md has no section {name}"
    return found[1]


def written(kind: Any) -> str:
    """A field's type as the document writes it."""
    if get_origin(kind) is tuple:
        return f"[{written(get_args(kind)[0])}]"
    if get_origin(kind) is dict:
        return "{" + ": ".join(map(written, get_args(kind))) + "}"
    if isinstance(kind, UnionType):
        return " or ".join("null" if k is NoneType else written(k) for k in get_args(kind))
    return str(kind.__name__)


def default_of(field: Any) -> str:
    """A field's default as the document writes it."""
    value = field.default
    if value is msgspec.NODEFAULT:
        if field.default_factory is msgspec.NODEFAULT:
            return ""
        value = field.default_factory()
    return f"`{json.dumps(value) if isinstance(value, str) else repr(value)}`"


def test_the_version_is_the_documents():
    (number,) = re.findall(r"^Protocol version: (\d+)$", DOCUMENT, re.MULTILINE)
    assert int(number) == protocol.PROTOCOL_VERSION


def test_every_record_is_documented_and_no_other():
    assert set(re.findall(r"^### (\w+)$", DOCUMENT, re.MULTILINE)) == set(RECORDS)


@pytest.mark.parametrize("name", RECORDS)
def test_fields_types_and_defaults_are_the_documents(name):
    fields = msgspec.structs.fields(RECORDS[name])
    expected = [(f.name, written(f.type), default_of(f)) for f in fields]
    table = section(name).split("| array |")[0]
    assert [(a, b.strip(), c.strip()) for a, b, c in ROW.findall(table)] == expected


@pytest.mark.parametrize("name", [n for n, cls in RECORDS.items() if issubclass(cls, Message)])
def test_the_kind_of_a_message_is_the_documents(name):
    (kind,) = re.findall(r"^Kind `([\w-]+)`\.", section(name), re.MULTILINE)
    assert kind == RECORDS[name].__struct_config__.tag
    assert RECORDS[name] in (*get_args(ClientMessage), *get_args(DaemonMessage))


def test_limits_and_names_are_the_documents():
    numbers = (requests.MAX_IDS, requests.MAX_BATCH, requests.MAX_WORLD)
    for number in (*(f"{n:,}" for n in numbers), requests.MAX_WINDOW):
        assert f" {number}" in DOCUMENT
    assert f"at most {endpoint.MAX_PATH_BYTES} bytes" in DOCUMENT
    for suffix in (protocol.DOOR_SUFFIX, endpoint.LOCK_SUFFIX):
        assert f"`PATH{suffix}`" in DOCUMENT
    (row,) = re.findall(r"^\| `error` .*$", section("ErrorReply"), re.MULTILINE)
    for name in re.findall(r"`([A-Z]\w+)`", row):
        assert issubclass(getattr(errors, name), errors.DaemonError)


def test_the_example_runs():
    (code,) = re.findall(r"^```python\n(.*?)^```", DOCUMENT, re.MULTILINE | re.DOTALL)
    parsed = doctest.DocTestParser().get_doctest(code, {}, "PROTOCOL.md", None, 0)
    assert parsed.examples
    assert doctest.DocTestRunner(verbose=False).run(parsed).failed == 0


@pytest.mark.parametrize("message", SAMPLES, ids=lambda m: type(m).__name__)
def test_a_message_comes_out_as_it_went_in(message):
    is_clients = isinstance(message, get_args(ClientMessage))
    decode = protocol.decode_client if is_clients else protocol.decode_daemon
    assert decode(encode(message)) == message
    assert decode(memoryview(encode(message))) == message


def test_another_version_is_named():
    frame = msgspec.msgpack.encode((1, {"kind": "status"}))
    with pytest.raises(BadMessage, match="peer speaks protocol 1, this side 5"):
        protocol.decode_client(frame)


def test_unknown_fields_are_ignored_and_unknown_kinds_refused():
    frame = msgspec.msgpack.encode(
        (PROTOCOL_VERSION, {"kind": "status", "request": 3, "news": [1]})
    )
    assert protocol.decode_client(frame) == StatusRequest(request=3)
    for body in ({"kind": "sing"}, {"request": 3}, [], 7, None):
        with pytest.raises(BadMessage):
            protocol.decode_client(msgspec.msgpack.encode((PROTOCOL_VERSION, body)))


@pytest.mark.parametrize(
    "frame",
    [
        b"\x92\x03" + b"\x91" * 200_000,  # nested deeper than the stack
        b"\x92\x03" + b"\x81\xa1a" * 200_000,
        b"\x92\x03\x82\xa4kind\xa6status\xa1z" + b"\x91" * 200_000,
        encode(Attach(token=1, request=2, split="abcd")).replace(b"abcd", b"\xff\xfe\xff\xff"),
        encode(StatusRequest()).replace(b"status", b"\xff" * 6),
        b"\x92\x03\xdd\xff\xff\xff\xff",  # four billion items announced
        b"",
        encode(StatusRequest()) + b"\x00",
    ],
)
def test_odd_frames_are_bad_messages(frame):
    for decode in (protocol.decode_client, protocol.decode_daemon):
        with pytest.raises(BadMessage):
            decode(frame)


@st.composite
def mutated_frames(draw):
    """A good frame with some bytes changed, cut out, put in or doubled."""
    frame = bytearray(encode(draw(st.sampled_from(SAMPLES))))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(frame)))
        count = draw(st.integers(0, 8))
        frame[at : at + draw(st.integers(0, 8))] = draw(
            st.one_of(st.binary(max_size=8), st.just(bytes(frame[at : at + count])))
        )
    return bytes(frame)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=8)
    | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=12,
)  # fmt: skip
FIELDS = sorted({f.name for cls in RECORDS.values() for f in msgspec.structs.fields(cls)})
KINDS = sorted(m.__struct_config__.tag for m in get_args(ClientMessage | DaemonMessage))
BODIES = st.builds(
    lambda kind, fields: {"kind": kind, **fields},
    st.sampled_from(KINDS) | VALUES,
    st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=6),
)


@settings(deadline=None)
@given(
    st.one_of(
        st.binary(max_size=200),
        mutated_frames(),
        st.tuples(st.just(1) | VALUES, BODIES | VALUES).map(msgspec.msgpack.encode),
    )
)
def test_no_frame_raises_anything_else(frame):
    for decode in (protocol.decode_client, protocol.decode_daemon):
        with contextlib.suppress(BadMessage):
            assert isinstance(decode(frame), Message)
