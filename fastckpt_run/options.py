"""The launcher's command line: torchrun's own parser, with an option for each of our settings."""

import inspect
import logging
import re
from argparse import SUPPRESS, Action, ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from dataclasses import Field, dataclass, fields, replace
from difflib import get_close_matches
from functools import cache
from typing import Any, NoReturn

import click
from torch.distributed.run import get_args_parser

from fastckpt._core.config import Settings
from fastckpt.errors import ConfigError
from fastckpt_run.commands import version_line

logger = logging.getLogger("fastckpt.launcher")

PREFIX = "--fast"
_OF_LAUNCHERS = "--nproc", "--nnodes", "--max-restarts", "--max_restarts", "--standalone", "--rdzv"
"""Beginnings of torchrun's options that no script is likely to have."""
GROUPS = {
    "Memory and storage": {
        "shm_dir": "DIR",
        "memory": "",
        "slots": "N",
        "fill_threads": "N",
        "flush": "",
        "flush_timeout": "SECONDS",
        "require_persist": "",
        "persist_mbps": "MB/S",
        "file_mode": "MODE",
        "take_over": "",
        "exclusive": "",
        "check_overlap": "",
    },
    "Workers": {
        "max_stalls": "N",
        "restart_budget": "N/TIME",
        "stop_grace": "SECONDS",
        "hang_timeout": "SECONDS",
        "preload": "MODULES",
        "allow_lost_rank_state": "",
        "summary": "KIND",
        "exit_codes": "",
    },
    "Nodes": {
        "secret_file": "FILE",
        "node_timeout": "SECONDS",
        "node_check": "",
        "spares": "N",
        "exclude_after": "N",
        "domain": "NAME",
        "replicas": "NUMBER",
        "replica_mbps": "MB/S",
        "replica_medium": "PLACE",
    },
    "Monitoring": {
        "metrics_port": "PORT",
        "tensorboard": "DIR",
        "event_log": "",
        "events": "FILE",
        "slow_ranks": "",
    },
}
"""The settings by subject, with the value of each option; a switch takes nothing."""
USAGE = "fastckpt-run [OPTION ...] [TORCHRUN OPTION ...] SCRIPT [ARGUMENT ...]"
DESCRIPTION = """\
Launch a script as torchrun does, with checkpoints in shared memory.
Options stand before the script, with their names in full. Each has a variable:
FASTCKPT_SLOTS for --fast-slots. [Defaults]; more: docs/reference/launcher.md"""
DRY_RUN = "Print what the launch would do instead of it"
TORCHRUN = """\
Each option of torchrun means what it means there, and each PET_* variable:
torchrun --help lists them. --version shows versions of fastckpt and torch."""
_TEXT_COLUMN = 32


@dataclass(frozen=True)
class CommandLine:
    """A command line, read.

    Attributes:
        settings: Ours: options before ``FASTCKPT_*`` variables before defaults.
        torchrun: The namespace that torchrun would have had for the same command line without our options.
        given: Names of the settings that options gave.
        is_dry_run: True if the launch is only printed.
    """

    settings: Settings
    torchrun: Namespace
    given: frozenset[str]
    is_dry_run: bool


def read(argv: Sequence[str]) -> CommandLine:
    """Read a command line. Raises click.UsageError or ConfigError."""
    parser = LauncherParser()
    # So that a misspelt --fast option has an error of its own, with the name that is nearest.
    namespace, unknown = parser.parse_known_args(argv)
    if ours := [argument for argument in unknown if argument.startswith(PREFIX)]:
        raise click.UsageError(_unknown(ours[0].partition("=")[0], list(parser.ours)))
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if "--" not in argv:
        _look_behind_the_script(namespace.training_script, namespace.training_script_args, parser)
    is_dry_run = vars(namespace).pop("fast_dry_run")
    options = {field.name: vars(namespace).pop(_destination(field)) for field in fields(Settings)}
    given = {name: value for name, value in options.items() if value is not None}
    return CommandLine(replace(Settings.from_environment(), **given), namespace, frozenset(given), is_dry_run)


def _look_behind_the_script(script: str, arguments: Sequence[str], parser: "LauncherParser") -> None:
    """Raise click.UsageError for options of ours among the script's arguments; warn of torchrun's."""
    names = [each.partition("=")[0] for each in arguments]
    if ours := [name for name in names if name in parser.ours]:
        raise click.UsageError(f"{ours[0]} comes after {script}, which would get it: give it before the script")
    if torchs := [name for name in names if name.startswith(_OF_LAUNCHERS)]:
        logger.warning("%s comes after %s, which gets it: an option of the launcher comes before", torchs[0], script)


def require_positive(arguments: Namespace) -> None:
    """Raise ValueError for numbers that torch refuses without a message, as it does for others."""
    if re.fullmatch(r"-?\d+", str(arguments.nproc_per_node)) and int(arguments.nproc_per_node) < 1:
        raise ValueError(f"--nproc-per-node is {arguments.nproc_per_node}; give 1 or more workers, auto, cpu or gpu")
    if arguments.monitor_interval <= 0:
        raise ValueError(f"--monitor-interval is {arguments.monitor_interval:g}; give seconds above 0")


def require_room_for_spares(settings: Settings, arguments: Namespace) -> None:
    """Raise ConfigError unless the agents of the job can meet a spare, and go on with it when one of them is lost."""
    if not settings.spares:
        return
    request = f"spares is {settings.spares} (--fast-spares)"
    if arguments.standalone or arguments.rdzv_backend != "c10d":
        backend = "--standalone is given" if arguments.standalone else f"--rdzv-backend is {arguments.rdzv_backend}"
        raise ConfigError(
            f"{request}, and {backend}: nodes that meet so take no other one in; use --rdzv-backend c10d with "
            "--rdzv-endpoint, or leave --fast-spares out"
        )
    if str(arguments.nnodes).rpartition(":")[2] == "1":
        raise ConfigError(
            f"{request}, and --nnodes is {arguments.nnodes}: nobody would notice the loss of the only node; give "
            "--nnodes 2 or more, without the spares"
        )


