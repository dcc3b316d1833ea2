"""Names that are imported when they are used."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

PACKAGE = """
from checkpointd_client.lazy_names import names_of
__getattr__ = names_of(__name__, {"Thing": "things"})
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = "package_of_a_lazy_name"
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text(PACKAGE)
    (tmp_path / name / "things.py").write_text("class Thing: ...")
    monkeypatch.syspath_prepend(tmp_path)
    for module in (name, f"{name}.things"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    return name


def test_a_module_is_imported_when_its_name_is_used(package: str) -> None:
    imported = __import__(package)
    assert f"{package}.things" not in sys.modules
    assert imported.Thing is sys.modules[f"{package}.things"].Thing
    assert vars(imported)["Thing"] is imported.Thing


def test_another_name_is_an_error_as_of_every_module(package: str) -> None:
    with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'Other'"):
        _ = __import__(package).Other
