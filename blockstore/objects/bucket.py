"""Objects below one URL, by obstore: the only module that knows it.

Credentials, endpoint and region come from the variables that every tool of the provider reads.
Messages name the object, the range, the status and the provider's code; never the text of a
response, which may hold a key.
"""

import importlib
import random
import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from importlib.util import find_spec
from typing import Any, NamedTuple, TypeVar

from blockstore import concurrency
from blockstore.errors import StoreError

SCHEMES = ("s3", "gs", "az", "abfs", "abfss", "http", "https")
WAIT_S = 60.0  # for which an object may be out of reach before an error says so
PART_BYTES = 8 << 20  # of a multipart upload
_PARTS = 8  # of one object, in flight
_MIN_S, _MAX_S = 0.05, 5.0  # of a pause between two attempts
_TIMEOUT_S = 30.0  # of one request
_DIGEST = "blockstoredigest"  # the name is one that every provider takes
_AGAIN = re.compile(r"408|429|5\d\d")
_URL = re.compile(r"([a-z0-9]+)://?([^/].*)")  # a Path of a URL has one slash


_FoundT = TypeVar("_FoundT")


class ObjectError(StoreError):
    """An object cannot be read, or cannot be written."""


class ObjectGone(ObjectError):
    """There is no such object."""


class ObjectHead(NamedTuple):
    """What is known of an object without its bytes."""

    size: int
    etag: str


class Transfer(NamedTuple):
    """Sums over ranges that came at the first attempt, to fit a line to their times."""

    samples: int = 0
    num_bytes: float = 0.0
    seconds: float = 0.0
    squares: float = 0.0
    products: float = 0.0

    def seen(self, num_bytes: int, seconds: float) -> "Transfer":
        return Transfer(
            self.samples + 1, self.num_bytes + num_bytes, self.seconds + seconds,
            self.squares + num_bytes**2, self.products + num_bytes * seconds,
        )  # fmt: skip

    def fit(self) -> tuple[float, float]:
        """Fixed seconds of a request, and seconds per byte, by least squares.

        (0, 0) while there are too few ranges, or all of one size.
        """
        spread = self.samples * self.squares - self.num_bytes**2
        if self.samples < 16 or spread <= 0:
            return 0.0, 0.0
        slope = (self.samples * self.products - self.num_bytes * self.seconds) / spread
        return max(0.0, (self.seconds - slope * self.num_bytes) / self.samples), max(0.0, slope)


