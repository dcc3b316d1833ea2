"""The text of a mismatch: the first few differences of one rank, and the count; `mismatches` of the error has all."""

from __future__ import annotations

from collections.abc import Container

from checkpointd.errors import MismatchError

TOLD_MAX = 10


def error(found: tuple[str, ...]) -> MismatchError:
    """The error that lists `found`, one line for each difference."""
    told = found[:TOLD_MAX]
    more = f". The first {TOLD_MAX} of them (all are in the error's `mismatches`)" if len(found) > TOLD_MAX else ""
    return MismatchError(
        f"the checkpoint and the objects to load into differ in {_places(found)}; nothing was loaded. Make them alike, or load "
        f"what fits with strict=False{more}:\n  " + "\n  ".join(told),
        found,
    )


def left_out(tag: str, missing: int, unexpected: int, mismatched: int, found: tuple[str, ...]) -> str:
    """The warning that a checkpoint was loaded in part: the counts of each kind, and the first lines of `found`."""
    first = f"The first {TOLD_MAX} of them" if len(found) > TOLD_MAX else "They are"
    lines = "\n  ".join(found[:TOLD_MAX])
    return (
        f"{tag} was loaded in part, as strict=False allows: {missing} missing, {unexpected} unexpected and {mismatched} "
        f"mismatched. These were left as they are, and stand in the result of load(). {first}:\n  {lines}"
    )


def told_by(rank: int, found: tuple[str, ...], *, own: bool) -> MismatchError:
    """The short error of the other ranks. `own`: `found` are the differences on this rank; else those on rank `rank`."""
    where = "here, too, and" if own else f"on rank {rank}, which"
    verb = f"rank {rank} lists its own" if own else "lists them"
    return MismatchError(f"nothing was loaded: the checkpoint and the objects differ in {_places(found)} {where} {verb}", found)


def stands_in(fqn: str, places: Container[str]) -> bool:
    """Whether `fqn` is one of `places`, or below one."""
    return fqn in places or any(letter == "." and fqn[:at] in places for at, letter in enumerate(fqn))


def _places(found: tuple[str, ...]) -> str:
    return f"{len(found)} {'place' if len(found) == 1 else 'places'}"
