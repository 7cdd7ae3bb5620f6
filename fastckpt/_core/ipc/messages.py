"""The messages between a writer and the saver.

A writer asks and the saver answers in order, each message once, but for those in UNANSWERED. Messages are hints:
commits are read from the records in the slots.
"""

from dataclasses import dataclass, field
from typing import Any, Union

from fastckpt._core.ipc.offload_messages import OffloadEnded, OffloadMeasured, OffloadMessage, OffloadPlanned


@dataclass(frozen=True)
class Hello:
    """A writer introduces itself and its checkpoint directory. Answer: Welcome.

    ``imported`` is when it had imported its modules, in seconds of the monotonic clock.
    """

    directory: str
    local_rank: int
    local_world_size: int
    world_size: int
    group_rank: int
    restart_count: int
    policy: dict[str, Any] = field(default_factory=dict)
    verify: str = "resume"
    remote: str = ""
    remote_policy: dict[str, Any] = field(default_factory=dict)
    rank: int = 0
    imported: float = 0.0


@dataclass(frozen=True)
class Welcome:
    """Location of the arena, and the history that these workers write.

    Attributes:
        slot: Number of the saver's agent among those that share this host's memory: its other arenas have the same.
    """

    arena: str
    history: int
    telemetry: str
    slot: int = 0


@dataclass(frozen=True)
class Reserve:
    """Images of these sizes (bytes), or about these, will be saved: make room in all slots, soon. Answer: Done."""

    files: dict[str, int]
    about: bool = False


@dataclass(frozen=True)
class BeginSave:
    """A save begins, perhaps again: make room for images of these sizes (bytes). Answer: Granted or Skipped.

    ``closed`` is as `Goodbye.closed`.
    """

    history: int
    step: int
    files: dict[str, int]
    closed: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Granted:
    """The slot to write to, and the checkpoints made durable since the last answer to the writer."""

    slot: str
    persisted: list[list[int]] = field(default_factory=list)
    trouble: str = ""


@dataclass(frozen=True)
class Skipped:
    """This id is not saved, on any rank, and why."""

    reason: str
    persisted: list[list[int]] = field(default_factory=list)
    trouble: str = ""


@dataclass(frozen=True)
class Committed:
    """The writer's done record of this id is in the slot; persist it if ``persist``. There is no answer.

    Attributes:
        path: Path that the user wants for the model's file; empty for the default.
        overtakable: True if a newer one may be persisted instead, as long as this one waits.
        agreed: True if all nodes persist it, unless they are busy.
    """

    history: int
    step: int
    persist: bool
    path: str = ""
    overtakable: bool = False
    agreed: bool = False


@dataclass(frozen=True)
class Uncommitted:
    """The writer could not write its part of this save, and why; it may begin it again. There is no answer."""

    history: int
    step: int
    reason: str


@dataclass(frozen=True)
class Pin:
    """Pin the checkpoints in memory until Release. Answer: Pinned."""


@dataclass(frozen=True)
class Pinned:
    """Saves that are in memory.

    Attributes:
        slots: Slots that hold a whole checkpoint.
        durable: History and step of the newest durable one; empty for none.
        verified: Slots of which nobody need compare the digests: the saver has, and nobody has saved since.
        lost: Saves in memory that were found bad.
        address: Address at which other agents can fetch these saves; empty if they cannot.
        alike: Whether files that each node has of its own were equal on all nodes when they were last compared.
    """

    slots: list[str]
    durable: list[int] = field(default_factory=list)
    verified: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    address: str = ""
    alike: bool = False


@dataclass(frozen=True)
class Release:
    """The writer reads no slot any more. Answer: Done."""


@dataclass(frozen=True)
class Fetch:
    """Bring files of a save from other agents' memory; of each node, the first to ask has it done. Answer: Fetched.

    Attributes:
        save: History and step.
        attempt: The token that ranks of all nodes share from one load to the next.
        sources: The addresses of agents that hold each file, by its name.
        beside: True if they are for a load alone, and not to be a save of this node's ranks in a slot.
    """

    save: list[int]
    attempt: str
    sources: dict[str, list[str]]
    beside: bool = False


@dataclass(frozen=True)
class Fetched:
    """Paths of the files, their sizes in bytes and xxh3-128, and the details of their save; they stay until Release."""

    files: dict[str, str]
    sizes: dict[str, int]
    digests: dict[str, str]
    details: dict[str, Any]


