"""The units, sysusers.d and tmpfiles.d: read by systemd's own tools, and held against what `checkpointd serve` takes."""

from __future__ import annotations

import configparser
import os
import pwd
import re
import shutil
import stat
import subprocess
from pathlib import Path

import click
import pytest

from checkpointd.bucket_urls import is_bucket_url
from checkpointd.config import ServeConfig, credential_places, read_serve_file
from checkpointd.daemon.runner import OVERDUE_S
from tests.deploy.serve_arguments import serve_parameters

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "systemd"
SYSTEM, USER = FOLDER / "checkpointd@.service", FOLDER / "user" / "checkpointd.service"
UNITS = [SYSTEM, USER]
STAND_IN = "/bin/true"
EXPOSURE_MAX = 2.0


def need(tool: str) -> str:
    found = shutil.which(tool)
    if found is None:
        pytest.skip(f"needs {tool}, a part of systemd")
    return found


def keys(unit: Path) -> dict[str, str]:
    """The keys of [Service]; where one is given several times, the last."""
    parsed = configparser.RawConfigParser(strict=False)
    parsed.optionxform = str  # type: ignore[assignment,method-assign]
    parsed.read(unit)
    return dict(parsed["Service"])


def arguments(unit: Path) -> list[str]:
    """What the unit gives `checkpointd`, with the instance's name filled in."""
    return keys(unit)["ExecStart"].replace("%i", "alice").replace("%t", "/run").replace("%E", "/etc").split()[1:]


