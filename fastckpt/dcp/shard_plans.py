"""Plans the saves of one rank's shards: with all ranks for each structure once, from then on alone."""

import contextlib
import logging
import os
import pickle
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from fastckpt._core import metrics
from fastckpt._core.client.save_results import ABSENT
from fastckpt._core.config import RankInfo
from fastckpt._core.format.distcp import ShardPlan, ShardPlanner, whole
from fastckpt._core.format.file_names import copies_of, index_of, shards_of
from fastckpt._core.format.ids import SaveId
from fastckpt._core.format.manifest import METADATA
from fastckpt._core.format.plan import Plan
from fastckpt._core.torch_private.sharding import StorageInfo
from fastckpt.dcp.flattening import Archiver, FlatItem, Leaves, flattened, in_order, item_of, structure
from fastckpt.dcp.name_conflicts import StageClaim, claim
from fastckpt.dcp.name_conflicts import objection as why_not_one
from fastckpt.dcp.node_copies import copies_for_nodes
from fastckpt.dcp.plan_messages import Assigned, Overtaken, PlanMailbox, PlanRound, Stage
from fastckpt.errors import ConfigError

logger = logging.getLogger("fastckpt")

DEADLINE = 60.0
"""Seconds that a save waits for the other ranks to plan with it, before it is skipped."""
_CLOSED = "closed after "
"""Prefix of the word of a rank that saves no more; its last save follows."""
Stall = Callable[[str, float], AbstractContextManager[None]]


class Unplanned(Exception):
    """A save is skipped because the ranks have no plan for it yet."""


class PlannerDeparted(Unplanned):
    """This save and all later ones are skipped because a rank has closed."""