def parse(argv: Sequence[str]) -> tuple[Settings, Namespace]:
    """Our settings, and the namespace of torchrun; raises as `read`."""
    command = read(argv)
    return command.settings, command.torchrun


class LauncherParser(ArgumentParser):
    """torchrun's parser, as its version of torch defines it and the PET variables adjust it, with our options.

    Attributes:
        ours: Our options by their names.
    """

    def __init__(self) -> None:
        super().__init__("fastckpt-run", USAGE, parents=[get_args_parser()], add_help=False)
        self.add_argument("--version", action=_ShowVersion, nargs=0, default=SUPPRESS)
        added = [self.add_argument(*_flags(field), **_described(field)) for field in fields(Settings)]
        off: dict[str, Any] = {"action": "store_const", "const": "off", "dest": "fast_preload"}
        added.append(self.add_argument(f"{PREFIX}-no-preload", **off))
        added.append(self.add_argument(f"{PREFIX}-dry-run", action="store_true"))
        self.ours = {flag: action for action in added for flag in action.option_strings}

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        """Expansions of an abbreviation: torchrun's options alone, so that each means the same as with torchrun."""
        # argparse expands abbreviations over all options: one of ours could make one of torchrun's ambiguous.
        found = super()._get_option_tuples(option_string)
        return [each for each in found if each[1] != "--version" and each[1] not in self.ours]

    def format_help(self) -> str:
        """Format our options by groups, one in a line; torchrun describes its own."""
        lines = [f"usage: {USAGE}", "", DESCRIPTION, "", _help_line(f"{PREFIX}-dry-run", DRY_RUN)]
        for group, members in GROUPS.items():
            described = [describe(name) for name in members]
            lines += [f"{group}:", *(_help_line(each.usage, f"{each.summary}{each.shown}") for each in described)]
        return "\n".join([*lines, "", TORCHRUN, ""])

    def error(self, message: str) -> NoReturn:
        """Raise a click.UsageError."""
        raise click.UsageError(f"{message}; see {self.prog} --help")


class _ShowVersion(Action):
    """Prints the versions, which argparse's own action would look up at each start."""

    def __call__(self, parser: ArgumentParser, *_: Any) -> NoReturn:
        print(version_line("fastckpt-run"))
        parser.exit()


class _Switch(Action):
    """An option of two names, ``--fast-x`` and ``--fast-no-x``."""

    def __call__(self, _: ArgumentParser, namespace: Namespace, __: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, not str(option_string).startswith(f"{PREFIX}-no-"))


def _flags(field: Field[Any]) -> list[str]:
    name = field.name.replace("_", "-")
    return [f"{PREFIX}-{name}"] + ([f"{PREFIX}-no-{name}"] if isinstance(field.default, bool) else [])


def _destination(field: Field[Any]) -> str:
    return f"fast_{field.name}"


def _described(field: Field[Any]) -> dict[str, Any]:
    """The arguments of add_argument for a setting."""
    # None means "not given": then the environment variable decides, and after it the default.
    common = {"dest": _destination(field), "default": None}
    if isinstance(field.default, bool):
        return common | {"action": _Switch, "nargs": 0}
    kind: Any = type(field.default)
    return common | {"type": kind if kind is str else _number(_flags(field)[0], kind)}


@dataclass(frozen=True)
class OptionText:
    """The description of an option, from the docstring of Settings.

    Attributes:
        usage: The option and its value: ``--fast-slots N``, ``--fast-[no-]flush``.
        default: As people write it; empty for none.
        summary: A sentence, without the point.
        details: The sentences that follow; may be empty.
    """

    usage: str
    default: str
    summary: str
    details: str

    @property
    def shown(self) -> str:
        """The default, in brackets."""
        return f" [{self.default}]" if self.default else ""


def describe(setting: str) -> OptionText:
    """The description of the option of a setting."""
    default = getattr(Settings, setting)
    name, taken = setting.replace("_", "-"), next(group[setting] for group in GROUPS.values() if setting in group)
    usage = f"{PREFIX}-{name} {taken}" if taken else f"{PREFIX}-[no-]{name}"
    shown = ("no", "yes")[default] if isinstance(default, bool) else format(default, "g" * isinstance(default, float))
    summary, _, details = _texts()[setting].partition(". ")
    return OptionText(usage, shown, summary.removesuffix("."), details)


@cache
def _texts() -> dict[str, str]:
    """The texts of all settings, from the docstring of Settings."""
    return dict(re.findall(r"^    (\w+): (.+)$", inspect.getdoc(Settings) or "", re.MULTILINE))


def _help_line(usage: str, text: str) -> str:
    return f"  {usage}".ljust(_TEXT_COLUMN - 1) + f" {text}"


def _number(flag: str, kind: type[float]) -> Callable[[str], float]:
    """A parser of an option's value, which refuses bad values with the same text as for an environment variable."""

    def read(text: str) -> float:
        try:
            return kind(text)
        except ValueError:
            allowed = "a whole number" if kind is int else "a number"
            raise click.UsageError(f"{flag} is {text!r}; give {allowed}") from None

    return read


def _unknown(name: str, known: Sequence[str]) -> str:
    begun = [flag for flag in known if flag.startswith(name)]
    near = begun or get_close_matches(name, known, 1, 0.8)
    question = f"; did you mean {near[0]}?" if len(near) == 1 else ""
    return f"no such option: {name}; names are given in full: {', '.join(begun or known)}{question}"
