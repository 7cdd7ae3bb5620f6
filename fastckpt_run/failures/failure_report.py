"""What a failed job says of its workers: each traceback once, wherever the worker wrote it."""

from collections.abc import Container
from pathlib import Path

from torch.distributed.elastic.multiprocessing import MultiprocessContext, PContext
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from fastckpt_run.failures.tracebacks import last_traceback, tail_of


def explain(failure: ProcessFailure, workers: PContext, hung: Container[int], lost: str) -> None:
    """Word ``failure.message``, which ChildFailedError shows as the traceback; the error file stays as it is.

    ``hung`` are the pids of workers that were killed for that; ``lost`` says why all were stopped, if none had failed.
    """
    if failure.exitcode < 0 and not isinstance(failure.message, dict):
        if failure.pid in hung:
            failure.message += ", from the agent, because it hung"
        elif failure.local_rank in getattr(workers, "stopped", ()):
            failure.message += f", from the agent, because {lost or 'another worker had failed'}"
    elif _on_console(workers, failure.local_rank):
        failure.message = f"{_summary(failure)}see above for what the worker printed"
    elif not isinstance(failure.message, dict):
        failure.message = _last_traceback(Path(workers.stderrs[failure.local_rank]))


def _summary(failure: ProcessFailure) -> str:
    return f"{failure.message.get('message')}; " if isinstance(failure.message, dict) else ""


def _on_console(workers: PContext, local_rank: int) -> bool:
    """Whether what the worker wrote to stderr has been shown; functions' tracebacks go to error files only."""
    teed = any(local_rank in tail._log_files for tail in workers._tail_logs[1:2])
    return not isinstance(workers, MultiprocessContext) and (teed or not workers.stderrs[local_rank])


def _last_traceback(log: Path) -> str:
    """The end of a redirected stderr, from its last traceback on."""
    if not log.is_file():
        return "not known: its stderr was not shown"
    return "\n  ".join([f"see {log}", *last_traceback(tail_of(str(log)))]).rstrip()
