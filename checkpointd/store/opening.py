"""Opens the store at a user's root."""

from __future__ import annotations

import os
import re
from importlib import import_module
from urllib.parse import unquote, urlsplit

from checkpointd import arguments
from checkpointd.bucket_urls import BucketUrl, is_bucket_url, parse, shown
from checkpointd.commands import install
from checkpointd.errors import UsageError
from checkpointd.store.base import Store
from checkpointd.store.posix.store import PosixStore

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


def open_store(root: str | os.PathLike[str], *, read_only: bool = False) -> Store:
    """The store at a path, a `file:///path`, a `memory://name`, or in a bucket: `s3://`, `gs://` or `az://`, then
    `bucket/path?option=value`. UsageError for other URLs. Does no I/O at the root.

    With `read_only`, the store refuses every write with a StoreError.
    """
    arguments.path("root", root)
    text = os.fspath(root)
    if is_bucket_url(text):
        return _bucket_store(text, read_only=read_only)
    if not (found := _SCHEME.match(text)):
        return PosixStore(text, read_only=read_only)
    if found[1].lower() not in {"file", "memory"}:
        raise UsageError(
            f"{shown(text)}: there is no store for {found[1]}:// URLs; give a directory, or a URL of file, s3, gs or az"
        )
    url = urlsplit(text)
    if url.scheme == "memory":
        if read_only:
            raise UsageError(f"{text!r} exists only in the process that made it, so it cannot be opened to read")
        from checkpointd.store.memory import MemoryStore  # imports numpy, which slows the start of commands that do not need it

        return MemoryStore(url.netloc or "memory")
    if url.netloc not in {"", "localhost"} or url.query or url.fragment:
        raise UsageError(f"{text!r}: a file URL has three slashes and nothing after the path, such as file:///mnt/ckpts/run1")
    return PosixStore(unquote(url.path), read_only=read_only)


def _bucket_store(text: str, *, read_only: bool) -> Store:
    location = parse(text)
    import_client(location)
    from checkpointd.store.objects.remote import RemoteBucket
    from checkpointd.store.objects.store import ObjectStore

    return ObjectStore(RemoteBucket(location), read_only=read_only)


def import_client(location: BucketUrl) -> None:
    """Import the client of the bucket at `location`, which takes a while. UsageError if it is not installed."""
    try:
        import_module("checkpointd.store.objects.remote")
    except ModuleNotFoundError as error:
        if error.name != "obstore":
            raise
        raise UsageError(f"{location.url} needs obstore: {install(location.scheme)}") from error
