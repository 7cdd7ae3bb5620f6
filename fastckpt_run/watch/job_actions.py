"""The actions on a running job that the live page offers: a flush now, and a stop with a flush."""

import logging
import os
import signal
import threading
from typing import Any

from fastckpt._core import metrics
from fastckpt._core.format.ids import SaveId
from fastckpt._core.saver.server import Saver
from fastckpt.errors import FastckptError
from fastckpt_run.torchrun_patches import SIGNAL_HANDLER
from fastckpt_run.watch.node_channel import NodeChannel

logger = logging.getLogger("fastckpt.launcher")

Json = dict[str, Any]

HELD, FLUSH, STOP = "held", "flush", "stop"
"""Questions among agents: what a node has in memory; to persist one save; to end."""
ANSWER = 5.0
"""Seconds that a node has to answer."""
ATTEMPTS = 5
"""How often a flush is tried again if a save was overwritten on a node meanwhile."""
_LATER = 0.2
"""Seconds from the answer of an agent that is asked to stop to the signal."""
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class JobActions:
    """Carries out actions on all nodes of the job; called in threads of requests.

    A flush persists the newest save that all nodes have in memory: each node's own newest may be another one, which
    could never become whole on storage. It pins that save's slot as any persist does, until it is durable or has
    failed; meanwhile saves take the other slots. A stop is the signal that ends one agent, sent to all of them.

    Args:
        channel: Asks the agents of other nodes.
        saver: Persists what this node has in memory.
    """

    def __init__(self, channel: NodeChannel, saver: Saver) -> None:
        self._channel, self._saver = channel, saver
        self._flushing, self._stopping = threading.Lock(), threading.Lock()
        self._is_stopped = False
        channel.answer(HELD, lambda sender, body: self._held())
        channel.answer(FLUSH, self._persist)
        channel.answer(STOP, self._stop)

    def flush(self) -> Json:
        """Begin to persist the newest save in memory of each checkpoint directory, and return without waiting for it.

        Returns, by directory, a ``step`` and an ``outcome``: ``begun``; ``known``, if that save or a newer one is
        durable, or on its way; or ``nothing``, and ``why``.
        """
        with self._flushing:  # of two that press at once, the second finds it begun
            outcomes = {}
            for _ in range(ATTEMPTS):
                outcomes = self._flush_once()
                if not any(one.get("again") for one in outcomes.values()):
                    break
        for directory, one in outcomes.items():
            logger.warning("flush of %s, asked for on the live page: %s", directory, _told(one))
        return {"directories": {name: {k: v for k, v in one.items() if k != "again"} for name, one in outcomes.items()}}

    def _flush_once(self) -> dict[str, Json]:
        answers = self._channel.ask_all(HELD, {}, ANSWER)
        if missing := [rank for rank in range(self._channel.nodes) if rank not in answers]:
            why = f"node {missing[0]} does not answer, and a checkpoint needs the parts of all nodes"
            directories = {name for answer in answers.values() for name in answer["directories"]}
            return {name: _nothing(why) for name in directories}
        held = {rank: answer["directories"] for rank, answer in answers.items()}
        return {name: self._flush_directory(name, held) for name in sorted({n for own in held.values() for n in own})}

    def _flush_directory(self, directory: str, held: dict[int, dict[str, list[list[int]]]]) -> Json:
        having = [{SaveId(*id) for id in own[directory]} for own in held.values() if directory in own]
        # A directory that not all nodes use is one of each node's own.
        common = max(set.intersection(*having), default=None)
        if common is None:
            whole = any(having)
            return _nothing("no save is whole on all nodes yet" if whole else "nothing is in memory yet", again=whole)
        body = {"directory": directory, "save": list(common)}
        answers = self._channel.ask_all(FLUSH, body, ANSWER)
        found = {answer.get("outcome") for rank, answer in answers.items() if directory in held[rank]}
        if "gone" in found:
            return _nothing("each save was overwritten before all nodes had begun to persist it", again=True)
        outcome = "begun" if "begun" in found else "known"
        return {"step": common.step, "history": common.history, "outcome": outcome}

    def stop(self) -> Json:
        """Ask all agents to end as by a signal: the job ends flushed, with the exit code of one."""
        answers = self._channel.ask_all(STOP, {}, ANSWER)
        missing = [rank for rank in range(self._channel.nodes) if rank not in answers]
        refused = {rank: answer["why"] for rank, answer in answers.items() if answer.get("why")}
        return {"nodes": sorted(answers.keys() - refused.keys()), "missing": missing, "refused": refused}

    # --- this node's part

    def _held(self) -> Json:
        return {"directories": {name: [list(id) for id in ids] for name, ids in self._saver.in_memory().items()}}

    def _persist(self, sender: int, body: Json) -> Json:
        save = SaveId(*body["save"])
        try:
            return {"outcome": self._saver.persist(str(body["directory"]), save)}
        except (FastckptError, RuntimeError, TimeoutError) as error:  # the loop has ended, with the job
            return {"outcome": "gone", "why": str(error)}

    def _stop(self, sender: int, _: Json) -> Json:
        number = next((each for each in _SIGNALS if signal.getsignal(each) is SIGNAL_HANDLER), None)
        if number is None:
            return {"why": "this agent handles no signal that ends it with a flush"}
        with self._stopping:
            # Once: a third signal to an agent gives up its last flush.
            if not self._is_stopped:
                self._is_stopped = True
                metrics.event("stop_asked", node=sender)
                logger.warning("the job is stopped with a flush, as asked on the live page of node %d", sender)
                timer = threading.Timer(_LATER, os.kill, (os.getpid(), number))
                timer.daemon = True
                timer.start()
        return {}


def _nothing(why: str, *, again: bool = False) -> Json:
    return {"step": None, "outcome": "nothing", "why": why, "again": again}


def _told(one: Json) -> str:
    if one["outcome"] == "nothing":
        return f"nothing is persisted: {one['why']}"
    begun = one["outcome"] == "begun"
    return f"step {one['step']} is {'being persisted' if begun else 'durable, or being persisted, already'}"
