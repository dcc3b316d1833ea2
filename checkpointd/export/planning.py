"""Decides which checkpoints of a root are exported next, and which exports are removed. It does neither."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from checkpointd.bucket_urls import is_same_root
from checkpointd.config import ExportConfig
from checkpointd.export.record import ExportRecord
from checkpointd.layout.log_records import LoggedAttempt
from checkpointd.pipeline.gc.export_leases import is_wanted


@dataclass(frozen=True, slots=True)
class ExportAgenda:
    """The checkpoints to export, newest first: retention removes the oldest first. `blocked`: those whose place is taken by
    something that is not an export of this root. `going`: the exports to remove: those that `keep_last` does not keep, oldest
    first, and unfinished ones that are not due any more.
    """

    due: tuple[LoggedAttempt, ...] = ()
    blocked: tuple[LoggedAttempt, ...] = ()
    going: tuple[ExportRecord, ...] = ()


def planned(
    newest_first: Sequence[LoggedAttempt],
    there: Mapping[str, ExportRecord | None],
    config: ExportConfig,
    root: str,
    tried: Collection[str] = (),
) -> ExportAgenda:
    """`there`: the names at the place, each with its record if it is an export. `tried`: attempts to skip for now.

    A copy of an export under another name is nobody's. Exports of commits newer than all at the root are of a root that was
    there before, or of checkpoints that were deleted by hand: they stay, and `keep_last` does not count them.
    """
    wanted = [one for one in newest_first if is_wanted(one.commit.step, config.every_steps) and one.read_back != "damaged"]
    ours = {
        name: record
        for name, record in there.items()
        if record is not None and record.tag == name and is_same_root(record.root, root)
    }
    newest = max((one.commit.order for one in newest_first), default=(0, 0))
    done = [record for record in ours.values() if record.complete and record.order <= newest]
    orders = {one.commit.order for one in wanted} | {record.order for record in done}
    kept = set(sorted(orders, reverse=True)[: config.keep_last])
    due, blocked = [], []
    for one in wanted:
        record = there.get(one.tag)
        if one.commit.order not in kept or (record is not None and record.complete and record.is_of(one)):
            continue
        if one.tag in there and one.tag not in ours:
            blocked.append(one)
        elif one.prefix not in tried:
            due.append(one)
    done.sort(key=lambda record: record.order, reverse=True)
    going = done[config.keep_last :] if config.keep_last is not None else []
    left = [record for record in ours.values() if not record.complete and record.tag not in {one.tag for one in due}]
    return ExportAgenda(tuple(due), tuple(blocked), (*reversed(going), *left))
