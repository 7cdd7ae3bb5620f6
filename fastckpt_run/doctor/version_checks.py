"""Checks of the versions of Python, of packages and of the kernel."""

import os
import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec

from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

from fastckpt._core.torch_version import NEEDED
from fastckpt._core.version import VERSION
from fastckpt_run.doctor.diagnosis import Diagnosis, Subject, ok, problem

OLDEST_PYTHON = (3, 11)
_OURS = "fastckpt-run"


def python(_: Subject) -> Iterator[Diagnosis]:
    """The interpreter."""
    text = f"{platform.python_implementation()} {platform.python_version()} on {platform.machine()}"
    numbers = tuple(map(int, platform.python_version_tuple()[:2]))
    if numbers < OLDEST_PYTHON or platform.python_implementation() != "CPython":
        yield problem("Python", text, "Use CPython {}.{} or newer".format(*OLDEST_PYTHON))
    else:
        yield ok("Python", text)


def packages(_: Subject) -> Iterator[Diagnosis]:
    """Packages that are needed, by the metadata of this release."""
    try:
        needed = [Requirement(text) for text in requires(_OURS) or []]
    except PackageNotFoundError:
        needed = [Requirement(NEEDED)]
    found, wrong = list[str](), list[Requirement]()
    for requirement in needed:
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            text = version(requirement.name)
            fits = requirement.specifier.contains(Version(text), prereleases=True)
        except (PackageNotFoundError, InvalidVersion):
            text, fits = "missing" if find_spec(requirement.name) is None else "of no known version", False
        found.append(f"{requirement.name} {text}")
        if not fits:
            wrong.append(requirement)
            yield problem(
                "packages",
                f"{requirement.name} is {text}; needed is {requirement.name}{requirement.specifier}",
                f"pip install '{requirement.name}{requirement.specifier}'",
            )
    if not wrong:
        yield ok("packages", f"fastckpt {VERSION}, {', '.join(sorted(found))}")


def kernel(_: Subject) -> Iterator[Diagnosis]:
    """The kernel, and whether it lets a process be waited for."""
    name = f"{platform.system()} {platform.release()}"
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        remedy = "Use Linux 5.3 or newer, and a seccomp profile that allows pidfd_open"
        yield problem("kernel", f"{name}: deaths of workers cannot be noticed (pidfd_open: {error.strerror})", remedy)
        return
    yield ok("kernel", name)
