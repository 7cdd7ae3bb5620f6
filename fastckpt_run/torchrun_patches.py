"""Put our parts where torch's launcher constructs its own."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any

from torch.distributed.elastic import multiprocessing
from torch.distributed.elastic.multiprocessing import api as multiprocessing_api
from torch.distributed.launcher import api as launcher_api

from fastckpt._core.config import Settings
from fastckpt_run.agent import FastckptAgent
from fastckpt_run.preload.preloader import Preloader
from fastckpt_run.workers import BoundSubprocessHandler, FunctionWorkers, ScriptWorkers


@contextmanager
def substituted(settings: Settings) -> Iterator[None]:
    """While this lasts, torch.distributed.run launches our agent, with ``settings``, and our workers."""
    preloader = Preloader(settings.preload)
    ours: list[tuple[ModuleType, str, Any]] = [
        (launcher_api, "LocalElasticAgent", partial(FastckptAgent, settings=settings, preloader=preloader)),
        (multiprocessing, "SubprocessContext", partial(ScriptWorkers, grace=settings.stop_grace)),
        (multiprocessing, "MultiprocessContext", partial(FunctionWorkers, grace=settings.stop_grace)),
        (multiprocessing_api, "get_subprocess_handler", partial(BoundSubprocessHandler, preloader=preloader)),
    ]
    torchs = [(module, name, getattr(module, name)) for module, name, _ in ours]
    try:
        for module, name, value in ours:
            setattr(module, name, value)
        yield
    finally:
        for module, name, value in torchs:
            setattr(module, name, value)
