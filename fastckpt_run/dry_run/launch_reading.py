"""The reading of a launch by torch and by us, up to where the agent would begin, with every refusal of a real one."""

import os
from argparse import Namespace
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch.distributed.run as torchrun
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters, rendezvous_handler_registry
from torch.distributed.launcher.api import LaunchConfig

from fastckpt._core.config import Settings
from fastckpt._core.policy.restarts import parse_budget
from fastckpt.errors import ConfigError
from fastckpt_run.options import CommandLine
from fastckpt_run.rendezvous.handler import BACKEND, create_handler
from fastckpt_run.rendezvous.signing import secret_of
from fastckpt_run.script import require_script
from fastckpt_run.torchrun_patches import is_registered, is_this_host, registered
from fastckpt_run.watch.http_server import parse_address
from fastckpt_run.workers import run_script_path


@dataclass(frozen=True)
class ReadLaunch:
    """A launch, as it was understood.

    Attributes:
        config: Configuration with which torch would launch.
        spec: Specification of the workers.
        is_ours: True if the rendezvous is ours, and not one of torch's.
    """

    config: LaunchConfig
    spec: WorkerSpec
    is_ours: bool


def read_launch(command: CommandLine) -> ReadLaunch:
    """Read a command line as a launch does, with the same errors; starts nothing."""
    # In the order of a launch: 1. the secret   2. torch's options   3. the rendezvous   4. the agent's arguments
    # 5. the script   6. where events and metrics go
    settings = command.settings
    secret = secret_of(settings)
    config, entrypoint, arguments = _read_by_torch(command.torchrun)
    parameters = RendezvousParameters(
        backend=config.rdzv_backend,
        endpoint=config.rdzv_endpoint,
        run_id=config.run_id,
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        local_addr=config.local_addr,
        **config.rdzv_configs,
    )
    is_ours = config.rdzv_backend == BACKEND and parameters.get("store_type", "tcp") == "tcp"
    handler: RendezvousHandler | None = None
    with registered(partial(create_handler, secret=secret, is_here=is_this_host)):
        if is_ours or not is_registered(
            config.rdzv_backend
        ):  # which raises; torch's own would connect, or hold a store
            handler = rendezvous_handler_registry.create_handler(parameters)
    parse_budget(settings.restart_budget)
    spec = WorkerSpec(
        role=config.role,
        local_world_size=config.nproc_per_node,
        entrypoint=run_script_path if entrypoint is torchrun.run_script_path else entrypoint,
        args=tuple(arguments),
        rdzv_handler=cast(RendezvousHandler, handler),
        max_restarts=config.max_restarts,
    )
    require_script(spec)
    _require_events(settings)
    if settings.metrics_port:
        parse_address(settings.metrics_port)
    return ReadLaunch(config, spec, is_ours)


def _read_by_torch(arguments: Namespace) -> tuple[LaunchConfig, Any, list[Any]]:
    """Return torch's own reading of its options."""
    copy = Namespace(**vars(arguments))  # torch fills in values that were left open
    if not (copy.log_dir and Path(copy.log_dir).is_file()):  # which is refused
        copy.log_dir = os.devnull  # any other directory would be made
    found = list[tuple[LaunchConfig, Any, list[Any]]]()

    class Reading:
        def __init__(self, config: LaunchConfig, entrypoint: Any) -> None:
            self._launch = config, entrypoint

        def __call__(self, *arguments: Any) -> None:
            found.append((*self._launch, [*arguments]))

    launcher: Any = torchrun
    torchs = launcher.elastic_launch
    launcher.elastic_launch = Reading
    try:
        launcher.run(copy)
    finally:
        launcher.elastic_launch = torchs
    return found[0]


def _require_events(settings: Settings) -> None:
    """Refuse a file for events that could not be written to; it is not made."""
    if not settings.events:
        return
    path = Path(settings.events)
    try:
        if path.exists():
            os.close(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | os.O_CLOEXEC))
        else:
            os.close(os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
    except OSError as error:
        raise ConfigError(f"events cannot be written to {settings.events}: {error.strerror}") from error
