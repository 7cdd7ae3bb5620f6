"""Isolation: every test has its own shared memory and temporary directory, and leaves nothing behind."""

import compileall
import gc
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Collection, Generator, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import settings

MARK = "TEST_MARK"
ROOT = Path(__file__).parents[1]
# torch's stores look up names of addresses, in the thread that serves all: a question that a name server loses shall
# cost them 1 s, not 5 s.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
# Of several processes on few cores, each with threads that wait for one another, most of the time is spent waiting: a
# step of a small model took five times as much of it. Set before torch is imported, which reads it then.
os.environ.setdefault("OMP_NUM_THREADS", "1")
QUICK = str(Path(__file__).parent / "start")
"""Where Python finds what lets each process of a test start and end sooner."""
PATH = f"{QUICK}{os.pathsep}{ROOT}"
"""Besides that, the packages beside these tests, whichever are installed."""


settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("random", deadline=None)
# The same examples in each run: what is found anew is found by `make faults`, not by whoever changes something else.
settings.load_profile(os.environ.get("TEST_EXAMPLES", "repeatable"))


def pytest_configure(config: pytest.Config) -> None:
    """Compile once what else each process would compile, where PYTHONDONTWRITEBYTECODE is set: a fifth of its start."""
    # In the background of a shell, or by nohup, these are ignored, and so in all that tests start.
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number is signal.SIGINT else signal.SIG_DFL)
    if not hasattr(config, "workerinput"):
        for folder in ("fastckpt", "fastckpt_run", "tests"):
            compileall.compile_dir(ROOT / folder, quiet=1)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported lasts: only what tests make themselves is looked through for garbage."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable() -> Generator[None, object, object]:
    """Half a surrogate pair, as liars send it and logs repeat it, would end the process of tests that reports it."""
    return _encodable((yield))


@pytest.fixture(scope="session")
def forked_launchers() -> Iterator[None]:
    """Launchers that tests start are forked: older than any test, for what forks them to be nobody's leak."""
    from tests.support import launchers

    with launchers.forked(os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": PATH}):
        yield


@pytest.fixture(autouse=True)
def leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """Fail a test that leaks a process, a /dev/shm entry, a socket or a temporary file; return to its directory."""
    tmp_path_factory.getbasetemp()  # is made under the common temporary directory
    name = f"fastckpt-test-{os.getpid()}-{time.monotonic_ns()}"
    shm, temporary = Path("/dev/shm") / name, Path("/tmp") / name
    shm.mkdir(mode=0o700)
    temporary.mkdir()
    monkeypatch.setenv(MARK, name)
    monkeypatch.setenv("FASTCKPT_SHM_DIR", str(shm))
    monkeypatch.setenv("TMPDIR", str(temporary))
    # torch's compiler, once imported, writes this into the environment of all that follows: the place of a test before.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(temporary / "torchinductor_cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", PATH)
    monkeypatch.setenv("FASTCKPT_PRELOAD", "off")
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))  # known, or each forked process tries it with a file
    for variable in [v for v in os.environ if v.startswith("PET_") or v in ("RANK", "WORLD_SIZE", "FASTCKPT_AGENT")]:
        monkeypatch.delenv(variable)
    sockets, directory, older = _sockets(), Path.cwd(), set(os.listdir("/proc"))
    # A collection, of which many tests need one, then looks through what this test makes, not through all that earlier
    # ones have left: of those in a long run, each took a second.
    gc.collect()
    gc.freeze()
    try:
        yield
        leaks = _processes(name, older)
        leaks += [f"shared memory {path}" for path in Path("/dev/shm").glob(f"*{name}*") if path != shm]
        leaks += [f"shared memory {path}" for path in shm.iterdir()]
        # importing torch.optim makes an empty cache directory; a worker of torch's loader that is stopped while it
        # sends its first batch may leave the directory of Python's multiprocessing
        kept = ("torchinductor_", "pymp-")
        temporaries = [path for path in temporary.iterdir() if not path.name.startswith(kept)]
        leaks += [f"temporary file {path}" for path in temporaries]
        leaks += [f"socket {socket}" for socket in _more_sockets(sockets)]
    finally:
        os.chdir(directory)
        shutil.rmtree(shm, ignore_errors=True)
        shutil.rmtree(temporary, ignore_errors=True)
        for path in Path("/dev/shm").glob(f"*{name}*"):
            path.unlink()
    assert not leaks, f"{request.node.name} left behind: {leaks}"


def _encodable(report: object) -> object:
    if isinstance(report, str):
        return report.encode(errors="backslashreplace").decode()
    if isinstance(report, dict):
        return {key: _encodable(value) for key, value in report.items()}
    return type(report)(map(_encodable, report)) if type(report) in (list, tuple) else report


def _more_sockets(before: set[str]) -> set[str]:
    """Sockets that are still there after a moment, in which threads close what they have, and collections."""
    begin = time.monotonic()
    # A store's server closes what its clients have closed, from a thread of its own.
    while (found := _sockets() - before) and (passed := time.monotonic() - begin) < 10:
        if passed > 2:  # some belong to cycles, such as that of an error and the frames of a thread that ends only now
            gc.collect()
        time.sleep(0.02 if passed <= 2 else 0.2)
    return found


def _processes(mark: str, older: Collection[str]) -> list[str]:
    """Processes that inherited the mark of this test and live on; they are ended."""
    end = time.monotonic() + 2
    while (found := _with_mark(f"{MARK}={mark}\0".encode(), older)) and time.monotonic() < end:
        time.sleep(0.02)  # the dying need a moment
    described = []
    for pid in found:
        with suppress(OSError):
            described.append(f"process {pid} {Path(f'/proc/{pid}/comm').read_text().strip()}")
            os.kill(pid, signal.SIGKILL)
    return described


def _with_mark(variable: bytes, older: Collection[str] = ()) -> list[int]:
    """Other processes with a variable, which zombies have not; those that are older than the test cannot have it."""
    found = []
    for name in set(os.listdir("/proc")).difference(older, [str(os.getpid())]):
        with suppress(OSError):
            if name.isdigit() and variable in Path(f"/proc/{name}/environ").read_bytes():
                found.append(int(name))
    return found


def _sockets() -> set[str]:
    links = set()
    for path in Path("/proc/self/fd").iterdir():
        try:
            links.add(os.readlink(path))
        except FileNotFoundError:
            continue  # the descriptor that listed the directory
    return {link for link in links if link.startswith("socket:")}
