"""The layout of stored files: which bytes of a file come from which tensor.

Invariants
  FILE-1  The pieces of a file cover it once, from its first byte to its last; what says otherwise is refused.
  FILE-2  No name leads out of the directory in which the files are shown.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from checkpointd.errors import FormatError
from checkpointd.layout.keys import FILES_MAX, AttemptId
from checkpointd.layout.tree import FilesNode, StoredFileNode

SUM_BYTES = 4
LEFTOVERS_MAX = 16
"""So many ends of names at most tell the leftovers of a save."""
_NAME_BYTES_MAX = 255
_PLACE_MAX = 2000


@dataclass(frozen=True, slots=True)
class FilePiece:
    """Bytes `[start, stop)` of a file: those of the tensor `fqn` from its byte `at` on. `placeholder`: its
    number, if it is one.
    """

    start: int
    stop: int
    fqn: str
    at: int
    placeholder: int | None = None

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


def check_place(at: str) -> str:
    """Return `at` if it can be the directory of a checkpoint beside a root, else raise FormatError."""
    fault = "it is too long" if len(at) > _PLACE_MAX else next(filter(None, map(_name_fault, at.split("/"))), None)
    if fault:
        raise FormatError(f"{at!r} cannot be the directory of a checkpoint: {fault}")
    return at


def check_unfinished(name: str) -> str:
    """Return `name` if a directory can be filled under it, else raise FormatError."""
    if AttemptId.parse(name) is None:
        raise FormatError(f"{name!r} cannot be the name of a directory that is being filled: it is no <epoch>-<number>")
    return name


def check_beside(paths: Collection[str]) -> Collection[str]:
    """Return `paths` if each leads to a file in the directory that they are relative to, else raise FormatError."""
    for path in paths:
        if not {"", ".", ".."}.isdisjoint(path.split("/")):
            raise FormatError(f"{path!r} cannot be a file in the directory above a checkpoint's files")
    return paths


def check_leftovers(ends: Collection[str]) -> tuple[str, ...]:
    """Return `ends` if names of leftovers can end in them, else raise FormatError; every name ends in an empty one."""
    if len(ends) > LEFTOVERS_MAX:
        raise FormatError(f"{len(ends)} ends of names of leftovers are more than the {LEFTOVERS_MAX} that a save may have")
    for end in ends:
        if not end or "/" in end or len(end) > _NAME_BYTES_MAX:
            raise FormatError(f"{end!r} cannot be the end of the names of leftovers: it is no part of a file's name")
    return tuple(ends)


def check_files(files: FilesNode) -> None:
    """FormatError unless the directory and every name can be such, and no two names are the same."""
    check_place(files.at)
    names = [file.name for file in files.files]
    check_names(names)
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise FormatError(f"{twice!r} is the name of two files of one rank")


def check_names(names: Collection[str]) -> None:
    """FormatError for what cannot be the name of a plain file in a directory, and for too many of them."""
    if len(names) > FILES_MAX:
        raise FormatError(f"{len(names)} files are more than the {FILES_MAX} that a rank may have in a checkpoint")
    for name in names:
        fault = _name_fault(name)
        if fault:
            raise FormatError(f"{name!r} cannot be the name of a file of a checkpoint: {fault}")


def _name_fault(name: str) -> str | None:
    if not name or "/" in name:
        return "it is no name of a file in a directory"
    if name.startswith("."):
        return "it starts with a dot"
    if not name.isprintable() or any(0xD800 <= ord(letter) <= 0xDFFF for letter in name):
        return "it contains a character that cannot be printed"
    return f"it is longer than {_NAME_BYTES_MAX} bytes" if len(name.encode()) > _NAME_BYTES_MAX else None


def pieces_of(file: StoredFileNode, sizes: Mapping[str, int]) -> list[FilePiece]:
    """The pieces of `file` in order, those of no bytes left out; `sizes` has the bytes of every tensor.

    FormatError where placeholders overlap or lie outside, the bytes around them are not those of `hollow`, or a sum has no
    place.
    """
    found = list(_pieces(file, sizes))
    around = sum(piece.nbytes for piece in found if piece.placeholder is None)
    if sizes.get(file.hollow) != around:
        raise FormatError(
            f"{file.name}: {around} bytes lie around its placeholders, and {sizes.get(file.hollow)} are there for them"
        )
    _check_sums(file, found)
    return [piece for piece in found if piece.nbytes]


def _pieces(file: StoredFileNode, sizes: Mapping[str, int]) -> Iterator[FilePiece]:
    end = hollow = 0
    for number, (start, fqn) in sorted(enumerate(file.placeholders), key=lambda placeholder: placeholder[1][0]):
        nbytes = sizes.get(fqn)
        if nbytes is None or not end <= start <= file.size - nbytes:
            raise FormatError(f"{file.name}: the placeholder for {fqn} at byte {start} overlaps another, or lies outside")
        yield FilePiece(end, start, file.hollow, hollow)
        hollow += start - end
        end = start + nbytes
        yield FilePiece(start, end, fqn, 0, number)
    if file.size < end:
        raise FormatError(f"{file.name}: it has {file.size} bytes, and its placeholders end at {end}")
    yield FilePiece(end, file.size, file.hollow, hollow)


def _check_sums(file: StoredFileNode, pieces: list[FilePiece]) -> None:
    """Each sum is one of a placeholder, lies between placeholders, and shares no byte with another."""
    between = iter([piece for piece in pieces if piece.placeholder is None and piece.nbytes])
    piece, end = next(between, None), 0
    for number, at in sorted(file.sums, key=lambda placed: placed[1]):
        while piece is not None and piece.stop < at + SUM_BYTES:
            piece = next(between, None)
        if piece is None or at < max(piece.start, end) or not 0 <= number < len(file.placeholders):
            raise FormatError(f"{file.name}: the sum of placeholder {number} at byte {at} has no place there")
        end = at + SUM_BYTES
