"""Names of Lightning that are not public; tried with Lightning 2.6."""

from typing import Any

from lightning.pytorch import Trainer


def is_validated_next(trainer: Trainer) -> bool:
    """Return whether Lightning validates once the hooks of this training batch have run; called in these hooks.

    By time (``Trainer(val_check_interval="00:10:00")``) each rank has a clock of its own: False then, on all alike.
    """
    fit = trainer.fit_loop
    if getattr(trainer, "_val_check_time_interval", None) is not None:
        return False
    return bool(fit.epoch_loop._should_check_val_fx(fit._data_fetcher))  # type: ignore[arg-type]


def has_stepped(trainer: Trainer) -> bool:
    """Return whether the optimizers have stepped with the newest batch, so that no gradients wait for more."""
    return not trainer.fit_loop.epoch_loop._should_accumulate()


def is_in_batch_hooks(trainer: Trainer) -> bool:
    """Return whether the hooks of a training batch's end are running."""
    batches: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    return bool(batches.completed < batches.processed)


def progress(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """The progress of the training loops when a checkpoint was made."""
    fit = checkpoint["loops"]["fit_loop"]
    return {name: fit[name] for name in fit if name.endswith("progress")}
