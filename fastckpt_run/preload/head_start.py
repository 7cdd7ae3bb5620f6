"""Head start of a template: it imports torch while the launcher does, which needs torch to read its command line.

The two imports take about as long, so that workers of a launch start in half the time where two cores are free.
Values for the template to inherit are guessed from the command line; after a wrong guess it is not used.
"""

import re
from collections.abc import Sequence

from fastckpt_run.preload.environment import current
from fastckpt_run.preload.template_process import Template, inheritance

_NOT_NEEDED = re.compile(r"--fast-(no-)?preload(=.*)?|--fast-dry-run|--no[-_]python|--run[-_]path|--version|--help|-h")
"""Options with which no template may be needed, or another one: wherever they stand, for nothing is parsed yet."""
_WORKERS = re.compile(r"--nproc[-_]per[-_]node(?:=(.*))?")
_THREADS = "OMP_NUM_THREADS"
_OF_TORCHRUN = "TORCHELASTIC_"
"""Beginning of the variables that torchrun sets for itself meanwhile.

If an import reads one, the fork compares it.
"""
_begun: list[Template] = []


def begin(arguments: Sequence[str]) -> None:
    """Start a template for a command line, if it is likely that one will be needed."""
    environment = current()
    usual = environment.get("FASTCKPT_PRELOAD", "auto") == "auto"
    if not arguments or not usual or any(map(_NOT_NEEDED.fullmatch, arguments)):
        return
    if _count_of_workers(arguments, environment) != "1":
        environment.setdefault(_THREADS, "1")  # as torchrun sets it for several workers
    try:
        _begun.append(Template(environment))
    except OSError:
        return  # the launcher itself will report why, when it starts one


def take() -> Template | None:
    """The template that was begun, if it is as one that would be started now; once."""
    template = _begun.pop() if _begun else None
    if template is None or (not _changed(template.environment) and template.inherited == inheritance()):
        return template
    template.close()
    return None


def end() -> None:
    """End a template that nobody has taken."""
    while _begun:
        _begun.pop().close()


def _changed(environment: dict[str, str]) -> set[str]:
    """The variables that are not as in an environment any more."""
    return {name for name, _ in environment.items() ^ current().items() if not name.startswith(_OF_TORCHRUN)}


def _count_of_workers(arguments: Sequence[str], environment: dict[str, str]) -> str:
    count = environment.get("PET_NPROC_PER_NODE", "1")
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=True):
        if option := _WORKERS.fullmatch(argument):
            count = following if option[1] is None else option[1]
    return count
