"""What people type for ROOT and TAG: it is understood, or the command that they meant is printed whole, ready to run."""

from __future__ import annotations

import errno
import os
import re
import shlex
from pathlib import Path

import pytest

from checkpointd.cli import COMMANDS
from checkpointd.cli.arguments import given_root
from checkpointd.cli.locating import is_used
from checkpointd.cli.program import MODULES
from checkpointd.store.base import Store
from tests.builders import save_checkpoint
from tests.unit.cli.conftest import Answer, Cli, With, contents

ONE_ROOT = ("list", "status", "recover", "gc")
WITH_TAG = ("inspect", "explain", "verify")


async def two(store: Store) -> None:
    await save_checkpoint(store, tag="global_step148000")
    await save_checkpoint(store, tag="global_step149000")


@pytest.fixture
def used(root: Path, at: With) -> Path:
    at(two)
    return root


def call(cli: Cli, name: str, *places: str | Path) -> Answer:
    options = {"recover": ["--dry-run"], "gc": ["--dry-run"], "delete": ["--dry-run"]}.get(name, [])
    return cli(name, *places, *options)


def suggested(text: str) -> list[list[str]]:
    """The commands that `text` prints, as the words that a shell makes of them."""
    return [shlex.split(found)[1:] for found in re.findall(r"`(checkpointd [^`]*)`", text)]


# --- understood ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ONE_ROOT)
@pytest.mark.parametrize("spelling", ["{root}/", "{root}/.checkpointd", "{root}/log", "{root}/../run1"])
def test_spellings_of_a_root(used: Path, cli: Cli, name: str, spelling: str) -> None:
    answer = call(cli, name, spelling.format(root=used), "--json")
    assert answer.code == 0, answer.err
    assert answer.json["root"] == str(used)


@pytest.mark.parametrize("name", [*WITH_TAG, "delete"])
@pytest.mark.parametrize(
    "spelling",
    [
        "{root} global_step148000/",
        "{root} {root}/global_step148000",
        "{root} 148000",
        "{root}/ 148000",
        "{root}/.checkpointd 148000",
        "{root}/global_step148000",
        "{root}/global_step148000/",
        "{root}/global_step148000/00000001-0",
        "{root}/global_step148000/00000001-0/00000.index",
        "{root}/148000",
    ],
)
def test_spellings_of_a_tag(used: Path, cli: Cli, name: str, spelling: str) -> None:
    answer = call(cli, name, *spelling.format(root=used).split(), "--json")
    assert answer.code == 0, answer.err
    found = answer.json
    if name == "verify":
        [found] = found["checkpoints"]
    assert (found["retired"] if name == "delete" else found["tag"]) in ("global_step148000", ["global_step148000"])


def test_latest_as_a_path(used: Path, cli: Cli) -> None:
    assert cli("inspect", used / "latest", "--json").json["tag"] == "global_step149000"


def test_a_number_is_the_tag_of_that_name_before_it_is_a_step(root: Path, at: With, cli: Cli) -> None:
    async def saves(store: Store) -> None:
        await save_checkpoint(store, tag="7", step=1)
        await save_checkpoint(store, tag="global_step7")
        await save_checkpoint(store, tag="checkpoint-12", step=12, n=12)
        await save_checkpoint(store, tag="a-30", step=30, n=30)
        await save_checkpoint(store, tag="b-30", step=30, n=31)

    at(saves)
    assert cli("inspect", root, "7", "--json").json["tag"] == "7"
    assert cli("inspect", root, "12", "--json").json["tag"] == "checkpoint-12"
    assert cli("inspect", root, "2").code == 4
    assert cli("inspect", root, "30").code == 4


