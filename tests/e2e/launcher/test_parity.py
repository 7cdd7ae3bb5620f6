"""Parity of the command line with torchrun: our options anywhere among its own, against torch's own parser."""

from argparse import Namespace
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import click
import pytest
from torch.distributed.run import get_args_parser

from fastckpt._core.config import Settings
from fastckpt.errors import ConfigError
from fastckpt_run.options import parse

ACTIONS = [action for action in get_args_parser()._actions if action.option_strings and action.dest != "help"]
FLAGS = {action: next(f for f in action.option_strings if f[:2] == "--" and "_" not in f) for action in ACTIONS}
WORTHS = ["2", "auto", "1:4", "", "a b", "timeout=5,a=b", "0:1,1:2", "-1", "-", "-x", "1.5", "--fast-slots"]
"""Values of options, some of them wrong for some of these."""
OTHERS = "-r3|-r=1|-t3|-mr3|-mt=1|-mm|-mx|-r-1|-r 3|-t 0:1|-mr 3|-mmt 2|--bogus|--bogus=1|-q|--n|--no|--nnodes-|--st"
OTHERS += "|--fas|-h|--help|--nproc|--max-r 2|--max-r=2|--rdzv-e x"
SCRIPTS = ["train.py", "-1", "-", "", "--log dir", "--a b=c", "my.module", "-2.5"]
SCRIPT_ARGUMENTS = ["--nnodes", "3", "--fast-tokens", "--fast-tokens=9", "--fast-bogus", "-x", "--", "", "-m", "--lr=1"]
OURS: list[tuple[list[str], dict[str, object]]] = [
    (["--fast-slots", "2"], {"slots": 2}),
    (["--fast-shm-dir", "/mnt/a b"], {"shm_dir": "/mnt/a b"}),
    (["--fast-shm-dir=-"], {"shm_dir": "-"}),
    (["--fast-no-flush"], {"flush": False}),
    (["--fast-flush"], {"flush": True}),
    (["--fast-no-preload"], {"preload": "off"}),
    (["--fast-events", "train.py"], {"events": "train.py"}),
]
VARIABLES = [
    ("PET_NNODES", "2"), ("PET_NPROC_PER_NODE", "auto"), ("PET_STANDALONE", "0"), ("PET_STANDALONE", "1"),
    ("PET_MAX_RESTARTS", "x"), ("PET_START_METHOD", "nonsense"), ("PET_LOG_DIR", "--fast-slots"),
]  # fmt: skip


def units() -> list[list[str]]:
    """Each option of torchrun, spelled in each way, with what belongs to it; some of them wrong."""
    found = [each.split() for each in OTHERS.split("|")]
    worths = cycle(WORTHS)
    for action, flag in FLAGS.items():
        if action.nargs == 0:
            found.append([flag])
            continue
        for value in [*(action.choices or ()), *(next(worths) for _ in range(5))]:
            found += [[flag, value], [f"{flag.replace('-', '_').replace('__', '--', 1)}={value}"]]
    return found


def outcome(read: Callable[[], Any]) -> Any:
    """What is read of a command line, or how it is refused."""
    try:
        return read()
    except SystemExit as exit:
        return f"exit {exit.code}"
    except (ConfigError, click.UsageError):
        return "exit 2"
    except ValueError as error:  # torch's own, of a PET variable
        return str(error)


def test_command_lines_are_parsed_as_torchrun_does(here: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.delenv("FASTCKPT_SHM_DIR", raising=False)
    monkeypatch.delenv("FASTCKPT_PRELOAD", raising=False)
    ours, scripts, arguments = cycle(OURS), cycle(SCRIPTS), cycle(SCRIPT_ARGUMENTS)
    variables = cycle([*VARIABLES, *[None] * 2 * len(VARIABLES)])
    accepted = 0
    for number, unit in enumerate(units()):
        one, other = next(ours), next(ours)
        rest = ["--"] * (number % 5 == 0) + [next(scripts)] + [next(arguments) for _ in range(number % 4)]
        rest = rest if number % 9 else rest[:0]
        with monkeypatch.context() as environment:
            if variable := next(variables):
                environment.setenv(*variable)
            plain, strewn = unit + rest, [*one[0], *unit, *other[0], *rest]
            expected = outcome(lambda plain=plain: get_args_parser().parse_args(plain))
            found = outcome(lambda strewn=strewn: parse(strewn))
        if isinstance(expected, Namespace):
            accepted += 1
            expected = (Settings(**one[1] | other[1]), expected)
        assert found == expected, (plain, strewn)
    capsys.readouterr()
    assert accepted > number / 5
