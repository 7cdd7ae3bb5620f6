"""Parity of the command line with torchrun: thousands of arguments against torch's own parser."""

import random
import string
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import click
import pytest
from torch.distributed.run import get_args_parser

from fastckpt._core.config import Settings
from fastckpt.errors import ConfigError
from fastckpt_run.options import parse

CASES_PER_SEED = 40

VALUES = {
    "--nnodes": ["1", "1:4", "2"],
    "--nproc-per-node": ["2", "auto", "gpu"],
    "--rdzv-backend": ["c10d", "static"],
    "--rdzv-endpoint": ["localhost:29400", ":0", ""],
    "--rdzv-id": ["7", "job name", "--fast-slots"],
    "--rdzv-conf": ["timeout=5,join_timeout=3", "a=b"],
    "--max-restarts": ["3", "-1", "x", "1.5"],
    "--monitor-interval": ["0.5", ".1", "-2"],
    "--start-method": ["spawn", "fork", "thread"],
    "--event-log-handler": ["null", "console"],
    "--role": ["trainer", "-", "-x"],
    "--log-dir": ["/tmp/logs", "a b", "-1", "--fast-x", "-5.5"],
    "--redirects": ["3", "0:1,1:2"],
    "--tee": ["3", "1:3"],
    "--local-ranks-filter": ["0,1"],
    "--duplicate-stdout-filters": ["apple,orange", "a,,b"],
    "--duplicate-stderr-filters": ["error"],
    "--node-rank": ["0", "1"],
    "--master-addr": ["127.0.0.1", "[0:0:0:0:0:0:0:1]"],
    "--master-port": ["29500", "port"],
    "--local-addr": ["localhost"],
    "--logs-specs": ["default"],
    "--numa-binding": ["node", "nowhere"],
    "--signals-to-handle": ["SIGTERM,SIGUSR1"],
    "--shutdown-timeout": ["30", "soon"],
}
KNOWN = {flag for action in get_args_parser()._actions for flag in action.option_strings if "_" not in flag}
LATER = {"--log-line-prefix-template": ["[${role_name}]", "${rank}: "], "--print-completion": ["bash", "fish"]}
"""Of torch 2.14 and later."""
VALUES |= {flag: values for flag, values in LATER.items() if flag in KNOWN}
SWITCHES = ["--standalone", "--module", "--no-python", "--run-path", "--virtual-local-rank", "-m"]
SHORT = ["-r3", "-r=1", "-t3", "-mr3", "-mt=1", "-mm", "-mx", "-r-1"]
SHORT_PAIRS = [["-r", "3"], ["-t", "0:1"], ["-mr", "3"], ["-mmt", "2"]]
ODD = ["--bogus", "--bogus=1", "-q", "--n", "--no", "--nnodes-", "--st", "--fas", "-h", "--help", "--nproc"]
SCRIPTS = ["train.py", "-1", "-", "", "--log dir", "--a b=c", "my.module", "-2.5"]
SCRIPT_ARGUMENTS = ["--nnodes", "3", "--fast-tokens", "--fast-tokens=9", "--fast-bogus", "-x", "--", "", "-m", "--lr=1"]
OURS: list[tuple[list[str], dict[str, object]]] = [
    (["--fast-slots", "2"], {"slots": 2}),
    (["--fast-slots=3"], {"slots": 3}),
    (["--fast-shm-dir", "/mnt/a b"], {"shm_dir": "/mnt/a b"}),
    (["--fast-shm-dir=-"], {"shm_dir": "-"}),
    (["--fast-no-flush"], {"flush": False}),
    (["--fast-no-memory"], {"memory": False}),
    (["--fast-flush"], {"flush": True}),
    (["--fast-flush-timeout", "1.5"], {"flush_timeout": 1.5}),
    (["--fast-persist-mbps", "250"], {"persist_mbps": 250.0}),
    (["--fast-file-mode", "0640"], {"file_mode": "0640"}),
    (["--fast-fill-threads=4"], {"fill_threads": 4}),
    (["--fast-max-stalls", "0"], {"max_stalls": 0}),
    (["--fast-spares", "1"], {"spares": 1}),
    (["--fast-replicas=2", "--fast-replica-mbps", "500"], {"replicas": "2", "replica_mbps": 500.0}),
    (["--fast-replica-medium", "disk:/nvme"], {"replica_medium": "disk:/nvme"}),
    (["--fast-domain", "env:RACK"], {"domain": "env:RACK"}),
    (["--fast-restart-budget=2/h"], {"restart_budget": "2/h"}),
    (["--fast-preload", "numpy"], {"preload": "numpy"}),
    (["--fast-no-preload"], {"preload": "off"}),
    (["--fast-events", "train.py"], {"events": "train.py"}),
]
VARIABLES = {
    "PET_NNODES": ["2", "1:3"],
    "PET_NPROC_PER_NODE": ["4", "auto"],
    "PET_STANDALONE": ["0", "1"],
    "PET_MODULE": ["0", "1"],
    "PET_MAX_RESTARTS": ["2", "x"],
    "PET_RDZV_ID": ["from env"],
    "PET_START_METHOD": ["fork", "nonsense"],
    "PET_MONITOR_INTERVAL": ["2"],
    "PET_LOG_DIR": ["--fast-slots"],
}