def test_a_tag_alone_in_the_root_itself(used: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(used)
    assert cli("inspect", "global_step149000", "--json").json["root"] == str(used)
    assert cli("list", ".", "--json").json["root"] == str(used)


# --- not understood, but suggested -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ONE_ROOT)
@pytest.mark.parametrize("below", ["global_step149000", "global_step149000/00000001-0", "latest"])
def test_a_tag_where_a_root_is_wanted(used: Path, cli: Cli, name: str, below: str) -> None:
    before = contents(used)
    given = used / below
    answer = cli(name, given, *(["--keep-last", "1"] if name == "gc" else []))
    assert (answer.code, answer.out) == (2, "")
    tag = below.partition("/")[0]
    whole = [name, str(used), *(["--keep-last", "1"] if name == "gc" else [])]
    assert suggested(answer.err) == [whole, ["inspect", str(used), tag]]
    assert contents(used) == before
    for words in suggested(answer.err):
        assert cli(*words, *(["--dry-run"] if name in ("gc", "recover") and words[0] == name else [])).code in (0, 2)


@pytest.mark.parametrize("name", WITH_TAG)
def test_a_tags_directory_and_a_tag(used: Path, cli: Cli, name: str) -> None:
    answer = cli(name, used / "global_step149000", "global_step148000")
    assert answer.code == 2
    assert suggested(answer.err) == [[name, str(used), "global_step148000"]]
    answer = cli(name, used / "global_step149000", "00000001-0")
    assert suggested(answer.err) == [["explain", str(used), "global_step149000"]]


def test_what_is_no_root_names_those_below_it(used: Path, cli: Cli) -> None:
    for name in ("verify", "recover", "gc"):
        answer = cli(name, used.parent)
        assert (answer.code, answer.out) == (4, "")
        assert f"{used.parent} is not a root (no job ever saved there): did you mean" in answer.err
        assert suggested(answer.err) == [[name, str(used)]]
    for name in ("inspect", "explain", "delete"):
        answer = cli(name, used.parent, "global_step149000")
        assert (answer.code, suggested(answer.err)) == (4, [[name, str(used), "global_step149000"]])


@pytest.mark.parametrize("name", ["list", "status"])
def test_looking_at_an_unused_directory_is_no_error_and_names_the_roots_below_it(used: Path, cli: Cli, name: str) -> None:
    answer = cli(name, used.parent)
    assert answer.code == 0
    assert suggested(answer.err) == [[name, str(used)]]
    assert cli(name, used.parent, "--json").err == ""


def test_a_mistyped_root_names_the_one_beside_it(used: Path, cli: Cli) -> None:
    answer = cli("list", used.parent / "run11", "--limit", "3")
    assert answer.code == 4
    assert f"there is no directory {used.parent}/run11" in answer.err
    assert suggested(answer.err) == [["list", str(used), "--limit", "3"]]


def test_a_file_in_a_root_is_not_a_root(used: Path, cli: Cli) -> None:
    answer = cli("list", used / "global_step149000" / "notes" / "file")
    assert answer.code == 4
    assert suggested(answer.err) == [["list", str(used)]]


def test_a_suggestion_is_quoted_for_a_shell(root: Path, at: With, cli: Cli) -> None:
    at(lambda store: save_checkpoint(store, tag="it's; best", step=1))
    answer = cli("explain", root, "it's best")
    assert "did you mean it's; best?" in answer.err
    [words] = suggested(cli("list", root / "it's; best").err)[1:]
    assert words == ["inspect", str(root), "it's; best"]
    assert cli(*words).code == 0


def test_a_copy_without_the_hidden_directory_is_still_a_root(used: Path, cli: Cli) -> None:
    (used / ".checkpointd").rename(used.parent / "hidden")
    assert cli("explain", used, "149000").code == 0
    assert cli("list", used).err == ""


def test_the_root_of_the_environment_is_understood_alike(used: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHECKPOINTD_ROOT", f"{used}/")
    assert cli("inspect", "149000", "--json").json["tag"] == "global_step149000"
    monkeypatch.setenv("CHECKPOINTD_ROOT", str(used.parent))
    answer = cli("gc")
    assert (answer.code, suggested(answer.err)) == (4, [["gc", str(used)]])


def test_an_import_may_make_a_root_below_another(used: Path) -> None:
    assert given_root((str(used / "new"),), "import") == str(used / "new")


# --- what messages suggest -------------------------------------------------------------------------------------------


def test_what_is_not_a_checkpoint_prints_the_whole_command_that_explains_it(root: Path, at: With, cli: Cli) -> None:
    at(lambda store: save_checkpoint(store, failing={1: RuntimeError("boom")}))
    answer = cli("inspect", root, "global_step1")
    assert suggested(answer.err) == [["explain", str(root), "global_step1"]]
    assert cli(*suggested(answer.err)[0]).code == 0


def test_every_command_that_explain_names_can_be_run(used: Path, cli: Cli) -> None:
    answer = cli("explain", used, "149000")
    assert suggested(answer.out) == [["verify", str(used), "global_step149000"]]
    assert cli(*suggested(answer.out)[0]).code == 0


@pytest.mark.parametrize(
    ("typed", "meant"), [("lst", "list"), ("verfy", "verify"), ("stat", "status"), ("remove", "recover"), ("del", "delete")]
)
def test_a_mistyped_command_is_suggested_with_all_that_followed_it(cli: Cli, typed: str, meant: str) -> None:
    answer = cli(typed, "/mnt/my runs", "--json")
    assert answer.code == 2
    assert [meant, "/mnt/my runs", "--json"] in suggested(answer.error["message"])


def test_a_mistyped_option_is_suggested(cli: Cli) -> None:
    assert "--limit" in cli("list", "--limt", "3").err
    assert cli("xyzzy").err == "error: No such command 'xyzzy'; `checkpointd --help` shows the arguments\n"


def test_help_names_every_command_and_options_are_described(cli: Cli) -> None:
    for name in COMMANDS:
        assert cli(name, "--help").code == 0
    assert set(MODULES) <= set(COMMANDS)


def test_a_defect_prints_the_call_that_shows_where_it_happened(used: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("checkpointd.pipeline.root.root_view.state_of", fail)
    assert suggested(cli("list", used).err) == [["--debug", "list", str(used)]]


def test_a_root_that_may_not_be_looked_into_is_not_called_unused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(path: str, **_: object) -> os.stat_result:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    assert not is_used(str(tmp_path))
    monkeypatch.setattr("checkpointd.cli.locating.os.stat", denied)
    assert is_used(str(tmp_path))
