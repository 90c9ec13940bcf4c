"""A real S3 server for tests, and a proxy before it that delays, cuts and refuses."""

import http.client
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tests.daemons import ROOT, until
from tools.bench.setup import free_port

KEY, SECRET = "AKIDOFTESTS", "secret-of-tests"
BUCKET = "graphs"
Fault = Callable[[str, str], str]  # of a method and a path: "", "refuse", "reset", "cut", ...


@contextmanager
def s3_server() -> Iterator[int]:
    """The port of a server of moto with an empty bucket."""
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        until(lambda: _listens(port), "moto's server does not listen")
        ask(port, "PUT", f"/{BUCKET}")
        yield port
    finally:
        process.kill()
        process.wait()


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


def ask(port: int, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, bytes]:
    """One request, without a signature."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        connection.request(method, path, body, headers)
        reply = connection.getresponse()
        return reply.status, reply.read()
    finally:
        connection.close()


class Proxy:
    """Passes requests on to a server; `fault` says what is done to each.

    refuse   503 SlowDown                  denied   403 AccessDenied
    reset    the connection is reset       region   301 without a place
    cut      half of the body comes        changed  a byte of the body is another one
    silent   no answer for 20 s, or until the proxy ends
    """

    def __init__(self, server: int) -> None:
        self.fault: Fault = lambda _method, _path: ""
        self.injected: list[str] = []
        self.gets: list[tuple[str, str]] = []  # path and range of each, as it came
        self._server, self._end = server, threading.Event()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                proxy.pass_on(self)

            do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = answer

            def log_message(self, *args: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 256

            def handle_error(self, request: Any, client_address: Any) -> None:
                pass  # a client that was cut off has left

        self._http = Server(("127.0.0.1", 0), Handler)
        self.port = self._http.server_address[1]
        self._thread = threading.Thread(target=self._http.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._end.set()
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def pass_on(self, request: BaseHTTPRequestHandler) -> None:
        size = int(request.headers.get("Content-Length") or 0)
        body = request.rfile.read(size)
        if request.command == "GET":
            self.gets.append((request.path, request.headers.get("Range", "")))
        fault = self.fault(request.command, request.path)
        if fault:
            self.injected.append(fault)
        match fault:
            case "refuse":
                return self._say(request, 503, "SlowDown")
            case "denied":
                return self._say(request, 403, "AccessDenied")
            case "region":
                return self._say(request, 301, "PermanentRedirect")
            case "reset":
                request.connection.setsockopt(
                    socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0"
                )
                request.connection.close()
                request.close_connection = True
                return None
            case "silent":
                self._end.wait(20)
                request.close_connection = True
                return None
        connection = http.client.HTTPConnection("127.0.0.1", self._server, timeout=60)
        try:
            connection.request(request.command, request.path, body, dict(request.headers.items()))
            reply = connection.getresponse()
            answer = reply.read()
        finally:
            connection.close()
        request.send_response_only(reply.status)
        for name, value in reply.getheaders():
            if name.lower() not in ("connection", "transfer-encoding", "content-length"):
                request.send_header(name, value)
        length = reply.getheader("Content-Length") if request.command == "HEAD" else len(answer)
        request.send_header("Content-Length", str(length))
        request.end_headers()
        if fault == "changed" and answer:
            answer = answer[:-1] + bytes([answer[-1] ^ 1])
        if fault == "cut":
            answer = answer[: len(answer) // 2]
            request.close_connection = True
        request.wfile.write(b"" if request.command == "HEAD" else answer)
        return None

    @staticmethod
    def _say(request: BaseHTTPRequestHandler, status: int, code: str) -> None:
        text = f"<Error><Code>{code}</Code><Message>{KEY} {SECRET}</Message></Error>".encode()
        request.send_response_only(status)
        request.send_header("Content-Length", str(len(text)))
        request.end_headers()
        request.wfile.write(b"" if request.command == "HEAD" else text)


@contextmanager
def proxied() -> Iterator[Proxy]:
    """A proxy before a fresh server; the usual variables lead to it."""
    with s3_server() as server, pytest.MonkeyPatch.context() as patch:
        proxy = Proxy(server)
        patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
        patch.setenv("AWS_ACCESS_KEY_ID", KEY)
        patch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        patch.setenv("AWS_REGION", "us-east-1")
        patch.delenv("AWS_SESSION_TOKEN", raising=False)
        try:
            yield proxy
        finally:
            proxy.close()
