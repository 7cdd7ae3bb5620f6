"""A hang that was found: its log lines, the groups of ranks first and then the stacks of this node, and its event."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastckpt._core import metrics
from fastckpt._core.error_codes import coded
from fastckpt._core.memory.stacks import Stacks
from fastckpt._core.memory.telemetry import Telemetry
from fastckpt._core.policy.hangs import Observation, Witness
from fastckpt._core.policy.stack_groups import StackGroups
from fastckpt_run.hangs.stack_exchange import awaited
from fastckpt_run.hangs.worker_inspection import CloseLook, NodeWorkers

logger = logging.getLogger("fastckpt.launcher")


@dataclass(frozen=True)
class Hang:
    """A hang: the ranks to blame, and the states of all workers of the node, by local rank.

    Attributes:
        groups: Of the ranks of all nodes; None if other nodes did not answer.
        asked: Seconds that the exchange with them took.
        spared: Reason why nobody is killed, since the wait may be sound; empty if the culprits are killed.
    """

    culprits: tuple[int, ...]
    reason: str
    sights: Mapping[int, Observation]
    witnesses: Mapping[int, Witness]
    look: CloseLook
    groups: StackGroups | None = None
    asked: float = 0.0
    spared: str = ""

    @property
    def places(self) -> frozenset[str]:
        """Places of the ranks that hold the others up; of all nodes, if these have answered."""
        return self.groups.places if self.groups else frozenset(self.witnesses[rank].place for rank in self.culprits)

    @property
    def idle(self) -> float:
        """Seconds for which those to blame have done nothing."""
        return (
            self.groups.idle if self.groups else min([self.witnesses[rank].idle for rank in self.culprits], default=0.0)
        )


def log(hang: Hang, workers: NodeWorkers) -> None:
    """Log a hang, with the groups of all ranks and the stacks of all workers of this node, and record it."""
    ranks = workers.ranks
    blamed = " and ".join(_name(ranks[rank], hang.witnesses[rank]) for rank in hang.culprits)
    silent = max(sight.silent for sight in hang.sights.values())
    what = hang.spared or "killing"
    logger.error(coded("the job hangs, for %.1f s: %s %s; %s", "FC-031"), silent, blamed, hang.reason, what)
    if hang.groups is not None:
        _log_groups(hang.groups, workers)
    found = []
    for rank, witness in sorted(hang.witnesses.items()):
        last, sight = hang.look.lines.get(rank, Telemetry()), hang.sights.get(rank)
        entry: dict[str, Any] = {"rank": ranks[rank], "local_rank": rank, "worker_pid": workers.pids[rank]}
        entry |= {
            "silent": sight.silent if sight else None,
            "step": last.step,
            "steps": last.steps,
            "phase": last.phase,
        }
        found.append(entry | {"state": witness.state, "place": witness.place})
        text = hang.look.stacks.get(rank, Stacks()).text.rstrip() or "its stacks cannot be had"
        process = f"local rank {rank}, pid {workers.pids[rank]}, state {witness.state or 'exited'}"
        silence = f"silent for {sight.silent:.1f} s in {last.phase or 'a step'}" if sight else "without a checkpointer"
        logger.error("rank %d (%s) after %d steps, %s:\n%s", ranks[rank], process, witness.steps, silence, text)
    metrics.event(
        "hang_spared" if hang.spared else "hang",
        culprits=[ranks[rank] for rank in hang.culprits],
        reason=hang.reason,
        silent=silent,
        ranks=found,
        groups=[group.to_event() for group in hang.groups.groups] if hang.groups else [],
        unheard=[*hang.groups.unheard] if hang.groups else [],
        awaited=awaited(hang.groups, [*ranks.values()]) if hang.groups else None,
        asked=hang.asked,
        spared=hang.spared,
    )


def log_external(look: CloseLook, workers: NodeWorkers, told: Mapping[int, int]) -> None:
    """Log outside causes that hold workers up, once for each rank since its last report, which ``told`` has."""
    if look.is_debugged:
        logger.info("a debugger holds silent workers")
    for rank, output in look.unread.items():
        if told.get(rank) != look.lines.get(rank, Telemetry()).beat:
            logger.warning("rank %d waits: nobody reads its output (%s)", workers.ranks[rank], output)


def log_found_elsewhere(host: str, groups: StackGroups, workers: NodeWorkers) -> None:
    """Log and record a hang that the agent on ``host`` has found, before it ends the round; called in any thread."""
    logger.error(coded("the job hangs, as the agent on host %s has found: %s", "FC-031"), host, groups.line)
    here = [*workers.ranks.values()]
    found = [group.to_event() for group in groups.groups]
    metrics.event("hang_elsewhere", host=host, groups=found, unheard=[*groups.unheard], awaited=awaited(groups, here))


def _log_groups(groups: StackGroups, workers: NodeWorkers) -> None:
    if groups.world > 1:
        logger.error("stacks of all ranks: %s", groups.line)
    for group in groups.odd:
        if group.stack and not set(group.ranks) <= {*workers.ranks.values()}:
            stack = "\n".join(f"  {frame}" for frame in group.stack)
            logger.error("%s, most recent call first:\n%s", group.name, stack)


def _name(rank: int, witness: Witness) -> str:
    return f"rank {rank}" + (f", in {witness.place}," if witness.place else "")