@dataclass(frozen=True)
class Bad:
    """The ranks have found checkpoints bad. Answer: Done.

    Attributes:
        memory: Ids (history and step) of those in memory: they must neither be offered again nor persisted.
        storage: True if some on storage were bad, too: durable checkpoints must be listed again.
        distrusted: True if their bytes are as saved, and that state is wrong: they do not count as lost.
    """

    memory: list[list[int]]
    storage: bool
    distrusted: bool = False


@dataclass(frozen=True)
class Resumed:
    """The writer has looked for a checkpoint to resume. Answer: Done.

    Attributes:
        tier: Tier in which it found one; empty if it did not.
        bad: Checkpoints that could not be used, and why.
        abandoned: Ids of newer ones in memory, which other nodes do not have.
    """

    tier: str
    bad: list[str]
    abandoned: list[list[int]] = field(default_factory=list)


@dataclass(frozen=True)
class Loaded:
    """The writer has its state, after so many seconds. There is no answer.

    Attributes:
        save: History and step; empty if the state names none.
        tier: Tier in which it was found; empty if there was none.
    """

    save: list[int]
    tier: str
    seconds: float


@dataclass(frozen=True)
class Decided:
    """Save intervals that all ranks have decided. There is no answer.

    Attributes:
        step: After which it counts.
        memory, storage: Steps between snapshots, between persists; None while their cost is measured.
        overhead, bound: The parts of training time that they took, as far as was measured, and may take.
        changed: True if the intervals are others than before.
    """

    step: int
    memory: int | None
    storage: int | None
    overhead: float | None
    bound: float | None
    changed: bool
    why: str


@dataclass(frozen=True)
class Logged:
    """The newest values that the script has logged since the last such message, by name. There is no answer.

    Attributes:
        step: The newest that it gave.
    """

    step: int
    values: dict[str, float]


@dataclass(frozen=True)
class Goodbye:
    """The writer saves no more: nobody need wait for it. Answer: Done.

    Attributes:
        history: The one that it wrote.
        lends: Files that later saves of the others take as its part, and their sizes (bytes): they are in the arena.
            Without any, no later save can be whole.
        details: The details of its done record.
        closed: Rank, history and step of the last save of a rank on another node that has closed and lends nothing;
            empty for none.
    """

    history: int = 0
    lends: dict[str, int] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)
    closed: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class NextHistory:
    """The writer resumes again. Answer: Welcome, with the same history for all ranks that have asked as often."""


@dataclass(frozen=True)
class Ask:
    """Request for the state of persistence. Answer: Status."""


@dataclass(frozen=True)
class Status:
    """State of persistence: durable checkpoints, persists that are under way, and failures.

    Attributes:
        waiting: Persists that wait or run, and saves to be persisted unless a newer one is.
        newest: History and step of the newest durable checkpoint; empty for none.
        persisted: As in Granted.
        trouble: The last failure of a persist that no later one has made good; empty for none.
        since: Time at which the newest durable checkpoint became durable, in seconds of the monotonic clock; 0 if it
            was before this saver.
        persists: Persists that nothing overtakes, of saves that are in memory whole: they end without any rank's doing.
        filling: Saves in memory that are not whole yet, and may still come to be.
    """

    waiting: int
    newest: list[int]
    persisted: list[list[int]]
    trouble: str
    since: float = 0.0
    persists: int = 0
    filling: int = 0


@dataclass(frozen=True)
class Done:
    """The message was carried out."""


@dataclass(frozen=True)
class Failed:
    """The message could not be carried out; the error's class and text."""

    kind: str
    text: str


Message = Union[  # noqa: UP007
    Hello,
    Welcome,
    Reserve,
    BeginSave,
    Granted,
    Skipped,
    Committed,
    Uncommitted,
    Pin,
    Pinned,
    Release,
    Fetch,
    Fetched,
    Bad,
    Resumed,
    Loaded,
    Decided,
    OffloadPlanned,
    OffloadMeasured,
    OffloadEnded,
    Logged,
    Goodbye,
    NextHistory,
    Ask,
    Status,
    Done,
    Failed,
]
UNANSWERED = Committed | Uncommitted | Loaded | Decided | OffloadMessage | Logged
