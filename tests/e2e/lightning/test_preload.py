"""Lightning in the process from which workers are forked: each has its own rank, as if it had imported it itself."""

import json
import subprocess
from pathlib import Path

import pytest

from fastckpt_run.preload.preloader import ForkedWorker
from tests.e2e.launcher.preloading import Starter, template
from tests.faults.jobs import run_forked
from tests.support.json_lines import whole_lines

pytestmark = pytest.mark.frameworks

SEEN = """
import json, logging, os, sys
import {fabric}, {pytorch}, torchmetrics
from lightning_utilities.core import rank_zero

ranks = [module.rank_zero_only.rank for name, module in sorted(sys.modules.items()) if "rank_zero_only" in vars(module)]
loggers = [logging.getLogger(name) for name in ("lightning", "{fabric}", "{pytorch}", "torchmetrics", "")]
handlers = [[[type(h).__name__, h.level, h.formatter and h.formatter._fmt] for h in each.handlers] for each in loggers]
levels = [[each.level, each.propagate] for each in loggers]
variables = {{name: value for name, value in os.environ.items() if name != "PROBE"}}
json.dump([ranks, handlers, levels, variables], open(os.environ["PROBE"], "w"))
"""
MODULES = "import json, os, sys\njson.dump(sorted(sys.modules), open(os.environ['PROBE'], 'w'))\n"
KILLED = """
import json, os, signal, time
import lightning.pytorch
import torchmetrics.utilities.prints
from lightning_utilities.core.rank_zero import rank_zero_only
from fastckpt.lightning import FastCheckpointIO

rank, start = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
kept = [rank_zero_only.rank, torchmetrics.utilities.prints.rank_zero_only.rank]
with open(f"{os.environ['TMPDIR']}/kept.{start}.{rank}", "w") as file:
    json.dump([kept, time.monotonic()], file)
if start == "0" and rank == "1":
    os.kill(os.getpid(), signal.SIGKILL)
if start == "0":
    signal.pause()
"""


@pytest.mark.parametrize(
    ("fabric", "pytorch"), [("lightning.fabric", "lightning.pytorch"), ("lightning_fabric", "pytorch_lightning")]
)
def test_a_forked_worker_has_its_own_rank_in_lightning_fabric_and_torchmetrics(
    fabric: str, pytorch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "train.py"
    script.write_text(SEEN.format(fabric=fabric, pytorch=pytorch))
    with template("train.py", "auto") as preloader:
        preloader.wait()
        starter = Starter(tmp_path, preloader)
        runs = starter.both("train.py", RANK="3", LOCAL_RANK="1", WORLD_SIZE="4")
        executed, forked = [(run.wait(), run.told()) for run in runs]
        script.write_text(MODULES)
        modules = starter.start(preloader, ("train.py",), {})
        assert modules.wait() == (0, "", "")
    assert [type(run.handler.proc) for run in (*runs, modules)] == [subprocess.Popen, ForkedWorker, ForkedWorker]
    assert {fabric, pytorch, "torchmetrics"} <= set(modules.told())
    assert forked == executed
    assert set(forked[1][0]) == {3, 1}, "torchmetrics keeps the local rank"


def test_lightning_is_preloaded_for_a_job_and_each_restarted_worker_has_its_rank(
    tmp_path: Path, forked_launchers: None
) -> None:
    (tmp_path / "train.py").write_text(KILLED)
    events = tmp_path / "events"
    arguments = ("--standalone", "--nproc-per-node=2", "--max-restarts=1", f"--fast-events={events}")
    text = run_forked(tmp_path, *arguments, tmp_path / "train.py")
    kept = {path.name: json.loads(path.read_text()) for path in tmp_path.glob("kept.*")}
    expected = {f"kept.{start}.{rank}": [rank, rank] for start in (0, 1) for rank in (0, 1)}
    assert {name: ranks for name, (ranks, _) in kept.items()} == expected
    lines = whole_lines(events)
    preloaded = [line["event"] for line in lines if line["event"].startswith("preload")]
    assert preloaded == ["preload_ready"], text
    seconds = max(at for name, (_, at) in kept.items() if ".1." in name) - kept["kept.0.1"][1]
    print(f"{seconds:.2f} s from the kill to the end of the imports of all restarted workers")
