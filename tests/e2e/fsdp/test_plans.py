"""Plans of ranks, in threads with one store: in any order of events, no checkpoint mixes two of them."""

import pickle
import random
import threading
import time
from collections.abc import Callable
from contextlib import closing, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from fastckpt._core.client.mailbox import PIECE
from fastckpt._core.config import RankInfo
from fastckpt._core.format.ids import SaveId
from fastckpt._core.transfer.host_copy import HostCopy
from fastckpt._core.transfer.image import Image
from fastckpt.dcp import shard_plans
from fastckpt.dcp.plan_messages import PlanMailbox, Stage
from fastckpt.dcp.shard_plans import ShardPlans, Unplanned
from fastckpt.errors import ConfigError
from tests.e2e.dcp.states import same, zeros
from tests.support.counting_store import CountingStore

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")
State = dict[str, Any]


class Ranks:
    """A job of threads. ``state_of(rank, step)`` is what a rank saves in a step."""

    def __init__(self, folder: Path, count: int, state_of: Any) -> None:
        self.folder, self.count, self.state_of = folder, count, state_of
        self.saved: dict[int, set[int]] = {}
        self.skipped: dict[int, list[str]] = {}
        self.errors: list[BaseException] = []
        self.between = threading.Barrier(count)

    def run(self, steps: int, pause: float = 0.0, together: int = 10**9) -> "Ranks":
        """With pauses of random lengths, and nothing else, between saves; without, all ranks meet there.

        Every so many saves is one that all make together.
        """
        self.together = together
        mine = plans(self.count)
        at_once(*(partial(self._rank, mine[rank], rank, steps, pause) for rank in range(self.count)))
        assert not self.errors
        return self

    def _rank(self, mine: ShardPlans, rank: int, steps: int, pause: float) -> None:
        try:
            for step in range(steps):
                self._save(mine, rank, step)
                if pause:
                    time.sleep(random.random() * pause)
                else:
                    self.between.wait(60)
        except BaseException as error:
            self.errors.append(error)
            self.between.abort()
            raise

    def _save(self, mine: ShardPlans, rank: int, step: int) -> None:
        try:
            together = step % self.together == self.together - 1
            files = mine.files(SaveId(1, step), self.state_of(rank, step), together=together)
        except Unplanned as reason:
            self.skipped.setdefault(step, []).append(str(reason))
            return
        for name, plan in files.items():
            if rank == 0 or name != ".metadata":
                path = self.folder / str(step) / name
                path.parent.mkdir(exist_ok=True)
                path.write_bytes(bytes(plan.skeleton.length))
                with closing(Image(path)) as image:
                    HostCopy(1).fill(image.install(plan))
        self.saved.setdefault(step, set()).add(rank)

    @property
    def whole(self) -> list[int]:
        return [step for step, ranks in sorted(self.saved.items()) if len(ranks) == self.count]

    def check(self) -> None:
        """Plain torch loads each whole checkpoint, and finds in it what some rank has saved in that step."""
        for step in self.whole:
            saved = [self.state_of(rank, step) for rank in range(self.count)]
            dcp.load(loaded := zeros(saved[0]), checkpoint_id=self.folder / str(step))
            for name, value in loaded.items():
                assert any(same(value, each[name]) for each in saved if name in each), (step, name)


