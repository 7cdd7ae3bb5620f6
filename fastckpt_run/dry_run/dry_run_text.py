"""The text of `fastckpt-run --fast-dry-run`: the steps of a launch, section by section."""

import re
from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, replace
from typing import Any

from torch.distributed.run import get_args_parser

from fastckpt._core.config import Settings, copy_of_environment, variable
from fastckpt._core.policy.node_check import CheckResult
from fastckpt_run.cli.output import Screen
from fastckpt_run.doctor import catalogue, shm_checks
from fastckpt_run.doctor.diagnosis import Diagnosis, Subject, without_secrets
from fastckpt_run.doctor.examination import of_directory, run
from fastckpt_run.dry_run.launch_reading import ReadLaunch, read_launch
from fastckpt_run.exit_codes import BAD_NODE
from fastckpt_run.formatting import count
from fastckpt_run.node_check.check_process import CheckProcess
from fastckpt_run.options import PREFIX, CommandLine
from fastckpt_run.preload.preloader import AUTO, is_off, runs_script, unfit
from fastckpt_run.script_analysis import read as read_script

DEADLINE = 30.0
"""Seconds that one look at a directory may take."""
UNKNOWN = (
    "unknown until the script constructs its checkpointer: give the directory as an argument of the script, such as "
    "--checkpoint-dir DIR, or look at it with: fastckpt which DIR, fastckpt doctor DIR"
)
_SECRET = re.compile(r"(?i)--?[\w-]*(token|secret|password|passwd|api[_-]?key|credential)s?")
"""Options of scripts with a value that is not printed."""
Row = Sequence[str]


def show_dry_run(command: CommandLine) -> None:
    """Print the steps of a launch. Raises a launch's errors; starts, writes and changes nothing."""
    launch, screen = read_launch(command), Screen()
    screen.line("dry run: nothing is started, written or changed")
    _section(screen, "launch", _launch(command, launch))
    _section(screen, "rendezvous", _rendezvous(launch))
    screen.line("")
    screen.table(["OPTION", "VALUE", "FROM"], [*_ours(command), *_of_torchrun(command.torchrun)])
    subject = _subject(command, launch)
    with CheckProcess(DEADLINE) as process:
        found = process.directories(_command(launch), command.settings.arenas)
        known = [] if isinstance(found, CheckResult) else found
        screen.line("")
        screen.line("this node")
        # Not the trial write: a dry run writes nothing.
        looked = [check for check in catalogue.SHARED_MEMORY if check is not shm_checks.shared_memory_writes]
        _show(screen, run(process, looked, subject))
        # Here, where torch has been imported: their questions have an answer, or a deadline.
        _show(screen, (line for check in catalogue.NETWORK for line in catalogue.lines_of(check, subject)))
        for directory, how in known:
            screen.line("")
            screen.line(f"checkpoint directory {without_secrets(directory)} ({how})")
            _show(screen, of_directory(process, replace(subject, directory=directory), storage=False))
        if not known:
            screen.line("")
            screen.line(f"checkpoint directory: {found.message if isinstance(found, CheckResult) else UNKNOWN}")
            _show(screen, of_directory(process, subject))


def _launch(command: CommandLine, launch: ReadLaunch) -> Iterator[Row]:
    config, spec, settings = launch.config, launch.spec, command.settings
    yield "script", " ".join(_without_secrets(_command(launch)))
    yield "run by", _run_by(spec.entrypoint, [str(each) for each in spec.args])
    nodes = count(config.max_nodes, "node")
    ranks = count(config.max_nodes * config.nproc_per_node, "rank")
    if config.min_nodes < config.max_nodes:
        nodes, ranks = f"{config.min_nodes} to {nodes}", f"up to {ranks}"
    yield "workers", f"{config.nproc_per_node} on {'each of ' * (config.max_nodes > 1)}{nodes}: {ranks}"
    yield "start", _start(settings, launch)
    yield (
        "restarts",
        f"{config.max_restarts} at most"
        + (f", {settings.restart_budget} given back for progress" if settings.restart_budget else ""),
    )
    check = f"before it joins; one that fails ends with code {BAD_NODE}" if settings.node_check else "off"
    yield "node check", check
    kept = [f"--fast-events {settings.events}"] if settings.events else []
    kept += ["the checkpoint directory"] if settings.event_log else []
    yield "events", f"to {' and '.join(kept)}" if kept else "written to no file"
    served = [f"metrics at {settings.metrics_port}"] if settings.metrics_port else []
    served += [f"TensorBoard's files in {settings.tensorboard}"] if settings.tensorboard else []
    yield "watch", " and ".join(served) or "nothing is served"


