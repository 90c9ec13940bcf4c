"""The daemon's HTTP port: metrics, a page of live charts with its JSON, liveness, readiness."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from pathlib import Path
from socket import AF_INET, AF_INET6, SHUT_RDWR, socket
from urllib.parse import parse_qs, urlsplit

import msgspec

from blockstore.closing import Closing
from loaderd.api.errors import DaemonError
from loaderd.api.protocol import StatusReply
from loaderd.monitoring.metrics import CONTENT_TYPE, metrics_text
from loaderd.monitoring.rates import History, StatusSample

log = logging.getLogger(__name__)
SAMPLE_S = 1.0
SAMPLES = 300
POLL_S = 0.1  # between two checks whether to end
MAX_REQUESTS = 16  # at a time; another one ends the oldest
REQUEST_S = 10.0  # for a client to ask, and to take the answer
_EXPECTED = b"expected /, /metrics, /status.json, /healthz or /readyz\n"
_PAGE = Path(__file__).parent / "page.html"
_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'; connect-src 'self'; img-src data:",
}


class MonitoringServer(Closing):
    """Has threads: one takes a status each second, one listens, one answers each request."""

    def __init__(self, host: str, port: int, status: Callable[[], StatusReply]) -> None:
        """`status` may be called from any thread.  Raises DaemonError: the port cannot be had."""
        self._status, self._history = status, History(SAMPLES)
        self._page = _PAGE.read_bytes()
        try:
            self._server = _Server((host, port), _handler_of(self, host))
        except (OSError, OverflowError) as error:
            raise DaemonError(
                f"--metrics-port {port}: {host} does not give it "
                f"({getattr(error, 'strerror', None) or error}); choose another one, or 0 for none"
            ) from error
        self._stop = threading.Event()
        sample, serve = self._take_samples, self._server.serve_forever
        threading.Thread(target=sample, name="monitoring-sample", daemon=True).start()
        threading.Thread(target=serve, args=(POLL_S,), name="monitoring", daemon=True).start()

    @property
    def address(self) -> str:
        host, port = self._server.server_address[:2]
        name = f"[{host!s}]" if ":" in str(host) else str(host)
        return f"http://{name}:{port}/"

    def close(self) -> None:
        self._stop.set()
        self._server.shutdown()
        self._server.server_close()

    def answer(self, target: str) -> tuple[int, str, bytes]:
        """Code, content type and body for a path."""
        parts = urlsplit(target)
        try:
            match parts.path:
                case "/":
                    return 200, "text/html; charset=utf-8", self._page
                case "/metrics":
                    return 200, CONTENT_TYPE, metrics_text(self._status())
                case "/status.json":
                    return 200, "application/json", self._json(parts.query)
                case "/healthz":  # the daemon's loop has answered: a restart would mend nothing
                    self._status()
                    return 200, "text/plain", b"ok\n"
                case "/readyz":
                    if self._status().draining:
                        return 503, "text/plain", b"draining: no session may attach\n"
                    return 200, "text/plain", b"ready\n"
        except (TimeoutError, RuntimeError):
            return 503, "text/plain", b"the daemon does not answer\n"
        return 404, "text/plain", _EXPECTED

    def _json(self, query: str) -> bytes:
        """The status, and the rates that are newer than `after`."""
        try:
            after = float(parse_qs(query).get("after", ["-1"])[0])
        except ValueError:
            after = -1.0
        return msgspec.json.encode(
            {"status": self._status(), "rates": self._history.after(after), "every_s": SAMPLE_S}
        )

    def _take_samples(self) -> None:
        while True:
            try:
                self._history.add(StatusSample(time.monotonic(), self._status()))
            except (TimeoutError, RuntimeError):
                log.debug("the daemon does not answer")
            if self._stop.wait(SAMPLE_S):
                return


class _Server(ThreadingHTTPServer):
    """Takes a bounded number of requests at a time.

    Connections that send their request a byte a second, or never, must not keep others out: if all
    places are taken, the oldest connection that has not asked yet is ended, or else the oldest.
    """

    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True
    request_queue_size = 256  # beyond, a client tries again only after a second

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self.address_family = AF_INET6 if ":" in address[0] else AF_INET
        self._lock = threading.Lock()
        self._open: dict[socket, bool] = {}  # oldest first: whether the request has come
        super().__init__(address, handler)

    def asked(self, request: socket) -> None:
        with self._lock:
            if request in self._open:
                self._open[request] = True

    def process_request(self, request: "socket | tuple[bytes, socket]", client: object) -> None:
        assert isinstance(request, socket)
        with self._lock:
            if len(self._open) == MAX_REQUESTS:
                oldest = min(self._open, key=self._open.__getitem__)
                del self._open[oldest]
                with contextlib.suppress(OSError):  # it has left
                    oldest.shutdown(SHUT_RDWR)  # its thread wakes, and closes it
            self._open[request] = False
        super().process_request(request, client)

    def process_request_thread(
        self, request: "socket | tuple[bytes, socket]", client: object
    ) -> None:
        assert isinstance(request, socket)
        try:
            super().process_request_thread(request, client)
        finally:
            with self._lock:
                self._open.pop(request, None)

    def handle_error(self, request: object, client: object) -> None:  # noqa: ARG002
        """A client that leaves is no event."""
        log.debug("a client of the HTTP port left", exc_info=True)


def _handler_of(server: MonitoringServer, host: str) -> type[BaseHTTPRequestHandler]:
    loopback = _is_loopback(host)

    class Handler(BaseHTTPRequestHandler):
        timeout = REQUEST_S
        server_version, sys_version = "loaderd", ""

        def do_GET(self) -> None:
            assert isinstance(self.server, _Server)
            self.server.asked(self.connection)
            if loopback and not _is_loopback(_host_of(self.headers.get("Host", host))):
                code, kind, body = 403, "text/plain", b"ask by a loopback name\n"
            else:
                code, kind, body = server.answer(self.path)
            self.send_response(code)
            for name, value in (_HEADERS | {"Content-Type": kind}).items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_HEAD = do_GET  # noqa: N815

        def log_message(self, format: str, *words: object) -> None:  # noqa: A002
            log.debug(format, *words)

    return Handler


def _host_of(header: str) -> str:
    return urlsplit(f"//{header}").hostname or ""


def _is_loopback(host: str) -> bool:
    """Whether a name can only mean this machine: no other site can make it point here."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False
