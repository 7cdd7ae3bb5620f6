"""Hooks of mkdocs: the navigation from folders and headings, and pages for files that are linked to outside of docs/.

mkdocs loads this file by its path (mkdocs.yml); it imports nothing else of this folder.
"""

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

SECTIONS = {
    "Start": ("index.md", "quickstart.md", "concepts.md", "faq.md"),
    "Guides": ("guides/saving.md", "guides/data.md", "guides/frequency.md", "guides/storage.md", "guides/fsdp.md"),
    "Clusters": ("clusters/nodes.md", "clusters/slurm.md", "clusters/kubernetes.md", "clusters/docker.md"),
    "Operate": ("operate/doctor.md", "operate/plan.md", "operate/watch.md", "operate/live_page.md"),
    "Migrate": ("migrate/torchrun.md",),
    "Reference": ("errors.md", "reference/launcher.md", "reference/cli.md", "reference/api.md"),
    "Evidence": ("evidence/results.md", "evidence/methods.md"),
    "Internals": ("architecture.md", "glossary.md"),
}
"""The pages that come first in each section; all others of its folder follow by their titles."""
REPOSITORY = "repository"
"""The folder of the site with the files outside of docs/ that pages link to."""
WIDE = 3
"""Columns from which on a table is wide."""
_LINK = re.compile(r"(?<=\]\()(?!\w+:)(?P<path>[^)#\s]+)(?P<anchor>#[^)\s]*)?(?=\))")
_TABLE = re.compile(r"<table>(?P<rows>.*?)</table>", re.DOTALL)
_ROW = re.compile(r"<tr>.*?</tr>", re.DOTALL)
_HEAD = re.compile(r"<th[^>]*>(?P<text>.*?)</th>", re.DOTALL)
_LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".sbatch": "bash", ".sh": "bash"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of files outside, and lay out the navigation."""
    root = Path(config.config_file_path).parent
    pages = {file.src_uri: file for file in files.documentation_pages()}
    config.nav = [{section: _paths(section, first, pages)} for section, first in SECTIONS.items()]
    config.nav = [entry for entry in config.nav if any(entry.values())]
    linked = set[str]()
    found = {target for uri, file in pages.items() for target in _outside(f"docs/{uri}", file.content_string)}
    while found := {each for each in found - linked if (root / each).exists()}:  # mkdocs reports links to no file
        linked |= found
        found = {target for each in found for target in _leads_to(each, root / each)}
    for target in sorted(linked):
        content = _shown(target, root / target)
        page = File.generated(config, _page_of(target), content=content, inclusion=InclusionLevel.NOT_IN_NAV)
        files.append(page)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, **_: Any) -> str:
    """Have links that leave docs/, and those of files outside of it, lead to pages of the site."""
    uri = page.file.src_uri
    here, root = posixpath.dirname(uri), Path(config.config_file_path).parent
    source = _source_of(uri)

    def led(link: re.Match[str]) -> str:
        target = _target(source, link["path"])
        if target is None or not (root / target).exists():
            return link[0]
        has_headings = target.endswith(".md")
        place = target.removeprefix("docs/") if target.startswith("docs/") else _page_of(target)
        return posixpath.relpath(place, here or ".") + ((link["anchor"] or "") if has_headings else "")

    return _LINK.sub(led, markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Give each cell of a wide table the head of its column, by which site.css shows it on a phone."""
    return _TABLE.sub(_with_heads, html)


def _with_heads(table: re.Match[str]) -> str:
    texts = [re.sub("<[^>]+>", "", head["text"]).strip() for head in _HEAD.finditer(table["rows"])]
    heads = [text.replace('"', "&quot;") for text in texts]
    if len(heads) < WIDE:
        return table[0]

    def marked(row: re.Match[str]) -> str:
        begin, *cells = row[0].split("<td")
        named = zip(heads, cells, strict=bool(cells))  # the first row has heads alone
        return begin + "".join(f'<td data-head="{head}"{cell}' for head, cell in named)

    return f'<table data-columns="{len(heads)}">{_ROW.sub(marked, table["rows"])}</table>'


def _paths(section: str, first: tuple[str, ...], pages: dict[str, File]) -> list[str]:
    listed = {uri for each in SECTIONS.values() for uri in each}
    folder = section.lower() if section not in ("Start", "Internals") else ""
    rest = [uri for uri in pages if uri not in listed and _section_of(uri) == (folder or section)]
    return [uri for uri in first if uri in pages] + sorted(rest, key=lambda uri: _title(pages[uri].content_string))


def _section_of(uri: str) -> str:
    """The folder of a page; what is in none, and in no list above, is about internals."""
    return PurePosixPath(uri).parts[0] if "/" in uri else "Internals"


def _title(markdown: str) -> str:
    found = re.search(r"^# (.+)$", markdown, re.MULTILINE)
    return found[1].replace("`", "").lower() if found else ""


def _target(source: str, path: str) -> str | None:
    """The path in the repository that a link of a file leads to; None if both are in docs/, or it leads elsewhere."""
    target = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
    is_within = source.startswith("docs/") and target.startswith("docs/")
    return None if is_within or target.startswith("..") or target in ("docs", ".") else target


def _outside(source: str, markdown: str) -> Iterator[str]:
    """The files outside of docs/ that a page of this source links to."""
    for link in _LINK.finditer(markdown):
        if (target := _target(source, link["path"])) is not None and not target.startswith("docs/"):
            yield target


def _leads_to(target: str, path: Path) -> Iterator[str]:
    """The files outside of docs/ to which the page of such a file or folder links."""
    if path.is_dir():
        yield from (f"{target}/{name}" for name in _names(path))
    elif path.suffix == ".md":
        yield from _outside(target, path.read_text())


def _names(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir() if each.is_file())


def _source_of(uri: str) -> str:
    """The path in the repository of the file that a page shows."""
    outside = uri.removeprefix(f"{REPOSITORY}/")
    return f"docs/{uri}" if outside == uri else outside.removesuffix(".md")


def _page_of(target: str) -> str:
    return f"{REPOSITORY}/{target}.md"


def _shown(target: str, path: Path) -> str:
    if path.is_dir():
        links = (f"- [{name}]({path.name}/{name})\n" for name in _names(path))
        return f"# {target}\n\n" + "".join(links)
    if path.suffix == ".md":
        return path.read_text()
    return f"# {target}\n\n````{_LANGUAGES.get(path.suffix, 'text')}\n{path.read_text()}\n````\n"
