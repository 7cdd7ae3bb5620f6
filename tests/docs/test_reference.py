"""The generated pages (errors.md, api.md, cli.md, launcher.md) are those that the sources make now."""

import re
from pathlib import Path

import pytest

from docs_site import api_reference, sources
from docs_site.pages import PAGES

ROOT = Path(__file__).parents[2]
OTHERS = {
    "load_checkpoint": "**named",
    "FastCheckpointMixin": "**kwargs",
    "train": "**kwargs",
    "evaluate": "**kwargs",
    "load_state": "**load_state_kwargs",
}
"""Arguments that are handed on to the framework's own function of this name, whose documentation has them."""


@pytest.mark.parametrize("name", PAGES)
def test_a_generated_page_is_what_the_sources_make(name: str):
    assert (ROOT / name).read_text() == PAGES[name](), "make docs-reference"


def test_the_api_page_has_every_public_module_and_name():
    folder = ROOT / "fastckpt"
    tops = [path for path in folder.iterdir() if not path.name.startswith("_") and path.suffix in ("", ".py")]
    assert {f"fastckpt.{path.stem}" for path in tops} | {"fastckpt"} == set(api_reference.MODULES)
    text = api_reference.document()
    for module in api_reference.MODULES:
        names = sources.exported(module)
        assert names
        marks = {name: (f"{name}`](#", f"### {name}\n", f"\n- `{name}`") for name in names if name != "metrics"}
        assert [name for name, shown in marks.items() if not any(mark in text for mark in shown)] == []
    unnamed = dict(re.findall(r"`(\w+)\([^`]*(\*\*\w+)", text))
    assert unnamed == OTHERS, "help() and editors show options that the signature names"


def test_the_arguments_that_a_docstring_describes_are_those_of_the_signature(caplog: pytest.LogCaptureFixture):
    api_reference.document()
    assert [record.getMessage() for record in caplog.records] == []
