"""`checkpointd status --socket`, against a daemon that says what the test tells it to."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from checkpointd.cli.commands.daemon_status import page
from checkpointd.cli.formatting import duration, speed
from checkpointd.cli.render import plain, rich_page
from checkpointd.daemon.protocol import wire
from checkpointd.daemon.protocol.decoder import Decoder
from checkpointd.daemon.query import AsyncStatusClient
from checkpointd.daemon.status.changes import changes
from checkpointd.daemon.status.model import DaemonStatus, SpoolStatus
from checkpointd.daemon.status.verdict import judged
from checkpointd.layout.manifest import ErrorReport, Inline
from tests.unit.cli.conftest import Cli
from tests.unit.daemon.example_statuses import (
    BUSY_ROOT,
    HOSTILE,
    NOW,
    busy,
    daemon_status,
    failing,
    fresh,
    hostile,
    many,
    rank_status,
    root_status,
    save,
    spooling,
)

WELCOME = wire.Welcome(protocol=1, release="0.1.0", pid=1, frame_bytes_max=64 << 20, slots_max=1, memory_bytes_max=1)


class Daemon:
    """Answers one client after the other with what `says` holds."""

    def __init__(self, path: Path) -> None:
        self.path, self.says = path, busy(8)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._connection: socket.socket | None = None
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                self._connection, _ = self._listener.accept()
            except OSError:
                return
            with self._connection:
                self._answer(self._connection)

    def _answer(self, connection: socket.socket) -> None:
        decoder = Decoder()
        try:
            while data := connection.recv(65536):
                for message, _ in decoder.feed(data):
                    report = wire.Report(status=self.says.to_json().decode())
                    connection.sendall(wire.encode(WELCOME if isinstance(message, wire.Hello) else report))
        except OSError:
            return

    def end(self) -> None:
        self.path.unlink(missing_ok=True)
        for end in (self._listener, self._connection):
            if end is not None:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()


@pytest.fixture
def daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Daemon]:
    monkeypatch.setitem(AsyncStatusClient.__init__.__kwdefaults__, "timeout_s", 60.0)  # none of its answers is late
    made = Daemon(tmp_path / "s")
    yield made
    made.end()


# --- once ----------------------------------------------------------------------------------------------------


def test_what_it_is_at(daemon: Daemon, cli: Cli) -> None:
    answer = cli("status", "--socket", daemon.path)
    assert (answer.code, answer.err) == (0, "")
    assert answer.lines[0] == "daemon: serving, checkpointd 0.1.0, process 812 on node-17, up 23h53m"
    assert "latest: global_step4100, newest step 4100, committed 93s ago" in answer.lines
    assert "global_step4200 (00000003-0): in flight for 3.4s" in answer.lines
    assert "waiting for the votes of ranks 1-3, 5-7" in answer.lines
    assert "all      60%  6 persisting, 2 voted, 4.0s left, 2.2GiB/s, 9.7GiB of 16.0GiB" in answer.lines
    assert "rank 0  100%  voted" in answer.lines
    assert "rank 1   56%  2.0s left, 444.4MiB/s, 1.1GiB of 2.0GiB" in answer.lines
    assert "global_step4100  00000003-0  8 committed  7.2s  16.0GiB  10.6GiB     93s" in answer.lines


def test_what_went_wrong_in_words(daemon: Daemon, cli: Cli) -> None:
    daemon.says = failing()
    lines = cli("status", "--socket", daemon.path, BUSY_ROOT).lines
    assert "trainers: 3 of 4 ranks connected; gone: rank 3" in lines
    assert "rank 2 failed: write: no space left on device (/mnt/ckpts/llama-7b)" in lines
    assert "what to do: Free some space, or raise the quota, where rank 2 writes. The next save starts afresh." in lines
    unreadable = cli("status", "--socket", daemon.path, "/mnt/scratch/run2").lines
    assert any(
        line.startswith("verdict: unreadable: The root cannot be looked at: /mnt/scratch/run2: Stale") for line in unreadable
    )
    assert lines[0].startswith("daemon: leaving: nothing new is taken")


def test_a_root_that_its_trainers_closed(daemon: Daemon, cli: Cli) -> None:
    closed = rank_status(0, 1, connected=False, left_well=True)
    daemon.says = daemon_status(judged(root_status("/a/done", ranks=(closed,), past=0), NOW))
    lines = cli("status", "--socket", daemon.path).lines
    first = lines.index("/a/done") + 1
    assert lines[first] == "verdict: closed: The trainers of this node closed it"
    assert "trainers: 0 of 1 rank connected; closed: rank 0" in lines


def test_many_roots_are_a_line_each_what_needs_a_look_first(daemon: Daemon, cli: Cli) -> None:
    [well] = busy().roots
    daemon.says = daemon_status(msgspec.structs.replace(well, root="/a/well", name="llama"), *failing().roots)
    lines = cli("status", "--socket", daemon.path).lines
    first = lines.index("roots") + 1
    assert lines[first].split()[:2] == ["STATE", "ROOT"]
    rows = [line.split() for line in lines[first + 1 :]]
    assert [row[0] for row in rows] == ["unreadable", "failing", "healthy"]
    assert "/mnt/scratch/run2: Stale file handle" in lines[first + 1]
    assert {"/mnt/ckpts/llama-7b", "3/4", "global_step3900"} <= set(rows[1])
    assert {"llama", "(/a/well)", "8/8", "global_step4200"} <= set(rows[2])
    assert len(lines) == first + 4


def narrow(found: DaemonStatus, width: int) -> str:
    """The page of a terminal of `width` columns."""
    console = Console(file=io.StringIO(), width=width, highlight=False, markup=False, emoji=False)
    for part in rich_page(page(found), width):
        console.print(part)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_a_narrow_terminal_keeps_the_state_the_root_and_why(width: int) -> None:
    found = daemon_status(*failing().roots, *many(12).roots)
    text = narrow(found, width)
    lines = text.splitlines()
    head = next(line for line in lines if line.split()[:2] == ["state", "root"])
    column = {title: head.index(title) for title in ("state", "root", "why")}
    after = head.split()
    ends = {title: head.index(after[after.index(title) + 1]) if title != "why" else width for title in column}
    rows = lines[lines.index(head) + 2 :]
    told = {title: "".join(line[column[title] : ends[title]].replace(" ", "") for line in rows) for title in column}
    for root in found.roots:
        assert root.verdict.state.replace(" ", "") in told["state"]
        assert root.root in told["root"]
        assert root.verdict.reason.replace(" ", "") in told["why"]


@pytest.mark.parametrize("width", [40, 60, 100])
def test_a_narrow_terminal_keeps_who_a_bar_is_of_and_what_is_said_of_it(width: int) -> None:
    root = busy(4).roots[0]
    error = ErrorReport(code="StoreFullError", message="write: no space left on device (/mnt/ckpts/llama-7b)")
    flights = (*root.in_flight[:3], msgspec.structs.replace(root.in_flight[3], phase="failed", error=error))
    text = narrow(daemon_status(msgspec.structs.replace(root, in_flight=flights)), width)
    assert [f"rank {rank}" for rank in range(4)] == [line[:6] for line in text.splitlines() if line.startswith("rank ")]
    joined = "".join(line[len("rank 0") + 2 + max(8, min(40, width // 4)) + 2 + 4 + 2 :].strip() for line in text.splitlines())
    assert error.message.replace(" ", "") in joined.replace(" ", "")


def test_which_roots_are_served_is_said(daemon: Daemon, cli: Cli) -> None:
    assert "serves: /mnt/ckpts, /mnt/scratch" in cli("status", "--socket", daemon.path).lines


def test_a_rank_that_never_called_save_is_named_and_counts_as_not_done(daemon: Daemon, cli: Cli) -> None:
    began = [save(0, 900, began=NOW - 9, phase="prepared", missing=(1,)), save(2, 900, began=NOW - 9, phase="prepared")]
    root = root_status("/r", ranks=[rank_status(rank, 3) for rank in range(3)], in_flight=began)
    daemon.says = daemon_status(root)
    lines = cli("status", "--socket", daemon.path).lines
    assert "rank 1 has not called save() yet" in lines
    assert [line.split()[1] for line in lines if line.startswith("all ")] == ["66%"]
    daemon.says = daemon_status(root, root_status("/s", ranks=[rank_status(0, 1)], in_flight=began[:1]))
    rows = [line for line in cli("status", "--socket", daemon.path).lines if "global_step900" in line]
    assert ["global_step900 66%" in row for row in rows] == [True, False]
    assert "global_step900 voted" in rows[1]


def test_more_than_the_whole_is_never_done(daemon: Daemon, cli: Cli) -> None:
    """What is written again counts twice."""
    one = save(0, 900, began=NOW - 9, phase="persisting", total=771 << 10)
    more = msgspec.structs.replace(one, raw_done=772 << 10)
    daemon.says = daemon_status(root_status("/r", ranks=[rank_status(0, 1)], in_flight=[more]))
    text = "\n".join(cli("status", "--socket", daemon.path).lines)
    assert "771.0KiB of 771.0KiB" in text
    assert "772.0KiB" not in text


def test_what_trainers_persisted_themselves_and_what_was_refused(daemon: Daemon, cli: Cli) -> None:
    [root] = busy().roots
    lost = Inline(reason="refused", why="the sidecar refused: no room")
    saves = [msgspec.structs.replace(save, inline=lost) for save in root.recent[-8:]]
    ranks = [msgspec.structs.replace(rank, saves_inline=2) for rank in root.ranks]
    told = daemon_status(msgspec.structs.replace(root, recent=(*root.recent[:-8], *saves), ranks=tuple(ranks)))
    daemon.says = msgspec.structs.replace(told, refusals={"full": 2, "request": 0})
    lines = cli("status", "--socket", daemon.path).lines
    assert "the trainers persisted 16 saves themselves; the last one: the sidecar refused: no room" in lines
    assert "connections: 8 of 512, 2 refused so far (2 full)" in lines


def test_each_rung_of_the_spool_is_shown(daemon: Daemon, cli: Cli) -> None:
    [root] = busy().roots
    root = msgspec.structs.replace(root, ranks=root.ranks[:2])
    waits, uploads = root.in_flight[:2]
    flights = (
        msgspec.structs.replace(waits, rank=0, phase="spooled", upload_total=1 << 31, votes_missing=None),
        msgspec.structs.replace(uploads, rank=1, phase="uploading", uploaded=1 << 30, upload_total=1 << 31, votes_missing=None),
    )
    gone = save(0, 4000, began=NOW - 50, phase="superseded", error=ErrorReport(code="SupersededError", message="a newer save"))
    spool = SpoolStatus(
        directory="/nvme/spool",
        used_bytes=3 << 30,
        free_bytes=7 << 30,
        bytes_max=None,
        keep="newest",
        waiting=2,
        waiting_bytes=1 << 31,
        bandwidth_bps=None,
        spooled=9,
        uploaded=4,
        uploaded_bytes=1 << 33,
        superseded=3,
        direct_full=1,
        direct_failed=0,
        damaged=0,
        resumed=2,
    )
    told = daemon_status(msgspec.structs.replace(root, in_flight=flights, recent=(gone,)))
    daemon.says = msgspec.structs.replace(told, spool=spool)
    lines = cli("status", "--socket", daemon.path).lines
    words = "/nvme/spool, 2 shards wait (2.0GiB), 3.0GiB used, 7.0GiB free, 3 superseded"
    assert f"spool: {words}, 1 straight to the root, since it was full" in lines
    assert "all      25%  1 spooled, 1 uploading, 1.0GiB of 4.0GiB uploaded" in lines
    assert "rank 0    0%  spooled, 2.0GiB to upload" in lines
    assert "rank 1   50%  uploading, 1.0GiB of 2.0GiB" in lines
    assert any("1 superseded" in line for line in lines)
    assert not any("failing" in line for line in lines), "a superseded save is no failure"


def test_of_many_saves_in_flight_the_newest_few_are_shown_and_the_others_counted(daemon: Daemon, cli: Cli) -> None:
    daemon.says = spooling(30)
    lines = cli("status", "--socket", daemon.path).lines
    flights = [line.partition(" ")[0] for line in lines if ": in flight for" in line]
    assert flights == ["step27", "step28", "step29", "step30"]
    assert "26 more saves in flight, the oldest for 30m00s; 26 of them wait in the spool" in lines
    daemon.says = daemon_status(*spooling(30).roots, *fresh().roots)
    (line,) = [line for line in cli("status", "--socket", daemon.path).lines if "s3://bucket/run" in line]
    assert "step29 0% uploaded, step30 12% uploaded, 28 more" in line


def test_what_is_left_out_is_said(daemon: Daemon, cli: Cli) -> None:
    assert "not looked after" not in cli("status", "--socket", daemon.path).out
    words = "2 more are not looked after: /a, /b. Let another daemon serve some."
    daemon.says = msgspec.structs.replace(busy(), left_out=(words, "This is too long to be told whole."))
    lines = cli("status", "--socket", daemon.path).lines
    assert words in lines
    assert "This is too long to be told whole." in lines


def test_one_root_of_several(daemon: Daemon, cli: Cli) -> None:
    daemon.says = failing()
    answer = cli("status", "--socket", daemon.path, "--json", "/mnt/scratch/run2")
    assert [root["root"] for root in answer.json["roots"]] == ["/mnt/scratch/run2"]
    answer = cli("status", "--socket", daemon.path, "--json", "/mnt/other")
    assert (answer.code, answer.error["code"]) == (4, "NotFoundError")


@pytest.mark.parametrize("spelling", ["run1", "./run1/", "../runs/run1", "link", "{real}", "run1/.checkpointd"])
def test_a_root_is_found_however_it_is_spelt(
    daemon: Daemon, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spelling: str
) -> None:
    """The daemon calls a root by its real path."""
    real = Path(os.path.realpath(tmp_path)) / "runs" / "run1"
    (real / "log").mkdir(parents=True)
    (real / "log/root").touch()
    (real.parent / "link").symlink_to(real)
    monkeypatch.chdir(real.parent)
    known = failing()
    [first, *others] = known.roots
    daemon.says = msgspec.structs.replace(known, roots=(msgspec.structs.replace(first, root=str(real)), *others))
    answer = cli("status", "--socket", os.path.relpath(daemon.path), "--json", spelling.format(real=real))
    assert answer.code == 0, answer.err
    assert [root["root"] for root in answer.json["roots"]] == [str(real)]


def test_the_save_dir_of_a_deepspeed_job_stands_for_the_root_in_it(daemon: Daemon, cli: Cli, tmp_path: Path) -> None:
    real = Path(os.path.realpath(tmp_path)) / "save_dir" / ".checkpointd"
    (real / "log").mkdir(parents=True)
    (real / "log/root").touch()
    known = failing()
    daemon.says = msgspec.structs.replace(known, roots=(msgspec.structs.replace(known.roots[0], root=str(real)),))
    assert len(cli("status", "--socket", daemon.path, "--json", real.parent).json["roots"]) == 1


def test_json_is_the_status_itself(daemon: Daemon, cli: Cli) -> None:
    answer = cli("status", "--socket", daemon.path, "--json")
    assert msgspec.json.decode(answer.out, type=DaemonStatus) == daemon.says


def test_nobody_listens(tmp_path: Path, cli: Cli) -> None:
    answer = cli("status", "--socket", tmp_path / "none")
    assert answer.code == 13
    assert answer.err.startswith(f"error: the daemon at {tmp_path}/none cannot be asked: [ENOENT]")


def test_names_cannot_write_to_the_terminal() -> None:
    text = plain(page(hostile()))
    assert "\u202e" not in text
    assert HOSTILE.replace("\u202e", "\\u202e") in text


def test_of_many_ranks_the_slowest_are_shown() -> None:
    lines = plain(page(busy(256))).splitlines()
    assert "240 more ranks are further" in lines
    assert len([line for line in lines if line.startswith("rank ")]) == 16
    assert len(lines) < 40


def test_nobody_has_come() -> None:
    assert plain(page(daemon_status())).splitlines()[-1] == "no trainer has come yet"


# --- changes -------------------------------------------------------------------------------------------------


def test_the_first_look_tells_what_is_there_and_not_what_was() -> None:
    assert list(changes(None, busy(8))) == [
        "daemon: checkpointd 0.1.0, process 812 on node-17",
        f"{BUSY_ROOT}: trainers: 8 of 8 connected",
        f"{BUSY_ROOT}: in flight: global_step4200 (00000003-0): 6 persisting, 2 voted; waiting for ranks 1-3, 5-7",
        f"{BUSY_ROOT}: latest: global_step4100",
    ]


def test_bytes_are_no_news() -> None:
    before = busy(8)
    root = before.roots[0]
    further = tuple(msgspec.structs.replace(save, raw_done=save.raw_done + 1, speed_bps=1.0) for save in root.in_flight)
    after = msgspec.structs.replace(before, now=NOW + 1, roots=(msgspec.structs.replace(root, in_flight=further),))
    assert list(changes(before, after)) == []


def test_what_happened_between_two_looks() -> None:
    before, after = busy(4), failing()
    lines = list(changes(before, msgspec.structs.replace(after, leaving=False)))
    assert f"{BUSY_ROOT}: trainers: 3 of 4 connected; gone: rank 3" in lines
    assert f"{BUSY_ROOT}: ended: global_step3900 (00000003-0): 4 committed in 6.8 s" in lines
    [line] = [line for line in lines if "global_step4100 (00000003-0)" in line]
    assert line.startswith(
        f"{BUSY_ROOT}: ended: global_step4100 (00000003-0): 3 aborted, 1 failed: rank 2: write: no space left"
    )
    assert "/mnt/scratch/run2: cannot be looked at: /mnt/scratch/run2: Stale file handle" in lines
    assert not [line for line in lines if "daemon:" in line]
    assert "daemon: leaving; it finishes the saves in flight" in list(changes(before, after))


def test_a_root_that_is_back_and_a_daemon_that_began_anew() -> None:
    well = daemon_status(root_status("/mnt/scratch/run2", ranks=[rank_status(0, 1)], newest=None))
    assert "/mnt/scratch/run2: can be looked at again" in list(changes(failing(), well))
    anew = msgspec.structs.replace(busy(8), pid=5, started_at=NOW)
    assert list(changes(busy(8), anew)) == ["daemon: checkpointd 0.1.0, process 5 on node-17"]


# --- watching ------------------------------------------------------------------------------------------------


class Watching:
    """`status --socket ... --watch` as a process; its output line by line."""

    def __init__(self, path: Path, *options: str, stdout: int = subprocess.PIPE) -> None:
        command = [
            sys.executable,
            "-m",
            "checkpointd",
            "status",
            "--socket",
            str(path),
            "--watch",
            "--interval",
            "0.01",
            *options,
        ]
        hear = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
        size = {"COLUMNS": "100", "LINES": "50", "TERM": "xterm-256color"}
        self.process = subprocess.Popen(
            command, stdout=stdout, stderr=subprocess.PIPE, text=True, preexec_fn=hear, env={**os.environ, **size}
        )

    def until(self, text: str) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if text in line:
                return line
        raise AssertionError(f"it ended without {text!r}")

    def complaint(self) -> str:
        assert self.process.stderr is not None
        return self.process.stderr.readline()

    def stop(self) -> int:
        self.process.send_signal(signal.SIGINT)
        self.process.communicate()
        return self.process.returncode


def test_piped_it_prints_a_line_for_each_change(daemon: Daemon) -> None:
    watching = Watching(daemon.path)
    assert watching.until("in flight: global_step4200").startswith("20")
    watching.until("latest: global_step4100")
    daemon.says = failing()
    assert "3 aborted, 1 failed" in watching.until("ended: global_step4100")
    assert watching.stop() == 0


def test_a_daemon_that_goes_is_waited_for(daemon: Daemon) -> None:
    watching = Watching(daemon.path)
    watching.until("latest:")
    daemon.end()
    assert "warning: " in watching.complaint()
    again = Daemon(daemon.path)
    again.says = failing()
    watching.until("ended: global_step4100")
    assert watching.stop() == 0
    again.end()


def test_documents_for_machines(daemon: Daemon) -> None:
    watching = Watching(daemon.path, "--json")
    assert msgspec.json.decode(watching.until("{"), type=DaemonStatus) == daemon.says
    daemon.says = msgspec.structs.replace(daemon.says, now=NOW + 1)  # no change
    daemon.says = msgspec.structs.replace(daemon.says, refused=77)
    assert msgspec.json.decode(watching.until("{"), type=DaemonStatus).refused == 77
    assert watching.stop() == 0


def test_on_a_terminal_it_is_a_live_view_with_bars(daemon: Daemon) -> None:
    master, slave = pty.openpty()
    watching = Watching(daemon.path, stdout=slave)
    os.close(slave)
    seen = b""
    while b"last saves" not in seen:
        seen += os.read(master, 65536)
    text = seen.decode(errors="replace")
    assert "━" in text
    assert "global_step4200 (00000003-0): in flight" in text
    assert "healthy" in text
    daemon.end()
    seen = b""
    while b"this goes on asking" not in seen:
        seen += os.read(master, 65536)
    gone = seen[seen.rindex(b"the last answer came at 20") - 400 :].decode(errors="replace")
    said = " ".join(re.sub(r"\x1b\[[\d;]*[A-Za-z]", "", gone).split())  # the terminal is narrow, so a line may break anywhere
    assert "no socket" in said or "went away" in said or "closed the connection" in said
    assert "healthy" not in said
    assert watching.stop() == 0
    os.close(master)


# --- words ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0ms"),
        (0.0123, "12ms"),
        (0.999, "999ms"),
        (0.9996, "1.0s"),
        (7.24, "7.2s"),
        (9.96, "10s"),
        (95.0, "95s"),
        (123.4, "2m03s"),
        (3840.0, "1h04m"),
        (266400.0, "3d02h"),
        (None, "-"),
    ],
)
def test_durations(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


def test_speeds() -> None:
    assert (speed(1.5 * 2**30), speed(None)) == ("1.5GiB/s", "-")
