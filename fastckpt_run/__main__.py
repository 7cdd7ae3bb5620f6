"""``python -m fastckpt_run`` is the command fastckpt-run."""

from fastckpt_run.commands import launch

launch()
