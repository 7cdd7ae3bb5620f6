"""Compares, by digests, state that ranks have in common and one of them saves for all."""

import itertools
import logging
import math
import socket
import time
import zlib
from collections.abc import Callable, Collection, Mapping
from operator import itemgetter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from fastckpt._core import metrics
from fastckpt._core.arguments import abbreviated
from fastckpt._core.client.collective import Agreement, PeerDeparted, agreement
from fastckpt._core.error_codes import coded
from fastckpt._core.replicas.distrusted_saves import give_up_since
from fastckpt._core.replicas.own_entries import State, entries, named, own_entries, own_names
from fastckpt._core.replicas.replica_faults import (
    SHARD,
    Lacking,
    ReplicaFault,
    groups,
    head_of,
    replica_fault,
    unlike_entries,
    unlike_groups,
    whole_objects,
)
from fastckpt._core.replicas.state_digest import PLAIN, digest_of, is_shard
from fastckpt._core.session import Session
from fastckpt._core.torch_private.tensors import compiled_module, local_part
from fastckpt.errors import ConfigError, FastckptError, ReplicasDiffer

logger = logging.getLogger("fastckpt")

EVERY = 100
"""Steps after a comparison in which there is no other."""
SHARE = 0.001
"""The part of training time that comparisons may cost."""
PATIENCE = 60.0
"""Seconds that a rank may be later than others at a comparison."""
TRIES = 2
"""Comparisons, one after the other, to which a rank does not come, before there are no more: it may never save."""
MODELS = ("model", "state_dict")
LEARNED = (*MODELS, "optimizer", "optimizer_states")
"""Parts of a state, as checkpointers call them, of which replicas that were equal stay so."""

PARTS = 64
"""Parts of the entries: entries in parts that differ are sent one by one."""

SAMPLE = 64
"""Elements of a tensor that was loaded by which it is seen whether it has changed."""

_NUMBERS = itertools.count()


class ComparedState(NamedTuple):
    """State of a rank in the form in which ranks compare it.

    Attributes:
        host: Its host; empty if it has no state to compare.
        digests: Of entries, those in parts that differ.
        fresh: Names of entries that were not equal at the comparison before, or that may begin to differ.
        changed: The number of all others that have changed since then.
        objects: Names of parts that are not learned, and have no shards: each is of one rank alone.
        whole: Names of objects that one rank saves as they are: nothing in them is another rank's.
    """

    host: str
    digests: dict[str, str]
    fresh: list[str]
    changed: int
    objects: list[str]
    whole: list[str]


class Judgement(NamedTuple):
    """Decision about the entries that ranks have unlike.

    Attributes:
        unlike: Names of the entries, and whether all have them in one shape.
        refused: Entries that cannot be kept.
        fault: Entries that a processor has computed wrongly; None for none.
        hosts: Of the ranks that are at fault.
    """

    unlike: dict[str, bool]
    refused: list[str]
    fault: ReplicaFault | None
    hosts: list[str]


