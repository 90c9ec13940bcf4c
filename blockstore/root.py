"""The root zarr.json of a store: the manifest, and the fingerprint over every byte of it.

The manifest binds all other files: it holds a digest of each of them but the shards, and pages of
shards have checksums in a file that is bound.  Source: FORMAT.md, "Fingerprint".
"""

import hashlib
import json
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from blockstore.errors import CorruptBlock, NotAStore, UnsupportedVersion
from blockstore.format import FINGERPRINT_KEY, FORMAT_VERSION, MANIFEST_KEY, ROOT, Manifest
from blockstore.io.files import naming
from blockstore.validate import inside

_METADATA_BYTES = 1 << 20  # of an array or a group, at most
_MENDS = "restore it from a copy, or ingest again"
_NOT_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)  # or of other types
_RecordT = TypeVar("_RecordT")


class _Root(msgspec.Struct):
    """The metadata of the group.  Attributes of other programs are theirs."""

    zarr_format: Literal[3]
    node_type: Literal["group"]
    attributes: dict[str, msgspec.Raw]


class _Version(msgspec.Struct):
    format: int


def digest(raw: bytes) -> str:
    """Digest of a bound file, or fingerprint of a manifest: 32 hex digits."""
    return hashlib.blake2b(raw, digest_size=16).hexdigest()


def write_digested(path: Path, name: str, record: object) -> None:
    """Write a JSON file of a record and its digest.

    name   name of the record in the file
    """
    raw = msgspec.json.encode(record)
    path.write_bytes(msgspec.json.encode({"digest": digest(raw), name: msgspec.Raw(raw)}))


def read_digested(
    path: Path, name: str, kind: type[_RecordT], version: int, mends: str
) -> _RecordT:
    """Read the record of such a file, whose field `format` tells its version.

    mends   what to do if it is damaged

    Raises CorruptBlock, UnsupportedVersion.
    """
    try:
        fields = msgspec.json.decode(path.read_bytes(), type=dict[str, msgspec.Raw])
        raw, expected = bytes(fields[name]), _text(fields.get("digest"))
        if digest(raw) != expected:
            raise CorruptBlock(f"{path}: digest {digest(raw)}, expected {expected!r}; {mends}")
        found = msgspec.json.decode(raw, type=_Version).format
        if found != version:
            raise UnsupportedVersion(f"{path}: format {found}, this code reads {version}; {mends}")
        return msgspec.json.decode(raw, type=kind)
    except (OSError, KeyError, *_NOT_JSON) as error:
        raise CorruptBlock(f"{path}: {error}, expected {name!r} and a digest; {mends}") from error


def read_root(folder: Path) -> Manifest:
    """Read the manifest of a store, with its fingerprint, which is that of the bytes in the file.

    Raises NotAStore, UnsupportedVersion, CorruptBlock.
    """
    path = folder / ROOT
    try:
        attributes = msgspec.json.decode(path.read_bytes(), type=_Root).attributes
        text = bytes(attributes[MANIFEST_KEY])
        version = msgspec.json.decode(text, type=_Version).format
    except FileNotFoundError as error:
        found = f"no {ROOT}" if folder.exists() else f"no {ROOT}, as nothing is there"
        if str(folder).startswith(("ipc:/", "tcp:/")):
            found = "an endpoint, which `loaderd status` takes"
        raise NotAStore(
            f"{folder}: {found}, expected a store made by `blockstore ingest`"
        ) from error
    except NotADirectoryError as error:
        raise NotAStore(
            f"{folder}: not a folder, expected a store made by `blockstore ingest`"
        ) from error
    except (KeyError, *_NOT_JSON) as error:
        raise NotAStore(f"{path}: no attribute {MANIFEST_KEY!r}, expected a store") from error
    if version != FORMAT_VERSION:
        raise UnsupportedVersion(
            f"{path}: format {version}, this code reads {FORMAT_VERSION}; use the version of "
            "blockstore that wrote it, or ingest again"
        )
    found, expected = digest(text), _text(attributes.get(FINGERPRINT_KEY))
    if found != expected:
        raise CorruptBlock(
            f"{path}: the manifest has fingerprint {found}, expected {expected!r}; it was changed "
            f"after it was written: {_MENDS}"
        )
    try:
        manifest = msgspec.json.decode(text, type=Manifest)
    except msgspec.ValidationError as error:
        raise CorruptBlock(f"{path}: {error}; {_MENDS}") from error
    return msgspec.structs.replace(manifest, fingerprint=found)


def write_root(folder: Path, manifest: Manifest) -> Manifest:
    """Put a manifest into the group that is there; returns it with its fingerprint.

    The group has the new manifest or the old one, and keeps the attributes of other programs.
    """
    path, fresh = folder / ROOT, folder / f"{ROOT}.partial"
    document = json.loads(path.read_bytes())
    bare = msgspec.structs.replace(manifest, fingerprint="")
    document["attributes"][MANIFEST_KEY] = msgspec.to_builtins(bare)
    written = msgspec.json.decode(_encode(document), type=_Root).attributes
    fingerprint = digest(bytes(written[MANIFEST_KEY]))
    document["attributes"][FINGERPRINT_KEY] = fingerprint
    text = _encode(document)
    with naming(fresh, len(text)):
        fresh.write_bytes(text)
    fresh.replace(path)
    return msgspec.structs.replace(manifest, fingerprint=fingerprint)


def read_bound(root: str, manifest: Manifest, name: str, size: int = 0) -> bytes:
    """Read a bound file.  Raises CorruptBlock: it is missing, or is not the one that was bound.

    root   of the store, without links: `os.path.realpath`
    size   expected, else nothing is read of the file; 0: of metadata, any small size
    """
    path = inside(root, name)
    try:
        found = path.stat().st_size
        if found != size if size else found > _METADATA_BYTES:
            expected = size or "metadata of an array"
            raise CorruptBlock(f"{path}: {found} bytes, expected {expected}: {_MENDS}")
        raw = path.read_bytes()
    except OSError as error:
        raise CorruptBlock(f"{path}: {error.strerror}, expected a file: {_MENDS}") from error
    bound = manifest.files.get(name)
    if digest(raw) != bound:
        raise CorruptBlock(
            f"{path}: digest {digest(raw)} of {len(raw)} bytes, the manifest binds {bound}; the "
            f"file was changed, or is of another store: {_MENDS}"
        )
    return raw


def _encode(document: object) -> bytes:
    """As Zarr writes it: a program that adds an attribute by Zarr keeps the manifest's bytes."""
    return json.dumps(document, indent=2).encode()


def _text(raw: msgspec.Raw | None) -> str | None:
    try:
        return None if raw is None else msgspec.json.decode(raw, type=str)
    except msgspec.ValidationError:
        return None
