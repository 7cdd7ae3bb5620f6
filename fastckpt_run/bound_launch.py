"""Launches that a command makes for itself: bound to its process, with memory of their own, and removed at the end."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from fastckpt._core.memory.census import ArenaState, census, clean
from fastckpt.errors import FastckptError

ENDING = 120.0
"""Seconds that a launcher has to flush and end."""
OLD = 600.0
"""Seconds after which unused memory counts as a killed command's."""
DYING = 10.0
"""Seconds in which the workers of a killed launcher release its memory."""
_PROGRAM = """
import sys
from fastckpt_run.parent_death import die_with
die_with(int(sys.argv.pop(1)))
from fastckpt_run.commands import launch
launch()
"""
"""fastckpt-run, bound to the process that starts it: it does not outlive that."""
_NAME = re.compile(r"fastckpt-(?:plan|prove)-(\d+)-.+")


def start_bound(arguments: Sequence[str], environment: Mapping[str, str], output: int) -> subprocess.Popen[bytes]:
    """Start fastckpt-run with these arguments in a session of its own; it dies with this process."""
    return subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, str(os.getpid()), *arguments],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        env=environment,
        start_new_session=True,
    )


def end_bound(process: subprocess.Popen[bytes]) -> None:
    """Have a launcher end with its last flush; one that does not is killed, with which its workers die."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(ENDING)
    except subprocess.TimeoutExpired:
        kill_bound(process)
    except BaseException:  # a second signal: nothing of it is left
        kill_bound(process)
        raise


def kill_bound(process: subprocess.Popen[bytes]) -> None:
    """Kill a launcher at once, with which its workers die."""
    process.kill()
    process.wait()


@contextlib.contextmanager
def orderly_end() -> Iterator[None]:
    """Have signals that would end this process raise SystemExit instead: launches are ended and removed."""

    def end(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def own_memory_place(prefix: str, shm_dir: str) -> Iterator[Path]:
    """A directory for the arenas of a launch, on the tmpfs of others; removed at the end, with all in it."""
    sweep(Path(shm_dir))
    memory = Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-", dir=shm_dir))
    try:
        yield memory
    finally:
        _remove_memory(memory)


def sweep(shm_dir: Path) -> None:
    """Remove the memory of commands that were killed, once it is old: of other containers, processes are not seen."""
    for path in shm_dir.iterdir() if shm_dir.is_dir() else ():
        match = _NAME.fullmatch(path.name)
        if match and not Path(f"/proc/{match[1]}").exists() and path.lstat().st_uid == os.getuid():
            in_use = any(entry.state is ArenaState.IN_USE for entry in census(path))
            if not in_use and time.time() - path.lstat().st_mtime > OLD:
                _remove_memory(path)


def _remove_memory(memory: Path) -> None:
    end = time.monotonic() + DYING
    with contextlib.suppress(OSError):
        while entries := census(memory):
            for entry in entries:
                with contextlib.suppress(FastckptError, OSError):
                    clean(entry, force=True)
            if time.monotonic() > end or all(entry.state is not ArenaState.IN_USE for entry in entries):
                break
            time.sleep(0.05)
    shutil.rmtree(memory, ignore_errors=True)
