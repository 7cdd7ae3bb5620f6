"""Makes docs/reference/cli.md from the help of the command `fastckpt`, and a template with examples and JSON keys."""

import inspect
import re
from collections.abc import Iterator

import click

from docs_site.sources import ROOT, linked_pages
from fastckpt_run.cli import main

TEMPLATE = ROOT / "docs_site/templates/commands.md"
"""The head of the page, a section for each command with what follows its help, and sections for the end."""
EVERYWHERE = ("--help", "--json", "--quiet")
"""Options that the head of the page describes for all commands."""


def document() -> str:
    """The text of the page."""
    head, sections = _template()
    context = click.Context(main, info_name="fastckpt", **main.context_settings)
    parts = [head]
    for name, command in main.commands.items():
        if not command.hidden:
            parts += _command(command, context, name, sections)
    parts += [f"## {name}\n\n{text}" for name, text in sections.items()]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def _template() -> tuple[str, dict[str, str]]:
    head, *sections = re.split(r"^## ", TEMPLATE.read_text(), flags=re.MULTILINE)
    return head, dict(section.split("\n\n", 1) for section in sections)  # type: ignore[misc]


def _command(command: click.Command, above: click.Context, name: str, sections: dict[str, str]) -> Iterator[str]:
    """The section of a command; takes its examples out of the template's sections."""
    context = click.Context(command, info_name=name, parent=above, **command.context_settings)
    if isinstance(command, click.Group):
        for inner, each in command.commands.items():
            yield from _command(each, context, inner, sections)
        return
    yield f"## {context.command_path}"
    pieces = [piece for piece in command.collect_usage_pieces(context) if piece != "[OPTIONS]"]
    yield f"    {context.command_path} {' '.join(pieces)}"
    yield _help(command)
    records = [record for each in command.get_params(context) if (record := each.get_help_record(context))]
    rows = [(names, meaning) for names, meaning in records if meaning and not names.endswith(EVERYWHERE)]
    yield "\n".join(f"- `{names}`: {_linked(meaning)}" for names, meaning in rows)
    yield sections.pop(context.command_path.partition(" ")[2], "")


def _help(command: click.Command) -> str:
    return _linked(inspect.cleandoc(command.help or "").replace("\b\n", ""))


def _linked(text: str) -> str:
    text = linked_pages(text)
    return re.sub(r"`[^`]+`|(?<![\w/-])(--[a-z][a-z-]+)", lambda found: f"`{found[1]}`" if found[1] else found[0], text)