class RankDifferences:
    """Compares the states of ranks before they are saved: at the first save, and at the next after 100 steps or more.

    All ranks call `begin` and `turn`, with the same steps. An entry is a value in nested dictionaries, such as
    ``optimizer.state.0.exp_avg``; a list is one entry. Of a DTensor the replicas of a shard are compared.

    Args:
        session: Session that saves.
        keeps: True if entries that ranks have unlike are saved of each; else unlike learned tensors are refused.
        lacking: Verdict on an entry that a rank lacks, as one may in a state of torch's DCP.

    Attributes:
        unlike: Names of entries that ranks have unlike, and whether all have them in one shape.
        agreed: The newest step that was saved to storage when all ranks had the same; None before that.
        is_alone: True if other ranks may not make the save that follows: it waits for no comparison but the first.
        all_persist: Whether all ranks save the next one to storage; None if each decides for itself.
        compared: The number of ranks that were compared last, since they have loaded; 0 before that, and if one was
            missed.
    """

    def __init__(self, session: Session, *, keeps: bool = True, lacking: Lacking = "unlike") -> None:
        self._session, self._keeps, self._lacking = session, keeps, lacking
        self._name = f"differences {next(_NUMBERS)}"
        self._ranks: Agreement | None = None
        self._ignored, self._buffers, self._left_out = frozenset[str](), frozenset[str](), frozenset[str]()
        self._has_begun = self.is_alone = False
        self.all_persist: bool | None = None
        self._reset()

    def _reset(self) -> None:
        self.unlike: dict[str, bool] = {}
        self._known: dict[str, str] = {}
        self._last = self._next = -1
        self._failures, self._since, self.compared = 0, 0.0, 0
        self.agreed: int | None = None

    def leave_out(self, name: str) -> None:
        """Do not compare the entries of the state under this key."""
        self._left_out |= {name}

    def leave_buffers(self, model: torch.nn.Module, key: str = "model", *, broadcast: bool = False) -> None:
        """Let buffers of a model, with its state under this key, begin to differ.

        Buffers that DistributedDataParallel makes equal before each forward are not compared: the wrapper's option
        shows that, or ``broadcast``.
        """
        wrapper: Any = compiled_module(model) or model
        bare = wrapper.module if isinstance(wrapper, DistributedDataParallel) else wrapper
        buffers = {named((key, name)) for name, _ in bare.named_buffers()}
        self._buffers |= buffers
        if broadcast or (bare is not wrapper and wrapper.broadcast_buffers):
            self._ignored |= buffers

    def begin(self, loaded: int = -1) -> None:
        """Compare all from now on: all ranks have loaded this step, or none."""
        self._reset()
        self.agreed = loaded if loaded >= 0 else None
        self._has_begun = True
        world = self._session.place.world_size
        self._ranks = agreement(world, self._name) if world > 1 and dist.is_initialized() else None

    def know(self, loaded: State, own: Mapping[str, Any], compared: int) -> None:
        """Let entries that all ranks have loaded equal be a fault if they are unequal at the first comparison.

        Entries that a rank has left as they were are exempt: they may be another's to change.

        Args:
            loaded: The state, as this rank has loaded it.
            own: Result of `own` for this rank at that save; empty for none.
            compared: Value of `compared` then: nothing is known of other entries, or with another number of ranks.
        """
        if compared != self._session.place.world_size:
            return
        names = frozenset(own_names(own))
        self._known = {
            name: _sampled(leaf)
            for name, leaf in self._compared(loaded)
            if self._is_learned(name, leaf) and head_of(name.partition(SHARD)[0], names) is None
        }

    def leave(self) -> None:
        """Compare nothing any more; no rank waits for this one."""
        if self._ranks is not None:
            self._ranks.leave()
        self._ranks, self.compared = None, 0

    def turn(
        self, step: int, state: Callable[[], State], *, persists: bool, whole: Callable[[], Collection[str]] = tuple
    ) -> None:
        """Compare the states of ranks, if that is due at this step.

        Args:
            step: Step to be saved.
            state: Gives this rank's state, if a comparison is due; empty if nobody gave it.
            persists: True if it is saved to storage: a comparison is put off, for 100 steps at most, to such a save.
            whole: Gives the keys of objects that one rank saves as they are: there a missing entry counts as unlike.

        Raises:
            ReplicasDiffer: On all ranks; saves since replicas were equal are not loaded any more.
            ConfigError: On all ranks, for tensors that are unlike and cannot be kept.
        """
        if not self._has_begun or step < self._last:
            self.begin()
        persists = persists if self.all_persist is None else self.all_persist
        if self._ranks is None or not self._is_due(step, persists):
            return
        start = time.monotonic()
        given = state()
        try:
            self._compare(self._ranks, step, given, frozenset(map(_key, whole())), start)
        except PeerDeparted as error:
            logger.info("the states of ranks are not compared any more: %s", error)
            self.leave()
        except (ConfigError, ReplicasDiffer):
            raise
        except (FastckptError, dist.DistError) as error:
            self._missed(step, error)
        else:
            self._failures, self.compared = 0, self._session.place.world_size
            self.agreed = step if persists else self.agreed

    def _is_due(self, step: int, persists: bool) -> bool:
        if self._last < 0:
            return True
        # The first save to storage is one to go on from, if a later one is wrong.
        is_first = persists and self.agreed is None
        return not self.is_alone and (is_first or step >= self._next + (0 if persists else EVERY))

    def _missed(self, step: int, error: Exception) -> None:
        """Try it again later, as the others do: each of them has come to the end of this comparison, or will."""
        self._failures += 1
        is_last = self._failures == TRIES
        logger.warning(
            "the states of ranks were not compared at step %d, %s: %s",
            step,
            "and are not any more" if is_last else "and will be later",
            error,
        )
        self._known, self._last, self._next, self.compared = {}, step, step + EVERY, 0
        if is_last:
            self.leave()

    def own(self, state: State) -> dict[str, Any]:
        """Return the entries that a rank saves as its own, as `own_entries`."""
        return own_entries(state, self.unlike if self._keeps else {}, self._session.place.world_size)

    def _compare(self, ranks: Agreement, step: int, state: State, whole: Collection[str], start: float) -> None:
        # 1. a digest of all, and how long each rank would wait for the next   2. if they differ, digests of parts, and
        # of entries in the parts that differ   3. entries that were equal before are a fault   4. the rest is each
        # rank's own, or refused. The first rank alone has the digests of all: answers do not grow with the ranks.
        compared = self._compared(state)
        digests = {name: digest_of(leaf) for name, leaf in compared}
        wait, unlike = self._wait(step, start), dict[str, bool]()
        alike, wait = ranks.decide([_digest_of_each(groups(digests)), wait, step], _alike_and_longest, PATIENCE)
        parameters = self._parameters()
        learned = {
            name: digests[name]
            for name, leaf in compared
            if self._is_learned(name, leaf) and _is_trained(name, leaf, parameters)
        }
        now = learned
        if self._last < 0:  # the known digests are of the loaded state
            now = {name: _sampled(leaf) for name, leaf in compared if name in learned and name in self._known}
        changed = {name for name, digest in now.items() if digest != self._known.get(name, digest)}
        known = self._known.keys() if self._last >= 0 else changed
        if not alike:
            parts: list[str] = ranks.decide(_digest_of_each(_parts(digests)), unlike_groups, PATIENCE)
            some = {name: digest for name, digest in digests.items() if _part(name) in parts}
            host, fresh = socket.gethostname() if digests else "", sorted(some.keys() - known)
            objects = {_key(key) for key in state if key not in LEARNED and not _has_shards(state[key])}
            mine = ComparedState(host, some, fresh, len(changed), sorted(objects | {*whole}), sorted(whole))
            unlike = self._judged(ranks, step, Judgement(*ranks.decide(mine, self._judge, PATIENCE)))
        self._known = {name: digest for name, digest in learned.items() if name not in unlike}
        self._last, self._next, self._since = step, step + wait, start

    def _wait(self, step: int, start: float) -> int:
        """Steps until the next comparison, if each costs as much as this one."""
        passed = start - self._since
        if not 0 <= self._last < step or passed <= 0:
            return EVERY
        return max(EVERY, math.ceil((time.monotonic() - start) * (step - self._last) / (SHARE * passed)))

    def _judge(self, sent: list[Any]) -> "Judgement":
        """Return the decision about the entries that ranks have unlike; only the first rank calls it."""
        given = [ComparedState(*each) for each in sent]
        digests = [each.digests for each in given]
        whole = {key for each in given for key in each.whole}
        unlike = unlike_entries([each.digests for each in given if each.host], self._lacking, whole)
        known = {name for each in digests for name in each}.difference(*(each.fresh for each in given))
        fault = replica_fault(digests, unlike, known, max(each.changed for each in given))
        refused = sorted(name for name in unlike if self._is_refused(name, digests))
        if self._keeps and not refused:
            unlike = whole_objects(unlike, {key for each in given for key in each.objects})
        return Judgement(unlike, refused, fault, [given[rank].host for rank in fault.ranks] if fault else [])

    def _judged(self, ranks: Agreement, step: int, found: "Judgement") -> dict[str, bool]:
        """Return the entries that ranks have unlike and keep; raises as `turn` does."""
        if found.fault is not None:
            self._raise(ranks, step, ReplicaFault(*found.fault), found.hosts)
        if found.refused:
            text = (
                f"ranks have unlike {abbreviated(found.refused)}, of which one would be saved for all. Have ranks "
                "make it equal, or use fastckpt.Checkpointer, which saves of each rank what is no replica of a shard"
            )
            raise ConfigError(coded(text, "FC-048"))
        self._keep(found.unlike)
        return found.unlike

    def _is_refused(self, name: str, digests: Collection[Mapping[str, str]]) -> bool:
        if SHARD in name or self._keeps:
            return SHARD in name
        is_tensor = any(each.get(name, "").startswith("torch.") for each in digests)
        return is_tensor and (self._lacking == "fine" or name.partition(".")[0] in LEARNED)

    def _compared(self, state: State) -> list[tuple[str, Any]]:
        """The entries that are compared, by name; of a shard this rank's part."""
        found = dict[str, Any]()
        for name, path, leaf in entries(state):
            own = name in self.unlike or named(path[:1]) in self.unlike
            if own or name in self._ignored or path[0] in self._left_out:
                continue  # each rank's own entries need no comparison any more
            if not is_shard(leaf):
                found[name] = leaf
            elif (first := first_replica(leaf)) is not None:
                found[f"{name}{SHARD}{first})"] = local_part(leaf)
        return sorted(found.items(), key=itemgetter(0))

    def _parameters(self) -> set[int]:
        """Addresses of the parameters of all optimizers that have made a step."""
        groups = (group for each in self._session.beats.optimizers for group in each.param_groups)
        return {_address(local_part(each)) for group in groups for each in group["params"]}

    def _is_learned(self, name: str, leaf: object) -> bool:
        return name.partition(".")[0] in LEARNED and torch.is_tensor(leaf) and name not in self._buffers

    def _raise(self, ranks: Agreement, step: int, fault: ReplicaFault, hosts: list[str]) -> None:
        """Have nobody load saves since the last comparison, and raise ReplicasDiffer."""
        last = self._last if self._last >= 0 else self.agreed or 0  # it was loaded
        rank = self._session.place.rank
        who = " and ".join(f"rank {each} on {host}" for each, host in zip(fault.ranks, hosts, strict=True))
        names = abbreviated(fault.names)
        metrics.event("replicas_differ", step=step, since=last, ranks=fault.ranks, names=fault.names[:10])
        why = f"it was saved after step {last}, the last one at which ranks had equal {names}: its values may be wrong"
        give_up_since(self._session, ranks, last, why)
        where = "this rank" if rank in fault.ranks else "another rank" if fault.ranks else "another rank or this one"
        differ = "differs" if len(fault.names) == 1 else "differ"
        text = (
            f"{where}{f' ({who})' if who else ''} has computed what its replicas have not: {names}, equal at step "
            f"{last}, {differ} at step {step}. So does a processor that is broken"
            f"{'' if who else '; no majority tells which'}. What was saved after step {last} is not loaded any more"
        )
        raise ReplicasDiffer(coded(text, "FC-046"))

    def _keep(self, unlike: Mapping[str, bool]) -> None:
        fresh = sorted(unlike.keys() - self.unlike.keys())
        self.unlike |= unlike
        place = self._session.place
        if fresh and place.rank == 0:
            does = (
                "of each rank its own is saved, and loaded in a job of" if self._keeps else "that of one is saved for"
            )
            logger.warning("ranks have unlike %s: %s %d ranks", abbreviated(fresh), does, place.world_size)


