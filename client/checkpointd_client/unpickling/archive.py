"""The entries of a zip archive of torch.save, in which every byte belongs to one entry or to the directory.

Programs read a zip file that has two directories, entries that overlap, or bytes in between, in different ways, so that what
one of them checks is not what another one loads. Such a file is refused here. torch.save never writes one.
"""

from __future__ import annotations

import os
import struct
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any

from checkpointd_client.unpickling.records import PickleFault, PickleLimit

DIRECTORY_BYTES_MAX = 64 << 20
"""As many bytes describe half a million storages."""

# APPNOTE.TXT 4.3.7, 4.3.9, 4.3.14 to 4.3.16
_LOCAL = struct.Struct("<4s22x2H")
_END = struct.Struct("<4s6xH2LH")
_END_64 = struct.Struct("<4s28x3Q")
_LOCATOR = struct.Struct("<4s4xQ4x")
_UNKNOWN = (0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF)
"""What the short record says where only the long one has room for a number."""
_DESCRIPTOR_BYTES = (16, 24)
"""A data descriptor, with short and with long sizes."""
_IS_ENCRYPTED, _HAS_DESCRIPTOR, _IS_UTF8 = 0x1, 0x8, 0x800


@dataclass(frozen=True, slots=True)
class ArchiveEntry:
    """The bytes of one entry: `size` bytes from byte `offset` of the archive."""

    offset: int
    size: int


def entries_of(file: IO[bytes]) -> dict[str, ArchiveEntry]:
    """The entries of the archive that `file` is, by name without the folder that torch.save puts them in.

    PickleFault if torch.save did not write it: if anything in it is compressed, or a name comes twice, or bytes belong to no
    entry or to several. `file` stays open.
    """
    try:
        start, count = _directory(file)
        with zipfile.ZipFile(file) as archive:
            if archive.start_dir != start or len(archive.infolist()) != count:
                raise PickleFault("it has two directories")
            infos = sorted(archive.infolist(), key=lambda info: info.header_offset)
        found = _in_folder(list(_apart(file, infos, start)))
    except (zipfile.BadZipFile, struct.error, UnicodeDecodeError, OverflowError, NotImplementedError) as error:
        raise PickleFault(f"it is not a zip archive of torch.save: {error}") from error
    return found


def _directory(file: IO[bytes]) -> tuple[int, int]:
    """Where the directory begins, and its number of entries. PickleFault unless it ends where the records at the end begin."""
    size = file.seek(0, os.SEEK_END)
    if size < _END.size:
        raise PickleFault(f"it has {size} bytes, and is not a zip archive of torch.save")
    signature, *said, comment = _unpacked(_END, file, size - _END.size)
    if signature != b"PK\x05\x06" or comment:
        raise PickleFault(
            "it does not end as a zip archive of torch.save does: it is cut off, or torch before 1.6 wrote it (load it with "
            "torch, and save it again)"
        )
    end = size - _END.size
    if end >= _LOCATOR.size + _END_64.size:
        mark, end_64 = _unpacked(_LOCATOR, file, end - _LOCATOR.size)
        if mark == b"PK\x06\x07":
            end -= _LOCATOR.size + _END_64.size
            said = _long(file, end, end_64, said)
    count, nbytes, start = said
    if start + nbytes != end:
        raise PickleFault(f"its directory, of {nbytes} bytes from byte {start}, does not end at byte {end}: there may be two")
    if nbytes > DIRECTORY_BYTES_MAX:
        raise PickleLimit(f"its directory has {nbytes} bytes, more than {DIRECTORY_BYTES_MAX}")
    return start, count


def _long(file: IO[bytes], at: int, said_at: int, short: list[int]) -> list[int]:
    """The number of entries, and the size and the start of the directory, from the long record at byte `at`."""
    mark, *found = _unpacked(_END_64, file, at)
    agree = all(one in (two, unknown) for one, two, unknown in zip(short, found, _UNKNOWN, strict=True))
    if mark != b"PK\x06\x06" or said_at != at or not agree:
        raise PickleFault("the two records at its end do not agree: it may have two directories")
    return found


def _apart(file: IO[bytes], infos: Sequence[zipfile.ZipInfo], end: int) -> Iterator[tuple[str, ArchiveEntry]]:
    """The entries in the order of the file. PickleFault unless they fill it up to byte `end` without a gap or an overlap."""
    if not infos:
        raise PickleFault("it holds no entries")
    at = 0
    for info, following in zip(infos, [*(info.header_offset for info in infos[1:]), end], strict=True):
        name = info.orig_filename
        if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size or info.flag_bits & _IS_ENCRYPTED:
            raise PickleFault(f"{name:.99} is compressed or encrypted, which torch.save never does")
        signature, name_size, extra_size = _unpacked(_LOCAL, file, at)
        local_name = file.read(name_size).decode("utf-8" if info.flag_bits & _IS_UTF8 else "cp437")
        start = at + _LOCAL.size + name_size + extra_size
        stop = start + info.file_size
        if info.flag_bits & _HAS_DESCRIPTOR and following - stop in _DESCRIPTOR_BYTES:
            stop = following
        if info.header_offset != at or signature != b"PK\x03\x04" or local_name != name or stop != following:
            raise PickleFault(f"{name:.99} overlaps another entry, or bytes beside it belong to none")
        yield name, ArchiveEntry(start, info.file_size)
        at = stop


def _in_folder(entries: Sequence[tuple[str, ArchiveEntry]]) -> dict[str, ArchiveEntry]:
    found: dict[str, ArchiveEntry] = {}
    folder = entries[0][0].partition("/")[0] if entries else ""
    for name, entry in entries:
        own, _, rest = name.partition("/")
        if rest in found:
            raise PickleFault(f"it holds {name:.99} twice")
        if own != folder:
            raise PickleFault(f"{name:.99} lies outside the folder {folder:.99} of its archive")
        found[rest] = entry
    return found


def _unpacked(record: struct.Struct, file: IO[bytes], at: int) -> list[Any]:
    file.seek(at)
    return [*record.unpack(file.read(record.size))]
