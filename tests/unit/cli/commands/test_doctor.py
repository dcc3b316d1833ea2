"""`checkpointd doctor` as people and scripts call it. Faults that it must find: tests/faults/test_doctor.py."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from checkpointd.cli import run
from checkpointd.cli.commands import doctor
from checkpointd.cli.commands.doctor import page
from checkpointd.cli.render import console, rich_page
from checkpointd.doctor.finding import DeviceReport, Diagnosis, Fact, Figure, Finding
from tests.unit.cli.commands.test_list import RAW, many
from tests.unit.cli.conftest import Cli, With, contents


def test_a_fit_machine_in_plain_columns(root: Path, at: With, cli: Cli) -> None:
    at(many)
    before = contents(root)
    answer = cli("doctor", root)
    assert (answer.code, answer.err) == (0, "")
    header, *rows = answer.lines
    assert header.split() == ["CHECK", "RESULT", "SEEN"]
    assert any(row.startswith("root/hard-links ") and " ok " in row for row in rows)
    assert rows[-1].startswith("fit: no check failed")
    assert contents(root) == before
    assert not (root / ".checkpointd" / "doctor").exists()


def test_json_is_typed_and_complete(root: Path, at: With, cli: Cli) -> None:
    at(many)
    found = cli("doctor", root, "--json").json
    assert found["root"] == str(root)
    assert found["fit"] is True
    assert found["state_bytes"] == RAW
    assert found["state_source"] == "as global_step3 has" or found["state_source"].startswith("as ")
    assert {finding["topic"] for finding in found["findings"]} == {"root", "space", "memory", "machine", "software"}
    assert all(set(finding) == {"topic", "check", "level", "seen", "fix"} for finding in found["findings"])
    assert len({finding["check"] for finding in found["findings"]}) == len(found["findings"])


def test_what_failed_is_said_with_what_to_do_and_ends_with_code_1(root: Path, cli: Cli) -> None:
    answer = cli("doctor", root, "--socket", root / "none.sock")
    assert answer.code == 1
    assert answer.err == ""
    assert answer.lines[-1].startswith("not fit: 1 check failed")
    start = f"`checkpointd serve --socket {root}/none.sock --root DIR`"
    assert f"fail: socket-rights: start it: {start}, DIR being where the jobs' roots lie" in answer.lines


def test_a_state_that_does_not_fit_anywhere(root: Path, cli: Cli) -> None:
    answer = cli("doctor", root, "--state-bytes", "100PiB", "--nodes", "1", "--json")
    assert answer.code == 1
    failed = {finding["check"] for finding in answer.json["findings"] if finding["level"] == "fail"}
    assert failed == {"free-space", "memory"}
    assert answer.json["state_bytes"] == 100 << 50


def test_without_a_root_the_machine_alone_is_looked_at(cli: Cli) -> None:
    answer = cli("doctor", "--json")
    assert answer.code == 0
    checks = {finding["check"]: finding for finding in answer.json["findings"]}
    assert checks["root"]["level"] == "note"
    assert "CHECKPOINTD_ROOT" in checks["root"]["fix"]
    assert "hard-links" not in checks
    assert "memfd" in checks


def test_the_root_of_the_environment(root: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHECKPOINTD_ROOT", str(root))
    assert cli("doctor", "--json").json["root"] == str(root)


def test_a_root_behind_a_link_is_followed_and_said(root: Path, tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "link").symlink_to(root)
    findings = {finding["check"]: finding for finding in cli("doctor", tmp_path / "link", "--json").json["findings"]}
    assert findings["root"]["level"] == "ok"
    assert findings["root"]["seen"].endswith(f"it leads to {root}")


@pytest.mark.parametrize("text", ["-5", "0", "many", "5 parsecs", "1.5.2G"])
def test_a_size_that_is_none(root: Path, cli: Cli, text: str) -> None:
    answer = cli("doctor", root, f"--state-bytes={text}", "--json")
    assert answer.code == 2
    assert "--state-bytes is" in answer.error["message"]


@pytest.mark.parametrize(
    ("text", "nbytes"), [("4096", 4096), ("1k", 1000), ("1.5 MiB", 3 << 19), ("2GB", 2 * 10**9), ("3tib", 3 << 40)]
)
def test_sizes_with_units(cli: Cli, text: str, nbytes: int) -> None:
    assert cli("doctor", "--state-bytes", text, "--json").json["state_bytes"] == nbytes


def test_a_store_that_nobody_else_sees_is_a_wrong_call(cli: Cli) -> None:
    answer = cli("doctor", "memory://x", "--json")
    assert answer.code == 2
    assert "nothing to examine" in answer.error["message"]


def test_a_damaged_root_is_still_examined(root: Path, cli: Cli) -> None:
    (root / "latest").mkdir()
    assert cli("doctor", root, "--json").json["state_bytes"] is None


def test_the_page_on_a_terminal_says_the_worst_first() -> None:
    found = Diagnosis(
        release="1",
        root="/r",
        socket=None,
        state_bytes=None,
        state_source="not known",
        fit=False,
        findings=(
            Finding(topic="root", check="names", level="warn", seen="upper is lower", fix="other tags"),
            Finding(topic="root", check="locks", level="fail", seen="no \x1b[31mlocks", fix="mount otherwise"),
            Finding(topic="memory", check="memfd", level="ok", seen="well"),
        ),
    )
    out = io.StringIO()
    for part in rich_page(page(found), 80):
        console(out).print(part)
    lines = out.getvalue().splitlines()
    fixes = [line for line in lines if line.startswith(("fail: ", "warn: "))]
    assert fixes == ["fail: locks: mount otherwise", "warn: names: other tags"]
    assert lines[-1] == "not fit: 1 check failed, 1 warning"
    assert "\x1b" not in out.getvalue()


def test_torch_is_not_imported(root: Path) -> None:
    program = "import sys; from checkpointd.cli import run; run(sys.argv[1:]); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program, "doctor", str(root), "--json"], capture_output=True, check=False)
    assert done.returncode == 0
    assert json.loads(done.stdout)["fit"] is True


@pytest.mark.parametrize("name", ["backports.zstd", "zstandard", "xxhash", "numpy", "uvloop"])
def test_a_library_that_cannot_be_loaded_is_named(root: Path, name: str) -> None:
    """Even one without which nothing else can be examined."""
    program = f"import sys; sys.modules['{name}'] = None; from checkpointd.cli import run; sys.exit(run(sys.argv[1:]))"
    done = subprocess.run([sys.executable, "-c", program, "doctor", str(root), "--json"], capture_output=True, check=False)
    assert done.returncode == 1, done.stderr
    [failed] = [finding for finding in json.loads(done.stdout)["findings"] if finding["level"] == "fail"]
    assert failed["check"] == "libraries"
    assert f"{name}: " in failed["seen"]


def test_the_page_of_the_docs_names_every_check(root: Path, cli: Cli) -> None:
    text = (Path(__file__).parents[4] / "docs" / "DOCTOR.md").read_text()
    findings = cli("doctor", root, "--socket", root / "none.sock", "--json").json["findings"]
    assert [f["check"] for f in findings if f"`{f['topic']}/{f['check']}`" not in text] == []


NO_TORCH = """
import sys
sys.modules["torch"] = None
from checkpointd.cli import run
sys.exit(run(sys.argv[1:]))
"""


def test_a_device_cannot_be_tested_without_torch() -> None:
    done = subprocess.run([sys.executable, "-c", NO_TORCH, "doctor", "--device"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: --device needs torch, which cannot be imported (")
    assert "pip install '.[torch]' in a clone" in done.stderr


def test_device_bytes_are_for_device(cli: Cli) -> None:
    answer = cli("doctor", "--device-bytes", "1GiB", "--json")
    assert answer.code == 2
    assert answer.error["message"] == "--device-bytes is for --device, which is missing"


def test_what_was_tested_on_a_device_is_part_of_the_answer(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    report = DeviceReport(
        facts=(Fact("device", "cuda, 8 of them"),),
        figures=(Figure("staging", 3 * 2.0**30, "B/s"), Figure("call of save()", 0.00125, "s")),
        findings=(Finding("device", "clone", "fail", "a later value"),),
    )
    monkeypatch.setattr(doctor, "_device_report", lambda nbytes: report if nbytes == 1 << 20 else None)
    answer = cli("doctor", "--device", "--device-bytes", "1MiB")
    assert answer.code == 1
    assert answer.lines[0] == "device: cuda, 8 of them"
    assert [line.split()[-1] for line in answer.lines[2:4]] == ["3.0GiB/s", "1.25ms"]
    assert any(line.startswith("device/clone ") and "a later value" in line for line in answer.lines)
    assert cli("doctor", "--device", "--device-bytes", "1MiB", "--json").json["device_facts"][0]["name"] == "device"


def test_help_names_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--help"]) == 0
    words = " ".join(capsys.readouterr().out.split())
    assert "Ends with code 1 if a check failed, otherwise 0" in words
