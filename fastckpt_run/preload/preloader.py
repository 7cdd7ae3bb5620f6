"""Start workers by a fork of a template; where that is not possible, log why, and leave it to the caller."""

import logging
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from subprocess import Popen
from typing import Any

from torch.distributed.elastic.agent.server.api import WorkerSpec

from fastckpt._core import metrics
from fastckpt_run.preload import head_start
from fastckpt_run.preload.environment import READ_BY_LIBRARIES
from fastckpt_run.preload.fork_request import ForkReport, ForkRequest, ignored_signals
from fastckpt_run.preload.imports import ImportOutcome, ImportPlan
from fastckpt_run.preload.orphans import reap
from fastckpt_run.preload.template_process import Template, TemplateError, inheritance
from fastckpt_run.script_analysis import Script, read

logger = logging.getLogger("fastckpt.launcher")

AUTO, OFF = "auto", "off"
_OFF = {OFF, "no", "false", "0", ""}
# Seconds that workers wait for the template's imports, which an executed worker would spend as well.
_PATIENCE = 60.0
# A template that dies again and again has a cause that the next one has, too: from then on workers are executed.
_FAILURES = 3


class ForkedWorker(Popen[bytes]):
    """A child of this process that a template has forked; all else is as with one that was executed."""

    def __init__(self, arguments: Sequence[str], pid: int) -> None:
        self._forked = pid
        # Popen's bookkeeping (poll, wait, reaping) is as for any child; only the start is left out.
        super().__init__(arguments)

    def _execute_child(self, *_: Any) -> None:
        self.pid = self._forked
        self._child_created = True


