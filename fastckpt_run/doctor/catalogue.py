"""The catalogue of checks, and their run in the process that may be given up."""

import os
from collections.abc import Callable, Iterator
from typing import Any

from fastckpt.errors import FastckptError
from fastckpt_run.doctor import (
    claim_checks,
    host_checks,
    limit_checks,
    network_checks,
    resume_checks,
    shm_checks,
    storage_checks,
    url_checks,
    version_checks,
)
from fastckpt_run.doctor.diagnosis import Diagnosis, Subject, of_error, problem

Check = Callable[[Subject], Iterator[Diagnosis]]
HOST: tuple[Check, ...] = (
    version_checks.python,
    version_checks.packages,
    version_checks.kernel,
    host_checks.cores,
    host_checks.memory_nodes,
    host_checks.huge_pages,
    host_checks.clock,
    host_checks.traces,
    host_checks.gpus,
    limit_checks.cgroup_memory,
    limit_checks.cgroup_processor,
    limit_checks.cgroup_processes,
    limit_checks.resource_limits,
)
SHARED_MEMORY: tuple[Check, ...] = (
    shm_checks.shared_memory,
    shm_checks.shared_memory_size,
    shm_checks.shared_memory_writes,
)
PATH: tuple[Check, ...] = (
    storage_checks.directory,
    storage_checks.file_system,
    storage_checks.space,
    storage_checks.writes,
    storage_checks.direct_writes,
    storage_checks.names,
    storage_checks.locks,
)
URL: tuple[Check, ...] = (url_checks.store,)
ARENAS: tuple[Check, ...] = (claim_checks.memory_of_others,)
CLAIMS: tuple[Check, ...] = (claim_checks.arena_of_directory, claim_checks.history)
RESUME: tuple[Check, ...] = (resume_checks.resume, resume_checks.memory_needed)
NETWORK: tuple[Check, ...] = (
    network_checks.interfaces,
    network_checks.host_name,
    network_checks.endpoints,
    network_checks.secret,
)
ALL: tuple[Check, ...] = (*HOST, *SHARED_MEMORY, *PATH, *URL, *ARENAS, *CLAIMS, *RESUME, *NETWORK)


def name_of(check: Check) -> str:
    """The name of a check, by which `examine` finds it."""
    return check.__name__.replace("_", " ")


_BY_NAME = {name_of(check): check for check in ALL}


def examine(which: str, **subject: Any) -> list[dict[str, Any]]:
    """The lines of a check, as JSON objects. Raises nothing: an error is a line, too."""
    return [line.to_record() for line in lines_of(_BY_NAME[which], Subject(**subject))]


def lines_of(check: Check, subject: Subject) -> Iterator[Diagnosis]:
    """The lines of a check; an error is one, too."""
    name = name_of(check)
    try:
        yield from check(subject)
    except FastckptError as error:
        yield of_error(name, error)
    except OSError as error:
        where = f"{os.fspath(error.filename)!s}: " if error.filename else ""
        yield problem(name, f"{where}{error.strerror or error}", "Repair what it names, and look again")
    except Exception as error:  # noqa: BLE001 (a defect of one check must not hide the findings of others)
        text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        yield problem(name, f"the check failed: {text}", "Report it, with this line")
