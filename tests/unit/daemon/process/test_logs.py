"""The daemon's log: one line a record whatever it repeats, and no flood."""

from __future__ import annotations

import contextvars
import json
import logging
import sys
import time
from datetime import datetime

import pytest

from checkpointd.daemon.process import logs
from checkpointd.daemon.process.logs import JsonFormatter, LineFormatter, Rationed, Subject, about, escaped, log_to_stderr

EVIL = "\x1b]0;pwn\x07\x1b[31mEVIL\n2026-11-22 00:00:00 INFO forged line\r\u202e\u009b31m\ud800"


def formatted(message: str, *args: object, error: BaseException | None = None) -> str:
    info = None if error is None else (type(error), error, error.__traceback__)
    return LineFormatter().format(logging.LogRecord("checkpointd", logging.ERROR, __file__, 1, message, args, info))


def test_what_a_record_repeats_neither_ends_its_line_nor_steers_a_terminal() -> None:
    """LOGLINE-1"""
    line = formatted("process %d was refused: %s", 7, EVIL)
    assert line.isprintable()
    assert "\\n2026-11-22 00:00:00 INFO forged line\\r\\u202e\\x9b31m\\ud800" in line
    assert line.isascii() or line.encode()


def test_a_traceback_keeps_its_lines_and_none_of_them_looks_like_a_record() -> None:
    """LOGLINE-1"""
    try:
        raise ValueError(EVIL)
    except ValueError as error:
        first, *rest = formatted("it failed", error=error).split("\n")
    assert first.endswith(" ERROR it failed")
    assert rest[0] == "    Traceback (most recent call last):"
    assert all(line.isprintable() and line.startswith("    ") for line in rest)


def test_times_are_utc_and_say_so_in_both_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Asia/Kathmandu")
    time.tzset()
    try:
        record = logging.LogRecord("checkpointd", logging.INFO, __file__, 1, "said", (), None)
        record.created, record.msecs = 1_790_000_000.123, 123.0
        assert LineFormatter().format(record) == "2026-09-21T14:13:20.123Z INFO said"
        assert json.loads(JsonFormatter().format(record))["time"] == "2026-09-21T14:13:20.123Z"
    finally:
        monkeypatch.undo()
        time.tzset()


def test_a_record_has_a_bounded_length() -> None:
    """LOGLINE-2"""
    assert len(formatted("%s", "ü" * (15 << 20))) < logs.MESSAGE_MAX + 200
    assert escaped("abc", 2) == "ab… (1 characters more)"
    assert len(formatted("it failed", error=ValueError("x\n" * (1 << 20)))) < 10 * logs.TRACEBACK_MAX


def test_the_daemon_writes_its_log_in_that_form() -> None:
    log = logging.getLogger("checkpointd")
    before = log.handlers[:], log.propagate, log.level
    try:
        for form, formatter in (("text", LineFormatter), ("json", JsonFormatter)):
            log_to_stderr("error", form)
            assert [type(handler.formatter) for handler in log.handlers] == [formatter]
            assert log.level == logging.ERROR
    finally:
        log.handlers[:], log.propagate, log.level = before


def record_of(message: str, *args: object, fields: dict[str, object] | None = None) -> logging.LogRecord:
    record = logging.LogRecord("checkpointd", logging.INFO, __file__, 1, message, args, None)
    if fields is not None:
        record.fields = fields
    return record


def test_a_record_of_a_task_names_the_root_and_the_rank_that_it_works_for() -> None:
    def formatted_within() -> tuple[str, dict[str, object]]:
        about(Subject("/r\nforged", 3, "global_step1", "00000001-0"))
        record = record_of("committed: %d bytes", 7, fields={"bytes": 7, "seconds": 1.5})
        return LineFormatter().format(record), json.loads(JsonFormatter().format(record))

    text, found = contextvars.copy_context().run(formatted_within)
    assert text.endswith(" INFO [/r\\nforged rank 3] committed: 7 bytes")
    assert datetime.fromisoformat(str(found.pop("time"))).tzinfo is not None
    assert found == {
        "level": "info",
        "message": "committed: 7 bytes",
        "root": "/r\\nforged",
        "rank": 3,
        "tag": "global_step1",
        "attempt": "00000001-0",
        "bytes": 7,
        "seconds": 1.5,
    }
    assert "[" not in LineFormatter().format(record_of("of nobody"))


def test_json_is_one_line_whatever_it_repeats() -> None:
    try:
        raise ValueError(EVIL)
    except ValueError as error:
        record = logging.LogRecord("checkpointd", logging.ERROR, __file__, 1, "%s", (EVIL,), (ValueError, error, None))
    line = JsonFormatter().format(record)
    assert line.count("\n") == 0
    found = json.loads(line)
    assert found["message"].isprintable()
    assert "ValueError" in found["traceback"]


def test_what_happens_again_and_again_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    """LOGLINE-3: for each cause and user by itself."""
    now = [0.0]
    said = Rationed(logging.getLogger("checkpointd"), lambda: now[0])
    for number in range(1000):
        said.warning("refused", 1, "refused %d", number)
    said.warning("refused", 2, "another user's")
    said.warning("malformed", 1, "another cause")
    assert caplog.messages == [*(f"refused {n}" for n in range(logs.SAID_MAX)), "another user's", "another cause"]
    caplog.clear()
    now[0] = logs.PERIOD_S
    said.warning("refused", 1, "again")
    assert caplog.messages == [f"refused (user 1): {1000 - logs.SAID_MAX} more in 60 s were left out here", "again"]


def test_the_causes_that_are_remembered_are_bounded(caplog: pytest.LogCaptureFixture) -> None:
    """LOGLINE-3"""
    said = Rationed(logging.getLogger("checkpointd"), lambda: 0.0)
    for uid in range(2 * logs.CAUSES_MAX):
        said.warning("refused", uid, "refused")
    assert sys.getsizeof(said._causes) < sys.getsizeof(dict.fromkeys(range(4 * logs.CAUSES_MAX)))
    assert len(said._causes) == logs.CAUSES_MAX
