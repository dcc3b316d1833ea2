"""Where the demonstration's checkpoints lie, seen from outside: a directory or a bucket, and what a kill has left there."""

from __future__ import annotations

import errno
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from checkpointd.bucket_urls import parse

UNFINISHED = " (unfinished upload)"
CHUNKS = ".chunks"


class Place(ABC):
    """A root. `poll_s`: how often a watcher looks, which is short against a save, and cheap against training."""

    root: str
    poll_s: float
    strike_after: float
    """A rank is killed when it has written this part of what its shard took in the checkpoint before."""
    served: str
    """What a sidecar for it is allowed to serve."""

    @abstractmethod
    def latest(self) -> str:
        """The tag that `latest` names; empty where there is none."""

    @abstractmethod
    def attempts(self, tag: str) -> Mapping[str, Mapping[str, int]]:
        """The attempts of `tag`: the name of each object, and how many bytes of it are there. Only chunks are measured."""

    @abstractmethod
    def uploads(self) -> list[str]:
        """The unfinished uploads; none in a directory."""


class Directory(Place):
    poll_s = 0.002
    strike_after = 0.25

    def __init__(self, path: Path) -> None:
        self.path, self.root, self.served = path, str(path), str(path.parent)

    def latest(self) -> str:
        path = self.path / "latest"
        return path.read_text().strip() if path.exists() else ""

    def attempts(self, tag: str) -> Mapping[str, Mapping[str, int]]:
        found: dict[str, dict[str, int]] = {}
        for path in (self.path / tag).glob("*/*"):
            size = data_bytes(path) if path.name.endswith(CHUNKS) else 0
            found.setdefault(path.parent.name, {})[path.name] = size
        return found

    def uploads(self) -> list[str]:
        return []


class Bucket(Place):
    """A root in an S3 bucket. An object appears when its upload is complete; before that, its parts can be listed."""

    poll_s = 0.02
    strike_after = 0.0  # an upload that has begun is enough: its parts are under way all at once, and arrive together

    def __init__(self, root: str) -> None:
        from botocore.session import Session

        self.root, self.served, where = root, root, parse(root)
        self._bucket, self._prefix = where.bucket, f"{where.prefix}/"
        self._client: Any = Session(profile=where.options.get("profile")).create_client(
            "s3", endpoint_url=where.options.get("endpoint"), region_name=where.options.get("region")
        )

    def latest(self) -> str:
        try:
            found = self._client.get_object(Bucket=self._bucket, Key=f"{self._prefix}latest")
        except self._client.exceptions.NoSuchKey:
            return ""
        return str(found["Body"].read().decode().strip())

    def attempts(self, tag: str) -> Mapping[str, Mapping[str, int]]:
        found: dict[str, dict[str, int]] = {}
        for one in self._listed("list_objects_v2", "Contents", tag):
            attempt, _, name = one["Key"].removeprefix(f"{self._prefix}{tag}/").partition("/")
            found.setdefault(attempt, {})[name] = one["Size"]
        for one in self._listed("list_multipart_uploads", "Uploads", tag):
            attempt, _, name = one["Key"].removeprefix(f"{self._prefix}{tag}/").partition("/")
            found.setdefault(attempt, {})[f"{name}{UNFINISHED}"] = self._uploaded(one["Key"], one["UploadId"])
        return found

    def uploads(self) -> list[str]:
        return [one["Key"].removeprefix(self._prefix) for one in self._listed("list_multipart_uploads", "Uploads")]

    def clear(self) -> None:
        """Remove all that lies there."""
        keys = [{"Key": one["Key"]} for one in self._listed("list_objects_v2", "Contents")]
        for first in range(0, len(keys), 1000):
            self._client.delete_objects(Bucket=self._bucket, Delete={"Objects": keys[first : first + 1000]})
        for one in self._listed("list_multipart_uploads", "Uploads"):
            self._client.abort_multipart_upload(Bucket=self._bucket, Key=one["Key"], UploadId=one["UploadId"])

    def _listed(self, request: str, what: str, tag: str = "") -> list[dict[str, Any]]:
        prefix = self._prefix + (f"{tag}/" if tag else "")
        pages = self._client.get_paginator(request).paginate(Bucket=self._bucket, Prefix=prefix)
        return [one for page in pages for one in page.get(what, ())]

    def _uploaded(self, key: str, number: str) -> int:
        """The bytes of the parts that the server has."""
        try:
            pages = self._client.get_paginator("list_parts").paginate(Bucket=self._bucket, Key=key, UploadId=number)
            return sum(part["Size"] for page in pages for part in page.get("Parts", ()))
        except self._client.exceptions.ClientError:  # it was completed or aborted meanwhile
            return 0


def data_bytes(path: Path) -> int:
    """Bytes of a file that have been written: space that is only reserved is a hole to SEEK_DATA. 0 where there is no file."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:  # its writer dropped it meanwhile
        return 0
    try:
        return sum(end - begin for begin, end in _data_segments(descriptor))
    finally:
        os.close(descriptor)


def _data_segments(descriptor: int) -> Iterator[tuple[int, int]]:
    end = 0
    while True:
        try:
            begin = os.lseek(descriptor, end, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # nothing but holes up to the end
                return
            raise
        end = os.lseek(descriptor, begin, os.SEEK_HOLE)
        yield begin, end
