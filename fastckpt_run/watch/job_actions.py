"""The actions on a running job that the live page offers: a flush now, a drain of a host, and a stop with a flush."""

import json
import logging
import os
import signal
import threading
import time
from typing import Any

from fastckpt._core import metrics
from fastckpt._core.format.ids import SaveId
from fastckpt._core.saver.server import Saver
from fastckpt.errors import FastckptError
from fastckpt_run.rendezvous.host_drain import DrainRefused, HostDrain
from fastckpt_run.torchrun_patches import SIGNAL_HANDLER
from fastckpt_run.watch.node_channel import NodeChannel

logger = logging.getLogger("fastckpt.launcher")

Json = dict[str, Any]

HELD, FLUSH, STOP = "held", "flush", "stop"
"""Requests among agents: for a node's saves in memory; to persist one save; to end."""
ANSWER = 5.0
"""Seconds that a node has to answer."""
ATTEMPTS = 5
"""Number of attempts at a flush if a save was overwritten on a node meanwhile."""
HAND_OVER = 120.0
"""Seconds for the newest save to be durable before a host is drained."""
_LOOK = 0.2
_LATER = 0.2
"""Seconds from the answer of an agent that is asked to stop to the signal."""
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class JobActions:
    """Carries out actions on all nodes of the job; called in threads of requests.

    A flush persists the newest save that all nodes have in memory: each node's own newest may be another one, which
    could never become whole on storage. It pins that save's slot as any persist does, until it is durable or has
    failed; meanwhile saves take the other slots. A drain is a flush, and then a round without a host. A stop is the
    signal that ends one agent, sent to all of them.

    Args:
        channel: Asks the agents of other nodes.
        saver: Persists this node's saves in memory.
        hosts: Leaves hosts out; None if the rendezvous of the job cannot.
    """

    def __init__(self, channel: NodeChannel, saver: Saver, hosts: HostDrain | None = None) -> None:
        self._channel, self._saver, self._hosts = channel, saver, hosts
        self._flushing, self._stopping, self._draining = (threading.Lock() for _ in range(3))
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
            return {name: _nothing(why) | {"missing": missing} for name in directories}
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

    def drain(self, body: bytes) -> Json:
        """Have the job go on without a host, once its newest save is durable; or take it back in, with ``undo``.

        Args:
            body: A JSON object with the ``host``; with ``undo``; and with ``now``, if the save is not waited for.

        Returns the ``host`` and an ``outcome``. With ``drained`` come the number of ``nodes`` that go on, the hosts
        that are ``new`` among them, and the ``step`` that is durable. Others are ``known`` if it was drained before;
        ``back``, or ``waits`` if there is no place for it yet; and ``refused``, with ``why``. Unknown values are null
        or empty.
        """
        host = ""
        try:
            asked = json.loads(body)
            host, undo, now = (asked.get(name, default) for name, default in (("host", ""), ("undo", 0), ("now", 0)))
            if not (isinstance(host, str) and host):
                raise ValueError
            with self._draining:  # of two that drain at once, the second sees the remaining hosts
                answer = self._take_back(host) if undo else self._drain(host, hands_over=not now)
        except (ValueError, AttributeError, RecursionError):
            answer = {"outcome": "refused", "why": "the request names no host"}
        except DrainRefused as error:
            answer = {"outcome": "refused", "why": str(error)}
        answer = {"host": host, "outcome": "", "nodes": None, "new": [], "step": None, "why": "", **answer}
        logger.warning("drain of %s, asked for on the live page: %s", host, answer["why"] or answer["outcome"])
        return answer

    def _drain(self, name: str, *, hands_over: bool) -> Json:
        # 1. whether the job can go on without it   2. the newest save of all nodes is durable   3. a round without it
        if self._hosts is None:
            raise DrainRefused("a job with this rendezvous cannot go on without a host; --rdzv-backend c10d can")
        host, is_drained = self._hosts.find(name)
        if is_drained:
            return {"host": host, "outcome": "known"}
        members = set(self._channel.hosts)
        step = self._hand_over(host) if hands_over else None
        self._hosts.find(name)  # again: that takes time, in which a spare may have been lost
        hosts = [node.host for node in self._hosts.leave_out(host).nodes]
        new = sorted({*hosts} - members)
        return {"host": host, "outcome": "drained", "nodes": len(hosts), "new": new, "step": step}

    def _take_back(self, name: str) -> Json:
        if self._hosts is None:
            raise DrainRefused("a job with this rendezvous drains no hosts")
        host, takes_part = self._hosts.take_back(name)
        return {"host": host, "outcome": "back" if takes_part else "waits"}

    def _hand_over(self, host: str) -> int | None:
        """Wait until the newest save that all nodes have is durable; its step, None for no save.

        Raises DrainRefused if that fails. A host that does not answer has nothing to hand over any more; a round that
        ends meanwhile has flushed its nodes' saves.
        """
        end, round, names, step = time.monotonic() + HAND_OVER, self._channel.round, self._channel.hosts, None
        for directory, one in self.flush()["directories"].items():
            if missing := [name for rank, name in enumerate(names) if rank in one.get("missing", ()) and name != host]:
                raise DrainRefused(f"{host} is not drained: {missing[0]} does not answer")
            if one["outcome"] == "nothing":
                continue
            save = SaveId(one["history"], one["step"])
            while (durable := self._durable(directory)) is None or durable < save:
                if self._channel.round is not round:
                    return step
                if time.monotonic() > end:
                    failure = next((s.last_failure for s in self._saver.report() if str(s.directory) == directory), "")
                    raise DrainRefused(
                        f"{host} is not drained: {save} in its memory is not durable after {HAND_OVER:g} s"
                        f"{f' ({failure})' if failure else ''}. Mend storage, or go on without it: --now"
                    )
                time.sleep(_LOOK)
            step = max(save.step, step or 0)
        return step

    def _durable(self, directory: str) -> SaveId | None:
        return next((stats.durable for stats in self._saver.report() if str(stats.directory) == directory), None)

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
