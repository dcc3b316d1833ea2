from __future__ import annotations

from pathlib import Path

from checkpointd.layout.catalog_records import CATALOG
from tests.builders import save_checkpoint
from tests.unit.cli.conftest import Cli, With


def test_makes_the_catalog_again(root: Path, at: With, cli: Cli) -> None:
    at(save_checkpoint)
    before = cli("list", root, "--all", "--json").json
    for record in (root / CATALOG).iterdir():
        record.write_bytes(b"damaged")
    answer = cli("rebuild-catalog", root)
    assert (answer.code, answer.lines) == (0, ["the catalog now names: 1 attempt"])
    assert [path.suffix for path in sorted((root / CATALOG).iterdir())].count(".summary") == 1
    assert cli("list", root, "--all", "--json").json == before
    assert cli("rebuild-catalog", root, "--json").json == {"root": str(root), "attempts": 1}
