"""Run a launcher built on torch's elastic agent, and stamp when it notices a death and when it starts workers.

    python _restart_launch.py STAMPS MODULE [ARGUMENT ...]

Any of them calls `PContext.close` when a worker has failed, and `start_processes` once a rendezvous is over.
"""

import json
import os
import runpy
import sys
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch.distributed.elastic.agent.server.local_elastic_agent as agent
from torch.distributed.elastic.multiprocessing import api


def stamped(file: int, what: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        os.write(file, json.dumps({"what": what, "at": time.monotonic()}).encode() + b"\n")
        return function(*args, **kwargs)

    return call


def mend_for_dlrover() -> None:
    """DLRover 0.6.1 does not know the last argument of torch 2.13, which has no default there."""

    class Handler(api.SubprocessHandler):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            if len(args) < 7:
                kwargs.setdefault("numa_options", None)
            super().__init__(*args, **kwargs)

    api.SubprocessHandler = Handler  # type: ignore[misc]


def patched_modules(module: str) -> tuple[Any, Any]:
    """Return the modules from which a launcher takes ``PContext`` and ``start_processes``: torch's or copies."""
    if module.startswith("nvidia_resiliency_ext"):
        package = "nvidia_resiliency_ext.fault_tolerance._torch_elastic_compat.multiprocessing"
        return import_module(f"{package}.api"), import_module(package)
    return api, agent


def main() -> None:
    _, path, module, *arguments = sys.argv
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC)
    closes, starts = patched_modules(module)
    closes.PContext.close = stamped(file, "noticed", closes.PContext.close)
    starts.start_processes = stamped(file, "rendezvous", starts.start_processes)
    if module.startswith("dlrover"):
        mend_for_dlrover()
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
