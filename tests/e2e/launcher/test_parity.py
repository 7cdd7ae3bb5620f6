"""Parity of the command line with torchrun: thousands of arguments against torch's own parser."""

import random
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from torch.distributed.run import get_args_parser

from fastckpt._core.config import Settings
from fastckpt.errors import ConfigError
from fastckpt_run.options import parse

CASES_PER_SEED = 60

ACTIONS = {action.dest: action for action in get_args_parser()._actions if action.option_strings}
FLAGS = {
    dest: next(f for f in action.option_strings if f[:2] == "--" and "_" not in f) for dest, action in ACTIONS.items()
}
WORTHS = ["2", "auto", "1:4", "", "a b", "timeout=5,a=b", "0:1,1:2", "-1", "-", "-x", "1.5", "--fast-slots"]
"""Values of options, some of them wrong for some of these."""
VALUES = {FLAGS[dest]: [*(action.choices or ()), *WORTHS] for dest, action in ACTIONS.items() if action.nargs != 0}
SWITCHES = ["-m", *(FLAGS[dest] for dest, action in ACTIONS.items() if action.nargs == 0 and dest != "help")]
OTHERS = "-r3|-r=1|-t3|-mr3|-mt=1|-mm|-mx|-r-1|-r 3|-t 0:1|-mr 3|-mmt 2|--bogus|--bogus=1|-q|--n|--no|--nnodes-|--st"
OTHERS += "|--fas|-h|--help|--nproc"
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
VARIABLES = {
    "PET_NNODES": ["2", "1:3"],
    "PET_NPROC_PER_NODE": ["4", "auto"],
    "PET_STANDALONE": ["0", "1"],
    "PET_MAX_RESTARTS": ["2", "x"],
    "PET_START_METHOD": ["fork", "nonsense"],
    "PET_LOG_DIR": ["--fast-slots"],
}


def flag_unit(rng: random.Random) -> list[str]:
    """One torchrun option with what belongs to it; some of them wrong."""
    if rng.random() < 0.15:
        return [rng.choice(SWITCHES)]
    if rng.random() < 0.25:
        return rng.choice(OTHERS.split("|")).split()
    flag = rng.choice(list(VALUES))
    value = rng.choice(VALUES[flag])
    if rng.random() < 0.3:
        flag = flag[:2] + flag[2:].replace("-", "_")
    if rng.random() < 0.25:
        flag = flag[: rng.randint(4, len(flag))]
    return [f"{flag}={value}"] if rng.random() < 0.4 else [flag, value]


def command_line(rng: random.Random) -> tuple[list[str], list[str], dict[str, object]]:
    """A command line for torchrun, the same one with our options strewn in, and what these say."""
    plain: list[str] = []
    strewn: list[str] = []
    said: dict[str, object] = {}

    def strew() -> None:
        while rng.random() < 0.4:
            tokens, meaning = rng.choice(OURS)
            strewn.extend(tokens)
            said.update(meaning)

    strew()
    for _ in range(rng.randint(0, 5)):
        unit = flag_unit(rng)
        plain += unit
        strewn += unit
        strew()
    rest: list[str] = []
    if rng.random() < 0.2:
        rest.append("--")
    if rng.random() < 0.93:
        rest.append(rng.choice(SCRIPTS))
        rest += [rng.choice(SCRIPT_ARGUMENTS) for _ in range(rng.randint(0, 4))]
    elif rng.random() < 0.3:
        rest.append(rng.choice(list(VALUES)))  # a value is missing
    return plain + rest, strewn + rest, said


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


@pytest.mark.parametrize("seed", range(3))
def test_generated_command_lines_are_parsed_as_torchrun_does(
    seed: int, here: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.delenv("FASTCKPT_SHM_DIR", raising=False)
    monkeypatch.delenv("FASTCKPT_PRELOAD", raising=False)
    rng = random.Random(seed)
    accepted = 0
    for _ in range(CASES_PER_SEED):
        with monkeypatch.context() as environment:
            for name in rng.sample(list(VARIABLES), rng.choice([0, 0, 1, 3])):
                environment.setenv(name, rng.choice(VARIABLES[name]))
            plain, strewn, said = command_line(rng)
            expected = outcome(lambda plain=plain: get_args_parser().parse_args(plain))
            found = outcome(lambda strewn=strewn: parse(strewn))
            if isinstance(expected, Namespace):
                accepted += 1
                assert found == (Settings(**said), expected), (plain, strewn)
            else:
                assert found == expected, (plain, strewn)
    capsys.readouterr()
    assert accepted > CASES_PER_SEED / 5
