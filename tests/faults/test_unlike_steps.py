"""Ranks that save different steps: no mixed checkpoint is ever resumed, and the ranks get an error or a warning."""

import re
import time
from typing import Any

from fastckpt._core.saver import skipped_saves
from fastckpt.ddp import DdpCheckpointer, StorageType
from tests.e2e.ddp.conftest import Ranks, directory, ranks, said  # noqa: F401 (fixtures)


def save(ranks: Ranks, *steps: list[int | None]) -> list[Any]:  # noqa: F811
    """What each of two ranks is told that saves these steps, in turns with the other one."""
    ranks.start(2)
    ranks.load()

    def in_turn(member: DdpCheckpointer, rank: int) -> list[Any]:
        told = []
        for at, step in enumerate(steps[rank]):
            if step is not None:
                result = member.save_checkpoint(step, {"time": at}, storage_type=StorageType.MEMORY)
                told.append(result.reason or bool(result))
            ranks._rounds.gather(None)
        return told

    return ranks.together(in_turn)


def test_a_rank_whose_step_is_one_ahead_is_refused(ranks: Ranks, said) -> None:  # noqa: F811
    """Else what it saved as step 3, at the time of step 2, would be resumed with step 3 of the other."""
    told = save(ranks, [1, 2, 3, 4], [2, 3, 4, 5])
    refused = [reason for reason in [*told[0], *told[1]] if reason is not True]
    assert len(refused) == 3 and all("they count steps differently" in reason for reason in refused), told
    assert said.text.count("not every rank saves the same steps") == 1
    assert ranks.load() == [{}, {}]


def test_steps_that_one_rank_omits_are_named_and_the_others_count(ranks: Ranks, said) -> None:  # noqa: F811
    """Whether it saved others in their place, or its save failed and was caught."""
    save(ranks, [1, 2, 3, 5, 7, 8, 9], [1, 2, 4, 6, 7, None, 9])
    assert re.search(r"rank 1 went on to step \d without saving step 3, which can never be resumed", said.text)
    assert ranks.load() == [{"time": 6}] * 2 and [member.loaded_step for member in ranks.members] == [9, 9]


def test_what_a_rank_has_to_do_that_never_saves_is_said_once(ranks: Ranks, said, monkeypatch) -> None:  # noqa: F811
    """When it has been late for some time: if it died, the launcher says of what."""
    monkeypatch.setattr(skipped_saves, "_PATIENCE", 0.2)
    first, _ = ranks.start(2)
    ranks.load()
    for step in range(1, 40):
        first.save_checkpoint(step, {"step": step}, storage_type=StorageType.MEMORY)
        time.sleep(0.01)
    [skipped] = [line for line in said.messages if "saves are skipped from step 4" in line]
    assert "waits for local rank 1 to save it, too" in skipped
    assert "If one of them never saves, call save_checkpoint(), or step(), on every rank" in skipped
