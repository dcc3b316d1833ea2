"""The layout of stored files: which bytes of a file come from which tensor, and where the files are shown.

Invariants
  FILE-1  The pieces of a file cover it once, from its first byte to its last; any other description is refused.
  FILE-2  No name leads out of the directory in which the files are shown, and no file has the name of a directory of another.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from checkpointd.errors import FormatError
from checkpointd.layout.keys import FILES_MAX, AttemptId
from checkpointd.layout.tree import FilesNode, StoredFileNode

SUM_BYTES = 4
WHOLE = "-whole"
"""Ends the name of an unfinished directory that will be the directory of the files itself, not the one above it."""
_NAME_BYTES_MAX = 255
_NUMBER = re.compile(r"\d+")
PLACE_MAX = 2000


@dataclass(frozen=True, slots=True)
class FilePiece:
    """Bytes `[start, stop)` of a file, which are the bytes of the tensor `fqn` from its byte `at` on.

    `placeholder`: the number of the placeholder that these bytes fill, if they fill one.
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
    """Return `at` if a checkpoint beside a root can have this directory, else raise FormatError."""
    fault = "it is too long" if len(at) > PLACE_MAX else next(filter(None, map(_name_fault, at.split("/"))), None)
    if fault:
        raise FormatError(f"{at!r} cannot be the directory of a checkpoint: {fault}")
    return at


def is_lone(at: str, names: Collection[str]) -> bool:
    """Whether a commit shows its one file as `at` itself, and not in a directory `at`: the file is named as `at` is."""
    return [*names] == [at.rpartition("/")[2]]


def check_unfinished(name: str) -> str:
    """Return `name` if an unfinished directory can have this name, else raise FormatError."""
    if unfinished_start(name) is None:
        raise FormatError(
            f"{name!r} cannot be the name of an unfinished directory: it has neither the form <start>-<number> nor "
            f"<start>-<number>{WHOLE}"
        )
    return name


def unfinished_start(name: str) -> int | None:
    """The start that filled the unfinished directory `name`; None if that is not its name."""
    filled_for = AttemptId.parse(name.removesuffix(WHOLE))
    return None if filled_for is None else filled_for.start


def unfinished_folder(name: str, at: str) -> str:
    """The directory that is filled as `name` beside files that will be shown in `at`: `at` itself, or the one above it."""
    return at if name.endswith(WHOLE) else at.rpartition("/")[0]


def numberless(path: str) -> str:
    """A file's path without the numbers in its name, which tell the files of several ranks apart."""
    directory, slash, name = path.rpartition("/")
    return f"{directory}{slash}{_NUMBER.sub('#', name)}"


def training_of(at: str, unfinished: str = "") -> str:
    """The directory of the training whose checkpoint is shown at `at`: several may share a root. "" is the root's own.

    `unfinished`: as in CommitRecord.
    """
    return (unfinished_folder(unfinished, at) if unfinished else at).rpartition("/")[0]


def check_files(files: FilesNode) -> None:
    """Raise FormatError unless the directory and every name are valid, and no two names are the same."""
    check_place(files.at)
    names = [file.name for file in files.files]
    check_names(names)
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise FormatError(f"{twice!r} is the name of two files of one rank")


def clash(names: Iterable[str]) -> str | None:
    """A name that is also the directory of another one of `names`; None if there is none."""
    known = set(names)
    return min(known & by_directory(known).keys(), default=None)


def by_directory(names: Iterable[str]) -> dict[str, set[str]]:
    """The names in each directory that `names`, relative paths, lead to, and "" for the first: parents before children."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in names:
        directory, _, name = path.rpartition("/")
        found[directory].add(name)
        while directory:
            directory = directory.rpartition("/")[0]
            found.setdefault(directory, set())
    return dict(sorted(found.items(), key=lambda item: item[0].split("/") if item[0] else []))


def check_names(names: Collection[str]) -> None:
    """Raise FormatError if a name cannot be the relative path of a plain file in a directory (FILE-2), or if there are too many
    names.
    """
    if len(names) > FILES_MAX:
        raise FormatError(f"{len(names)} files are more than the {FILES_MAX} that a rank may have in a checkpoint")
    for name in names:
        fault = "it is too long" if len(name) > PLACE_MAX else next(filter(None, map(_name_fault, name.split("/"))), None)
        if fault:
            raise FormatError(f"{name!r} cannot be the name of a file of a checkpoint: {fault}")
    if (both := clash(names)) is not None:
        raise FormatError(f"{both!r} cannot be the name of a file of a checkpoint: other files have it as their directory")


def _name_fault(name: str) -> str | None:
    if not name or "/" in name:
        return "it does not name a file in a directory"
    if name.startswith("."):
        return "it starts with a dot"
    if not name.isprintable() or any(0xD800 <= ord(letter) <= 0xDFFF for letter in name):
        return "it contains a character that cannot be printed"
    return f"it is longer than {_NAME_BYTES_MAX} bytes" if len(name.encode()) > _NAME_BYTES_MAX else None


def pieces_of(file: StoredFileNode, sizes: Mapping[str, int]) -> list[FilePiece]:
    """The pieces of `file` in order, without empty ones. `sizes` gives the bytes of every tensor.

    Raises FormatError if placeholders overlap or lie outside the file, if `hollow` does not have as many bytes as lie around
    them, or if a sum does not lie between placeholders.
    """
    found = list(_pieces(file, sizes))
    around = sum(piece.nbytes for piece in found if piece.placeholder is None)
    if sizes.get(file.hollow) != around:
        raise FormatError(
            f"{file.name}: {around} bytes lie around its placeholders, but {sizes.get(file.hollow)} bytes are stored for them"
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
    """Check that each sum belongs to a placeholder, lies between placeholders, and shares no byte with another sum."""
    between = iter([piece for piece in pieces if piece.placeholder is None and piece.nbytes])
    piece, end = next(between, None), 0
    for number, at in sorted(file.sums, key=lambda placed: placed[1]):
        while piece is not None and piece.stop < at + SUM_BYTES:
            piece = next(between, None)
        if piece is None or at < max(piece.start, end) or not 0 <= number < len(file.placeholders):
            raise FormatError(f"{file.name}: the sum of placeholder {number} at byte {at} has no place there")
        end = at + SUM_BYTES
