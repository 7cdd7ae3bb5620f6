"""Jobs of the training with a layout of its own."""

from pathlib import Path

from tests.faults.conftest import new_job, uninterrupted  # noqa: F401 (fixtures)

PROGRAM = str(Path(__file__).with_name("train.py"))
