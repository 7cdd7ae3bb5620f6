"""Jobs of the training with Lightning, and runs that nothing befell to compare them with."""

from pathlib import Path

from tests.faults.conftest import new_job, reference_runs  # noqa: F401 (a fixture)
from tests.faults.jobs import run_without_fastckpt

PROGRAM = str(Path(__file__).with_name("train.py"))
OPTIONS = {"program": PROGRAM}


uninterrupted = reference_runs(**OPTIONS)


def run_stock(folder: Path, *arguments: object) -> None:
    """Run the stock program on two ranks; ``folder`` is for the launcher's logs."""
    run_without_fastckpt(folder, Path(__file__).with_name("stock.py"), *arguments)
