"""Makes docs/reference/commands.md from the help of the command `fastckpt`."""

import inspect
import re
from collections.abc import Iterator

import click

from fastckpt_run.cli import GROUPS, main

HEAD = """\
# Commands

The command `fastckpt`, made from its help (`fastckpt COMMAND --help`) by `make docs-reference`. [cli.md](cli.md) shows what the commands
print, and the keys of `--json`; [launcher.md](launcher.md) and [options.md](options.md) have the command `fastckpt-run`.
"""


def document() -> str:
    """The text of the page."""
    context = click.Context(main, info_name="fastckpt", **main.context_settings)
    names = [name for name, command in main.commands.items() if not command.hidden]
    index = "\n".join(
        f"- {group}: " + ", ".join(f"[`{command.name}`](#fastckpt-{command.name})" for command in commands)
        for group, commands in GROUPS.items()
    )
    parts = [HEAD, f"{_help(main)}\n\n{index}"]
    for name in names:
        parts += _command(main.commands[name], context, name)
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def _command(command: click.Command, above: click.Context, name: str, level: str = "##") -> Iterator[str]:
    context = click.Context(command, info_name=name, parent=above, **command.context_settings)
    yield f"{level} {context.command_path}"
    yield f"```console\n{context.command_path} {' '.join(command.collect_usage_pieces(context))}\n```"
    yield _help(command)
    records = [record for each in command.get_params(context) if (record := each.get_help_record(context))]
    rows = [f"| `{names}` | {_cell(meaning)} |" for names, meaning in records if meaning and "--help" not in names]
    if rows:
        yield "\n".join(["| option | meaning |", "| --- | --- |", *rows])
    if isinstance(command, click.Group):
        for inner, each in command.commands.items():
            yield from _command(each, context, inner, level + "#")


def _help(command: click.Command) -> str:
    text = inspect.cleandoc(command.help or "").replace("\b\n", "")
    return re.sub(r"\bdocs/([\w/]+\.md)", r"[\1](../\1)", text)


def _cell(text: str) -> str:
    """A text that is part of a table: Markdown takes brackets of defaults, and bars, for its own."""
    return re.sub(r"\bdocs/([\w/]+\.md)", r"[\1](../\1)", text).replace("|", "\\|")
