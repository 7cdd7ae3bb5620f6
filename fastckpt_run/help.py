"""The parser that is torchrun's own, speaking as fastckpt-run: its help and its errors."""

from argparse import SUPPRESS, Action, ArgumentParser, HelpFormatter
from typing import Any, NoReturn

import click
from torch.distributed.argparse_util import check_env, env
from torch.distributed.run import get_args_parser

from fastckpt_run.options import command
from fastckpt_run.version_text import version_line

USAGE = "%(prog)s [--fast-OPTION ...] [TORCHRUN OPTION ...] training_script [SCRIPT ARGUMENT ...]"
DESCRIPTION = """\
Launch a script as torchrun does, with checkpoints in shared memory that outlive its workers.
Every option of torchrun means what it means there; the options that begin with --fast are ours.
They may stand anywhere before the script, with their names in full."""


class TorchrunHelp(HelpFormatter):
    """Shows the PET variable and the default of each option."""

    def _get_help_string(self, action: Action) -> str | None:
        if not action.option_strings or not action.help or (action.nargs == 0 and not isinstance(action, check_env)):
            return action.help
        shown = "none" if action.default in (None, "", []) else "%(default)s"
        pet = f"env: PET_{action.dest.upper()}; " if isinstance(action, env | check_env) else ""
        return f"{action.help} [{pet}default: {shown}]"


class _TellVersion(Action):
    """argparse's own would look them up at each start."""

    def __call__(self, parser: ArgumentParser, *_: Any) -> NoReturn:
        print(version_line("fastckpt-run"))
        parser.exit()


class LauncherParser(ArgumentParser):
    """A parser with all the arguments of another; differs in the text of help and errors."""

    def __init__(self, torchrun: ArgumentParser) -> None:
        super().__init__(
            "fastckpt-run", USAGE, parents=[torchrun], add_help=False, formatter_class=TorchrunHelp, epilog=None
        )
        self.add_argument(
            "--version",
            action=_TellVersion,
            nargs=0,
            default=SUPPRESS,
            help="show the versions of this and of torch, and exit",
        )

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        """What an abbreviation may stand for: torchrun's options alone, so that all mean there what they mean here."""
        return [found for found in super()._get_option_tuples(option_string) if found[1] != "--version"]

    def format_help(self) -> str:
        """Our options as click describes them, then torchrun's."""
        ours = click.Context(command()).make_formatter()
        command().format_options(click.Context(command()), ours)
        usage, _, theirs = super().format_help().partition("\n\n")
        own = ours.getvalue().replace("Options:", "options of fastckpt:", 1).rstrip()
        theirs = theirs.replace("\noptions:", "\noptions of torchrun:", 1)
        return f"{usage}\n\n{DESCRIPTION}\n\n{own}\n\n{theirs}"

    def error(self, message: str) -> NoReturn:
        """One line, and torchrun's exit code for it."""
        self.exit(2, f"{self.prog}: error: {message}; see {self.prog} --help\n")


def launcher_parser() -> ArgumentParser:
    """torchrun's parser, as its version of torch defines it and the PET variables adjust it."""
    return LauncherParser(get_args_parser())
