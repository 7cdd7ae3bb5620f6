"""The generated pages (errors.md, api.md, cli.md, launcher.md) are those that the sources make now."""

from pathlib import Path

import griffe
import pytest

from docs_site import api_reference, sources
from docs_site.pages import PAGES

ROOT = Path(__file__).parents[2]


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


def test_methods_that_frameworks_call_are_methods_of_their_class():
    for name, (_, methods) in api_reference.CALLED_BY.items():
        [cls] = {
            found.path: found
            for module in api_reference.MODULES
            for each in sources.exported(module)
            if each == name and isinstance(found := sources.find(f"{module}.{each}"), griffe.Class)
        }.values()
        assert set(methods.split()) <= set(sources.public_members(cls))


def test_the_arguments_that_a_docstring_describes_are_those_of_the_signature(caplog: pytest.LogCaptureFixture):
    api_reference.document()
    assert [record.getMessage() for record in caplog.records] == []
