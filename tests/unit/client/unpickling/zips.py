"""Zip archives that programs read in different ways, made from a file of torch.save."""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Callable, Mapping


def members(data: bytes) -> dict[str, bytes]:
    """The content of each entry by name."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def zipped(content: Mapping[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    """An archive of `content`."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        for name, data in content.items():
            archive.writestr(name, data, compression)
    return made.getvalue()


def parts_of(data: bytes) -> tuple[bytes, bytes, int]:
    """The entries, the directory, and the number of entries."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        start, count = archive.start_dir, len(archive.infolist())
    size = sum(len(one) for one in central(data[start:], count))
    return data[:start], data[start : start + size], count


def central(directory: bytes, count: int) -> list[bytes]:
    """The records of a directory."""
    found, at = [], 0
    for _ in range(count):
        size = 46 + sum(struct.unpack_from("<3H", directory, at + 28))
        found.append(directory[at : at + size])
        at += size
    return found


def end(count: int, size: int, start: int, comment: bytes = b"") -> bytes:
    """The record that ends an archive."""
    return struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, count, count, size, start, len(comment)) + comment


def long_end(count: int, size: int, start: int, at: int) -> bytes:
    """The long record, and its locator, which says that it begins at byte `at`."""
    record = struct.pack("<4sQ2H2L4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, size, start)
    return record + struct.pack("<4sLQL", b"PK\x06\x07", 0, at, 1)


def two_directories(data: bytes) -> bytes:
    """zipfile takes the second directory, torch the first."""
    body, directory, count = parts_of(data)
    other = directory.replace(b"byteorder", b"byteordeR")
    return body + directory + other + end(count, len(directory), len(body))


def two_ends(data: bytes) -> bytes:
    """The first end lies in the comment of the second one's archive."""
    return data + end(0, 0, len(data))


def a_long_record_that_differs(data: bytes) -> bytes:
    body, directory, count = parts_of(data)
    at = len(body) + 2 * len(directory)
    long = long_end(count, len(directory), len(body) + len(directory), at)
    return body + directory + directory + long + end(count, len(directory), len(body))


def a_locator_that_points_elsewhere(data: bytes) -> bytes:
    body, directory, count = parts_of(data)
    at = len(body) + len(directory)
    hidden = long_end(count, len(directory), len(body), 0)
    return body + directory + hidden + end(0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF) if at else data


def a_comment(data: bytes) -> bytes:
    body, directory, count = parts_of(data)
    return body + directory + end(count, len(directory), len(body), data[:99])


def bytes_in_front(data: bytes) -> bytes:
    return b"#!/bin/sh\n" + data


def bytes_behind(data: bytes) -> bytes:
    return data + b"\0"


def a_gap(data: bytes) -> bytes:
    body, directory, count = parts_of(data)
    return body + directory + directory + end(count, len(directory), len(body) + len(directory))


def fewer_than_it_says(data: bytes) -> bytes:
    body, directory, count = parts_of(data)
    return body + directory + end(count - 1, len(directory), len(body))


def overlapping(data: bytes) -> bytes:
    """The second entry has the bytes of the first one."""
    body, directory, count = parts_of(data)
    first, second, *rest = central(directory, count)
    moved = second[:20] + first[20:28] + second[28:42] + first[42:46] + second[46:]
    return body + first + moved + b"".join(rest) + end(count, len(directory), len(body))


def a_name_twice(data: bytes) -> bytes:
    body, directory, count = parts_of(data)
    entries = central(directory, count)
    folder = entries[0][46:].partition(b"/")[0]
    extra = struct.pack("<4s5H3L2H", b"PK\x03\x04", 20, 0, 0, 0, 0, 0, 1, 1, len(folder) + 9, 0) + folder + b"/data.pkl" + b"."
    record = struct.pack("<4s6H3L5H2L", b"PK\x01\x02", 20, 20, 0, 0, 0, 0, 0, 1, 1, len(folder) + 9, 0, 0, 0, 0, 0, len(body))
    whole = directory + record + folder + b"/data.pkl"
    return body + extra + whole + end(count + 1, len(whole), len(body) + len(extra))


def another_name_in_front_of_the_bytes(data: bytes) -> bytes:
    body, directory, count = parts_of(data)
    return body.replace(b"/data.pkl", b"/dat4.pkl", 1) + directory + end(count, len(directory), len(body))


def two_folders(data: bytes) -> bytes:
    return zipped(members(data) | {"other/data.pkl": b"\x80\x02N."})


def compressed(data: bytes) -> bytes:
    return zipped(members(data), zipfile.ZIP_DEFLATED)


AMBIGUOUS: tuple[Callable[[bytes], bytes], ...] = (
    two_directories,
    two_ends,
    a_long_record_that_differs,
    a_locator_that_points_elsewhere,
    a_comment,
    bytes_in_front,
    bytes_behind,
    a_gap,
    fewer_than_it_says,
    overlapping,
    a_name_twice,
    another_name_in_front_of_the_bytes,
    two_folders,
    compressed,
)
"""Every one is refused."""
