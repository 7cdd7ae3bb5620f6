"""The end of an agent: no call of a store is left behind, for which torch would print a stack when the store ends."""

import pytest

from tests.unit.fastckpt_run.rendezvous.agents import agents, meet

TIMES = 20
"""The bell rings once more at the end; without care about half of the threads that listen would wait for another."""


def test_the_end_of_the_agent_that_holds_the_store_prints_no_stack(capfd: pytest.CaptureFixture[str]) -> None:
    for _ in range(TIMES):
        with agents(1, 1) as job:
            meet([job.new()])
    assert "frame #" not in capfd.readouterr().err
