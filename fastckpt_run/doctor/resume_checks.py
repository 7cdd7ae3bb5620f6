"""Checks of the checkpoint that a launch would resume from a directory, and of memory for its checkpoints."""

from collections.abc import Iterator
from pathlib import Path

from fastckpt._core.byte_sizes import binary
from fastckpt._core.inspect.checkpoint_sizes import checkpoint_sizes
from fastckpt._core.inspect.inventory import WRITING, InventoryItem, take
from fastckpt._core.inspect.which import REFUSE, ResumeDecision, decide
from fastckpt._core.memory.headroom import unreserved
from fastckpt._core.storage.store import as_path, is_url
from fastckpt_run.doctor.diagnosis import Diagnosis, Subject, ok, problem, warning
from fastckpt_run.formatting import count
from fastckpt_run.plan.estimate import Observed, PlanOptions, estimate

_MOST = 8
"""Candidates that are named, at most."""


def resume(subject: Subject) -> Iterator[Diagnosis]:
    """Find the checkpoint that would be resumed, and why no other, by the command `fastckpt which`."""
    if _is_missing(subject):
        yield ok("resume", "nothing: a launch starts fresh, and makes the directory")
        return
    inventory = take(subject.directory, subject.job.arenas)
    decision = decide(inventory)
    choice = decision.choice
    if decision.outcome == REFUSE:
        text = "a launch refuses to start: checkpoints exist, but none can be loaded"
        yield problem("resume", text, f"See why: fastckpt which {subject.directory}")
    elif choice is None:
        yield ok("resume", "nothing: a launch starts fresh")
    else:
        yield ok("resume", f"{_in_words(choice)}: {choice.path}")
        world = subject.nodes * subject.ranks
        if world and choice.world and choice.world != world:
            text = f"{count(choice.world, 'rank')} saved it, and this launch has {world}: others' own states are lost"
            yield warning("resume", text, f"Launch {choice.world}, or look on the page of your framework what it loads")
    yield from _passed_over(decision)


def memory_needed(subject: Subject) -> Iterator[Diagnosis]:
    """Check that the slots of this node fit, by the command `fastckpt plan`."""
    name, settings = "memory needed", subject.job
    inventory = None if _is_missing(subject) else take(subject.directory, settings.arenas)
    if inventory is None or not inventory.whole:
        yield ok(name, "unknown before the first checkpoint; fastckpt plan SCRIPT tries the script until it saves")
        return
    sizes = checkpoint_sizes(subject.directory, settings.arenas)
    limit = unreserved(Path(settings.arenas))
    present = sum(arena.size for arena in inventory.arenas)  # its memory of now is there for it again
    options = PlanOptions(nodes=subject.nodes or None, ranks_per_node=subject.ranks or None, slots=settings.slots)
    found = estimate(sizes, Observed(free=limit.free + present, total=limit.total), options)
    need = found.slots * found.node.slot
    text = f"{found.slots} slots of {binary(found.node.slot)} for {count(found.shape.ranks_per_node, 'rank')}; {limit}"
    if present:
        text += f", and {binary(present)} are in its memory already"
    if found.fit == 0:
        yield problem(name, f"{text}: not even two fit", limit.remedies(need - limit.free - present))
    elif found.fit < found.slots:
        yield warning(name, f"{text}: {found.fit} fit", limit.remedies(max(0, need - limit.free - present)))
    else:
        yield ok(name, text)


def _is_missing(subject: Subject) -> bool:
    return not is_url(subject.directory) and not Path(as_path(subject.directory)).is_dir()


def _in_words(item: InventoryItem) -> str:
    return f"step {item.step} of history {item.history} from {item.tier}"


def _passed_over(decision: ResumeDecision) -> Iterator[Diagnosis]:
    """A line for each candidate that would not do, and one for all that are older or farther."""
    chosen, later = decision.choice, list[str]()
    bad = list[tuple[InventoryItem, str]]()
    for item, why in decision.others:
        if chosen is not None and (why == "older" or why.endswith(f"nearer than {item.tier}")):
            later.append(f"step {item.step} in {item.tier}")
        elif why:
            bad.append((item, why))
    for item, why in bad[:_MOST]:
        text = f"passes over {_in_words(item)}: {why} ({item.path})"
        ended = "nothing to do: it is no whole save, and an older one is resumed"
        yield warning("resume", text, ended if item.state == WRITING else "fastckpt verify reads it whole")
    if later:
        more = f" and {len(later) - _MOST} more" if len(later) > _MOST else ""
        yield ok("resume", f"older, or the same in a slower tier: {', '.join(later[:_MOST])}{more}")
