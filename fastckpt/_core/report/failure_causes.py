"""Why a worker failed, as far as its agent knew: parts of a failure, and of what followed from it."""

from dataclasses import dataclass
from typing import Self

from fastckpt._core.report.events import Event, text, whole


@dataclass(frozen=True, kw_only=True)
class FailureCause:
    """What the agent found when all workers were stopped.

    Attributes:
        exception: Type and message of what the worker raised; this and the next three are empty if not known.
        frame: Where that was, or where it hung.
        host: Where it ran.
        log: The file that has its stderr.
        restarts_left: How many restarts were left after this one, of ``restarts``; None if that is not known.
    """

    exception: str = ""
    frame: str = ""
    host: str = ""
    log: str = ""
    restarts_left: int | None = None
    restarts: int | None = None

    @classmethod
    def of(cls, event: Event) -> Self:
        """Read an event ``worker_failed``."""
        return cls(
            exception=text(event, "exception"),
            frame=text(event, "frame"),
            host=text(event, "host"),
            log=text(event, "log"),
            restarts_left=whole(event, "restarts_left", 0),
            restarts=whole(event, "restarts", 0),
        )
