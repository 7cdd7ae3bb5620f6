"""The command `fastckpt`: looks at checkpoints, jobs and nodes, changes checkpoints, and tries recovery."""

from collections.abc import Mapping, Sequence

import click

from fastckpt_run.cli.chaos import chaos
from fastckpt_run.cli.check import check
from fastckpt_run.cli.diff import diff
from fastckpt_run.cli.doctor import doctor
from fastckpt_run.cli.drain import drain
from fastckpt_run.cli.explain import explain
from fastckpt_run.cli.export import export
from fastckpt_run.cli.ls import ls
from fastckpt_run.cli.plan import plan
from fastckpt_run.cli.prove import prove
from fastckpt_run.cli.prune import prune
from fastckpt_run.cli.report import report
from fastckpt_run.cli.shm import shm
from fastckpt_run.cli.show import show
from fastckpt_run.cli.top import top
from fastckpt_run.cli.verify import verify
from fastckpt_run.cli.which import which
from fastckpt_run.commands import version_line


def _show_version(context: click.Context, _: click.Parameter, asked: bool) -> None:
    if asked and not context.resilient_parsing:
        click.echo(version_line("fastckpt"))
        context.exit()


GROUPS: Mapping[str, Sequence[click.Command]] = {
    "Checkpoints": (ls, show, which, verify, diff, export, prune),
    "Jobs": (plan, top, report, drain),
    "Hosts": (doctor, check, shm),
    "Tests with kills": (chaos, prove),
    "Messages": (explain,),
}
"""The commands, as the help lists them."""
_LONGEST = 70
"""Characters of the line of a command."""


class _Commands(click.Group):
    """The commands; one that starts a job is no part of them."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands of each group, each with the first line of its help."""
        for group, commands in GROUPS.items():
            with formatter.section(group):
                rows = [(f"{command.name:<7}", command.get_short_help_str(_LONGEST)) for command in commands]
                formatter.write_dl(rows)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Same as click's; raises UsageError with the name of the launcher for `fastckpt run`."""
        if args[0] in ("run", "launch"):
            raise click.UsageError(f"the launcher is fastckpt-run: fastckpt-run {' '.join(args[1:])}".rstrip(), ctx)
        return super().resolve_command(ctx, args)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_show_version, help="Show it and exit."
)
def main() -> None:
    """Look at checkpoints, check, compare, export and remove them; report on jobs; explain messages.

    DIR is a checkpoint directory. DIR@STEP is one of its checkpoints, DIR@STEP.HISTORY that of one history, DIR@latest
    the newest. A tier may follow, as in DIR@latest:memory. An existing path with an @ is that path.

    With --json each command prints one JSON document, and nothing else, to standard output.

    \b
    Exit codes:
    0  success
    1  a finding: something bad, a difference, a problem, or a refusal
    2  no answer: wrong usage, no such checkpoint or job, or an unreadable file
    """


for _commands in GROUPS.values():
    for _command in _commands:
        main.add_command(_command)
