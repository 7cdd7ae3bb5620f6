"""Lightning in the process from which workers are forked: each has its own rank, as if it had imported it itself."""

import subprocess
from pathlib import Path

import pytest

from fastckpt_run.preload.preloader import ForkedWorker
from tests.e2e.launcher.preloading import Starter, template

pytestmark = pytest.mark.frameworks

PACKAGES = {"lightning.fabric", "lightning.pytorch", "lightning_fabric", "pytorch_lightning", "torchmetrics"}
SEEN = f"""
import json, logging, os, sys
import {", ".join(sorted(PACKAGES))}
from lightning_utilities.core import rank_zero

ranks = [module.rank_zero_only.rank for name, module in sorted(sys.modules.items()) if "rank_zero_only" in vars(module)]
loggers = [logging.getLogger(name) for name in {sorted([*PACKAGES, "lightning", ""])}]
handlers = [[[type(h).__name__, h.level, h.formatter and h.formatter._fmt] for h in each.handlers] for each in loggers]
levels = [[each.level, each.propagate] for each in loggers]
variables = {{name: value for name, value in os.environ.items() if name != "PROBE"}}
json.dump([ranks, handlers, levels, variables], open(os.environ["PROBE"], "w"))
"""
MODULES = "import json, os, sys\njson.dump(sorted(sys.modules), open(os.environ['PROBE'], 'w'))\n"


def test_a_forked_worker_has_its_own_rank_in_lightning_fabric_and_torchmetrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "train.py"
    script.write_text(SEEN)
    with template("train.py", "auto") as preloader:
        preloader.wait()
        starter = Starter(tmp_path, preloader)
        runs = starter.both("train.py", RANK="3", LOCAL_RANK="1", WORLD_SIZE="4")
        executed, forked = [(run.wait(), run.told()) for run in runs]
        script.write_text(MODULES)
        modules = starter.start(preloader, ("train.py",), {})
        assert modules.wait() == (0, "", "")
    assert [type(run.handler.proc) for run in (*runs, modules)] == [subprocess.Popen, ForkedWorker, ForkedWorker]
    assert set(modules.told()) >= PACKAGES
    assert forked == executed
    assert set(forked[1][0]) == {3, 1}, "torchmetrics keeps the local rank"