def _run_by(entrypoint: Any, arguments: Sequence[str]) -> str:
    if callable(entrypoint):
        return "--run-path, in this interpreter"
    return " ".join([str(entrypoint), *(each for each in arguments[:2] if each in ("-u", "-m"))])


def _start(settings: Settings, launch: ReadLaunch) -> str:
    """Describe how workers are started, as far as that is known."""
    choice = settings.preload
    if is_off(choice):
        return "executed: --fast-no-preload"
    why = unfit(launch.spec)
    if not why and choice == AUTO:
        why = read_script([str(each) for each in launch.spec.args[1:]]).unsettling
    what = "torch, fastckpt and what the script imports first" if choice == AUTO else choice
    return f"executed: {why}" if why else f"forked from a process that has imported {what}"


def _without_secrets(arguments: Sequence[str]) -> Iterator[str]:
    """Arguments of a script, without values of options for secrets."""
    is_secret = False
    for argument in arguments:
        option, equals, _ = argument.partition("=")
        if is_secret:
            yield "***"
            is_secret = False
            continue
        is_option = _SECRET.fullmatch(option) is not None
        yield f"{option}=***" if is_option and equals else argument
        is_secret = is_option and not equals


def _rendezvous(launch: ReadLaunch) -> Iterator[Row]:
    config = launch.config
    yield "backend", f"{config.rdzv_backend}, {'of fastckpt' if launch.is_ours else 'of torch'}"
    yield "job", config.run_id or "a name is drawn"
    yield "endpoint", config.rdzv_endpoint or "none"
    if not launch.is_ours:
        yield "store", "held as that backend has it"
    elif config.max_nodes == 1 and config.rdzv_endpoint == "localhost:0":
        yield "store", "held by this agent, at a free port"
    else:
        yield "store", "held by the first of these hosts on which an agent lives; see their lines below"


def _ours(command: CommandLine) -> Iterator[Row]:
    """Our settings, and where each is from."""
    environment = copy_of_environment()
    for field in fields(Settings):
        name, value = field.name, getattr(command.settings, field.name)
        flag = f"{PREFIX}-{name.replace('_', '-')}"
        source = "option" if name in command.given else "default"
        if source == "default" and variable(name) in environment:
            source = f"variable {variable(name)}"
        yield flag, _value(value), source


def _of_torchrun(arguments: Namespace) -> Iterator[Row]:
    """torchrun's options that are not as by default, and where they are from."""
    parser, environment = get_args_parser(), copy_of_environment()
    defaults = vars(parser.parse_args(["script"]))  # values of PET variables are among them
    for name, value in vars(arguments).items():
        if name in ("training_script", "training_script_args"):
            continue
        pet = f"PET_{name.upper()}"
        if value != defaults.get(name):
            yield f"--{name.replace('_', '-')}", _value(value), "option"
        elif pet in environment:
            yield f"--{name.replace('_', '-')}", _value(value), f"variable {pet}"


def _value(value: object) -> str:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else without_secrets(str(value)) or "-"


def _subject(command: CommandLine, launch: ReadLaunch) -> Subject:
    config = launch.config
    # "static" is torch's default for --rdzv-backend: --master-addr and --master-port, or one endpoint.
    has_hosts = launch.is_ours or (config.rdzv_backend == "static" and config.max_nodes > 1)
    own = config.rdzv_endpoint if has_hosts and config.rdzv_endpoint != "localhost:0" else ""
    return Subject(
        endpoints=own,
        settings=command.settings.to_environment(),
        nodes=config.max_nodes,
        ranks=config.nproc_per_node,
    )


def _command(launch: ReadLaunch) -> list[str]:
    """The script, or -m and a module, with its arguments."""
    spec = launch.spec
    arguments = [str(each) for each in spec.args]
    if runs_script(spec):
        return arguments[1:]
    return arguments if callable(spec.entrypoint) else [str(spec.entrypoint), *arguments]


def _section(screen: Screen, title: str, rows: Iterator[Row]) -> None:
    screen.line("")
    screen.line(title)
    for name, text in rows:
        screen.line(f"  {name:<12}{without_secrets(text)}")


def _show(screen: Screen, lines: Iterable[Diagnosis]) -> None:
    for line in lines:
        screen.line(f"  {line.state:<9}{line.name}: {line.found}")
        if line.remedy:
            screen.line(f"  {'':<9}-> {line.remedy}")
