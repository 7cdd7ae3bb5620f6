"""`fastckpt prove`: a script run with and without kills, compared bit for bit."""

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fastckpt._core.config import large_files
from fastckpt.errors import ConfigError
from fastckpt_run.cli.output import FINDING, CommandOutput, answering, number, plain
from fastckpt_run.plan.quantities import positive_seconds

if TYPE_CHECKING:
    from fastckpt_run.proof.proof import Proof, ProofPlan
    from fastckpt_run.proof.run_comparison import RunComparison
    from fastckpt_run.proof.script_run import ProvedCommand, Starter

PREFIX = "fastckpt-prove-"


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--dir-argument", metavar="ARG", default="", help="The script's option for its directory.")
@click.option("--dir-variable", metavar="NAME", default="", help="The environment variable for it.")
@click.option("--kills", type=click.IntRange(min=1), default=3, metavar="N", help="Kills of workers (3).")
@click.option("--seed", type=int, default=0, metavar="N", help="Seed of steps, ranks and phases of kills (0).")
@click.option("--baseline-twice/--no-baseline-twice", "twice", default=None, help="Two runs without kills.")
@click.option("--folder", metavar="DIR", default="", help="Folder of all runs, which is kept (default: temporary).")
@click.option("--timeout", type=positive_seconds, metavar="TIME", default="1h", help="Limit of each run (1h).")
@click.argument(
    "what", metavar="[FASTCKPT-RUN OPTION]... SCRIPT [ARG]...", nargs=-1, required=True, type=click.UNPROCESSED
)
@answering
def prove(what: tuple[str, ...], folder: str, timeout: float, **options: Any) -> CommandOutput:
    """Run a script with and without kills, and compare both bit for bit.

    Each run is a launch of fastckpt-run with its own checkpoint directory. The source shows how the script's directory
    is set, unless an option does: --out, out= (hydra), or 2 for the second positional argument.

    It compares all values of fastckpt.metrics.log, repeated steps with their first execution, and each durable
    checkpoint. If they differ, one more run without kills shows if the script varies by itself. docs/operate/chaos.md
    has an example.

    Exit code: 0 if all is equal; 1 if not; 2 if it cannot be tried.
    """
    from fastckpt_run.proof.launch_command import read_command
    from fastckpt_run.proof.proof import ProofPlan
    from fastckpt_run.views import proof_text

    argument, name = options.pop("dir_argument"), options.pop("dir_variable")
    command = read_command(what, argument, name, options["kills"])
    proof, kept = run_proof(command, ProofPlan(**options), folder, timeout)
    document = _document(proof, kept)

    def show(screen: Any) -> None:
        proof_text.show(screen, proof)
        if kept:
            screen.line(f"all runs are in {kept}")

    return CommandOutput(document, show, 0 if proof.proven else FINDING)


def run_proof(
    command: "ProvedCommand", plan: "ProofPlan", folder: str, timeout: float, start: "Starter | None" = None
) -> "tuple[Proof, str]":
    """Run a proof; returns it, and the folder of its runs if that is kept. ``start`` starts launchers otherwise."""
    from fastckpt_run.bound_launch import orderly_end, own_memory_place, start_bound
    from fastckpt_run.proof.proof import prove as prove_script
    from fastckpt_run.proof.script_run import ScriptRunner

    with orderly_end(), _base(folder) as base, own_memory_place(PREFIX, command.shm_dir) as memory:
        runner = ScriptRunner(command, base.path, memory, start or start_bound, timeout)
        proof = prove_script(
            runner, plan, str(memory), command.tree, lambda line: click.echo(f"fastckpt: {plain(line)}", err=True)
        )
        base.kept = base.kept or not proof.proven
    return proof, str(base.path) if base.kept else ""


@dataclass
class _Base:
    """The folder of all runs."""

    path: Path
    kept: bool


@contextlib.contextmanager
def _base(folder: str) -> Iterator[_Base]:
    """A folder that was given, which is new or empty, and is kept; or one of our own, removed unless it shows more."""
    if folder:
        path = Path(folder)
        if path.exists() and not path.is_dir():
            raise ConfigError(f"{folder} is no directory: give one that is new, or empty, with --folder")
        if path.is_dir() and (names := sorted(each.name for each in path.iterdir())):
            raise ConfigError(f"{folder} is not empty (it has {names[0]}): give another folder, which is new or empty")
        path.mkdir(parents=True, exist_ok=True)
        yield _Base(path.resolve(), kept=True)
        return
    base = _Base(Path(tempfile.mkdtemp(prefix=PREFIX, dir=large_files())).resolve(), kept=False)
    try:
        yield base
    finally:
        if not base.kept:
            shutil.rmtree(base.path, ignore_errors=True)


# --- JSON


def _document(proof: "Proof", kept: str) -> dict[str, Any]:
    return {
        "proven": proof.proven,
        "kills": [
            {**asdict(kill), "made": note and {"step": note["step"], "phase": note["phase"]}}
            for kill, note in proof.kills
        ],
        "resumed": {
            str(rank): [{"step": start.loaded, "tier": start.tier} for start in starts if start.loaded is not None]
            for rank, starts in sorted(proof.killed.history.starts.items())
        },
        "exit_code": proof.killed.code,
        **_comparison(proof.found),
        "again": _comparison(proof.again) if proof.again else None,
        "causes": [asdict(cause) for cause in proof.causes],
        "notes": proof.notes,
        "folder": kept or None,
        "seconds": {run.name: run.seconds for run in (proof.plain, proof.killed)},
    }


def _comparison(found: "RunComparison") -> dict[str, Any]:
    value, state = found.value, found.state
    return {
        "equal": found.equal,
        "values": {"compared": found.values, "repeated": found.repeats, "differ": found.differing},
        "checkpoints": {"steps": found.steps, "files": found.files, "identical": found.identical},
        "last": list(found.last),
        "first_step": found.first_step,
        "first_value": value
        and {
            **value.of._asdict(),
            "a": number(value.a),
            "b": number(value.b),
            "repeated": value.repeated,
            "resumed": value.start.loaded if value.start else None,
        },
        "first_checkpoint": state
        and {
            "step": state.step,
            "only": state.only,
            "names": state.names,
            "changes": [{"file": file, **asdict(change)} for file, change in state.changes],
            "tensors": [
                {"name": name, **asdict(distance), "max_abs": number(distance.max_abs)}
                for name, distance in state.tensors.items()
            ],
        },
    }
