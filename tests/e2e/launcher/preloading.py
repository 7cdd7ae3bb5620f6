"""Start the same command as a fresh process and as a fork of a template, and compare what they saw and left."""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.elastic.agent.server.api import WorkerSpec

from fastckpt_run.preload.preloader import Preloader
from fastckpt_run.torchrun_patches import BoundSubprocessHandler

DEADLINE = 120


@dataclass
class Run:
    """One worker, started one way."""

    handler: BoundSubprocessHandler
    folder: Path

    def wait(self) -> tuple[int, str, str]:
        """Exit code and what it wrote."""
        code = self.handler.proc.wait(DEADLINE)
        return code, self.text("out"), self.text("err")

    def text(self, name: str) -> str:
        return (self.folder / name).read_text()

    def told(self) -> dict[str, object]:
        return json.loads((self.folder / "probe").read_text())


class Starter:
    """Starts workers in both ways, each in a folder of its own."""

    def __init__(self, folder: Path, template: Preloader) -> None:
        self.folder, self.template, self.count = folder, template, 0

    def both(self, *arguments: str, **environment: str) -> tuple[Run, Run]:
        """The same worker executed and forked."""
        return self.start(Preloader("off"), arguments, environment), self.start(self.template, arguments, environment)

    def start(self, preloader: Preloader, arguments: tuple[str, ...], environment: dict[str, str]) -> Run:
        self.count += 1
        folder = self.folder / f"run{self.count}"
        folder.mkdir()
        variables = {"PROBE": str(folder / "probe"), "PROBE_PARENT": str(os.getpid())} | environment
        streams = str(folder / "out"), str(folder / "err")
        command = (sys.executable, ("-u", *arguments), variables, *streams, 0, None)
        return Run(BoundSubprocessHandler(*command, preloader=preloader), folder)


@contextmanager
def template(script: str, modules: str = "math", *arguments: str) -> Iterator[Preloader]:
    """A preloader as an agent for ``script`` would have it; explicit modules make it wait for its template."""
    preloader = Preloader(modules)
    spec = WorkerSpec("test", 1, None, entrypoint=sys.executable, args=("-u", script, *arguments))
    preloader.begin(spec)
    preloader.prepare()
    try:
        yield preloader
    finally:
        preloader.close()
