"""Exit codes of the agent: the causes of its end, and the code of each, with `--fast-exit-codes` and without."""

import os
from dataclasses import dataclass
from enum import Enum

START_AGAIN = os.EX_TEMPFAIL
"""75: start the job again. All that was to be durable is, and the next start resumes."""
BAD_NODE = 76
"""Start the job on another node."""
NOT_STORED = os.EX_IOERR
"""74: the newest checkpoint is in the memory of this node alone."""
_OK, _FAILED, _USAGE = 0, 1, 2
ADVICE = {
    START_AGAIN: "start the job again: it resumes",
    BAD_NODE: "start the job again without this node",
    NOT_STORED: "the newest checkpoint is in memory on this node alone: mend storage, then start the job here again",
}
"""The meanings of the codes that only `--fast-exit-codes` has, in words."""


class Ending(Enum):
    """A cause of the agent's end: its exit code, the one with `--fast-exit-codes`, and the cause in words."""

    SUCCEEDED = _OK, _OK, "the script succeeded, also if this node waited without workers"
    SETTING = (
        _USAGE,
        _USAGE,
        "an unknown option; an option or variable with a value that cannot be used; this node does not fit the job",
    )
    REFUSED = _FAILED, _USAGE, "torch refuses the value of an option of torchrun"
    STOPPED = _FAILED, START_AGAIN, "a signal stopped the agent, such as SIGTERM or SIGINT"
    LOST_WORKERS = (
        _FAILED,
        START_AGAIN,
        "a worker hung or was killed from outside (SIGKILL, SIGTERM), and no restart is left",
    )
    LACKS_NODES = _FAILED, START_AGAIN, "too few nodes came, or came back; no endpoint answered"
    SCRIPT = (
        _FAILED,
        _FAILED,
        "a worker failed by itself (exception, `sys.exit`, SIGSEGV), and no restart is left; the script cannot start; "
        "failures without progress",
    )
    ENDED_ELSEWHERE = _FAILED, _FAILED, "another node has ended the job: its code has the cause"
    TAKEN_OVER = _FAILED, _FAILED, "another job has taken over the checkpoint directory"
    NOT_DURABLE = (
        START_AGAIN,
        NOT_STORED,
        "the script succeeded, but nothing that it saved on a node is durable, or the newest is not "
        "(`--fast-require-persist`)",
    )
    NODE_CHECK = (
        BAD_NODE,
        BAD_NODE,
        "this node failed `--fast-node-check`, or lacks the checkpoint directory of the others",
    )
    STUCK = _FAILED, BAD_NODE, "the kernel lets workers neither run nor die (state D)"
    NEVER_WHOLE = _FAILED, _FAILED, "the script succeeded, but none of its saves came to be whole"
    FAULT = _FAILED, _FAILED, "any other error of the launcher"

    def __init__(self, code: int, fast: int, when: str) -> None:
        self.code, self.fast, self.when = code, fast, when


@dataclass
class ExitStatus:
    """The end of the agent, as far as it is known.

    Attributes:
        fast: True if the codes of `--fast-exit-codes` are wanted.
        ending: The cause, where the agent knows more than its error reports.
        is_stored: True if all that was to be durable is.
    """

    fast: bool = False
    ending: Ending | None = None
    is_stored: bool = True

    def code(self, ending: Ending) -> int:
        """The exit code, for a cause that the agent may know better."""
        ending = self.ending or ending
        if not self.fast:
            return ending.code
        # A job that is started elsewhere would silently repeat steps whose save is in this memory alone.
        return NOT_STORED if ending.fast == START_AGAIN and not self.is_stored else ending.fast
