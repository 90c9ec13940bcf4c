"""Opens stores in object storage as local ones: tables whole, blocks as they are wanted."""

import shutil
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import msgspec

from blockstore.closing import Closing
from blockstore.errors import CorruptBlock, StoreError
from blockstore.format import ROOT, BlockGeometry, Manifest, blocked_arrays, shard_path
from blockstore.io.files import flush, flush_tree, naming
from blockstore.make_part import make_hole
from blockstore.objects.bucket import Bucket, ObjectError, ObjectGone
from blockstore.objects.cache import (
    IN_FLIGHT,
    CachedPages,
    CachedShard,
    PageCache,
    object_bytes,
)
from blockstore.root import digest, read_root
from blockstore.store import INDEX_ENTRY_BYTES, Store
from blockstore.validate import check_manifest

_ORIGIN = "origin.json"
_OneT = TypeVar("_OneT")
_FoundT = TypeVar("_FoundT")


class _Origin(msgspec.Struct, frozen=True):
    """The origin of the store in a folder."""

    url: str
    root_etag: str


class ObjectStores(Closing):
    """Stores by URL, whose pages one cache keeps."""

    def __init__(self, folder: Path, size_bytes: int, mem_bytes: int, wait_s: float) -> None:
        """Raises StoreError: the folder cannot be used."""
        self.cache = PageCache(folder, size_bytes)
        self._mem_bytes, self._wait_s = mem_bytes, wait_s
        self._open: dict[str, tuple[Store, CachedPages]] = {}
        self._sealed = False

    def close(self) -> None:
        """Close the cache, and stores that nobody has closed."""
        for _, pages in self._open.values():
            if not pages.closed:
                pages.close()
        self.cache.close()

    def seal(self) -> None:
        """Open no further stores: memory for their pages is taken at the start."""
        self._sealed = True

    def open(self, url: str) -> Store:
        """A store, as `open_store` would open its files; one that is open is the same object.

        Raises StoreError: another store is there now, or none; ObjectError; NotAStore; OSError.
        """
        bucket = Bucket(url, self._wait_s)
        if self._sealed and bucket.url not in self._open:
            raise StoreError(
                f"{bucket.url}: was not served when this daemon began, and pages of a store in "
                "object storage take memory from the start: end the daemon, and serve it again"
            )
        folder = self.cache.folder / digest(bucket.url.encode()) / store_name(bucket.url)
        manifest = _bring_tables(bucket, folder)
        if bucket.url in self._open:
            store, pages = self._open[bucket.url]
            if not pages.closed:
                return store
        pages = _open_pages(bucket, folder, manifest, self.cache, object_bytes(self._mem_bytes))
        try:
            store = Store(folder, manifest, pages=pages)
            store.check_files()
        except BaseException:
            pages.close()
            raise
        self._open[bucket.url] = store, pages
        return store


def store_name(url: str) -> str:
    """The name of a store for sessions: the last part of the URL."""
    return url.rpartition("/")[2]


def _bring_tables(bucket: Bucket, folder: Path) -> Manifest:
    """Bring a store into a folder, except its pages, which are holes; returns the manifest.

    What is there stays: if the root of the bucket has another etag than it had, it is read again,
    and must have the same fingerprint.  Raises StoreError, ObjectError, OSError.
    """
    origin = folder.parent / _ORIGIN
    try:
        known = msgspec.json.decode(origin.read_bytes(), type=_Origin)
    except (FileNotFoundError, msgspec.DecodeError):
        known = _Origin(bucket.url, "")
    held = read_root(folder) if folder.exists() else None
    if held is None or not known.root_etag or bucket.head(ROOT).etag != known.root_etag:
        raw, etag = bucket.read_whole(ROOT)
        fresh = folder.with_name(f".{folder.name}.partial")
        shutil.rmtree(fresh, ignore_errors=True)
        try:
            fresh.mkdir(parents=True)
            _write(fresh / ROOT, raw)
            found = read_root(fresh)
            check_manifest(found, Path(bucket.url.replace("://", ":/")) / ROOT)
            if held is None:
                _bring_all(bucket, fresh, found)
                flush_tree(fresh)
                fresh.rename(folder)
            elif held.fingerprint != found.fingerprint:
                raise StoreError(
                    f"{bucket.url}: fingerprint {found.fingerprint}, the pages in {folder.parent} "
                    f"are of a store with {held.fingerprint}, expected the same; give another "
                    "folder, or remove that one"
                )
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
        replaced = origin.with_name(f"{_ORIGIN}.partial")
        _write(replaced, msgspec.json.encode(_Origin(bucket.url, etag)))
        flush(replaced)
        replaced.replace(origin)
        held = found
    check_manifest(held, folder / ROOT)
    return held


def _open_pages(
    bucket: Bucket, folder: Path, manifest: Manifest, cache: PageCache, flight_bytes: int
) -> CachedPages:
    """The pages of a store whose tables are in a folder.

    Raises ObjectError: a shard is not there, or of another size; StoreError.
    """
    arrays = blocked_arrays(manifest)
    names = [
        (shard_path(path, i, ndim), geometry, i)
        for path, geometry, ndim in arrays
        for i in range(geometry.num_shards)
    ]

    def find(one: tuple[str, BlockGeometry, int]) -> CachedShard:
        name, geometry, shard = one
        found, expected = bucket.head(name), shard_bytes(geometry, shard)
        if found.size != expected:
            raise ObjectError(
                f"{bucket.url}/{name}: {found.size} bytes, expected {expected}; push the store "
                "again"
            )
        return CachedShard(name, folder / name, found.etag)

    shards = iter(in_parallel(find, names))
    by_path = {path: (g, [next(shards) for _ in range(g.num_shards)]) for path, g, _ in arrays}
    tables = sum((folder / name).stat().st_size for name in (ROOT, *manifest.files))
    return CachedPages(bucket, cache, by_path, tables, flight_bytes)


def shard_bytes(geometry: BlockGeometry, shard: int) -> int:
    """Bytes of a shard's file: its slots and its index."""
    index_bytes = geometry.blocks_per_shard * INDEX_ENTRY_BYTES + 4
    return geometry.blocks_in(shard) * geometry.slot_bytes + index_bytes


def in_parallel(work: Callable[[_OneT], _FoundT], of: Iterable[_OneT]) -> list[_FoundT]:
    """What `work` returns for each.  Raises the first error, and begins nothing more."""
    with ThreadPoolExecutor(IN_FLIGHT) as pool:
        asked = [pool.submit(work, one) for one in of]
        try:
            return [one.result() for one in asked]
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _bring_all(bucket: Bucket, folder: Path, manifest: Manifest) -> None:
    """Bring the bound files, each with the digest that the manifest binds; make shards of holes."""

    def bring(name: str) -> None:
        try:
            raw, _ = bucket.read_whole(name)
        except ObjectGone as error:
            raise CorruptBlock(f"{error}; push the store again") from error
        if digest(raw) != manifest.files[name]:
            raise CorruptBlock(
                f"{bucket.url}/{name}: digest {digest(raw)} of {len(raw)} bytes, the manifest "
                f"binds {manifest.files[name]}; push the store again"
            )
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        _write(folder / name, raw)

    in_parallel(bring, manifest.files)
    for path, geometry, ndim in blocked_arrays(manifest):
        for i in range(geometry.num_shards):
            make_hole(folder / shard_path(path, i, ndim), geometry, i)


def _write(path: Path, raw: bytes) -> None:
    with naming(path, len(raw)):
        path.write_bytes(raw)
