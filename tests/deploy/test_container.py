"""The Containerfile, read as text: no builder of images is needed to see what must not be in it."""

from __future__ import annotations

import re
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest
from click.testing import CliRunner

from checkpointd.cli.program import commands

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "deploy" / "container" / "Containerfile"
IGNORE = FILE.with_name("Containerfile.dockerignore")


def instructions(text: str) -> list[tuple[str, str]]:
    """Each instruction with its arguments; continued lines are joined, comments left out."""
    lines = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    joined = re.sub(r"\s*\\\n\s*", " ", lines)
    return [(name.upper(), rest.strip()) for name, _, rest in (line.partition(" ") for line in joined.splitlines() if line)]


STEPS = instructions(FILE.read_text())


def of(name: str) -> list[str]:
    return [rest for instruction, rest in STEPS if instruction == name]


def test_the_reader_joins_lines_and_skips_comments() -> None:
    assert instructions("# x\nrun a \\\n  && b\n\nUSER 1") == [("RUN", "a && b"), ("USER", "1")]


def test_bases_are_named_to_the_version() -> None:
    python = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"].removeprefix(">=")
    bases = [rest.split()[0] for rest in of("FROM")]
    assert bases
    assert {base.partition(":")[2] for base in bases} == {f"{python}-slim-bookworm"}


def test_it_ends_as_a_user_who_is_not_root() -> None:
    user, _, group = of("USER")[-1].partition(":")
    assert int(user) > 0, "a number: Kubernetes cannot tell whether a name is root"
    assert int(group) > 0


def test_nothing_is_installed_but_by_the_constraints() -> None:
    installs = [part for rest in of("RUN") for part in rest.split("&&") if "pip install" in part]
    assert installs
    assert [part for part in installs if "--constraint constraints.txt" not in part] == []


def test_there_is_no_torch_in_it() -> None:
    (extras,) = {found for rest in of("RUN") for found in re.findall(r"\.whl\)\[([\w,]+)\]", rest)}
    assert extras == "serve,s3"
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert not [line for extra in extras.split(",") for line in known[extra] if line.startswith("torch")]


def test_all_that_is_copied_is_there_and_reaches_the_builder() -> None:
    seen = {line[1:] for line in IGNORE.read_text().splitlines() if line.startswith("!")}
    copied = {word for rest in of("COPY") if "--from" not in rest for word in rest.split()[:-1]}
    assert copied == seen
    assert all((ROOT / name).exists() for name in copied)


def test_the_wheel_needs_nothing_that_is_not_copied() -> None:
    """Files that pyproject.toml names: without them the build in the image fails."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    named = {project["project"]["readme"], *project["project"]["license-files"], *(path.split("/")[0] for path in packages)}
    copied = {word for rest in of("COPY") if "--from" not in rest for word in rest.split()[:-1]}
    assert named <= copied


@pytest.mark.parametrize("secret", ["*.pem", "*.key", ".git", ".env", "*token*"])
def test_no_file_can_slip_in(secret: str) -> None:
    """The ignore file leaves out all, and names what may come."""
    lines = [line for line in IGNORE.read_text().splitlines() if line and not line.startswith("#")]
    assert lines[0] == "*"
    assert not [line for line in lines if line.startswith("!") and fnmatch(line[1:], secret)]


def test_it_runs_what_there_is() -> None:
    assert of("ENTRYPOINT") == ['["checkpointd"]']
    (arguments,) = of("CMD")
    done = CliRunner().invoke(commands, re.findall(r'"([^"]+)"', arguments))
    assert done.exit_code == 0
    assert "--socket" in done.output
