"""Launchers that tests start, forked from one process that has imported torch: importing it is most of what they cost.

What starts them is the product's own template of workers (`fastckpt_run.preload`), so that each is like a process that
was executed: a child of this process, with its own command line, environment, descriptors and signals.
"""

import os
import re
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from fastckpt_run.preload.environment import READ_BY_LIBRARIES
from fastckpt_run.preload.fork_request import ForkRequest, ignored_signals
from fastckpt_run.preload.imports import ImportPlan
from fastckpt_run.preload.preloader import ForkedWorker
from fastckpt_run.preload.template_process import Template, TemplateError

MODULES = ("fastckpt_run.main", "own_directory")
"""Imported besides what a template imports; the launcher's own modules are imported again, but not what they import."""
FORKED = "TEST_FORKED"
"""Is set where a launcher is a fork."""
_IMPORTS = 120.0
_OF_A_TEST = re.compile("TEST_MARK|TMPDIR|FASTCKPT_.*|TORCHINDUCTOR_CACHE_DIR")
"""Variables that differ from test to test; the compiler's are read when something is compiled, which no job does."""
_templates: list[Template] = []


@contextmanager
def forked(environment: Mapping[str, str], modules: Sequence[str] = ()) -> Iterator[None]:
    """While this lasts, `start` forks what has this environment, but for what no import depends on.

    Args:
        modules: Imported besides, for launchers whose workers are forks of them.
    """
    template = Template({name: value for name, value in environment.items() if not _OF_A_TEST.fullmatch(name)})
    try:
        template.follow(ImportPlan([(name, []) for name in (*modules, *MODULES)]))
        outcome = template.outcome(time.monotonic() + _IMPORTS)
        assert outcome is not None and not outcome.fault, outcome
        _templates.append(template)
        yield
    finally:
        _templates[:] = [other for other in _templates if other is not template]
        template.close()


def are_forked() -> bool:
    """Whether there is a process that launchers can be forked from."""
    return bool(_templates)


def start(arguments: Sequence[str], environment: Mapping[str, str], output: int) -> subprocess.Popen[bytes]:
    """Start Python in a session of its own with these arguments; both of its outputs go to a descriptor."""
    script = arguments[0] == "-m" or not arguments[0].startswith("-")
    fit = [template for template in reversed(_templates) if script and not _differences(template, environment)]
    if fit:
        try:
            return _fork(fit[0], [sys.executable, "-u", *arguments], environment, [0, output, output])
        except TemplateError as error:
            warnings.warn(f"a launcher is executed: {error}", stacklevel=2)
    streams: dict[str, Any] = {"stdout": output, "stderr": output}
    return subprocess.Popen([sys.executable, *arguments], env=environment, start_new_session=True, **streams)


def _fork(
    template: Template, command: list[str], environment: Mapping[str, str], streams: list[int]
) -> subprocess.Popen[bytes]:
    order = ForkRequest(command, {**environment, FORKED: "1"}, os.getpid(), ignored_signals())
    pid, memory = template.fork(order, streams)
    os.close(memory)
    return ForkedWorker(command, pid)


def _differences(template: Template, environment: Mapping[str, str]) -> set[str]:
    """Variables that imports would have read, and that are not as they were then."""
    outcome = template.outcome(time.monotonic())
    assert outcome is not None
    changed = {name for name, _ in template.environment.items() ^ environment.items()}
    read = {name for name in changed if name in outcome.read or READ_BY_LIBRARIES.fullmatch(name)}
    return {name for name in read if not _OF_A_TEST.fullmatch(name)}
