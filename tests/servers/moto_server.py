"""moto: an S3 server in the memory of a process of its own, which starts in half a second.

It checks neither rights nor digests, and a killed one has forgotten all. Conditions and the order of listings are as on AWS.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence

from tests.servers.s3_server import S3Server, free_ports

_ONE_BY_ONE = """
import io, sys, threading
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import run_simple

moto, one = DomainDispatcherApplication(create_backend_app), threading.Lock()

def serve(environ, start_response):
    if length := environ.get("CONTENT_LENGTH"):
        environ["wsgi.input"] = io.BytesIO(environ["wsgi.input"].read(int(length)))
    with one:
        return moto(environ, start_response)

run_simple("127.0.0.1", int(sys.argv[1]), serve, threaded=True)
"""
"""Its own server answers requests at once, and looks at a condition some time before it writes: races have two winners."""


def why_no_moto() -> str | None:
    """What keeps moto from running here, in words; None where it can run."""
    missing = [name for name in ("moto", "flask", "botocore") if importlib.util.find_spec(name) is None]
    return f"needs {', '.join(missing)}; `pip install 'moto[s3]' flask flask-cors` brings it" if missing else None


class MotoServer(S3Server):
    """As every S3Server."""

    def _prepare(self) -> None:
        (self._port,) = free_ports(1)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def _command(self) -> Sequence[str]:
        return [sys.executable, "-c", _ONE_BY_ONE, str(self._port)]
