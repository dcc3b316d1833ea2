"""System errors of a POSIX store as its own errors (invariant STORE-6)."""

from __future__ import annotations

import errno

from checkpointd.errors import LinkError, StoreError, StoreFullError, UnreadableError
from checkpointd.store.posix.anchor import LinkMet
from checkpointd.store.posix.directories import DirectoryNotSynced
from checkpointd.system_errors import NO_LINKS, Place, in_words


def store_error(error: OSError, *, doing: str, key: str, url: str, reads: bool = False) -> StoreError:
    """The StoreError for a system error while `doing` something to `key` of the store at `url`. If the call only `reads`, it is
    an UnreadableError, which does not count as damage.
    """
    if isinstance(error, LinkMet):
        return LinkError(
            f"{doing} {key!r} in {url} failed: {error.filename} is a symbolic link, and checkpointd follows no links in a "
            "root. Nothing was read or changed where it leads. Remove the link, or move its target there, and try again"
        )
    place: Place = "directory" if isinstance(error, DirectoryNotSynced) else "read" if reads else "root"
    kind = UnreadableError if reads else StoreFullError if error.errno in (errno.ENOSPC, errno.EDQUOT) else StoreError
    return kind(f"{doing} {key!r} in {url} failed: {in_words(error, place, url)}")


def is_without_links(error: OSError) -> bool:
    """Whether a refused hard link means that the file system has none."""
    return error.errno in NO_LINKS


def links_error(error: OSError, *, key: str, url: str) -> StoreError:
    """The StoreError for a file system without hard links, which `put_if_absent` needs to be atomic."""
    return StoreError(f"creating {key!r} in {url} failed: {in_words(error, 'link')}")


def swept_error(*, key: str, url: str) -> StoreError:
    """The StoreError for a writer whose temporary file another process removed."""
    return StoreError(
        f"writing {key!r} in {url} failed: its temporary file was removed, probably by a newer start of this job; nothing was "
        "written. Stop this process, or start the job again"
    )
