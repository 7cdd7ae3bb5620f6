"""The loss curve of a run with a failure, over that of the uninterrupted run."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from examples.gpt2.report import Event, Failure

_REFERENCE, _BEFORE, _AFTER, _VALIDATION, _KILL = "#b8c4d0", "#1f5fa8", "#d9730d", "#2a7f4f", "#c4262e"


def draw(path: Path, failure: Failure, reference: Sequence[Event], records: Sequence[Event]) -> None:
    """Write a PNG: the whole run on the left, the steps around the failure on the right."""
    figure = Figure(figsize=(13, 5.6), dpi=110, layout="constrained")
    whole, close = figure.subplots(1, 2, width_ratios=(3, 2))
    before, after = _parts(failure, records)
    _draw_whole(whole, failure, reference, before, after)
    _draw_close(close, failure, reference, before, after)
    for axes in (whole, close):
        axes.set_xlabel("step")
        axes.set_ylabel("loss (nats per byte)")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    shown = {
        label: handle
        for axes in (whole, close)
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(shown.values(), shown.keys(), loc="outside lower center", ncols=len(shown), frameon=False)
    figure.suptitle(
        f"GPT-2, worker {failure.local_rank} killed after step {failure.last_step}: "
        f"resumed at step {failure.resumed_step} from {failure.tier}, training on after {failure.back:.1f} s",
        fontsize=13,
    )
    figure.savefig(path)


def _parts(failure: Failure, records: Sequence[Event]) -> tuple[Sequence[Event], Sequence[Event]]:
    """Return the records from before and after the restart; together they have every step to the end once."""
    cut = len(records) - (records[-1]["step"] - failure.resumed_step)
    return records[:cut], records[cut:]


def _points(records: Sequence[Event], key: str = "loss") -> tuple[list[int], list[float]]:
    found = [record for record in records if key in record]
    return [record["step"] for record in found], [float.fromhex(record[key]) for record in found]


def _draw_whole(
    axes: Axes, failure: Failure, reference: Sequence[Event], before: Sequence[Event], after: Sequence[Event]
) -> None:
    axes.plot(*_points(reference), color=_REFERENCE, lw=5, label="uninterrupted run")
    axes.plot(*_points(before), color=_BEFORE, lw=1.2, label="done before the kill")
    axes.plot(*_points(after), color=_AFTER, lw=1.2, label="done after the resume")
    axes.plot(*_points(reference, "validation"), "o", ms=12, mfc="none", color=_VALIDATION)
    axes.plot(
        *_points([*before, *after], "validation"),
        "o",
        ms=5,
        color=_VALIDATION,
        label="validation (ring: uninterrupted)",
    )
    axes.axvline(failure.last_step, color=_KILL, lw=1.5, ls="--", label=f"SIGKILL, worker {failure.local_rank}")
    axes.set_title("the whole run", fontsize=11)


def _draw_close(
    axes: Axes, failure: Failure, reference: Sequence[Event], before: Sequence[Event], after: Sequence[Event]
) -> None:
    margin = max(6, len(failure.repeated))
    near = range(failure.resumed_step - margin, failure.last_step + margin + 1)
    reference, before, after = ([r for r in part if r["step"] in near] for part in (reference, before, after))
    axes.plot(*_points(reference), "-", lw=7, color=_REFERENCE)
    axes.plot(*_points(before), "o-", ms=11, lw=1.4, mfc="none", mew=1.6, color=_BEFORE)
    axes.plot(*_points(after), "o-", ms=5, lw=1.4, color=_AFTER)
    axes.axvline(failure.last_step + 0.5, color=_KILL, lw=1.5, ls="--")
    if failure.repeated:
        first, last = failure.repeated[0], failure.repeated[-1]
        label = f"steps done twice: {len(failure.repeated)}"
        axes.axvspan(first - 0.5, last + 0.5, color=_KILL, alpha=0.1, lw=0, label=label)
    axes.set_title("around the kill", fontsize=11)