def flag_unit(rng: random.Random) -> list[str]:
    """One torchrun option with what belongs to it; some of them wrong."""
    kind = rng.random()
    if kind < 0.15:
        return [rng.choice(SWITCHES)]
    if kind < 0.25:
        return [rng.choice(SHORT)]
    if kind < 0.33:
        return rng.choice(SHORT_PAIRS)
    if kind < 0.37:
        return [rng.choice(ODD)]
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


def outcome(parse: Callable[[], Namespace]) -> Namespace | str:
    try:
        return parse()
    except SystemExit as exit:
        return f"exit {exit.code}"
    except (ConfigError, click.UsageError):
        return "exit 2"
    except ValueError as error:  # torch's own, of a PET variable
        return str(error)


def theirs(argv: list[str]) -> Namespace | str:
    return outcome(lambda: get_args_parser().parse_args(argv))


def ours(argv: list[str], settings: list[Settings]) -> Namespace | str:
    def read() -> Namespace:
        found, namespace = parse(argv)
        settings.append(found)
        return namespace

    return outcome(read)


@pytest.fixture(autouse=True)
def own_environment(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No variables but those that a case sets."""
    monkeypatch.delenv("FASTCKPT_SHM_DIR", raising=False)
    monkeypatch.delenv("FASTCKPT_PRELOAD", raising=False)


@pytest.mark.parametrize("seed", range(20))
def test_generated_command_lines_are_parsed_as_torchrun_does(
    seed: int, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    rng = random.Random(seed)
    accepted = 0
    for _ in range(CASES_PER_SEED):
        with monkeypatch.context() as environment:
            for name in rng.sample(list(VARIABLES), rng.choice([0, 0, 1, 3])):
                environment.setenv(name, rng.choice(VARIABLES[name]))
            plain, strewn, said = command_line(rng)
            expected = theirs(plain)
            settings: list[Settings] = []
            assert ours(strewn, settings) == expected, (plain, strewn)
            if isinstance(expected, Namespace):
                accepted += 1
                assert settings == [Settings(**said)], strewn
    capsys.readouterr()
    assert accepted > CASES_PER_SEED / 5


def test_the_generator_covers_every_flag_of_torchrun() -> None:
    generated = set(VALUES) | set(SWITCHES) | set(ODD) | {s[:2] for s in SHORT}
    assert generated >= KNOWN


ALPHABET = [*SWITCHES, *SHORT, *ODD, *VALUES, "--", "x", "3", "--fast-slots", "--fast-slots=2", "--fast-flush", "a b"]


@pytest.mark.parametrize("seed", range(5))
def test_arguments_in_any_order_without_our_options_are_parsed_as_torchrun_does(
    seed: int, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """Not even command lines: where ours has nothing to say it changes nothing."""
    rng = random.Random(seed)
    alphabet = [a for a in ALPHABET if not a.startswith("--fast-")] + list(string.ascii_letters[:3])
    for _ in range(60):
        argv = [rng.choice(alphabet) for _ in range(rng.randint(0, 7))]
        assert ours(argv, []) == theirs(argv), argv
    capsys.readouterr()
