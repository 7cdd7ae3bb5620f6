"""`fastckpt explain`: the pages of the codes that messages end with."""

import re
from difflib import get_close_matches
from typing import Any

import click

from fastckpt._core.error_codes import PAGE, ErrorPage, read_pages
from fastckpt.errors import ConfigError
from fastckpt_run.cli.output import CommandOutput, Screen, answering

_WRITTEN = re.compile(r"(?:FC)?[-_ ]?0*(\d{1,6})", re.IGNORECASE)
_IN_MESSAGE = re.compile(r"\bFC-(\d{3})\b", re.IGNORECASE)
_LINK = re.compile(r"\[(?P<text>[^\]]+)\]\((?P<path>[^)#]*)(?P<anchor>#[^)]*)?\)")


@click.command()
@click.argument("code", default="")
@answering
def explain(code: str) -> CommandOutput:
    """Explain the CODE of a message: messages with it, cause, remedies.

    CODE is written as in the message, such as FC-030, or as fc30 or 30. Without one, all codes are listed. The pages
    are those of docs/errors.md; no network is needed.
    """
    pages = read_pages()
    if not code:
        titles = [{"code": page.code, "title": page.title} for page in pages.values()]
        return CommandOutput({"codes": titles}, lambda screen: _list(screen, titles))
    page = _find(code, pages)
    return CommandOutput({"codes": [_to_json(page)]}, lambda screen: _show(screen, page))


def _find(text: str, pages: dict[str, ErrorPage]) -> ErrorPage:
    written = _IN_MESSAGE.search(text) or _WRITTEN.fullmatch(text.strip())
    code = f"FC-{int(written[1]):03d}" if written else text.strip().upper()
    if code in pages:
        return pages[code]
    near = get_close_matches(code, pages, n=3)
    hint = f"near ones are {', '.join(sorted(near))}" if near else "a code is such as FC-030"
    raise ConfigError(f"there is no code {code}; {hint}; fastckpt explain lists all")


def _to_json(page: ErrorPage) -> dict[str, Any]:
    return {
        "code": page.code,
        "title": page.title,
        "messages": list(page.messages),
        "cause": _for_terminals(page.cause),
        "remedies": [_for_terminals(each) for each in page.remedies],
        "lost": _for_terminals(page.lost),
        "page": f"{PAGE}#{page.code.lower()}",
    }


def _for_terminals(text: str) -> str:
    """A text with the paths of pages in the place of links."""

    def path(link: re.Match[str]) -> str:
        if not link["path"]:
            return link["text"]
        return f"{link['text']}: docs/{link['path']}{link['anchor'] or ''}"

    return _LINK.sub(path, text)


def _list(screen: Screen, titles: list[dict[str, str]]) -> None:
    screen.table(["CODE", "MESSAGE ABOUT"], [[each["code"], each["title"]] for each in titles])


def _show(screen: Screen, page: ErrorPage) -> None:
    screen.line(f"{page.code}: {page.title}")
    remedies = [f"{number}. {each}" for number, each in enumerate(page.remedies, start=1)]
    for title, texts in (
        ("Messages", page.messages or ["(no message any more)"]),
        ("Cause", [page.cause]),
        ("What to do", remedies),
        ("Lost", [page.lost]),
    ):
        screen.line("")
        screen.line(f"{title}:")
        for text in texts:
            screen.paragraph(_for_terminals(text), hanging=3 if texts is remedies else 0)
