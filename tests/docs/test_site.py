"""The site of the documentation builds without a warning, and its links, anchors and images lead somewhere in it."""

import os
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).parents[2]
SECTIONS = ["Start", "Guides", "Clusters", "Operate", "Reference", "Evidence", "Internals"]


class Built(HTMLParser):
    """A page of the site: what it links to, what it loads, and its anchors, and the heads that cells of tables name."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = set()
        self.heads: set[str] = set()
        self.tabs: list[str] = []
        self._in_tab = False
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        self.heads |= {given["data-head"]} if "data-head" in given else set()
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
            self._in_tab = "md-tabs__link" in given.get("class", "")
        elif tag == "link" and given.get("rel") != "canonical" and "href" in given:
            self.loaded.append(given["href"])
        elif "src" in given:
            self.loaded.append(given["src"])

    def handle_data(self, data: str) -> None:
        if self._in_tab and data.strip():
            self.tabs.append(data.strip())

    def handle_endtag(self, tag: str) -> None:
        if tag == "a":
            self._in_tab = False


@pytest.fixture(scope="module")
def top(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the site."""
    target = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(target)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, check=False, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return target.resolve()


@pytest.fixture(scope="module")
def site(top: Path) -> dict[Path, Built]:
    return {path: Built(path) for path in sorted(top.rglob("*.html"))}


def test_links_anchors_and_images_of_the_site_lead_somewhere(top: Path, site: dict[Path, Built]):
    broken = []
    for page in site.values():
        for link in (*page.links, *page.loaded):
            parts = urlsplit(link)
            if parts.scheme or page.path.name == "404.html":  # whose links are those of a server's root
                continue
            target = (page.path.parent / unquote(parts.path)).resolve() if parts.path else page.path
            target = target / "index.html" if target.is_dir() else target
            is_there = target.is_relative_to(top) and target.is_file()
            if not is_there or (parts.fragment and target in site and parts.fragment not in site[target].anchors):
                broken.append(f"{page.path.relative_to(top)}: {link}")
    assert broken == []


def test_the_site_loads_nothing_from_elsewhere(site: dict[Path, Built]):
    assert {
        link for page in site.values() for link in page.loaded if urlsplit(link).scheme not in ("", "data")
    } == set()


def test_every_page_is_in_the_site_and_in_the_navigation(top: Path, site: dict[Path, Built]):
    names = {path.name for path in site}
    pages = [*(ROOT / "docs").rglob("*.md")]
    assert len(pages) > 20 and {path.with_suffix(".html").name for path in pages} <= names
    index = site[top / "index.html"]
    assert [tab for tab in index.tabs if tab != "Migrate"] == SECTIONS
    linked = {Path(link.partition("#")[0]).name for link in index.links}
    assert {path.with_suffix(".html").name for path in pages} <= linked | {"index.html"}


def test_cells_of_a_wide_table_name_their_columns_for_phones(top: Path, site: dict[Path, Built]):
    assert {"DCP async_save", "fastckpt"} <= site[top / "index.html"].heads


def test_the_start_page_has_the_picture_of_a_failure(top: Path, site: dict[Path, Built]):
    assert "images/failure.svg" in site[top / "index.html"].loaded
