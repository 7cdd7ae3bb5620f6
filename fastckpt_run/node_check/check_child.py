"""The process in which checks run, one after the other, each on request: a hang or death there ends nothing else."""

import json
import socket
from collections.abc import Callable
from typing import Any

from fastckpt._core.policy.node_check import CheckResult, Verdict
from fastckpt.errors import ConfigError, FastckptError
from fastckpt_run.parent_death import die_with

MESSAGE = 1 << 16
DEVICES, FAILURES, DOCTOR, DIRECTORIES = "devices", "failures", "doctor", "directories"
"""The requests: for torch's devices; for the failures of hosts in the job of a directory; for the lines of a check of
`fastckpt doctor`; and for records of the directories of a script."""


def main(descriptor: int, parent: int) -> None:
    """Answer requests that come through a socket until the other end is closed.

    A request is a JSON object of the arguments of a check, with its kind as ``check``; the answer is a result, or a
    list of devices.
    """
    die_with(parent)
    with socket.socket(fileno=descriptor) as other:
        while request := other.recv(MESSAGE):
            other.send(json.dumps(_answer(json.loads(request))).encode())


def _answer(request: dict[str, Any]) -> Any:
    name = request["name"]
    try:
        check = _check(request.pop("check"))
        if name in (DEVICES, FAILURES, DOCTOR, DIRECTORIES):
            request.pop("name")
            return check(**request)
        result: CheckResult = check(**request)
    except OSError as error:
        where = f"{error.filename}: " if error.filename and str(error.filename) not in name else ""
        result = CheckResult(name, Verdict.PROBLEM, f"{where}{error.strerror or error}")
    except ImportError as error:
        result = CheckResult(name, Verdict.UNKNOWN, f"{type(error).__name__}: {error}")
    except MemoryError:
        result = CheckResult(name, Verdict.UNKNOWN, "this process may not have the memory that it takes")
    except (RuntimeError, FastckptError) as error:  # the first is torch's error about devices and drivers
        first = (str(error).splitlines() or [""])[0]
        result = CheckResult(name, Verdict.PROBLEM, f"{type(error).__name__}: {first}")
    return result.to_record()


def _check(what: str) -> Callable[..., Any]:
    # Imported when they are asked for: torch takes a second, and may itself be broken.
    if what in ("shm", "disk"):
        from fastckpt_run.node_check.file_checks import check_disk, check_shm

        return check_shm if what == "shm" else check_disk
    if what == "memory":
        from fastckpt_run.node_check.memory_check import check_memory

        return check_memory
    if what == "loopback":
        from fastckpt_run.node_check.exchange import check_loopback

        return check_loopback
    if what == FAILURES:
        return _failures
    if what in (DOCTOR, DIRECTORIES):
        from fastckpt_run.doctor.catalogue import examine
        from fastckpt_run.dry_run.known_directories import known_directories

        return examine if what == DOCTOR else known_directories
    from fastckpt_run.node_check import matmul_check

    return matmul_check.devices if what == DEVICES else matmul_check.check_matmul


def _failures(directory: str, host: str) -> dict[str, int]:
    """Count the failures of a host, and of all, in the job of a directory; empty if it has no event log."""
    from fastckpt._core.report.events import find, read
    from fastckpt._core.report.report import report

    try:
        logs = [read(path) for path in find(directory)]
    except ConfigError:
        return {}
    hosts = report(logs).hosts
    return {"own": sum(one.failures for one in hosts if one.host == host), "all": sum(one.failures for one in hosts)}
