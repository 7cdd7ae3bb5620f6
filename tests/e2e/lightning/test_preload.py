"""Lightning in the process from which workers are forked: each reads its own rank (tests/e2e/dcp/one_sided.py)."""

import sys

import lightning.pytorch
import lightning_fabric.utilities.rank_zero
import pytest
import torchmetrics

from fastckpt_run.preload import import_effects

pytestmark = pytest.mark.frameworks

MODULES = {lightning.pytorch, lightning_fabric, torchmetrics}
KEEPERS = [each.rank_zero_only for each in [*sys.modules.values()] if "rank_zero_only" in getattr(each, "__dict__", ())]


def test_a_worker_reads_its_own_rank_where_lightning_fabric_and_torchmetrics_keep_it(monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("LOCAL_RANK", "1")
    for keeper in KEEPERS:
        monkeypatch.setattr(keeper, "rank", 0)
    assert len([*import_effects.unknown()]) == len(MODULES), "each of them would keep the rank of the template"
    import_effects.read_ranks()
    assert {keeper.rank for keeper in KEEPERS} == {3, 1}, "torchmetrics keeps the local rank"
    assert not [*import_effects.unknown()]
    assert import_effects.variables() == {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