class Bucket:
    """Objects below a URL.  Any thread may call; each call is tried again for `wait_s` seconds."""

    def __init__(self, url: str, wait_s: float = WAIT_S) -> None:
        """Raises ObjectError: obstore is not installed, or the URL is none of its kinds."""
        if find_spec("obstore") is None:
            raise ObjectError(
                f'{url}: obstore is not installed, expected it: pip install "blockstore[objects]"'
            )
        self.url, self._wait_s = url.rstrip("/"), wait_s
        self._errors = importlib.import_module("obstore.exceptions")
        self._listed = importlib.import_module("obstore")
        seconds = timedelta(seconds=max(0.1, min(_TIMEOUT_S, wait_s / 3)))
        options = {"timeout": seconds, "connect_timeout": min(seconds, timedelta(seconds=5))}
        self._reads = self._open(options | {"allow_http": True}, 0)
        self._writes = self._open(options | {"allow_http": True}, 5)
        self._ending = concurrency.Event()
        self._lock = concurrency.Lock()
        self.requests = self.retries = self.bytes_read = 0
        self._times = Transfer()

    def _open(self, options: dict[str, Any], retries: int) -> Any:
        module = importlib.import_module("obstore.store")
        again = {"max_retries": retries, "retry_timeout": timedelta(seconds=self._wait_s)}
        try:
            return module.from_url(self.url, client_options=options, retry_config=again)
        except Exception as error:  # its classes of errors have no common base
            expected = ", ".join(f"{scheme}://" for scheme in SCHEMES)
            raise ObjectError(
                f"{self.url}: not the URL of a store, expected BUCKET/FOLDER behind one of "
                f"{expected}, and the provider's variables: {self._reason(error)}"
            ) from None

    def hurry(self) -> None:
        """Make no more attempts: what waits fails."""
        self._ending.set()

    def cost(self) -> tuple[float, float]:
        """Fixed seconds of a request, and seconds per byte, as measured so far; or zeros."""
        with self._lock:
            return self._times.fit()

    def read(
        self, name: str, start: int, stop: int, etag: str, check: Callable[[Any], str]
    ) -> memoryview:
        """Bytes [start, stop) of an object that has this etag.

        check   says what is wrong with the bytes, or ""; wrong ones are read again

        Raises ObjectError: it was replaced, or does not come.
        """
        options = {"range": (start, stop)} | ({"if_match": etag} if etag else {})

        def attempt() -> memoryview:
            begun = concurrency.perf_counter_ns()
            body = memoryview(self._reads.get(name, options=options).bytes())
            with self._lock:
                self.bytes_read += len(body)
            if len(body) != stop - start:
                raise _Again(f"{len(body)} bytes came, expected {stop - start}")
            if fault := check(body):
                raise _Again(fault)
            seconds = (concurrency.perf_counter_ns() - begun) / 1e9
            with self._lock:
                self._times = self._times.seen(len(body), seconds)
            return body

        return self._retried(attempt, f"{self.url}/{name}, bytes {start} to {stop - 1}")

    def read_whole(self, name: str) -> tuple[bytes, str]:
        """A small object and its etag.  Raises ObjectGone, ObjectError."""

        def attempt() -> tuple[bytes, str]:
            result = self._reads.get(name)
            body, meta = bytes(result.bytes()), result.meta
            with self._lock:
                self.bytes_read += len(body)
            if len(body) != meta["size"]:
                raise _Again(f"{len(body)} bytes came, expected {meta['size']}")
            return body, meta["e_tag"] or ""

        return self._retried(attempt, f"{self.url}/{name}")

    def head(self, name: str) -> ObjectHead:
        """Size and entity tag of an object.  Raises ObjectGone, ObjectError."""

        def attempt() -> ObjectHead:
            meta = self._reads.head(name)
            return ObjectHead(meta["size"], meta["e_tag"] or "")

        return self._retried(attempt, f"{self.url}/{name}")

    def sizes(self) -> dict[str, int]:
        """Sizes of all objects below the URL, by name.  Raises ObjectError."""

        def attempt() -> dict[str, int]:
            pages = self._listed.list(self._reads)
            return {one["path"]: one["size"] for page in pages for one in page}

        return self._retried(attempt, self.url)

    def digest(self, name: str) -> str:
        """The digest that an object was written with, or "".  Raises ObjectGone, ObjectError."""

        def attempt() -> str:
            result = self._reads.get(name, options={"range": (0, 1)})
            return str(result.attributes.get(_DIGEST, ""))

        return self._retried(attempt, f"{self.url}/{name}")

    def write(self, name: str, body: Callable[[], Iterator[bytes] | bytes], digest: str) -> None:
        """Write an object, in parts if it is large; it appears whole or not at all.

        body   called again for each attempt

        Raises ObjectError, and what `body` raises.
        """

        def attempt() -> None:
            self._writes.put(
                name, body(), attributes={_DIGEST: digest}, use_multipart=None,
                chunk_size=PART_BYTES, max_concurrency=_PARTS,
            )  # fmt: skip

        self._retried(attempt, f"{self.url}/{name}")

    def _retried(self, attempt: Callable[[], _FoundT], where: str) -> _FoundT:
        """Repeat an attempt, with growing pauses of random length; returns what it returns."""
        end, pause = concurrency.monotonic() + self._wait_s, _MIN_S
        while True:
            with self._lock:
                self.requests += 1
            try:
                return attempt()
            except StoreError:
                raise
            except Exception as error:
                self._judge(error, where)
                found = str(error) if isinstance(error, _Again) else self._reason(error)
            if concurrency.monotonic() >= end or self._ending.is_set():
                raise ObjectError(
                    f"{where}: {found}, and so for {self._wait_s:g} s; expected the object: look "
                    "whether the object store is reachable and takes so many requests"
                )
            with self._lock:
                self.retries += 1
            self._ending.wait(random.uniform(0, pause))  # noqa: S311
            pause = min(_MAX_S, 2 * pause)

    def _judge(self, error: Exception, where: str) -> None:
        """Raise errors that another attempt would meet again."""
        if isinstance(error, _Again):
            return
        kinds, reason = self._errors, self._reason(error)
        if isinstance(error, FileNotFoundError | kinds.NotFoundError):
            bucket = "NoSuchBucket" in reason
            what = "there is no such bucket" if bucket else "there is no such object"
            raise ObjectGone(f"{where}: {what} ({reason}), expected a store that was pushed there")
        if isinstance(error, kinds.PreconditionError):
            raise ObjectError(
                f"{where}: the object was replaced since the store was opened ({reason}), expected "
                "the same etag: start again, and it is read as it is now"
            )
        status = re.search(r"^\d{3}", reason)
        if isinstance(error, kinds.PermissionDeniedError | kinds.UnauthenticatedError):
            raise ObjectError(
                f"{where}: access is refused ({reason}), expected rights to read, and to write for "
                "a push: see the provider's variables for credentials"
            )
        if status is not None and not _AGAIN.match(reason):
            raise ObjectError(
                f"{where}: refused ({reason}), expected bucket, region and endpoint that fit each "
                "other: see AWS_REGION and AWS_ENDPOINT_URL, or the provider's variables"
            )
        if isinstance(error, OSError) and error.errno is not None:
            raise error

    @staticmethod
    def _reason(error: Exception) -> str:
        """Status and code of a response, or the kind of failure; nothing else of its text."""
        text = str(error)
        status = re.search(r"status code: (\d{3}[ A-Za-z]*)", text)
        code = re.search(r"<Code>(\w+)</Code>", text)
        kind = re.search(r"kind: (\w+),\n", text.rpartition("HttpError")[2])
        found = [m[1].strip() for m in (status, code) if m is not None]
        if not found and "configured region" in text:  # a redirect that says nowhere
            found = ["301 Moved, another region"]
        if not found and kind is not None:
            found = [{"Timeout": "no answer in time", "Connect": "no connection"}.get(
                kind[1], f"the connection failed: {kind[1]}")]  # fmt: skip
        return ", ".join(found) or type(error).__name__


class _Again(Exception):
    """An answer that is not the one asked for."""


def parse_url(text: str) -> str:
    """The URL of a store in object storage; "" if the text is a path of this machine."""
    found = _URL.fullmatch(text)
    return f"{found[1]}://{found[2]}".rstrip("/") if found and found[1] in SCHEMES else ""
