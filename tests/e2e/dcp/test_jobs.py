"""Jobs with DCP: any sharding loads into any other, and what some ranks save alone is refused."""

from pathlib import Path

import pytest

from tests.faults.jobs import run_forked
from tests.support.json_lines import whole_lines

HERE = Path(__file__).parent
pytestmark = [pytest.mark.campaign, pytest.mark.usefixtures("forked_launchers")]


def run(folder: Path, ranks: int, program: str, *script: object) -> None:
    run_forked(folder, "--standalone", "--nproc-per-node", ranks, HERE / program, "--out", folder, *script)


def test_a_dcp_checkpoint_of_any_sharding_loads_into_any_other(tmp_path: Path) -> None:
    """Saved as one of these kinds by four ranks, or three, or two; loaded as any other by as many, or others."""
    kinds = ["ddp", "fsdp", "hsdp", "tp", "fsdp+tp"]
    run(tmp_path, 4, "kinds.py", "--save", "--kinds", *kinds)
    run(tmp_path, 3, "kinds.py", "--save", "--kinds", "fsdp", "ddp")
    run(tmp_path, 2, "kinds.py", "--save", "--kinds", *kinds)
    run(tmp_path, 4, "kinds.py", "--kinds", *kinds)
    said = whole_lines(tmp_path / "log.0")
    assert all(line["equal"] for line in said), said
    assert {(line["world"], line["kind"]) for line in said} >= {(4, "tp"), (3, "fsdp"), (2, "fsdp+tp")}
    steps = len(list(tmp_path.glob("full.*")))
    assert len([line for line in said if line["world"] == 4]) == 5 * len(kinds) + steps * len(kinds)


def test_a_dcp_save_by_some_ranks_alone_is_refused(tmp_path: Path) -> None:
    """One of two ranks has nothing to save in the end, since DCP saves what both have once."""
    run(tmp_path, 2, "refusals.py")
    for rank in (0, 1):
        said = whole_lines(tmp_path / f"log.{rank}")[0]
        assert said.pop("nothing") == "saved"
        assert said.pop("use_collectives") == "all ranks of the job"
        assert all("all" in str(why) for why in said.values()), said
