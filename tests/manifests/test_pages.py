"""The pages on clusters show the manifests as they are."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "docs/clusters" / name for name in ("kubernetes.md", "docker.md")]
MOST_WORDS = 700


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_a_page_shows_of_a_manifest_is_a_part_of_it(page: Path) -> None:
    for block in re.findall(r"^```yaml\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
        first, _, shown = block.partition("\n")
        assert first.startswith("# examples/"), first
        assert f"\n{shown}" in (ROOT / first.removeprefix("# ")).read_text(), first


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_is_short(page: Path) -> None:
    assert len(page.read_text().split()) < MOST_WORDS
