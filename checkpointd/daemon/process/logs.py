"""The daemon's log. Text from clients, files or names stays on one line and cannot fill the disk.

Invariants
  LOGLINE-1  A record is one line, and the lines of its traceback are indented. No text can forge a line or control a terminal.
  LOGLINE-2  A record takes at most MESSAGE_MAX characters and its traceback TRACEBACK_MAX, before any character is escaped.
  LOGLINE-3  A repeated message is logged at most SAID_MAX times in PERIOD_S for each cause and user, unless the caller gives
      another number. Later, one message says how many were left out.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime

MESSAGE_MAX = 4000
TRACEBACK_MAX = 16_000
TOLD_MAX = 2000
SAID_MAX = 5
PERIOD_S = 60.0
CAUSES_MAX = 1024

_INDENT = "    "


def escaped(text: str, most: int = MESSAGE_MAX) -> str:
    """At most `most` characters of `text` on one line. Escapes characters that cannot be printed."""
    shown = text[:most]
    if not shown.isprintable():
        shown = "".join(c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode() for c in shown)
    return shown if len(text) <= most else f"{shown}… ({len(text) - most} characters more)"


def told(text: str) -> str:
    """`text`, which may come from a client or another rank's vote, made safe for clients, users and the status."""
    return escaped(text, TOLD_MAX)


@dataclass(frozen=True, slots=True)
class Subject:
    """The root, rank and save that a task works for, for its log records."""

    root: str
    rank: int | None = None
    tag: str = ""
    attempt: str = ""

    def __str__(self) -> str:
        return self.root if self.rank is None else f"{self.root} rank {self.rank}"


_SUBJECT: ContextVar[Subject | None] = ContextVar("subject", default=None)


def about(subject: Subject) -> None:
    """From here on, the records of this task, and of tasks that it starts, are about `subject`."""
    _SUBJECT.set(subject)


@contextmanager
def regarding(subject: Subject) -> Iterator[None]:
    """Records logged inside the block are about `subject`."""
    before = _SUBJECT.set(subject)
    try:
        yield
    finally:
        _SUBJECT.reset(before)


class LineFormatter(logging.Formatter):
    """Formats a record by LOGLINE-1 and LOGLINE-2, with its root and rank if it has them."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        subject = _SUBJECT.get()
        record.message = f"{'' if subject is None else f'[{escaped(str(subject))}] '}{escaped(record.getMessage())}"
        record.asctime = _utc(record)
        return self.formatMessage(record) + self.traceback(record)

    def traceback(self, record: logging.LogRecord) -> str:
        """The traceback of `record`, each line indented after a line break; empty if there is none."""
        if not record.exc_info:
            return ""
        found = self.formatException(record.exc_info)
        shown = found if len(found) <= TRACEBACK_MAX else f"{found[: TRACEBACK_MAX // 2]}\n…\n{found[-TRACEBACK_MAX // 2 :]}"
        return "".join(f"\n{_INDENT}{escaped(line)}" for line in shown.split("\n"))


class JsonFormatter(LineFormatter):
    """Formats a record as one JSON object on a line: `time` (UTC), `level`, `message`; `root`, `rank`, `tag` and `attempt` if
    known; the `fields` of `extra`; `traceback`.
    """

    def format(self, record: logging.LogRecord) -> str:
        subject = _SUBJECT.get()
        known = {name: value for name, value in asdict(subject).items() if value not in (None, "")} if subject else {}
        found = {
            "time": _utc(record),
            "level": record.levelname.lower(),
            "message": escaped(record.getMessage()),
            **{name: escaped(value) if isinstance(value, str) else value for name, value in known.items()},
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            found["traceback"] = self.traceback(record).strip("\n")
        return json.dumps(found, ensure_ascii=False)


def _utc(record: logging.LogRecord) -> str:
    """`2026-11-28T09:30:11.123Z`."""
    return f"{datetime.fromtimestamp(record.created, UTC):%Y-%m-%dT%H:%M:%S}.{int(record.msecs):03d}Z"


FORMATTERS: dict[str, type[LineFormatter]] = {"text": LineFormatter, "json": JsonFormatter}


def log_to_stderr(level: str, form: str) -> None:
    """Send the log to standard error, which systemd and containers collect."""
    log = logging.getLogger("checkpointd")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(FORMATTERS[form]())
    log.handlers[:] = [handler]
    log.propagate = False
    log.setLevel(level.upper())


@dataclass(slots=True)
class _Cause:
    until: float
    said: int = 0
    left_out: int = 0


@dataclass(slots=True)
class Rationed:
    """Logs messages that may come thousands of times a second (LOGLINE-3)."""

    log: logging.Logger
    clock: Callable[[], float] = time.monotonic
    _causes: OrderedDict[tuple[str, int], _Cause] = field(default_factory=OrderedDict)

    def warning(self, cause: str, uid: int, message: str, *args: object) -> None:
        """Log `message`, unless `cause` of user `uid` was logged too often lately. `cause` is one of a few fixed texts."""
        self.say(logging.WARNING, cause, uid, message, *args)

    def say(
        self,
        level: int,
        cause: str,
        uid: int,
        message: str,
        *args: object,
        most: int = SAID_MAX,
        fields: Mapping[str, object] | None = None,
    ) -> None:
        """The same at a level, at most `most` times in PERIOD_S, with `fields` for the JSON log."""
        self.say_left_out()
        known = self._causes.get((cause, uid))
        if known is None:
            known = self._causes[(cause, uid)] = _Cause(self.clock() + PERIOD_S)
            if len(self._causes) > CAUSES_MAX:
                self._tell(*self._causes.popitem(last=False))
        if known.said < most:
            known.said += 1
            self.log.log(level, message, *args, extra={"fields": fields or {}})
        else:
            known.left_out += 1

    def say_left_out(self) -> None:
        """Log how many messages were left out of each cause whose period is over, and forget the cause."""
        now = self.clock()
        while self._causes:
            key, first = next(iter(self._causes.items()))
            if first.until > now:
                return
            del self._causes[key]
            self._tell(key, first)

    def _tell(self, key: tuple[str, int], cause: _Cause) -> None:
        if cause.left_out:
            whose = "" if key[1] < 0 else f" (user {key[1]})"
            self.log.warning("%s%s: %d more in %g s were left out here", key[0], whose, cause.left_out, PERIOD_S)
