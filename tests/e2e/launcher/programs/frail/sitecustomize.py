"""Makes a template light, and has it die or stop once, at the moment that FRAIL names; put it on PYTHONPATH."""

import os
import signal
import sys
from pathlib import Path

MOMENT, ONCE = os.environ.get("FRAIL", ""), Path(os.environ.get("FRAIL_FILE", "/none"))


def strike(pid: int, number: int = signal.SIGKILL) -> None:
    """Hit ``pid``, the first time that this is called on this machine."""
    try:
        ONCE.touch(exist_ok=False)
    except OSError:
        return
    os.kill(pid, number)
    while pid == os.getpid():  # a signal to oneself is delivered at once; to be stopped takes longer
        pass


def frail() -> None:
    from fastckpt_run.preload import imports

    imports.BASE = ("multiprocessing",)
    fork, template = os.fork, os.getpid()

    def forked() -> int:
        in_template = os.getpid() == template
        if in_template and MOMENT == "request":
            strike(template)
        if in_template and MOMENT == "stop":
            strike(template, signal.SIGSTOP)
        pid = fork()
        if in_template and not pid and MOMENT == "middle":
            strike(os.getpid())
        if not in_template and pid and MOMENT == "middle forked":
            strike(template)
        if not in_template and not pid and MOMENT == "by child":
            strike(template)
        return pid

    os.fork = forked
    if MOMENT == "import":
        strike(template)


if "template.main" in " ".join(sys.orig_argv):
    frail()
