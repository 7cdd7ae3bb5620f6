"""Likely causes of a difference after a resume, the likeliest first, by when and where it appears."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from fastckpt._core.format.manifest import MODEL
from fastckpt._core.inspect.diff import Change
from fastckpt_run.proof.run_comparison import RunComparison, StateDifference
from fastckpt_run.proof.run_history import RunHistory, WorkerStart

POSITION, PREFETCH, GENERATOR = "data position", "prefetched batch", "random generator"
OPTIMIZER, COUNTER, KERNEL = "optimizer state", "time or step counter", "nondeterministic kernel"
HASH, FILE = "hash seed", "file of the script"
BACKGROUND, RESUME, IGNORED = "the script itself", "no resume", "ignored resume"


@dataclass(frozen=True)
class LikelyCause:
    """A cause, and the evidence for it or the remedy."""

    name: str
    text: str


_USUAL = {
    POSITION: "save how many batches were taken, and go on behind them: data= of Checkpointer, or docs/guides/data.md",
    PREFETCH: "a batch that was drawn ahead of its step is drawn, and counted, before it is used: save the position of "
    "the batch that is used next, or keep the batch in the state",
    GENERATOR: "checkpointers save the generators of torch, Python and numpy; one that the script makes itself "
    "(torch.Generator, numpy.random.default_rng, of a data loader or its workers) belongs into the state",
    OPTIMIZER: "an optimizer, scheduler, scaler or average that is not in the state begins afresh after a resume",
    COUNTER: "something depends on the time, on the pace of threads, or on a count of steps or calls since the start "
    "of the process",
    KERNEL: "torch.use_deterministic_algorithms(True) names kernels whose results vary; DDP with 3 ranks or more "
    "takes fastckpt.ddp.settle",
    HASH: "the order of a set, and hash() of a text, differ from process to process: sort, or set PYTHONHASHSEED=0",
    FILE: "a file that the script writes and reads is not set back by a resume: keep what it holds in the state",
}
_VARY = [GENERATOR, HASH, FILE, COUNTER, KERNEL]
"""Causes by which any two runs differ."""
_GENERATOR_BYTES = 5056
"""Elements of the state of a generator of torch on the CPU."""
_RANDOM = re.compile(r"rng|random|generator|noise|seed|mt19937", re.IGNORECASE)
_OPTIMIZER = re.compile(r"optim|exp_avg|momentum|sched|scaler|ema", re.IGNORECASE)
_ONLY_OPTIMIZERS = re.compile(r"\.lr$|last_epoch$|_step_count$")
_AHEAD = re.compile(r"prefetch|ahead|lookahead|next_batch|num_workers", re.IGNORECASE)
_GENERATORS = ("Generator", "default_rng", "RandomState", "Random")
_READS, _WRITES = ("read_text", "read_bytes"), ("write_text", "write_bytes")


def not_resumed(killed: RunHistory) -> LikelyCause | None:
    """A run without a resume after a restart of workers, by the first process that shows it."""
    for rank, starts in sorted(killed.starts.items()):
        for before, start in pairwise(starts):
            saved = max(before.saved, default=None)
            if saved is None:
                continue
            after = f"after the kill rank {rank} "
            if start.fresh:
                return LikelyCause(
                    RESUME,
                    f"{after}asked for a checkpoint and found none, though step {saved} had been saved: the directory "
                    "must be the same at each start",
                )
            if start.loaded is None and start.steps:
                return LikelyCause(
                    RESUME,
                    f"{after}began at step {start.steps[0]} without a checkpoint, though step {saved} had been saved: "
                    "call load_checkpoint() before the first step, and use what it returns",
                )
            if start.loaded is not None and start.steps and start.steps[0] < start.loaded:
                return LikelyCause(
                    IGNORED,
                    f"{after}loaded step {start.loaded} and went on at step {start.steps[0]}: take the step, the "
                    "model and the optimizer from what load_checkpoint() returns",
                )
    return None


def varies_by_itself(found: RunComparison, killed: RunHistory) -> bool:
    """Return whether the first value that differs was logged before any effect of a kill: by a first process."""
    one = found.value
    return one is not None and not one.repeated and one.start is not None and one.start is killed.starts[one.of.rank][0]


def likely_causes(found: RunComparison, killed: RunHistory, tree: ast.Module | None) -> list[LikelyCause]:
    """The causes of the first difference, the likeliest first."""
    if (cause := not_resumed(killed)) is not None:
        return [cause]
    order = _by_time(found, found.value.start if found.value else None)
    return _ranked(order, dict(_by_state(found.state)) if found.state else {}, tree, likeliest=order[0])


def causes_of_variation(why: str, tree: ast.Module | None) -> list[LikelyCause]:
    """The causes of a difference that no kill has made."""
    return [LikelyCause(BACKGROUND, why), *_ranked(_VARY, {}, tree)]


def _ranked(order: list[str], hints: dict[str, str], tree: ast.Module | None, likeliest: str = "") -> list[LikelyCause]:
    source = dict(_by_source(tree))
    # Evidence of the checkpoints comes first, then of the source, then of the time of the difference.
    ranked = sorted(order, key=lambda name: (name not in hints, name not in source and name != likeliest))
    return [
        LikelyCause(name, "; ".join(filter(None, (hints.get(name), source.get(name), _USUAL[name])))) for name in ranked
    ]


def _by_time(found: RunComparison, start: WorkerStart | None) -> list[str]:
    """All causes, by how soon after the resume the first value differs."""
    if start is None or start.loaded is None or found.value is None:
        return [POSITION, PREFETCH, GENERATOR, OPTIMIZER, KERNEL, COUNTER, FILE, HASH]
    loaded = start.loaded
    same_weights = found.state is None and any(step > loaded for step in found.steps)
    if found.value.of.step - loaded <= 1 and not (found.same_input or same_weights):
        # The state was that of the save: the difference came in with the first step, or was logged after its update.
        return [POSITION, PREFETCH, GENERATOR, OPTIMIZER, COUNTER, KERNEL, FILE, HASH]
    # The first step's input was the same, and its result was not: the update was another.
    return [OPTIMIZER, COUNTER, KERNEL, GENERATOR, POSITION, PREFETCH, FILE, HASH]


def _by_state(state: StateDifference) -> Iterator[tuple[str, str]]:
    """Yield causes by the entries that differ in a checkpoint, but for weights, which follow from all causes."""
    for file, change in state.changes:
        if (name := _cause_of(change)) is not None:
            yield name, f"{file} of step {state.step}: {change.name} is {change.a}, and {change.b} with kills"
    for file, difference in state.files.items():
        for entry, distance in difference.tensors.items():
            if distance.count == _GENERATOR_BYTES or (file != MODEL and _RANDOM.search(entry)):
                yield GENERATOR, f"{file} of step {state.step}: {entry} differs"
            elif _OPTIMIZER.search(entry) and entry.endswith(".step"):
                yield OPTIMIZER, f"{file} of step {state.step}: {entry} is {distance.max_abs} apart"


def _cause_of(change: Change) -> str | None:
    if _ONLY_OPTIMIZERS.search(change.name):
        return OPTIMIZER
    if _OPTIMIZER.search(change.name):
        return None
    if _RANDOM.search(change.name):
        return GENERATOR
    a, b = _whole(change.a), _whole(change.b)
    # A position that is behind was not restored; one that is ahead has counted samples that were drawn and not used.
    return None if a is None or b is None else POSITION if b < a else PREFETCH


def _by_source(tree: ast.Module | None) -> Iterator[tuple[str, str]]:
    nodes = [*ast.walk(tree)] if tree is not None else []
    asked = {id(each) for node in nodes if isinstance(node, ast.Compare) for each in node.comparators}  # x in {1, 2}
    reads, writes = ([line for node in nodes if (line := _line_of_file(node, writes=w))] for w in (False, True))
    if reads and writes:
        yield FILE, f"the script writes a file (line {writes[0]}), and reads one (line {reads[0]})"
    for node in nodes:
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.keyword(arg=str(name)) if _AHEAD.search(name):
                yield PREFETCH, f"the script has {name} (line {node.lineno})"
            case ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name)) if name in _GENERATORS:
                yield GENERATOR, f"the script makes a generator of its own (line {node.lineno})"
            case ast.Call(func=ast.Name(id="hash" | "set" | "frozenset")) | ast.Set() | ast.SetComp():
                if id(node) not in asked:
                    yield HASH, f"the script has a set or a hash (line {node.lineno})"


def _line_of_file(node: ast.AST, *, writes: bool) -> int:
    """The line in which a call opens a file to read or to write; 0 if it does not."""
    match node:
        case ast.Call(func=ast.Attribute(attr=name)) if name in (_WRITES if writes else _READS):
            return node.lineno
        case ast.Call(func=ast.Name(id="open") | ast.Attribute(attr="open")):
            texts = [each.value for each in ast.walk(node) if isinstance(each, ast.Constant)]
            modes = [text for text in texts if isinstance(text, str) and re.fullmatch(r"[rwax][bt+]{0,2}", text)]
            return node.lineno if writes == any(set(mode) & set("wax+") for mode in modes) else 0
    return 0


def _whole(text: str) -> int | None:
    return int(text) if re.fullmatch(r"-?\d{1,18}", text) else None