def state(step: int, size: int, text: int) -> State:
    tensors = {f"w{i}": torch.full((size + i,), float(step)) for i in range(5)}
    return tensors | {"text": "x" * text, "step": step, "note": "y" * (text // 3)}


def plans(count: int, *stores: Any) -> list[ShardPlans]:
    stores = stores or (dist.HashStore(),)
    boards = [PlanMailbox(stores[min(rank, len(stores) - 1)]) for rank in range(count)]
    return [
        ShardPlans(RankInfo(rank, rank, count, count), board, lambda *_: nullcontext())
        for rank, board in enumerate(boards)
    ]


def at_once(*acts: Callable[[], object]) -> None:
    threads = [threading.Thread(target=act) for act in acts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_a_change_of_the_structure_costs_one_save(tmp_path: Path) -> None:
    """In all ranks; in one of them, by a value that one rank writes; and in all, one after the other."""

    def state_of(rank: int, step: int) -> State:
        late = {"late": torch.full((3,), float(step))} if step >= 12 + rank else {}
        return state(step, 4 if step < 5 else 6, 3000 if step >= 9 else 0) | late

    ranks = Ranks(tmp_path, 3, state_of).run(20)
    # rank 1 has changed by the time at which the change of rank 0 is planned
    assert [step for step in range(20) if step not in ranks.whole] == [5, 9, 12, 14], ranks.skipped
    ranks.check()


def changing(seed: int, steps: int, changes: int) -> Callable[[int, int], State]:
    """A state whose structure each of three ranks changes in steps of its own."""
    chance = random.Random(seed)
    of_ranks = [sorted(chance.sample(range(steps), changes)) for _ in range(3)]

    def state_of(rank: int, step: int) -> State:
        more = {f"more{change}": torch.full((3,), float(step)) for change in of_ranks[rank] if step >= change}
        return state(step, 3, 40 * step * (seed % 2)) | more

    return state_of


@pytest.mark.parametrize("seed", [0, 1])
def test_changes_of_structures_in_any_order_make_no_rank_wait(tmp_path: Path, seed: int) -> None:
    """Where training holds ranks together: a rank that waited for another that is training would do so for ever."""
    ranks = Ranks(tmp_path, 3, changing(seed, 20, 4)).run(24, together=4)
    ranks.check()
    assert set(range(3, 24, 4)) <= set(ranks.whole), "none of these is skipped"
    assert not [reason for reasons in ranks.skipped.values() for reason in reasons if "did not come" in reason]
    assert {23, 22} & set(ranks.whole)


@pytest.mark.parametrize("seed", [0, 1])
def test_ranks_at_unlike_steps_mix_no_plans_and_wait_only_briefly(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are steps apart, change as they like, and do not wait long: saves are lost, and none is torn."""
    monkeypatch.setattr(shard_plans, "DEADLINE", 0.05)
    Ranks(tmp_path, 3, changing(seed, 30, 3)).run(30, pause=0.01 * (seed % 3)).check()


def test_a_rank_that_never_sends_its_plan_is_waited_for_with_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_plans, "DEADLINE", 0.1)
    first, second = plans(2)
    for one, step in ((first, 1), (first, 2), (second, 1), (first, 3)):  # then the other has not said where it has what
        with pytest.raises(Unplanned, match="did not come"):
            one.files(SaveId(1, step), state(step, 4, 0))
    assert second.files(SaveId(1, 3), state(3, 4, 0)).keys() == {"__1_0.distcp"}
    assert ".metadata" in first.files(SaveId(1, 4), state(4, 4, 0))


@pytest.mark.parametrize("changes", [False, True])
def test_no_rank_saves_beyond_a_rank_that_has_closed(tmp_path: Path, changes: bool) -> None:
    """One more part would count as a checkpoint, without what the other had; a late rank ends the last one."""
    first, second = plans(2)
    at_once(*(partial(each.files, SaveId(1, 1), state(1, 4, 0)) for each in (first, second)))
    second.files(SaveId(1, 2), state(2, 4, 0))
    if changes:
        with pytest.raises(Unplanned, match="ranks plan again"):
            first.files(SaveId(1, 3), state(3, 5, 0))
    second.close(SaveId(1, 2))
    second.close(None)
    if not changes:
        assert ".metadata" in first.files(SaveId(1, 2), state(2, 4, 0))
    for together in (False, True):
        with pytest.raises(Unplanned, match="has closed its checkpointer"):
            first.files(SaveId(1, 4), state(4, 4, 0), together=together)
    with pytest.raises(Unplanned, match="has closed its checkpointer" if not changes else "ranks plan again"):
        first.files(SaveId(1, 2), state(2, 7, 0))


def test_states_that_cannot_form_one_checkpoint_are_refused() -> None:
    def save(mine: ShardPlans, value: Any) -> None:
        with pytest.raises(ConfigError):
            mine.files(SaveId(1, 1), {"w": value})
        refused.append(value)

    (first, second), refused = plans(2), list[Any]()
    at_once(partial(save, second, 5), partial(save, first, torch.zeros(3)))
    assert len(refused) == 2


def test_a_plan_larger_than_a_store_value_is_sent_in_parts_and_one_with_code_in_its_pickle_is_refused() -> None:
    board = PlanMailbox(dist.HashStore())
    message = {"bytes": bytes(range(256)) * (PIECE // 64), "text": ("a", [1])}
    pieces = board.put("key", message)
    assert board.read("key") == (message, pieces) and pieces > 1
    board.remove("key")
    with pytest.raises(TimeoutError):
        board.wait(["key"], time.monotonic())
    with pytest.raises(KeyError):
        board.read("key")
    board.put("key", [1, torch.load])
    with pytest.raises(pickle.UnpicklingError, match="a message of another rank has"):
        board.read("key")


@pytest.mark.parametrize("count", [2, 4])
def test_to_plan_costs_messages_in_proportion_to_the_ranks(count: int) -> None:
    """However late a rank is. Without meetings, and with one in each save."""
    store = dist.HashStore()
    stores = [CountingStore(store) for _ in range(count)]
    mine = plans(count, *stores)

    def save(rank: int, step: int, together: bool) -> None:
        time.sleep(0.2 * (rank == count - 1))
        mine[rank].files(SaveId(1, step), state(step, 4, 9), together=together)

    def messages(step: int, *, together: bool) -> int:
        at_once(*(partial(save, rank, step, together) for rank in range(count)))
        total = sum(each.requests.total() for each in stores)
        for each in stores:
            each.requests.clear()
        return total

    assert messages(1, together=False) == 15 * count + 27
    assert messages(2, together=False) == count
    assert messages(3, together=True) == 6 * count - 1


def test_a_plan_sent_before_a_rank_closed_is_received() -> None:
    """Else the others skip the save that this one was refused, and wait for it in their next load."""
    store, refusal = type("Store", (dist.HashStore,), {})(), "the states of the ranks do not go together"
    here = PlanMailbox(store)

    def check(keys: list[str]) -> bool:
        """Look, and have the rank refuse and close right after the first look."""
        del store.check
        there = bool(store.check(keys))
        here.put("1/items/1", refusal)
        here.put_word("2", "closed after 0 0")
        return there

    here.overtake(1)
    store.check = check
    assert here.receive(1, Stage.ASSIGNED, ["items/1"], time.monotonic() + 60, unless="2") == [refusal]
