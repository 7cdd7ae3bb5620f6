"""Reads the command line of a script that is to be proved: options of fastckpt-run, the script, its arguments."""

from collections.abc import Sequence
from pathlib import Path

from torch.distributed.run import parse_min_max_nnodes

from fastckpt._core.config import Settings
from fastckpt.errors import ConfigError
from fastckpt_run import script_analysis
from fastckpt_run.options import parse
from fastckpt_run.proof.directory_setting import DirectorySetting, find_setting
from fastckpt_run.proof.script_run import ProvedCommand

OWN = ("--kills", "--seed", "--folder", "--timeout", "--dir-argument", "--dir-variable", "--json")
"""Options of the command that stand before those of fastckpt-run."""


def read_command(what: Sequence[str], argument: str, variable: str, kills: int) -> ProvedCommand:
    """Read a command line.

    Args:
        what: All that follows the options of `fastckpt prove`.
        argument: The script's option for its directory, if the user names it.
        variable: The same for a variable of the environment.
        kills: Number of kills.

    Raises:
        ConfigError: The script cannot be tried with it.
        click.UsageError: It is none.
    """
    if argument and variable:
        raise ConfigError(f"--dir-argument {argument} and --dir-variable {variable} are both given: give one of them")
    for name in OWN:
        before = [each for each in what[: _before_script(what)] if each.partition("=")[0] == name]
        if before:
            raise ConfigError(f"{name} stands behind an option of fastckpt-run: options of this command come first")
    settings, namespace = parse(what)
    script, given = str(namespace.training_script), [str(each) for each in namespace.training_script_args]
    options = list(what[: _place_of(script, what, len(given))])
    if options[-1:] == ["--"]:
        options.pop()
    _check_shape(namespace.nnodes, namespace.max_restarts, kills)
    is_file = not (namespace.module or namespace.no_python)
    if is_file and not Path(script).is_file():
        raise ConfigError(f"there is no script {script}; give the path of one")
    if not namespace.standalone and not namespace.rdzv_endpoint and namespace.rdzv_backend in ("static", "c10d"):
        options.append("--standalone")
    source = script_analysis.read([*(["-m"] if namespace.module else []), script, *given])
    setting = DirectorySetting(argument, variable) if argument or variable else find_setting(source, script)
    return ProvedCommand(
        options,
        script,
        given,
        setting,
        restarts=namespace.max_restarts,
        shm_dir=_arenas(settings),
        tree=source.tree,
        logs=bool(namespace.log_dir),
    )


def _arenas(settings: Settings) -> str:
    if not Path(settings.arenas).is_dir():
        raise ConfigError(f"{settings.arenas} is no directory for memory: give one with --fast-shm-dir")
    return settings.arenas


def _check_shape(nnodes: str, restarts: int, kills: int) -> None:
    nodes = parse_min_max_nnodes(nnodes)[1]
    if nodes > 1:
        raise ConfigError(
            f"--nnodes is {nnodes}: a script is proved on one host; give --nnodes 1 and the ranks of a node with "
            "--nproc-per-node, and see fastckpt chaos for a job on several hosts"
        )
    if 0 < restarts < kills:
        raise ConfigError(
            f"--max-restarts is {restarts}, which {kills} kills use up: give {kills} or more, leave it out, or give "
            f"--kills {restarts}"
        )


def _before_script(what: Sequence[str]) -> int:
    """Return the index of the first file in the command line; options come before it."""
    return next((place for place, each in enumerate(what) if each.endswith(".py")), 0)


def _place_of(script: str, what: Sequence[str], arguments: int) -> int:
    place = len(what) - arguments - 1
    if not (0 <= place < len(what) and what[place] == script):  # argparse drops a "--"
        place = what.index(script)
    return place
