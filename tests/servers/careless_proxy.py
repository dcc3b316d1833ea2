"""A proxy before an S3 server that loses headers on the way, as real ones do that were not made for S3.

The server behind it must not check signatures (moto does not), since the client signs the headers that are lost.
"""

from __future__ import annotations

import http.client
import ssl
import threading
from collections.abc import Collection, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

_HOP: frozenset[str] = frozenset({"connection", "transfer-encoding", "content-length", "keep-alive"})


class CarelessProxy:
    """Passes requests on to the server at `target`, without the headers in `loses`, in lower case.

    `certificate`: it speaks TLS, with the certificate and the key in these files.
    """

    def __init__(
        self,
        target: str,
        *,
        loses: Collection[str] = (),
        certificate: tuple[Path, Path] | None = None,
    ) -> None:
        self.lost: list[str] = []
        """Each header that was lost, with its value, as `if-match: "1"`."""
        proxy, host = self, urlsplit(target)

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _pass_on(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                kept = {name: value for name, value in self.headers.items() if name.lower() not in loses}
                proxy.lost += [f"{name.lower()}: {value}" for name, value in self.headers.items() if name.lower() in loses]
                connection = http.client.HTTPConnection(host.hostname or "", host.port, timeout=60)
                try:
                    connection.request(self.command, self.path, body, kept)
                    answer = connection.getresponse()
                    self._answer(answer.status, dict(answer.getheaders()), answer.read())
                finally:
                    connection.close()

            def _answer(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
                self.send_response_only(status)
                length = headers.get("Content-Length", "0") if self.command == "HEAD" else str(len(body))
                for name, value in headers.items():
                    if name.lower() not in _HOP:
                        self.send_header(name, value)
                self.send_header("Content-Length", length)
                self.end_headers()
                self.wfile.write(body)

            do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = _pass_on

            def log_message(self, format: str, *args: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._scheme = "http"
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*certificate)
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
            self._scheme = "https"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self._thread.start()

    @property
    def endpoint(self) -> str:
        return f"{self._scheme}://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
