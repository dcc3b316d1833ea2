"""The page of object stores names every option of a URL, and its policies are JSON."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from checkpointd.bucket_urls import OPTIONS, REQUEST_S, RETRY_S, SCHEMES

PAGE = (Path(__file__).parents[2] / "docs" / "OBJECT_STORES.md").read_text()


def test_every_option_and_scheme_is_described() -> None:
    table = [line for line in PAGE.splitlines() if line.startswith("| `")]
    named = {name for line in table for name in re.findall(r"`([a-z_]+)`", line.split("|")[1])}
    assert set(OPTIONS) <= named
    assert all(f"`{scheme}://" in PAGE for scheme in SCHEMES)


@pytest.mark.parametrize(("option", "default"), [("retry_s", RETRY_S), ("request_s", REQUEST_S)])
def test_the_defaults_are_those_of_the_code(option: str, default: float) -> None:
    [line] = [line for line in PAGE.splitlines() if line.startswith(f"| `{option}`")]
    assert f"({default:g})" in line


def test_the_policies_can_be_read() -> None:
    policies = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
    assert policies
    for policy in policies:
        assert json.loads(policy)["Version"] == "2012-10-17"
