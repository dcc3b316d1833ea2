"""deploy/README.md says what is there; and deploy/ is files to install, never a package to import.

`tests/docs` runs the page's Python.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from checkpointd.cli.commands.serve import command as serve

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
README = (DEPLOY / "README.md").read_text()
FENCED = re.compile(r"(?ms)^```\w*\n(.*?)^```$")


def test_links_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#]+)", README)
    assert len(links) > 10
    assert [link for link in links if not (DEPLOY / link).exists()] == []


def test_every_file_is_named_or_its_folder_is() -> None:
    links = {(DEPLOY / link).resolve() for link in re.findall(r"\]\(([^)#]+)", README)}
    files = {path for path in DEPLOY.rglob("*") if path.is_file()} - {DEPLOY / "README.md"}
    known = {path for path in files if path in links or path.parent in links or path.parent.parent in links}
    assert {path for path in files - known if path.name not in README} == {DEPLOY / "container" / "Containerfile.dockerignore"}


def test_there_is_nothing_to_import() -> None:
    assert not list(DEPLOY.rglob("*.py"))


def test_options_of_serve_are_options() -> None:
    known = {option for parameter in serve.params for option in parameter.opts}
    sentences = FENCED.sub("", README)
    named = set(re.findall(r"`(--[a-z-]+)[` ]", sentences))
    elsewhere = {"--sidecar", "--root", "--mem", "--user", "--strict", "--signal", "--rdzv-id"}
    assert named - elsewhere <= known
    assert {"--grace", "--uid", "--root"} <= named


def test_shell_examples_are_shell() -> None:
    for block in FENCED.findall(re.sub(r"(?ms)^```python.*?^```$", "", README)):
        done = subprocess.run(["bash", "-n"], input=block, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, ""), block


@pytest.mark.parametrize("name", sorted(set(re.findall(r"systemd/([\w@.]+\.\w+)", README))))
def test_files_of_commands_are_there(name: str) -> None:
    assert (DEPLOY / "systemd" / name).is_file()


def test_the_number_of_alerts_is_right() -> None:
    words = {20: "twenty", 21: "twenty-one", 22: "twenty-two", 23: "twenty-three", 24: "twenty-four", 25: "twenty-five"}
    count = (DEPLOY / "prometheus" / "alerts.yml").read_text().count("- alert:")
    assert re.search(rf"{words[count]}\s+alerts", README)
