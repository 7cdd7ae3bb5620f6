"""A load that fails on one of two ranks raises on both, within seconds, and names the rank and the reason."""

import json
from pathlib import Path

from tests.faults.jobs import run_forked

PROGRAM = Path(__file__).with_name("one_sided.py")


def test_both_ranks_raise_soon_what_one_of_them_raises(tmp_path: Path, forked_launchers: None) -> None:
    shape = ("--standalone", "--nproc-per-node", 2)
    run_forked(tmp_path, *shape, PROGRAM, tmp_path, preload="lightning.pytorch")
    for rank in (0, 1):
        for victim, said in enumerate(json.loads((tmp_path / f"log.{rank}").read_text())):
            for name, text in said.items():
                _, fails, reason = name.partition(": ")
                assert bool(text) == bool(fails), (rank, name, text)
                # DCP's errors name ranks in capitals
                names_it = rank == victim or f"rank {victim}" in text.lower()
                assert not fails or (reason in text and names_it), (rank, name, text)