class ShardPlans:
    """The files of one rank in each save: its shards, and on each node a copy of ``.metadata``.

    DCP's plan has the items that each rank writes, and ``.metadata`` their places. It depends on the structure of the
    state alone, so all ranks make it once, over the store of the process group. Each rank offers its local plan, and
    the first rank answers with the parts to write. Each then reports their places in its file, and the first rank makes
    ``.metadata`` of these. An item that several ranks have is written by one of them. Of several nodes, one rank on
    each copies it, so that a node's memory has all that its own ranks need; these copies are not persisted. Later saves
    ask the store for one key, and the other ranks for nothing.

    A rank whose state does not fit the plan any more finds that out by itself. It skips this save, and calls all ranks
    to another plan under that key. Training's own collectives come between two saves: no rank ends those of the next
    step before all ranks have begun them. So every rank sees the call in its next save, at the latest. There all ranks
    plan together. Only the time it takes depends on that:

    - No rank waits in the save in which the call was made, since others may not have seen it, and may be training by
      now. Where it waits, it does so until another call, or until a deadline; then it skips the save and trains on.
      Its messages stay in the mailbox, so the plan is made in whichever save the last rank comes to.
    - In a save that all ranks make ``together`` they wait for each other anyway, and so plan in it.
    - No checkpoint mixes two plans. A rank that knows of a call never follows the old plan again. None follows the
      new one in saves before that in which the last offer was made.
    """

    def __init__(self, place: RankInfo, mailbox: PlanMailbox, stall: Stall, *, weights_only: bool = True) -> None:
        self._place = place
        self._mailbox = mailbox
        self._stall = stall
        self._files = shards_of(place.rank), copies_of(place.rank)
        self._planners, self._archiver = [ShardPlanner() for _ in self._files], Archiver(weights_only=weights_only)
        self._round = PlanRound(1)
        self._met = ""
        self._assigned: Assigned | None = None
        self._last: SaveId | None = None
        self._pid = os.getpid()

    def files(self, save: SaveId, state: dict[str, Any], *, together: bool = False) -> dict[str, Plan]:
        """Plan this rank's files of a save, by their names.

        With ``together`` all ranks make this save so, and wait for each other: a change costs no save.

        Raises:
            Unplanned: The save is to be skipped, with the reason.
            NotLoadable: A Python value would not load.
            ConfigError: The states of the ranks do not make one, as DCP sees it.
        """
        # 1. flatten   2. turn to the newest plan that a rank has called for   3. call for another if this one does
        # not fit   4. offer the local plan to a new one   5. follow it; Overtaken: a newer call came, so begin again
        flat = flattened(state)
        leaves = flat.state_dict
        shape = structure(leaves)
        while True:
            self._follow_calls(save)
            is_known = self._round.items is not None and shape == self._round.structure
            shards = self._lay_out(leaves) if is_known else None
            if not self._fits(shape, shards):
                self._call(save)
            if self._round.called is not None and save <= self._round.called and not (together or self._is_alone):
                raise Unplanned("the structure of the state has changed: the ranks plan again at their next save")
            if self._round.structure is None:
                self._offer(save, shape, leaves, flat.create_local_plan())
            with contextlib.suppress(Overtaken):
                files = self._follow(save, leaves, shards)
                if together and not self._is_alone:
                    self._meet(save)
                return files

    def _follow(self, save: SaveId, leaves: Leaves, shards: list[ShardPlan] | None) -> dict[str, Plan]:
        if shards is None or not self._round.complete:
            shards = self._join(leaves, save)
        if self._round.since is None or save < self._round.since:
            raise Unplanned("another rank follows an older plan in this save")
        return {name: shard.plan for name, shard in zip(self._files, shards, strict=False)} | self._round.described

    @property
    def _is_alone(self) -> bool:
        return self._place.world_size == 1

    def _meet(self, save: SaveId) -> None:
        """Return when the states of all ranks were found to fit; raises Overtaken if one was not."""
        now, end = self._round.number, time.monotonic() + DEADLINE
        key = f"{now}/met/{save.history}/{save.step}"
        try:
            with self._stall("save", DEADLINE):
                self._mailbox.barrier(now, key, self._place.world_size, end, self._unless)
        except (TimeoutError, dist.DistError) as error:
            raise Unplanned(f"{ABSENT} within {DEADLINE:g} s") from error
        # The key of the meeting before: all have left it, since they came to this one.
        if self._place.rank == 0 and self._met not in ("", key):  # others may yet come here for this save again
            self._mailbox.end_barrier(self._met)
        self._met = key

    def close(self, last: SaveId | None) -> None:
        """Have no rank save more than this one has: its part would be missing."""
        history, step = last or SaveId(0, 0)
        with contextlib.suppress(dist.DistError, RuntimeError):  # the others have ended, and the store with them
            while self._last is None and os.getpid() == self._pid:
                self._turn_all(f"{_CLOSED}{history} {step}")

    @property
    def _next(self) -> str:
        """The key under which a rank announces that all must turn from this plan."""
        return f"{self._round.number + 1}"

    @property
    def _unless(self) -> str:
        """The key of the message that makes those of this plan needless."""
        return self._next if self._last is None else ""

    def _turn_all(self, word: str) -> None:
        """Call all ranks from this plan by a word, unless one is there; and follow that word."""
        number = self._round.number
        word = self._mailbox.put_word(self._next, word)
        self._mailbox.overtake(number)
        self._turn(word)

    def _turn(self, word: str) -> None:
        """Turn to the plan that a rank has called for.

        If the rank has closed instead, there are no more plans.
        """
        if word.startswith(_CLOSED):
            self._last = _save(word.removeprefix(_CLOSED))
        else:
            self._round = PlanRound(self._round.number + 1, _save(word))

    def _follow_calls(self, save: SaveId) -> None:
        """Turn to the newest plan that any rank has called for."""
        while self._last is None and (word := self._mailbox.word(self._next)) is not None:
            self._turn(word)
        if self._last is not None and save > self._last:
            raise PlannerDeparted("a rank has closed its checkpointer: its part would be missing")

    def _call(self, save: SaveId) -> None:
        if self._last is None:
            self._turn_all(f"{save.history} {save.step}")
        if self._last is not None:
            raise PlannerDeparted("the structure of the state has changed, and a rank has closed its checkpointer")

    def _lay_out(self, leaves: Leaves) -> list[ShardPlan]:
        """This rank's files; without the second if there is nothing to copy."""
        return [
            planner.plan([self._archiver.data(leaves, item) for item in items], [item.name for item in items])
            for planner, items in zip(self._planners, self._round.items or [], strict=False)
        ]

    def _fits(self, shape: list[Any], shards: list[ShardPlan] | None) -> bool:
        """Return whether the state has the offered structure, and no Python value has outgrown its place since."""
        now = self._round
        is_in_place = shards is None or now.spans is None or [shard.places for shard in shards] == now.spans
        return now.structure is None or (shape == now.structure and is_in_place)

    def _offer(self, save: SaveId, shape: list[Any], leaves: Leaves, plan: SavePlan) -> None:
        offer = tuple(save), self._place.group_rank, plan, tuple(claim(leaves, plan, self._place.world_size))
        self._mailbox.put(f"{self._round.number}/offer/{self._place.rank}", offer)
        self._mailbox.count(self._round.number, Stage.OFFERED, self._place.world_size)
        # After the message was put: if that fails, this rank offers again.
        self._round.structure = shape

    def _join(self, leaves: Leaves, save: SaveId) -> list[ShardPlan]:
        """Do the rest of the plan, with all ranks."""
        end = time.monotonic() + DEADLINE
        try:
            with self._stall("plan", DEADLINE), metrics.phase("snapshot.plan", step=save.step):
                return self._plan(leaves, end)
        except (TimeoutError, dist.DistError) as error:
            logger.debug("plan %d: %s", self._round.number, error)
            raise Unplanned(f"the other ranks did not come to plan this save within {DEADLINE:g} s") from error

    def _plan(self, leaves: Leaves, end: float) -> list[ShardPlan]:
        # 1. rank 0: assign all offered items to ranks   2. all: lay out the own file, and report where each item is
        # 3. rank 0: make `.metadata` of that   4. the first rank of each node: receive it
        mailbox, now, place = self._mailbox, self._round, self._place
        if place.rank == 0 and (self._assigned is None or self._assigned.number != now.number):
            self._assign(end)
        if now.items is None:
            ((objection, since, files),) = self._receive(Stage.ASSIGNED, [f"items/{place.rank}"], end)
            if objection:
                raise ConfigError(f"the states of the ranks do not go together: {objection}")
            now.since, now.items = SaveId(*since), [[FlatItem(*item) for item in items] for items in files]
        shards = self._lay_out(leaves)
        if now.spans is None:
            now.spans = [shard.places for shard in shards]
            mailbox.put(f"{now.number}/spans/{place.rank}", [[tuple(span) for span in spans] for spans in now.spans])
            mailbox.count(now.number, Stage.LAID_OUT, place.world_size)
        if place.rank == 0:
            self._describe(end)
        if place.local_rank == 0:
            names = {METADATA: "metadata"}
            if place.group_world_size > 1:
                names[index_of(place.group_rank)] = f"index/{place.group_rank}"
            files = self._receive(Stage.DESCRIBED, [*names.values()], end)
            now.described = {name: whole(file) for name, file in zip(names, files, strict=True)}
        now.complete = True
        return shards

    def _receive(self, stage: Stage, what: Sequence[str], end: float) -> list[Any]:
        """Messages of this plan; raises Overtaken if a rank that it does not fit has called for another."""
        return self._mailbox.receive(self._round.number, stage, what, end, self._unless)

    def _assign(self, end: float) -> None:
        """Send each rank the items that it writes, chosen by DCP's planner."""
        number, ranks = self._round.number, range(self._place.world_size)
        received = self._receive(Stage.OFFERED, [f"offer/{rank}" for rank in ranks], end)
        saves, nodes, offers, sent = zip(*received, strict=True)
        objection = ""
        try:
            claims = [StageClaim(*each) for each in sent]
            if why := why_not_one(claims):
                raise ValueError(why)
            plans, metadata = DefaultSavePlanner().create_global_plan(list(offers))
            copies = copies_for_nodes(offers, plans, nodes)
            self._assigned = Assigned(number, nodes, [in_order(p.items) for p in plans], copies, metadata)
        # Errors of DCP's planner for states that do not go together.
        # Sent to all ranks, so that all raise it and none waits.
        except (ValueError, AssertionError) as error:
            plans, copies, objection = [SavePlan([]) for _ in ranks], [[] for _ in ranks], str(error)
        for rank, plan in enumerate(plans):
            files = [in_order(plan.items), *([copies[rank]] if copies[rank] else [])]
            items = [[tuple(item_of(item)) for item in file] for file in files]
            # The newest save of all offers: earlier saves of this
            # plan would lack the parts of ranks that offered later.
            self._mailbox.put(f"{number}/items/{rank}", (objection, max(saves), items))
        self._mailbox.ring(number, Stage.ASSIGNED)
        # The store keeps all keys in memory for the whole job: messages that everybody has read are removed.
        self._clear(f"{number}/offer/{rank}" for rank in ranks)
        self._mailbox.clear(number - 1, {*nodes})

    def _describe(self, end: float) -> None:
        """Make ``.metadata`` of the plan and of the items' places on all ranks; and the index of each node's copies."""
        assert self._assigned is not None
        plan, number = self._assigned, self._assigned.number
        storage: dict[MetadataIndex, Any] = {}
        copied: dict[int, dict[MetadataIndex, Any]] = {node: {} for node in plan.nodes}
        spans_of = self._receive(Stage.LAID_OUT, [f"spans/{rank}" for rank in range(len(plan.nodes))], end)
        for rank, (node, (spans, *more)) in enumerate(zip(plan.nodes, spans_of, strict=True)):
            storage |= _infos(shards_of(rank), plan.shards[rank], spans)
            copied[node] |= _infos(copies_of(rank), plan.copies[rank], *more or [[]])
        metadata = plan.metadata
        metadata.version, metadata.storage_meta, metadata.storage_data = CURRENT_DCP_VERSION, StorageMeta(), storage
        self._mailbox.put(f"{number}/metadata", pickle.dumps(metadata))
        if len(copied) > 1:
            for node, index in copied.items():
                self._mailbox.put(f"{number}/index/{node}", pickle.dumps(index))
        self._mailbox.ring(number, Stage.DESCRIBED)
        self._clear(f"{number}/{kind}/{rank}" for rank in range(len(plan.nodes)) for kind in ("items", "spans"))

    def _clear(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._mailbox.remove(key)


def _infos(file: str, items: list[WriteItem], spans: Sequence[Any]) -> dict[MetadataIndex, Any]:
    return {item.index: StorageInfo(file, *span) for item, span in zip(items, spans, strict=True)}


def _save(word: str) -> SaveId:
    return SaveId(*map(int, word.split()))
