"""Jobs that offload their activations, and their scratch directory."""

import os
from pathlib import Path

import pytest

from tests.faults.conftest import new_job  # noqa: F401 (a fixture)
from tests.support.offload_budget import budget_is_kept  # noqa: F401 (a fixture)

PROGRAM = str(Path(__file__).with_name("train.py"))


@pytest.fixture
def scratch(tmp_path):
    path = tmp_path / "scratch"
    path.mkdir()
    yield path
    assert os.listdir(path) == [], "nothing is left, whatever befell the job"
