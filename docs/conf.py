"""The documentation site: Sphinx with MyST and the PyData theme, as PyTorch builds its own. `make docs` builds and serves it.

The source folder is the repository, so that pages may link to the README, the benchmarks and the examples.
"""

import re
from importlib.metadata import version as version_of
from pathlib import Path
from typing import cast

from sphinx.application import Sphinx

project = "checkpointd"
author = "The checkpointd authors"
copyright = "The checkpointd authors"
version = release = version_of("checkpointd")

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinxcontrib.mermaid",
]
root_doc = "docs/index"
include_patterns = ["*.md", "docs/**", "benchmarks/*.md", "deploy/*.md", "examples/*.md"]
exclude_patterns = [".*", "build", "checkpointd", "client", "tests"]

# --- pages ---------------------------------------------------------------------------------------------------

myst_heading_anchors = 4  # links to headings, as on GitHub
myst_fence_as_directive = {"mermaid"}
# A release of Mermaid that readers' browsers load. Without a network the diagram is shown as its text.
mermaid_version = "11.12.1"
copybutton_prompt_text = "$ "
copybutton_only_copy_prompt_lines = True

# --- the reference, from docstrings ------------------------------------------------------------------------------

default_role = "code"  # docstrings are Markdown: one backtick is code
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}
autodoc_preserve_defaults = True
autodoc_mock_imports = ["lightning", "pyarrow", "ray", "torchdata", "torchtitan"]  # not installed where the site is built
python_maximum_signature_line_length = 90

# --- how it looks --------------------------------------------------------------------------------------------

html_theme = "pydata_sphinx_theme"
html_title = "checkpointd"
html_show_sourcelink = False
html_theme_options = {
    "navigation_with_keys": False,
    "show_toc_level": 2,
    "header_links_before_dropdown": 6,
    "footer_start": ["copyright"],
    "footer_end": [],
}


def unlink_folders(app: Sphinx, page: str, source: list[str]) -> None:
    """On GitHub a link may lead to a folder. The site has no page for one, so there it is only named."""
    folder = Path(app.srcdir, page).parent
    source[0] = re.sub(r"\[([^]]+)]\(([\w/]+)\)", lambda link: link[1] if (folder / link[2]).is_dir() else link[0], source[0])


def list_arguments(*event: object) -> None:
    """Lines of a docstring that begin with "`name`: " become a list; a line that goes on belongs to the entry before it."""
    lines = cast("list[str]", event[-1])
    listed: list[str] = []
    inside = False
    for line in lines:
        entry = re.match(r"`\w+`: ", line) is not None
        if entry and not inside:
            listed.append("")
        inside = entry or (inside and line != "")
        listed.append(f"- {line}" if entry else f"  {line}" if inside else line)
    lines[:] = listed


def setup(app: Sphinx) -> None:
    app.connect("source-read", unlink_folders)
    app.connect("autodoc-process-docstring", list_arguments)
