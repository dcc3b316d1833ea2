"""The output of an export: a file or a directory that appears whole, or not at all. `bucket_output.py` has the one in a bucket.

Invariants
  OUTPUT-1  The output is written in a hidden directory beside its place. Once it is whole and durable, one rename or one link
      shows it.
  OUTPUT-2  The output replaces a file or directory at its place only with `force`, and a directory only if it holds nothing but
      an export.
  OUTPUT-3  An error, an interruption or a full disk leaves no part of the new output behind, and the old output in its place.
      A process that is killed leaves the hidden directory.
"""

from __future__ import annotations

import asyncio
import errno
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import NamedTuple, Protocol, Self, TypeVar

import msgspec

from checkpointd import arguments
from checkpointd.bucket_urls import was_url
from checkpointd.errors import FormatError, NotFoundError, StoreError, StoreFullError, UsageError
from checkpointd.export.record import NAME, RECORD_BYTES_MAX, ExportRecord, decode, encode
from checkpointd.regular_files import open_regular
from checkpointd.system_errors import in_words
from checkpointd.waits import to_the_end

T = TypeVar("T")

DIRTY_BYTES_MAX = 64 << 20
"""The most bytes that are written and not durable yet: a flush of more would keep others, such as a save, from the disk."""
_EXPORTED = re.compile(
    r"(model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?|__\d+_\d+\.distcp|\.metadata|checkpointd\.json)\Z"
)
_NO_RESERVE = frozenset({errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, errno.ENODEV})


class FilePart(NamedTuple):
    """Bytes for a file of an export, and where in the file they go."""

    path: str
    offset: int
    data: memoryview


