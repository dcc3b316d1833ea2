"""Decides which checkpoints of a root are exported next, and which exports are removed. It does neither."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from checkpointd.bucket_urls import is_same_root
from checkpointd.config import ExportConfig
from checkpointd.export.record import ExportRecord
from checkpointd.pipeline.root.catalog import Checkpoint


@dataclass(frozen=True, slots=True)
class ExportAgenda:
    """The checkpoints to export, newest first: retention removes the oldest first. `blocked`: those whose place is taken by
    something that is not an export of this root. `going`: the exports to remove: those that `keep_last` does not keep, oldest
    first, and unfinished ones that are not due any more.
    """

    due: tuple[Checkpoint, ...] = ()
    blocked: tuple[Checkpoint, ...] = ()
    going: tuple[ExportRecord, ...] = ()


def planned(
    newest_first: Sequence[Checkpoint],
    there: Mapping[str, ExportRecord | None],
    config: ExportConfig,
    root: str,
    tried: Collection[str] = (),
) -> ExportAgenda:
    """`there`: the names at the place, each with its record if it is an export. `tried`: attempts to skip for now."""
    wanted = [one for one in newest_first if config.every_steps is None or one.outcome.step % config.every_steps == 0]
    wanted = [one for one in wanted if one.read_back != "damaged"]
    done = [record for record in there.values() if record is not None and record.complete and is_same_root(record.root, root)]
    orders = {one.outcome.order for one in wanted} | {record.order for record in done}
    kept = set(sorted(orders, reverse=True)[: config.keep_last])
    due, blocked = [], []
    for one in wanted:
        record = there.get(one.tag)
        if one.outcome.order not in kept or (record is not None and record.complete and record.is_of(one)):
            continue
        if one.tag in there and (record is None or not is_same_root(record.root, root)):
            blocked.append(one)
        elif one.prefix not in tried:
            due.append(one)
    newest = sorted(done, key=lambda record: record.order, reverse=True)
    going = newest[config.keep_last :] if config.keep_last is not None else []
    begun = [one for one in there.values() if one is not None and not one.complete and is_same_root(one.root, root)]
    left = [record for record in begun if record.tag not in {one.tag for one in due}]
    return ExportAgenda(tuple(due), tuple(blocked), (*reversed(going), *left))
