"""The text of a mismatch: the first few differences of one rank, and the count; `mismatches` of the error has all."""

from __future__ import annotations

from collections.abc import Container

from checkpointd.errors import MismatchError

TOLD_MAX = 10


_UNEXPECTED = "in the checkpoint, and nowhere in the objects"


def unexpected(fqn: str, where: str = "") -> str:
    """The line that the objects, or those that `where` names, have no place for a stored value."""
    return f"{fqn}: {_UNEXPECTED}{where}"


def error(found: tuple[str, ...]) -> MismatchError:
    """The error that lists `found`, one line for each difference."""
    told = found[:TOLD_MAX]
    more = f" The first {TOLD_MAX} of them (all are in the error's `mismatches`)" if len(found) > TOLD_MAX else " They are"
    return MismatchError(
        f"the checkpoint and the objects to load into differ in {_places(found)}; nothing was loaded. Make them alike. "
        f"strict=False would load the rest, {_kept(found)}.{more}:\n  " + "\n  ".join(told),
        found,
    )


def _kept(found: tuple[str, ...]) -> str:
    """What stays as it is in a load with strict=False."""
    kept = [line for line in found if _UNEXPECTED not in line]
    if not kept:
        return "and all values of the objects would come from the checkpoint"
    values, its = ("1 value", "its initial value") if len(kept) == 1 else (f"{len(kept)} values", "their initial values")
    return f"and {values} of the objects would not be loaded: in a new model, they would keep {its}"


def left_out(tag: str, missing: int, unexpected: int, mismatched: int, found: tuple[str, ...]) -> str:
    """The warning that a checkpoint was loaded in part: the counts of each kind, and the first lines of `found`."""
    first = f"The first {TOLD_MAX} of them" if len(found) > TOLD_MAX else "They are"
    lines = "\n  ".join(found[:TOLD_MAX])
    return (
        f"{tag} was loaded in part, as strict=False allows: {missing} missing, {unexpected} unexpected and {mismatched} "
        f"mismatched. The missing and mismatched values of the objects were not loaded, so they are what they were before. All "
        f"stand in the result of load(). {first}:\n  {lines}"
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