class ExportOutput(Protocol):
    """An export in progress, on this machine or in a bucket. Leaving `async with` ends it, unless `show` has shown it."""

    place: str

    def path(self, name: str) -> str:
        """What names the file `name` in a FilePart."""
        ...

    def create(self, name: str, head: bytes, size: int) -> str:
        """Create the file `name` of `size` bytes that begins with `head`, and return its path. May be called on a thread."""
        ...

    def describe(self, record: ExportRecord) -> None:
        """Put `record` beside the files, all of which are created by now, with their names. Comes before the first write."""
        ...

    async def write(self, parts: Sequence[FilePart]) -> None:
        """Write `parts`. Those of one file come in the order of their offsets, file by file."""
        ...

    async def show(self) -> list[tuple[str, int]]:
        """Make the export durable and visible; returns the names of the files and their sizes in bytes."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


async def on_thread(call: Callable[[], T]) -> T:
    """The result of `call` on a thread. A cancellation takes effect once `call` has ended."""
    return await to_the_end(asyncio.get_running_loop().run_in_executor(None, call))


class Output:
    """An export in progress on this machine. Leaving `with` removes its files, unless `publish` has shown them."""

    def __init__(
        self, place: str | os.PathLike[str], *, directory: bool, force: bool = False, mark: str = "checkpointd"
    ) -> None:
        """`directory`: whether the output is a directory of files; otherwise it is one file. `mark`: a part of the hidden name.

        UsageError if something is in the way, NotFoundError if the directory above `place` does not exist.
        """
        self.place = os.path.abspath(arguments.expanded(os.fspath(place)))
        if was_url(self.place):
            raise UsageError(
                f"{os.fspath(place)!r} is a URL, but an export goes to this machine: give the path of a file or directory"
            )
        self._directory, self._force = directory, force
        parent, name = os.path.split(self.place)
        if not os.path.isdir(parent):
            raise NotFoundError(f"there is no directory {parent} to put {name} into: make it first")
        self._recorded: frozenset[str] = frozenset()
        """The files of the export that this one replaces, as its record names them."""
        self._check_place()
        self._hidden = os.path.join(parent, f".{name[:100]}.{mark}-{secrets.token_hex(6)}")
        self._dirty: dict[str, int] = {}
        """The files with bytes that may not be durable yet, and how many."""

    def __enter__(self) -> Self:
        with translated("creating", self.place):
            os.mkdir(self._hidden)
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._hidden, ignore_errors=True)

    def path(self, name: str) -> str:
        """The path for writing the file `name` of a directory. If the output is one file, `name` is ignored."""
        return os.path.join(self._hidden, name if self._directory else os.path.basename(self.place))

    def create(self, name: str, head: bytes, size: int) -> str:
        """Create the file `name` of `size` bytes that begins with `head`, reserve its space, and return its path."""
        path = self.path(name)
        with translated("writing", self.place, size):
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            try:
                reserve(descriptor, size)
                view = memoryview(head)
                while view:
                    view = view[os.write(descriptor, view) :]
            finally:
                os.close(descriptor)
        return path

    def describe(self, record: ExportRecord) -> None:
        names = tuple(sorted(os.listdir(self._hidden)))
        data = encode(msgspec.structs.replace(record, complete=True, files=names))
        self.create(NAME, data, len(data))

    async def write(self, parts: Sequence[FilePart]) -> None:
        await on_thread(lambda: self._write(parts))

    def _write(self, parts: Sequence[FilePart]) -> None:
        with translated("writing", self.place):
            write_parts(parts)
            for part in parts:
                self._dirty[part.path] = self._dirty.get(part.path, 0) + part.data.nbytes
            if sum(self._dirty.values()) >= DIRTY_BYTES_MAX:
                for path in self._dirty:
                    _flush(path)
                self._dirty.clear()

    async def show(self) -> list[tuple[str, int]]:
        return await on_thread(self.publish)

    async def __aenter__(self) -> Self:
        return await on_thread(self.__enter__)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await on_thread(self.__exit__)

    def publish(self) -> list[tuple[str, int]]:
        """Make the output durable and show it at its place; returns the names of the files and their sizes in bytes."""
        with translated("writing", self.place):
            names = sorted(os.listdir(self._hidden))
            sizes = [(name, os.path.getsize(os.path.join(self._hidden, name))) for name in names]
            for name in names:
                _sync(os.path.join(self._hidden, name))
            _sync(self._hidden)
        self._check_place()  # again, since something may have appeared there meanwhile
        with translated("publishing", self.place):
            if self._directory:
                self._show_directory()
            else:
                self._show_file(os.path.join(self._hidden, names[0]))
            _sync(os.path.dirname(self.place))
        return sizes

    def _show_directory(self) -> None:
        """A rename cannot replace a directory that is not empty, so the old directory is moved aside first."""
        if os.path.isdir(self.place) and os.listdir(self.place):
            aside = f"{self._hidden}.replaced"
            os.rename(self.place, aside)
            try:
                os.rename(self._hidden, self.place)
            except BaseException:  # also an interruption
                os.rename(aside, self.place)
                raise
            if os.path.islink(aside):  # somebody has put the old output elsewhere: only the link goes
                os.unlink(aside)
            else:
                shutil.rmtree(aside, ignore_errors=True)  # the new output is there
        else:
            os.rename(self._hidden, self.place)

    def _show_file(self, path: str) -> None:
        if self._force:
            os.replace(path, self.place)
        else:
            # Unlike a rename, a link never replaces a file.
            os.link(path, self.place)

    def _check_place(self) -> None:
        if not os.path.lexists(self.place) or (self._directory and _is_empty_directory(self.place)):
            return
        if os.path.isdir(self.place) != self._directory:
            kinds = ("a directory", "a file") if self._directory else ("a file", "a directory")
            raise UsageError(f"the output must be {kinds[0]}, but {self.place} is {kinds[1]}: give another place")
        if not self._force:
            raise UsageError(f"{self.place} exists and is not overwritten: give another place, or --force")
        if self._directory:
            self._check_only_an_export()

    def is_exported(self, name: str) -> bool:
        """Whether an earlier export has made `name` in the directory that this one replaces."""
        return is_export_name(name) or name in self._recorded

    def _check_only_an_export(self) -> None:
        self._recorded = recorded_at(self.place)
        other = next((name for name in sorted(os.listdir(self.place)) if not self.is_exported(name)), None)
        if other is not None:
            raise UsageError(
                f"{self.place} holds {other!r}, which no export made and which would be removed: give another place"
            )


def is_export_name(name: str) -> bool:
    """Whether only exports give files this name, so that it may be replaced without a look into it."""
    return _EXPORTED.match(name) is not None


def recorded_at(place: str) -> frozenset[str]:
    """The files that the record of the export in the directory `place` names; none without a record that can be read."""
    try:
        with open_regular(os.path.join(place, NAME)) as file:
            return frozenset(decode(file.read(RECORD_BYTES_MAX)).files)
    except (OSError, FormatError):
        return frozenset()


def write_parts(parts: Sequence[FilePart]) -> None:
    """Write `parts` to files of this machine, which exist. Parts in a row that go to one file share one descriptor."""
    path, descriptor = "", -1
    try:
        for part in parts:
            if part.path != path:
                if descriptor >= 0:
                    os.close(descriptor)
                descriptor = -1
                descriptor, path = os.open(part.path, os.O_WRONLY | os.O_CLOEXEC), part.path
            _write_at(descriptor, part.data, part.offset)
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def _write_at(descriptor: int, data: memoryview, offset: int) -> None:
    """Write all of `data`, also after short writes."""
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written


def reserve(descriptor: int, size: int) -> None:
    """Set the size of a file and reserve its space; if the file system cannot reserve space, only set the size.

    OSError of ENOSPC if there is less space. The kernel would first take all that there is, from every other program.
    """
    room = os.fstatvfs(descriptor)
    if room.f_blocks and size > room.f_bavail * room.f_frsize:  # some network file systems tell nothing
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    try:
        if size:
            os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        if error.errno not in _NO_RESERVE:
            raise
    os.ftruncate(descriptor, size)


@contextmanager
def translated(doing: str, place: str, nbytes: int = 0) -> Iterator[None]:
    """Turns OSErrors into StoreErrors with advice; `nbytes` is the size of the file that was being made."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.EEXIST:
            raise UsageError(
                f"{place} appeared while it was being written and is not overwritten: give another place"
            ) from error
        needed = f"; {nbytes} bytes are needed for this file" if nbytes else ""
        kind = StoreFullError if error.errno in (errno.ENOSPC, errno.EDQUOT) else StoreError
        why = in_words(error, "export", os.path.dirname(place))
        raise kind(f"{doing} {place} failed: {why}{needed}; nothing was left") from error


def _is_empty_directory(path: str) -> bool:
    return os.path.isdir(path) and not os.path.islink(path) and not os.listdir(path)


def _flush(path: str) -> None:
    """Make the bytes of a file durable, and give its page cache back: nobody reads an export soon, and trainers read data."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.fdatasync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def _sync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