def verify(unit: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """`systemd-analyze verify`, which wants the program to exist: another one stands in for it."""
    folder.mkdir(exist_ok=True)
    name = "checkpointd@alice.service" if "@" in unit.name else unit.name
    (folder / name).write_text(re.sub(r"(?m)^(ExecStart=)\S+", rf"\g<1>{STAND_IN}", unit.read_text()))
    scope = ["--user"] if unit.parent.name == "user" else []
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(folder), "SYSTEMD_COLORS": "0"}
    command = [need("systemd-analyze"), *scope, "verify", str(folder / name)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_systemd_finds_nothing_to_say(unit: Path, tmp_path: Path) -> None:
    """By what it prints: a key that systemd does not know is a warning, and the exit code stays 0."""
    done = verify(unit, tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_key_that_systemd_does_not_know_is_seen(tmp_path: Path) -> None:
    spoilt = tmp_path / SYSTEM.name
    spoilt.write_text(SYSTEM.read_text().replace("MemoryDenyWriteExecute=", "MemoryDenyWrites="))
    assert "MemoryDenyWrites" in verify(spoilt, tmp_path / "copy").stderr


def test_the_drop_in_is_a_drop_in(tmp_path: Path) -> None:
    """Beside its unit, as it is installed: systemd reads both without a word."""
    drop_in = tmp_path / "checkpointd@alice.service.d"
    drop_in.mkdir()
    shutil.copy(FOLDER / "roots.conf", drop_in)
    done = verify(SYSTEM, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    (drop_in / "roots.conf").write_text("[Service]\nReadWritePath=/x\n")
    assert "ReadWritePath" in verify(SYSTEM, tmp_path).stderr


def test_the_drop_in_for_a_bucket_is_a_drop_in(tmp_path: Path) -> None:
    drop_in = tmp_path / "checkpointd@alice.service.d"
    drop_in.mkdir()
    shutil.copy(FOLDER / "bucket.conf", drop_in)
    done = verify(SYSTEM, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    (drop_in / "bucket.conf").write_text((FOLDER / "bucket.conf").read_text().replace("LoadCredential=", "LoadCredentials="))
    assert "LoadCredentials" in verify(SYSTEM, tmp_path).stderr


def test_exposure_stays_low(tmp_path: Path) -> None:
    """0 is locked up, 10 wide open; what is left off, and why, is said in the unit."""
    verify(SYSTEM, tmp_path)
    unit = tmp_path / "checkpointd@alice.service"
    command = [need("systemd-analyze"), "security", "--offline=true", f"--threshold={round(EXPOSURE_MAX * 10)}", str(unit)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "Unknown option" in done.stderr or "unrecognized option" in done.stderr:
        pytest.skip("this systemd cannot judge a unit that is not installed")
    found = re.search(r"Overall exposure level for \S+: ([\d.]+)", done.stdout)
    assert found, done.stdout + done.stderr
    assert float(found[1]) <= EXPOSURE_MAX
    assert done.returncode == 0


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_the_daemons_own_sandbox_is_not_kept_away(unit: Path) -> None:
    """systemd 252 has the calls that it takes in none of its groups, and the unit refuses what it does not name."""
    named = {word for line in re.findall(r"(?m)^SystemCallFilter=(.*)$", unit.read_text()) for word in line.split()}
    assert {"seccomp", "landlock_create_ruleset", "landlock_add_rule", "landlock_restrict_self"} <= named


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_the_command_takes_what_the_unit_gives(unit: Path) -> None:
    program, *rest = arguments(unit)
    assert program == "serve"
    given = serve_parameters(rest)
    assert given["file"].endswith(".toml")
    assert given["socket"].startswith("/run/checkpointd")


def test_the_command_refuses_what_it_does_not_know() -> None:
    with pytest.raises(click.UsageError):
        serve_parameters([*arguments(SYSTEM)[1:], "--graze", "60"])


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_sigkill_comes_after_the_grace(unit: Path) -> None:
    grace = serve_parameters(arguments(unit)[1:])["grace_s"]
    assert int(keys(unit)["TimeoutStopSec"]) > grace + OVERDUE_S


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_both_units_notify_and_are_watched(unit: Path) -> None:
    service = keys(unit)
    assert service["Type"] == "notify"
    assert int(service["WatchdogSec"]) > 0
    assert service["KillMode"] == "mixed"
    assert service["RestartPreventExitStatus"] == "2", "what a wrong setting ends with"


def test_the_directory_of_the_socket_is_made_by_the_unit() -> None:
    socket = serve_parameters(arguments(SYSTEM)[1:])["socket"]
    directory = keys(SYSTEM)["RuntimeDirectory"].replace("%i", "alice")
    assert socket.rpartition("/")[0] == f"/run/{directory}"


def test_the_example_settings_are_settings() -> None:
    settings = read_serve_file(str(FOLDER / "checkpointd.toml"))
    config = ServeConfig(socket="/run/checkpointd/alice/checkpointd.sock", **settings)  # type: ignore[arg-type]  # any field
    assert list(config.roots) == re.findall(r"(?m)^ReadWritePaths=(\S+)$", (FOLDER / "roots.conf").read_text())
    assert config.http is not None
    assert config.http.startswith("127.0.0.1:")


def test_the_settings_for_a_bucket_fit_their_drop_in() -> None:
    config = ServeConfig(socket="/run/s", **read_serve_file(str(FOLDER / "bucket.toml")))  # type: ignore[arg-type]  # any field
    assert all(is_bucket_url(root) for root in config.roots)
    drop_in = keys(FOLDER / "bucket.conf")
    assert drop_in["ReadWritePaths"] == config.spool
    assert config.spool_config is not None
    tmpfiles = (FOLDER / "checkpointd.tmpfiles.conf").read_text()
    assert f"#d {config.spool} 0700 alice alice -" in tmpfiles


def test_the_daemon_may_read_the_credential_that_systemd_gives_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is where the sandbox lets it read, and where botocore looks."""
    drop_in = keys(FOLDER / "bucket.conf")
    name, _, source = drop_in["LoadCredential"].partition(":")
    assert source.startswith("/etc/checkpointd/")
    variable, _, place = drop_in["Environment"].partition("=")
    assert place == f"%d/{name}"
    monkeypatch.setenv(variable, place)
    assert place in credential_places()


def test_the_drop_in_opens_what_the_unit_closes() -> None:
    """Without it, a daemon that is told of a bucket reaches loopback alone."""
    assert keys(SYSTEM)["IPAddressDeny"] == "any"
    assert keys(SYSTEM)["IPAddressAllow"] == "localhost"
    assert keys(FOLDER / "bucket.conf")["IPAddressAllow"] == "any"


@pytest.mark.parametrize("name", ["checkpointd.toml", "bucket.toml"])
def test_every_setting_that_is_commented_out_is_one(name: str) -> None:
    text = (FOLDER / name).read_text()
    offered = re.findall(r"(?m)^# (\w+) = ", text)
    assert offered
    assert set(offered) <= set(ServeConfig.__dataclass_fields__)


def test_descriptors_suffice() -> None:
    """A connection and its slots for every client, each slot held open; as much again for files."""
    bounds = ServeConfig(socket="/s", roots=("/r",))
    assert int(keys(SYSTEM)["LimitNOFILE"]) >= 2 * bounds.clients_max * (1 + bounds.slots_max)


@pytest.mark.root
def test_accounts_and_directories_are_made(tmp_path: Path) -> None:
    """Both tools really run, on a tree of their own; the group id comes with the user's."""
    sysusers, tmpfiles = need("systemd-sysusers"), need("systemd-tmpfiles")
    machine = pwd.getpwall()
    (tmp_path / "etc").mkdir()
    run(sysusers, f"--root={tmp_path}", str(FOLDER / "checkpointd.sysusers.conf"))
    (account,) = [line for line in (tmp_path / "etc/passwd").read_text().splitlines() if line.startswith("checkpointd:")]
    uid, home, shell = int(account.split(":")[2]), account.split(":")[5], account.split(":")[6]
    assert home == "/var/lib/checkpointd"
    assert shell.endswith("nologin")
    run(tmpfiles, "--create", f"--root={tmp_path}", str(FOLDER / "checkpointd.tmpfiles.conf"))
    made = {name: (tmp_path / name).stat() for name in ("run/checkpointd", "etc/checkpointd", "var/lib/checkpointd")}
    assert {name: (stat.S_IMODE(s.st_mode), s.st_uid) for name, s in made.items()} == {
        "run/checkpointd": (0o755, 0),
        "etc/checkpointd": (0o755, 0),
        "var/lib/checkpointd": (0o750, uid),
    }
    assert pwd.getpwall() == machine, "the machine's own accounts are left alone"


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
