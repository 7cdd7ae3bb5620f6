"""`fastckpt export`: takes a state out of a checkpoint into a file of its own."""

from pathlib import Path

import click

from fastckpt._core.byte_sizes import decimal
from fastckpt._core.config import Settings
from fastckpt._core.format.manifest import METADATA, MODEL
from fastckpt._core.inspect.checkpoint_files import find
from fastckpt._core.inspect.work_progress import WorkObserver
from fastckpt_run.cli.output import CommandOutput, Screen, answering
from fastckpt_run.cli.progress import observed


@click.command()
@click.argument("checkpoint", metavar="DIR[@STEP]")
@click.argument("out", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--format", "kind", type=click.Choice(["safetensors", "torch"]), help="Default: as OUT is named.")
@click.option("--file", "name", default="", metavar="NAME", help="The file to export (default: model.pt or .metadata).")
@click.option("--only", default="", metavar="KEYS", help="Part of the state to export, such as model.")
@click.option("--force", is_flag=True, help="Replace OUT if it exists.")
@answering
@observed
def export(
    checkpoint: str, out: Path, kind: str | None, name: str, only: str, force: bool, observer: WorkObserver
) -> CommandOutput:
    """Write the state of a checkpoint as safetensors or by torch.save.

    Shards of DCP are combined. The file is compared with its digest first; OUT appears complete or not at all. In
    safetensors, names are joined by dots, and numbers and strings become metadata; anything else is refused by
    name.
    """
    from fastckpt._core.inspect.export import ExportOrder, export_file

    source = find(checkpoint, Settings.from_environment().arenas)
    alone = next(iter(source.files)) if len(source.files) == 1 else MODEL
    name = name or (METADATA if METADATA in source.files else alone)
    file = source.file(name)
    kind = kind or ("safetensors" if out.suffix == ".safetensors" else "torch")
    export_file(file, out, ExportOrder(kind, only, force), source.check_unchanged, observer)
    written = out.stat().st_size
    document = {"source": str(file.path), "out": str(out), "format": kind, "only": only, "size": written}

    def show(screen: Screen) -> None:
        screen.line(f"{file.path} -> {out} ({kind}, {decimal(written)})")

    return CommandOutput(document, show)