class Preloader:
    """Keeps a template for the workers of one agent, and replaces it when it dies or no longer fits.

    ``choice`` is "auto" for the base and the script's imports, "off" for no template, or names of modules.

    Attributes:
        begun: The pids of the workers that were started since `prepare`.
    """

    def __init__(self, choice: str) -> None:
        self._asked = [] if choice in (AUTO, *_OFF) else [name for name in re.split(r"[,\s]+", choice) if name]
        self._off = is_off(choice)
        self._arguments: list[str] = []
        self._script = Script()
        self._plan = ImportPlan()
        self._template: Template | None = None
        self._failures = 0
        self._failed = False
        self._reported: set[str] = set()
        self._workers: set[int] = set()
        self.begun: set[int] = set()
        self._reports: dict[int, ForkReport] = {}

    def begin(self, spec: WorkerSpec) -> None:
        """Start a template for the script of ``spec``, if it can be forked."""
        if self._off:
            return
        if why := unfit(spec):
            head_start.end()  # whether it would be needed was guessed
            self._give_up(why)
            return
        self._arguments = [str(argument) for argument in spec.args[1:]]
        self._script = read(self._arguments)
        asked: list[tuple[str, list[str]]] = [(name, []) for name in self._asked]
        found = [] if asked else self._script.first_imports
        folder, argv = str(self._script.folder or ""), self._script.argv(self._arguments)
        self._plan = ImportPlan(asked, found, folder, argv, self._script.compiles)
        self._start()
        if why := self._script.unsettling:
            self._give_up(why)

    def wait(self) -> None:
        """Wait until the template is ready, unless workers would not wait for it."""
        try:
            if self._template is not None and (self._asked or self._script.needs_packages):
                self._outcome(self._template, self._template.started + _PATIENCE)
        except TemplateError as error:
            self._replace(str(error))

    def prepare(self) -> None:
        """Call before the workers are started, when none is left of the last start."""
        self._failed = False
        self._reports.clear()
        self.begun.clear()
        reap(self._workers)
        if not self._off and self._script.has_changed():
            self._script = read(self._arguments)
            if why := self._script.unsettling:
                self._give_up(why)

    def fork(
        self, arguments: Sequence[str], environment: Mapping[str, str], streams: Sequence[int]
    ) -> ForkedWorker | None:
        """A worker with this command line; None, with the reason logged, if it must be executed."""
        if self._off or self._failed:
            return None
        if arguments[0] != sys.executable:
            self._give_up(f"{arguments[0]} starts them, which binds each to its part of the machine")
            return None
        if closed := _not_inherited(streams):
            self._give_up(f"they inherit no {closed}, which is closed")
            return None
        # 1. a template whose imports this environment would not change   2. the order, in a memory file
        # 3. the fork, which becomes a child of this process; after any failure the worker is executed instead
        try:
            template = self._ready(environment)
            if template is None:
                return None
            order = ForkRequest(list(arguments), dict(environment), os.getpid(), ignored_signals())
            pid, memory = template.fork(order, streams)
        except TemplateError as error:
            self._replace(str(error))
            return None
        self._failures = 0
        self._reports[pid] = ForkReport(memory)  # has its own mapping of the file
        os.close(memory)
        return ForkedWorker(arguments, pid)

    def started(self, pid: int) -> None:
        """Register a worker, however it was started."""
        self._workers.add(pid)
        self.begun.add(pid)

    def last_words(self, pid: int) -> str:
        """The traceback of the exception with which a worker's script ended; empty if there is none, or not known."""
        return self._reports[pid].read() if pid in self._reports else ""

    def maintain(self) -> None:
        """Replace a template that has died or been spoiled since it was last looked at; never waits."""
        if self._template is not None:
            try:
                self._template.look()
                self._outcome(self._template, time.monotonic())
            except TemplateError as error:
                self._replace(str(error))

    def close(self) -> None:
        """End the template."""
        if self._template is not None:
            self._template.close()
            self._template = None

    def _start(self) -> None:
        try:
            self._template = head_start.take() or Template()
            self._template.follow(self._plan)
        except OSError as error:
            self._give_up(f"no template could be started: {error.strerror}")

    def _replace(self, why: str) -> None:
        """Start another template in the background; workers of this start are executed."""
        self.close()
        # The workers of this round are executed; the next round has the new template.
        self._failed = True
        self._failures += 1
        if self._failures > _FAILURES:
            self._give_up(why)
        else:
            self._report(why)
            self._start()

    def _give_up(self, why: str) -> None:
        self.close()
        self._off = True
        self._report(why)

    def _report(self, why: str, *, loudly: bool = True) -> None:
        metrics.event("preload_fallback", why=why)
        if loudly and why not in self._reported:
            logger.warning("workers start without preloaded modules: %s", why)
        self._reported.add(why)

    def _ready(self, environment: Mapping[str, str]) -> Template | None:
        """A template that can fork a worker with ``environment``, now or after as long as the imports take."""
        while self._template is not None:
            template = self._template
            # Limits, affinity, user and umask are inherited at fork
            # from the template, which has those of its own start.
            if template.inherited != inheritance():
                raise TemplateError("what workers inherit from the agent has changed since the template started")
            # Worth waiting for, as an executed worker would spend the same time on the same imports.
            patient = bool(self._asked) or self._script.needs_packages
            outcome = self._outcome(template, template.started + _PATIENCE if patient else time.monotonic())
            if outcome is None:
                self._failed = True
                self._report("the template is not ready yet", loudly=patient)
                return None
            # _outcome may have replaced the template by one without a faulty module: then wait for that one
            if self._template is template and (why := self._script.contradicts(outcome.read, outcome.late)):
                self._give_up(why)
            elif self._template is template:
                _require_unread(outcome, template.environment, environment)
                return template
        return None

    def _outcome(self, template: Template, deadline: float) -> ImportOutcome | None:
        """Wait for a template's imports; replace a template that modules have spoiled by one without them."""
        known = template.known
        outcome = template.outcome(deadline)
        if outcome is None or known:
            return outcome
        if not outcome.fault:
            seconds = time.monotonic() - template.started
            metrics.event("preload_ready", template=template.pid, seconds=seconds)
        elif not outcome.module:
            self._give_up(outcome.fault)
        else:
            self._exclude(outcome)
        return outcome

    def _exclude(self, outcome: ImportOutcome) -> None:
        module, requested = outcome.module, outcome.module in self._asked
        logger.log(30 if requested else 20, "%s is not preloaded: it %s", module, outcome.fault)
        metrics.event("preload_unsafe", module=module, why=outcome.fault)
        self._asked = [name for name in self._asked if name != module]
        self._plan = self._plan.without(module)
        since = self._template.started if self._template is not None else time.monotonic()
        self.close()
        self._start()
        if self._template is not None:
            self._template.started = since  # unfit modules must not extend the wait of the workers


def is_off(choice: str) -> bool:
    """Return whether --fast-preload has workers executed."""
    return choice in _OFF


def runs_script(spec: WorkerSpec) -> bool:
    """Return whether workers are this interpreter with a script or module, as without ``--no-python``."""
    return spec.entrypoint == sys.executable and spec.args[:1] == ("-u",) and len(spec.args) > 1


def unfit(spec: WorkerSpec) -> str:
    """The reason why workers of this kind cannot be forked; empty if they can."""
    if callable(spec.entrypoint):
        return "--run-path starts them in its own way"
    if not runs_script(spec):
        return f"they run {spec.entrypoint}, not this Python"
    return "the script comes from stdin" if spec.args[1] == "-" else ""


def _not_inherited(streams: Sequence[int]) -> str:
    """The standard stream that an executed worker would not have: another file may have its number here."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            if streams[number] == number and not os.get_inheritable(number):
                return name
        except OSError:
            return name
    return ""


def _require_unread(outcome: ImportOutcome, then: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Raise TemplateError if a variable that was read during the imports has another value now."""
    for name in (name for name, _ in then.items() ^ now.items()):
        if name in outcome.read or READ_BY_LIBRARIES.fullmatch(name):
            raise TemplateError(f"{name}, which modules read when they are imported, has changed since then")
