"""Environments of peers whose packages clash with those of the project, and why a peer cannot run here."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.harness.machine import PEERS, peers
from benchmarks.harness.results import ROOT


def python_of(peer: str) -> Path:
    """The interpreter of a peer's environment."""
    return peers() / peer / "bin/python"


def missing(peer: str, probe: str = "") -> str:
    """Return why a peer cannot run: its environment is not there, or its first save of a tiny state raised.

    Args:
        peer: The name of its environment.
        probe: The contender to be tried, where it is known to need a device; "" tries none.
    """
    python = python_of(peer)
    if not python.exists():
        return f"not installed: `make peers`, or {PEERS}=FOLDER that has {peer}/bin/python"
    if not probe:
        return ""
    command = [python, "-m", "benchmarks.suite._ways", probe]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)
    return done.stdout.strip() if done.returncode == 0 else f"its probe ended with {done.returncode}"


def launcher(peer: str, module: str = "torch.distributed.run") -> list[str]:
    """The command of a launcher in a peer's environment."""
    return [str(python_of(peer)), "-m", module]


@contextmanager
def cleared_up() -> Iterator[None]:
    """Memory and sockets that DLRover has left behind meanwhile are removed."""
    before = _left_by_dlrover()
    try:
        yield
    finally:
        for path in _left_by_dlrover() - before:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _left_by_dlrover() -> set[Path]:
    return {*Path("/dev/shm").glob("*ckpt_shm*"), *Path("/tmp/ckpt_sock").glob("*")}
