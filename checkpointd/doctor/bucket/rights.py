"""Tests what the credentials may do: list, put, get, head and delete. Everything else needs these."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

from checkpointd.doctor.finding import Finding
from checkpointd.errors import CheckpointdError, NotFoundError, StoreError
from checkpointd.store.objects.bucket import Bucket
from checkpointd.store.objects.failures import is_forbidden, reason_of

KEY: Final = "rights"
SKEW_CODE: Final = "RequestTimeTooSkewed"

_finding = partial(Finding, "root")


async def reached(bucket: Bucket) -> Finding:
    """Whether the server answers, and the bucket is there. Missing rights are left to the next check."""
    try:
        await bucket.list("")
    except StoreError as error:
        found = failed("root", error)
        if SKEW_CODE in found.seen:
            return _finding("clock", "fail", found.seen, "S3 refuses signatures by this clock: let chrony or NTP set it")
        if not is_forbidden(error):
            return found
    return _finding("root", "ok", "the server answers")


async def rights(bucket: Bucket) -> Finding:
    """Each kind of request once."""
    steps: tuple[tuple[str, Callable[[], Awaitable[object]]], ...] = (
        ("list", partial(bucket.list, "")),
        ("put", partial(bucket.put, KEY, b"text")),
        ("get", partial(bucket.get, KEY, 100)),
        ("head", partial(bucket.look, KEY)),
        ("delete", partial(bucket.delete, [KEY])),
    )
    refused: dict[str, StoreError] = {}
    for name, step in steps:
        try:
            await step()
        except NotFoundError:  # the put was refused, and reading is not
            continue
        except StoreError as error:
            if not is_forbidden(error):
                return failed("rights", error)
            refused[name] = error
    if not refused:
        return _finding("rights", "ok", f"these credentials may {', '.join(name for name, _ in steps)}")
    first = failed("rights", next(iter(refused.values())))
    if refused.keys() == {"delete"}:
        advice = "retention and `gc` need it. Allow it, at least for the doctor: the other checks would leave objects behind"
        return _finding("rights", "warn", f"these credentials may not delete: {first.seen}", advice)
    allowed = [name for name, _ in steps if name not in refused]
    may = f"; they may {', '.join(allowed)}" if allowed else ""
    return _finding("rights", "fail", f"these credentials may not {', '.join(refused)}{may}: {first.seen}", first.fix)


def failed(check: str, error: CheckpointdError) -> Finding:
    """The finding for `error`, in the words that a save would use for the same error."""
    if isinstance(error, StoreError) and error.__cause__ is not None:
        seen, fix = reason_of(error.__cause__)
        doing = str(error).partition(" in ")[0]
        return _finding(check, "fail", f"{doing} failed: {seen}", fix or "look at the server's log")
    return _finding(check, "fail", str(error), "look at the server's log")
