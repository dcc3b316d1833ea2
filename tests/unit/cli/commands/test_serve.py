"""`checkpointd serve`: what it says of options and settings that cannot be."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from checkpointd.cli.commands.serve import _mirror
from checkpointd.config import SpoolConfig
from checkpointd.errors import UsageError
from tests.unit.cli.conftest import Cli


def test_a_choice_that_is_none_is_refused_with_those_that_there_are(tmp_path: Path, cli: Cli) -> None:
    file = tmp_path / "serve.toml"
    file.write_text(f'[serve]\nsocket = "{tmp_path}/socket"\nroots = ["{tmp_path}"]\nsandbox = "maybe"\n')
    answer = cli("serve", "--config", file)
    assert (answer.code, answer.err) == (2, "error: sandbox is 'maybe'; choose one of auto, require, off\n")


def test_a_user_is_a_number(cli: Cli) -> None:
    answer = cli("serve", "--root", "/mnt", "--uid", "alice")
    assert answer.code == 2
    assert "'alice' is not a number; `id -u alice` prints the number of a user" in answer.err


def test_the_options_of_a_spool_are_checked_by_name(tmp_path: Path, cli: Cli) -> None:
    serve = ("serve", "--socket", tmp_path / "socket", "--root", tmp_path, "--uid", "0", "--spool", tmp_path / "spool")
    answer = cli(*serve, "--spool-keep", "some")
    assert (answer.code, "'some' is not one of 'all', 'newest'" in answer.err) == (2, True)
    (tmp_path / "file").write_text("")
    answer = cli("serve", "--socket", tmp_path / "s", "--root", tmp_path, "--uid", "0", "--spool", tmp_path / "file" / "spool")
    assert (answer.code, "the spool" in answer.err) == (2, True)


@pytest.mark.parametrize(
    "source", ["/scratch/run1", "/scratch/lr=3/run1", "s3://b/run1", "s3://b/run1?endpoint=http://h:9000&region=r"]
)
@pytest.mark.parametrize("target", ["/archive/run1", "/archive/lr=3", "s3://c/run1?endpoint=http://h:9001"])
def test_a_mirror_may_be_of_a_bucket_with_options(source: str, target: str) -> None:
    assert _mirror(f"{source}={target}") == {"origin": source, "mirror": target}


def test_a_mirror_needs_both_places(cli: Cli) -> None:
    for text in ("/scratch/run1", "=/archive/run1", "/scratch/run1="):
        answer = cli("serve", "--mirror", text)
        assert answer.code == 2
        assert "write SRC=DST" in answer.err


def test_the_options_of_a_spool_need_a_spool(tmp_path: Path, cli: Cli) -> None:
    answer = cli("serve", "--socket", tmp_path / "socket", "--root", tmp_path, "--uid", "0", "--spool-finish")
    assert answer.code == 2
    assert "spool_finish is set, but there is no spool: give --spool" in answer.err


@pytest.mark.parametrize("spool", ["s3://bucket/spool", "s3:/bucket/spool"])
def test_a_spool_is_not_in_a_bucket(tmp_path: Path, cli: Cli, spool: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    answer = cli("serve", "--socket", tmp_path / "socket", "--root", tmp_path, "--uid", "0", "--spool", spool)
    assert answer.code == 2
    assert "must be a directory on this node's own disk, not a URL" in answer.err
    assert not any(tmp_path.iterdir())
    with pytest.raises(UsageError, match="not a URL"):
        SpoolConfig(directory=spool)


def test_what_is_left_of_a_url_is_not_served(tmp_path: Path, cli: Cli) -> None:
    answer = cli("serve", "--socket", tmp_path / "socket", "--root", "s3:/bucket/run1", "--uid", "0")
    assert answer.code == 2
    assert "a URL has two slashes, as in s3://bucket/path" in answer.err


def test_a_daemon_for_buckets_needs_their_client_at_its_start(
    tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith("checkpointd.store.objects")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "obstore", None)
    answer = cli("serve", "--socket", tmp_path / "socket", "--root", "s3://bucket", "--uid", "0")
    assert (answer.code, "s3://bucket needs obstore: pip install '.[s3]' in a clone" in answer.err) == (2, True)