def _is_trained(name: str, leaf: torch.Tensor, parameters: Collection[int]) -> bool:
    """Return whether an entry is a parameter, or of an optimizer. Buffers of a model may begin to differ."""
    return name.partition(".")[0] not in MODELS or isinstance(leaf, torch.nn.Parameter) or _address(leaf) in parameters


def _address(tensor: torch.Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:  # of a layout without one
        return 0


def _sampled(tensor: torch.Tensor) -> str:
    """A digest of some elements, by which it is seen that training has changed a tensor; empty for one of a few types.

    Nothing is known of those: they count as left as they were.
    """
    if type(tensor) not in PLAIN or tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        return ""
    index = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())
    return digest_of(tensor.detach()[index].reshape(-1)[:SAMPLE].cpu())


def _key(key: object) -> str:
    return named((key,))


def _has_shards(part: object) -> bool:
    return any(is_shard(leaf) for _, _, leaf in entries({"": part}))


def first_replica(tensor: object) -> int | None:
    """The first rank that has the same shard of a DTensor; None if no other has, or it is none."""
    if type(tensor) is not DTensor or (place := tensor.device_mesh.get_coordinate()) is None:
        return None
    index = [slice(None) if how.is_replicate() else at for how, at in zip(tensor.placements, place, strict=True)]
    ranks = tensor.device_mesh.mesh[tuple(index)]
    return int(ranks.min()) if ranks.numel() > 1 else None


def _digest_of_each(found: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    return {name: digest_of([*digests.items()]) for name, digests in found.items()}


def _part(name: str) -> str:
    _, _, first = name.partition(SHARD)
    return f"{zlib.crc32(name.encode()) % PARTS} {first}"


def _parts(digests: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Entries by the part that they are in; entries of all ranks are in parts that each rank sends, even if empty."""
    found: dict[str, dict[str, str]] = {f"{number} ": {} for number in range(PARTS)} if digests else {}
    for name, digest in digests.items():
        found.setdefault(_part(name), {})[name] = digest
    return found


def _alike_and_longest(values: Collection[tuple[dict[str, str], int, int]]) -> tuple[bool, int]:
    if len(steps := {step for *_, step in values}) > 1:
        raise FastckptError(f"ranks are at unlike steps: {sorted(steps)}")
    return not unlike_groups([sent for sent, *_ in values]), max(wait for _, wait, _ in values)
