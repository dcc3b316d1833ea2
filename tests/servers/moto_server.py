"""moto: an S3 server in the memory of a process of its own, which starts in half a second.

It checks neither rights nor digests, and a killed one has forgotten all. Conditions and the order of listings are as on AWS.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence

from tests.servers.s3_server import S3Server, free_ports


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
        return [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self._port)]
