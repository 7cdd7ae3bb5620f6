"""Makes docs/reference/launcher.md from a template, the settings of the launcher, and torchrun's parser."""

import re
from argparse import SUPPRESS, Action
from collections.abc import Iterator

from docs_site.sources import ROOT, linked_pages
from fastckpt_run.options import GROUPS, LauncherParser, describe

TEMPLATE = ROOT / "docs_site/templates/launcher.md"
OPTIONS, TORCHRUN = "<!-- options -->\n", "<!-- torchrun -->\n"
"""Lines of the template that are replaced."""
_OURS = ("--help", "--version")
"""Options that both commands answer in their own way."""


def document() -> str:
    """The text of the page."""
    text = TEMPLATE.read_text()
    return text.replace(OPTIONS, "\n".join(_options())).replace(TORCHRUN, f"{_torchrun()}.\n")


def _options() -> Iterator[str]:
    """Lists of options and their defaults: a phone shows them whole, unlike tables of four columns."""
    for group, members in GROUPS.items():
        yield f"**{group}**\n"
        for name in members:
            option = describe(name)
            sentences = f"{option.summary}. {option.details}".strip()
            default = f" (`{option.default}`)" if option.default else ""
            yield f"- `{option.usage}`{default}: {_linked(sentences)}"
        yield ""


def _torchrun() -> str:
    parser = LauncherParser()
    theirs = [action for action in parser._actions if action.option_strings and action not in parser.ours.values()]
    names = [_longest(action) for action in theirs if action.help is not SUPPRESS]
    return ", ".join(f"`{name}`" for name in names if name not in _OURS)


def _linked(text: str) -> str:
    text = linked_pages(text)
    return re.sub(r"(--[a-z-]+|\$[A-Z]+|10\*\*6)", r"`\1`", text)


def _longest(action: Action) -> str:
    """An option as people write it: torchrun has each with hyphens and with underscores."""
    return max((flag for flag in action.option_strings if "_" not in flag), key=len)
