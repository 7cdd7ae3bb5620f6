"""The site of the documentation builds without a warning, such as of a broken link, and has all pages."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SECTIONS = ["Start", "Guides", "Clusters", "Operate", "Reference", "Evidence", "Internals"]
LOADED = re.compile(r'(?:<link(?![^>]*canonical)[^>]*\bhref|\bsrc)="?([^"\s>]+)')


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    target = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(target)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, check=False, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return {str(path.relative_to(target)): path.read_text() for path in target.rglob("*.html")}


def test_the_site_loads_nothing_from_elsewhere(site: dict[str, str]):
    loaded = {link for text in site.values() for link in LOADED.findall(text)}
    assert any("images/failure.svg" in link for link in loaded) and any(link.endswith(".css") for link in loaded)
    assert not [link for link in loaded if re.match(r"//|(?!data:)\w+:", link)]


def test_every_page_is_in_the_site_and_in_the_navigation(site: dict[str, str]):
    pages = {str(path.relative_to(ROOT / "docs").with_suffix(".html")) for path in (ROOT / "docs").rglob("*.md")}
    assert len(pages) > 20 and pages <= site.keys()
    index = site["index.html"]
    tabs = [tab.strip() for tab in re.findall(r"md-tabs__link[^>]*>([^<]*)", index)]
    assert [tab for tab in tabs if tab != "Migrate"] == SECTIONS
    assert pages <= set(re.findall(r'href="?([^"#\s>]+)', index)) | {"index.html"}
    assert 'data-head="DCP async_save"' in index, "cells of a wide table name their columns for phones"


def test_files_outside_of_docs_are_pages_with_headings_and_links_and_folders_lead_to_theirs(site: dict[str, str]):
    assert re.search(r'href="?repository/README.md.html#when-not-to-use-it"?', site["index.html"])
    readme = site["repository/README.md.html"]
    assert 'id="when-not-to-use-it"' in readme or "id=when-not-to-use-it" in readme
    links = set(re.findall(r'(?:href|src)="?([^"\s>]+)', readme))
    assert {"../faq.html", "SECURITY.md.html", "CONTRIBUTING.md.html", "LICENSE.html", "../images/failure.svg"} <= links
    slurm = site["repository/examples/slurm.html"]
    assert "slurm/many_nodes.sbatch.html" in slurm and "repository/examples/slurm/many_nodes.sbatch.html" in site
