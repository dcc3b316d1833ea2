"""Reads the journals of the ranks of an endless training, for tests that kill the ranks."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Event = dict[str, Any]


class JournalReader:
    """One rank's journal: `events` holds all that was noted until the last look, whatever process it was."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.events: list[Event] = []
        self._read = 0

    def look(self) -> list[Event]:
        """Read what is new; a line that is not whole yet, or that a kill cut off, is left out."""
        if self.path.exists():
            with self.path.open("rb") as file:
                file.seek(self._read)
                lines = file.read().splitlines(keepends=True)
            whole = [line for line in lines if line.endswith(b"\n")]
            self._read += sum(map(len, whole))
            self.events += map(json.loads, whole)
        return self.events

    def last(self, kind: str) -> Event | None:
        """The newest event of its kind."""
        return next((event for event in reversed(self.look()) if event["event"] == kind), None)


def committed_steps(journals: Iterable[JournalReader]) -> set[int]:
    """The steps whose save the handle of any rank has called committed."""
    noted = [event for journal in journals for event in journal.look()]
    return {int(event["tag"].removeprefix("global_step")) for event in noted if event["event"] == "committed"}
