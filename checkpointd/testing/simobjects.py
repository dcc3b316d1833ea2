"""The state of a simulated bucket. It is synchronous: each call is one instant. `simbucket.py` adds requests and processes.

Not modelled: objects that decay, versions of an object that was replaced, and providers' own deletion of old uploads.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from dataclasses import dataclass, field

from checkpointd.store.base import Entry
from checkpointd.store.objects.bucket import ObjectHead, Version


@dataclass(frozen=True, slots=True)
class SimObject:
    """One content of one object. `mark` as in `ObjectHead`."""

    data: bytes
    version: Version
    mark: str = ""

    @property
    def head(self) -> ObjectHead:
        return ObjectHead(len(self.data), self.version, self.mark)


@dataclass(frozen=True, slots=True)
class SimUpload:
    """A multipart upload that has begun and was neither completed nor aborted."""

    key: str
    process: str
    """The process that began it."""
    parts: dict[int, bytes] = field(default_factory=dict)


class SimObjects:
    """The objects and the unfinished uploads of one bucket.

    `numbered`: a version is a number, which never comes back. Otherwise it is the digest of the content, as with S3, so that an
    object whose content comes back has its old version again.
    """

    def __init__(self, *, numbered: bool = False) -> None:
        self.objects: dict[str, SimObject] = {}
        self.uploads: dict[int, SimUpload] = {}
        self._numbered = numbered
        self._places: dict[str, tuple[list[str], dict[str, Entry]]] = {}
        """The children of each prefix that was listed since the last change, by their places in the order."""
        self._made = 0

    def create(self, key: str, data: bytes, mark: str) -> bool:
        if key in self.objects:
            return False
        self._set(key, data, mark)
        return True

    def replace(self, key: str, data: bytes, version: Version, mark: str) -> bool:
        found = self.objects.get(key)
        if found is None or found.version != version:
            return False
        self._set(key, data, mark)
        return True

    def put(self, key: str, data: bytes) -> bool:
        self._set(key, data, "")
        return True

    def delete(self, key: str) -> bool:
        """Whether it was there."""
        self._places.clear()
        return self.objects.pop(key, None) is not None

    def begin(self, key: str, process: str) -> int:
        """The number of a new upload."""
        self._made += 1
        self.uploads[self._made] = SimUpload(key, process)
        return self._made

    def part(self, upload: int, number: int, data: bytes) -> bool:
        """Whether there is such an upload. A part that comes again replaces the first one."""
        if upload not in self.uploads:
            return False
        self.uploads[upload].parts[number] = data
        return True

    def complete(self, upload: int, parts: int) -> bool:
        """Make the object of its first `parts` parts. False if there is no such upload, or not all of these parts."""
        found = self.uploads.get(upload)
        if found is None or not found.parts.keys() >= set(range(parts)):
            return False
        del self.uploads[upload]
        self._set(found.key, b"".join(found.parts[number] for number in range(parts)), "")
        return True

    def abort(self, upload: int) -> bool:
        return self.uploads.pop(upload, None) is not None

    def page(self, prefix: str, after: str, count: int) -> tuple[list[Entry], str | None]:
        """Up to `count` children of `prefix` that come after `after`, and the last one's place if there may be more."""
        if prefix not in self._places:
            self._places[prefix] = self._children(prefix)
        order, places = self._places[prefix]
        first = bisect_right(order, after)
        page = order[first : first + count]
        return [places[place] for place in page], page[-1] if len(order) - first > count else None

    def _children(self, prefix: str) -> tuple[list[str], dict[str, Entry]]:
        start = f"{prefix}/" if prefix else ""
        places: dict[str, Entry] = {}
        for key, found in self.objects.items():
            if key.startswith(start):
                name, deeper, _ = key[len(start) :].partition("/")
                places[name + deeper] = Entry(name, 0 if deeper else len(found.data), bool(deeper))
        return sorted(places), places

    def _set(self, key: str, data: bytes, mark: str) -> None:
        self._made += 1
        version = Version(None, str(self._made)) if self._numbered else Version(hashlib.md5(data).hexdigest(), None)
        self.objects[key] = SimObject(data, version, mark)
        self._places.clear()
