"""Random sharded models come back from a checkpoint wherever stock DCP brings them back."""

import json
from pathlib import Path

import pytest

from tests.faults.jobs import run_forked

ROOT = Path(__file__).parents[2]


IN_A_JOB = 20
"""Seeds: what torch started for a model's process groups stays as long as a job."""
HOUR = pytest.mark.timeout(3600)


@pytest.mark.parametrize(
    "seeds",
    [
        pytest.param([24, 1004, 1006], id="3"),
        pytest.param([*range(200)], id="200", marks=[pytest.mark.campaign, HOUR]),
    ],
)
def test_sharded_models_that_stock_dcp_restores_are_restored(tmp_path: Path, forked_launchers: None, seeds: list[int]):
    """Each of the two also from what the other has saved; stages of a pipeline always, which stock does not know.

    Where stock fails fastckpt may fail, too, but it never gives what was not saved. Model 24 is of FSDP1, in float64.
    """
    for start in range(0, len(seeds), IN_A_JOB):
        run(tmp_path, seeds[start : start + IN_A_JOB])
    cases = [json.loads(line) for line in (tmp_path / "said").read_text().splitlines()]
    assert [case["seed"] for case in cases] == seeds
    bad = [case for case in cases if case["stock"] == "alike" and not _is_alike(case)]
    assert not bad, bad
    assert all(case.get("ours", "alike") == "alike" for case in cases if "stages" in case["ways"])
    wrong = [case for case in cases if "unlike" in (case.get("ours"), case.get("ours of stock's"))]
    assert not wrong, f"loaded, and not what was saved: {wrong}"
    alike = [sum(case.get(name) == "alike" for case in cases) for name in ("stock", "ours")]
    print(f"of {len(seeds)} models alike: by stock {alike[0]}, by fastckpt {alike[1]}")
    assert alike[0] > len(seeds) // 4, "too few can be compared"


def run(folder: Path, seeds: list[int]) -> None:
    shape = ("--standalone", "--nproc-per-node=4", "--max-restarts=0")
    run_forked(folder, *shape, ROOT / "tests/fuzz/meshes.py", folder, *seeds, seconds=60.0 + 30 * len(seeds))


def _is_alike(case: dict[str, str]) -> bool:
    return all(said == "alike" for name, said in case.items() if name not in ("seed", "ways"))
