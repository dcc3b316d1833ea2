"""The Python blocks of the pages as modules, one for each page, for mypy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tests.docs.blocks import REPOSITORY, blocks, pages
from tests.docs.session import before_of

# A page is one module here, and may use a name before it makes another thing of that name.
HEAD = '# mypy: disable-error-code="used-before-def"\n'


def write_modules(folder: Path) -> Iterator[Path]:
    """Write the Python blocks of each page to one module, with the names that the page takes for granted."""
    for path in pages():
        page = str(path.relative_to(REPOSITORY))
        found = [block for block in blocks(page, path.read_text(encoding="utf-8")) if block.language == "python"]
        if found:
            module = folder / f"{page.removesuffix('.md').replace('/', '_').lower()}.py"
            text = "".join(f"\n# {block.name}\n{block.text}" for block in found)
            module.write_text(f"{HEAD}from tests.docs.before.{before_of(page).stem} import *\n{text}", encoding="utf-8")
            yield module
