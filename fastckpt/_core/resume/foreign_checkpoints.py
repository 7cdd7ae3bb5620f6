"""Refuses to start afresh beside checkpoints that something else wrote."""

from pathlib import Path

from fastckpt._core.client.collective import Agreement
from fastckpt._core.storage.local import foreign_files as f
from fastckpt._core.storage.store import is_url
from fastckpt.errors import NoLoadableCheckpoint

_WAYS = {
    f.FLASH: "DdpCheckpointer.load_checkpoint(resume_path='{path}/rank_0.pt')",
    f.DCP: "FsdpShardCheckpointer.load_checkpoint(model, optimizer, resume_path='{path}')",
    f.TORCH: "DdpCheckpointer.load_checkpoint(resume_path='{path}')",
    f.LIGHTNING: "trainer.fit(model, ckpt_path='{path}')",
    f.DEEPSPEED: "DeepSpeedCheckpointer.load_checkpoint('{parent}', tag='{name}')",
    f.TRAINER: "FastCheckpointTrainer.train(resume_from_checkpoint='{path}')",
    f.ACCELERATE: "AccelerateCheckpointer.load_state('{path}')",
}


def refuse_foreign(directory: str, ranks: Agreement) -> None:
    """Raise NoLoadableCheckpoint, in all ranks, if a directory without checkpoints of ours has others'.

    All ranks call it when there is nothing of ours to load. What lies at a URL is not looked at.
    """
    said = ranks.gather(_found(directory))
    if text := next(filter(None, said), ""):
        raise NoLoadableCheckpoint(text)


def _found(directory: str) -> str:
    if is_url(directory):
        return ""
    try:
        found = f.foreign(Path(directory))
    except OSError as error:
        return f"{directory} cannot be searched for checkpoints of others: {error}"
    if not found:
        return ""
    path, writer = max(found, key=lambda each: each.path.stat().st_mtime)
    way = _WAYS.get(writer, "").format(path=path, parent=path.parent, name=path.name)
    more = f", nor of {len(found) - 1} more there" if len(found) > 1 else ""
    return (
        f"{directory} holds no checkpoint of fastckpt, but {path}, which {writer} seems to have written: training would"
        f" start afresh, without the state of that{more}. {f'Load it with {way}, or' if way else 'Load it'} by what "
        f"wrote it, and save to another checkpoint directory. To start afresh, move it elsewhere."
    )
