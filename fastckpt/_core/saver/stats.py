"""Counts outcomes of the checkpoints of one directory, for the report at the end of the job."""

import re
import time
from collections import Counter
from dataclasses import dataclass, field

from fastckpt._core.format.ids import SaveId
from fastckpt._core.policy.slots import Skip

KINDS = 20
"""Reasons that are counted apart, at most."""
OTHER = "other reasons"
TIMES = 512
"""Saves with remembered times, at most; of older ones every second."""


@dataclass
class Copies:
    """Counts of checkpoints that were copied to a remote store.

    Attributes:
        location: The URL, or path.
        uploaded: Checkpoints that arrived, of ``size`` bytes together.
        failures: Uploads that failed, each attempt counted; ``last_failure`` is the last one's message.
        newest: The newest checkpoint that it holds, as far as is known.
    """

    location: str
    uploaded: int = 0
    size: int = 0
    failures: int = 0
    last_failure: str = ""
    newest: SaveId | None = None

    def arrived(self, save: SaveId, size: int) -> None:
        """A checkpoint of ``size`` bytes did."""
        self.newest = save
        self.uploaded += 1
        self.size += size


@dataclass
class ReplicaCounts:
    """Counts of copies that other hosts keep of one node's own files.

    Attributes:
        saves: Saves of which all partners have got copies from this node, of ``size`` bytes together.
        skipped: Saves of which this node has made no copies.
        newest: The newest save of which all nodes have made copies, as far as is known.
    """

    saves: int = 0
    size: int = 0
    skipped: int = 0
    newest: SaveId | None = None


@dataclass
class SaverStats:
    """Counts of one node.

    Attributes:
        directory: The checkpoint directory: a path, or the URL of a store.
        saves: Checkpoints that came to be whole in memory, of ``saved_size`` bytes together; ``saved`` is the last.
        persisted: Checkpoints made durable, of ``size`` bytes together, in ``seconds``.
        failures: Persists that failed, each attempt counted; ``last_failure`` is the last one's message.
        asked: Checkpoints that were to be made durable and are not (yet), each with the path that its user gave.
        overtaken: Saves for storage that were not persisted, since newer ones came while they waited.
        skips: Number of skipped saves, by reason, and by its kind (``skip_kinds``).
        resumes: Number of resumes, by tier.
        bad: Checkpoints that a resume met and could not use, and why; the first of them.
        wanted: The newest checkpoint that was to be made durable: saved with DISK, or flushed.
        durable: The newest one that is; since ``since``, in seconds of the monotonic clock.
        remote: Outcome of the copies in a remote store, if there is one.
        memory: The newest checkpoint that is whole in memory; None if there is none.
        common: The newest one that all of several nodes held at the last flush, as far as was known; None for none.
        replicas: Copies in the memory of other hosts.
        begun: Time at which saves were begun, that is, the instant of the job that they hold; by id, in seconds of the
            monotonic clock, oldest first. Not all older ones are there.
        loaded: Checkpoint that a rank loaded last; None if there was nothing to load, or nobody has asked yet.
        loaded_at: Time of that load, in seconds of the monotonic clock; 0 for never.
    """

    directory: str
    saves: int = 0
    saved_size: int = 0
    saved: SaveId | None = None
    persisted: int = 0
    size: int = 0
    seconds: float = 0.0
    failures: int = 0
    last_failure: str = ""
    asked: set[tuple[SaveId, str]] = field(default_factory=set)
    overtaken: int = 0
    skips: Counter[str] = field(default_factory=Counter)
    skip_kinds: Counter[str] = field(default_factory=Counter)
    resumes: Counter[str] = field(default_factory=Counter)
    bad: list[str] = field(default_factory=list)
    wanted: SaveId | None = None
    durable: SaveId | None = None
    since: float = 0.0
    remote: Copies | None = None
    memory: SaveId | None = None
    common: SaveId | None = None
    replicas: ReplicaCounts = field(default_factory=ReplicaCounts)
    begun: dict[SaveId, float] = field(default_factory=dict)
    loaded: SaveId | None = None
    loaded_at: float = 0.0

    @property
    def lacking(self) -> SaveId | None:
        """The newest checkpoint that was to be made durable, if neither it nor a newer one is."""
        return self.wanted if self.wanted and (self.durable is None or self.durable < self.wanted) else None

    @property
    def has_durable(self) -> bool:
        """True if any checkpoint is durable: here, or where one was loaded from."""
        return self.durable is not None or bool(self.resumes.keys() - {"memory"})

    @property
    def never_whole(self) -> bool:
        """True if the script has saved, and none of its saves became whole."""
        return not self.saves and bool(self.begun or self.skips)

    @property
    def is_stored(self) -> bool:
        """True if all that the next start could resume is durable.

        Saves that only one of several nodes has cannot be resumed.
        """
        is_common = self.common is not None and self.durable is not None and self.durable >= self.common
        return self.lacking is None or is_common

    def want(self, save: SaveId) -> None:
        """A checkpoint is to be made durable."""
        self.wanted = max(self.wanted or save, save)

    def targets(self, save: SaveId | None) -> list[str]:
        """The paths at which a checkpoint is to be made durable, and is not (yet)."""
        return [target for asked, target in self.asked if asked == save]

    def begin(self, save: SaveId) -> None:
        """A save begins."""
        if len(self.begun) >= TIMES:
            kept = [*self.begun][::2]
            # Another dictionary: a thread that watches the job may be reading this one.
            self.begun = {id: self.begun[id] for id in kept}
        self.begun[save] = time.monotonic()

    def load(self, save: SaveId | None) -> None:
        """A rank has loaded a checkpoint, or found nothing to load."""
        self.loaded, self.loaded_at = save, time.monotonic()

    def save(self, save: SaveId, size: int) -> None:
        """A checkpoint of ``size`` bytes is whole in memory; may be reported more than once."""
        if save != self.saved:
            self.saved = save
            self.saves += 1
            self.saved_size += size

    def made_durable(self, save: SaveId, size: int, seconds: float) -> None:
        """A checkpoint of ``size`` bytes is."""
        if self.durable is None or self.durable < save:
            self.durable, self.since = save, time.monotonic()
        self.persisted += 1
        self.size += size
        self.seconds += seconds

    def fail(self, error: str) -> None:
        """An attempt to make one durable failed."""
        self.failures += 1
        self.last_failure = error

    def resume(self, tier: str, bad: list[str]) -> None:
        """A job looked for a checkpoint, found one in a tier (empty: none), and met bad ones."""
        self.resumes.update([tier] if tier else [])
        self.bad += [text for text in bad if text not in self.bad and len(self.bad) < KINDS]

    def skip(self, skip: Skip) -> None:
        """A save was skipped."""
        # Numbers are dropped from reasons, or each skipped step would have one of its own.
        parts = re.sub(r"\b(step|process) \d+", r"a \1", skip.reason).split("; ")
        # Of several slots with one reason the last has the remedy.
        reason = "; ".join(part for i, part in enumerate(parts) if not "; ".join(parts[i + 1 :]).startswith(part))
        self.skips[reason if reason in self.skips or len(self.skips) < KINDS else OTHER] += 1
        self.skip_kinds[skip.kind] += 1
