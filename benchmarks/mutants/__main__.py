"""Mutants that tests notice: of a seeded draw, each is run against the tests that call the function it changes.

python -m benchmarks.mutants record FOLDER [PYTEST OPTION ...]      # which test executes what: the suite once, traced
python -m benchmarks.mutants run FOLDER [--count N] [--seed N] [--seconds S] [--part I/N]
python -m benchmarks.mutants show FOLDER                            # how many die, by room and kind; those that live

The product is changed where it lies, and put back after each mutant: run it in a work tree of its own. Tests are taken
by how long they take, shortest first, until one fails, or those that were taken add up to SECONDS.
"""

import argparse
import ast
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import hypothesis  # noqa: F401 (takes long, as torch does)
import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # as for all tests: torch reads it when it is imported
import torch  # noqa: F401 (here, once for all forks)

from benchmarks.mutants import calls
from benchmarks.mutants.points import Point, drawn, first_line, outermost

ROOT = Path(calls.ROOT)
_ROOMS = {
    "fastckpt/_core": ["saver", "resume", "storage", "memory", "snapshot", "format", "policy", "client"],
    "fastckpt_run": ["rendezvous", "detection", "hangs", "failures", "preload"],
    "fastckpt": ["dcp", "data", "fsdp", "checkpointer"],
}
FOLDERS = [f"{house}/{room}" for house, rooms in _ROOMS.items() for room in rooms]
"""Rooms from which mutants are drawn."""
OPTIONS = ("-q", "-x", "-p", "no:cacheprovider")
AT_ONCE = 400
"""Tests that are given to one pytest, at most."""


def record(folder: Path, options: Sequence[str]) -> int:
    """Run the tests that pytest's options select, and note which lines each executes."""
    calls.prepare(folder)
    # pytest and its workers are traced as the processes are that tests start.
    start = os.pathsep.join([str(ROOT / "tests" / "start"), str(ROOT)])
    environment = os.environ | {"TEST_CALLS": str(folder.resolve()), "PYTHONPATH": start}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "benchmarks.mutants.calls", *options]
    return subprocess.call(command, cwd=ROOT, env=environment)


def covering(folder: Path) -> dict[tuple[str, int], list[tuple[float, str]]]:
    """The tests that passed and called each function, with their seconds, shortest first."""
    seconds: dict[str, float] = defaultdict(float)
    unfit: set[str] = set()
    for line in (folder / "durations").read_text().splitlines():
        test, _, took, outcome = line.split("\t")
        seconds[test] += float(took)
        if outcome != "passed":
            unfit.add(test)
    found: dict[tuple[str, int], set[str]] = defaultdict(set)
    for test, functions in _called(folder):
        for function in functions if test in seconds and test not in unfit else ():
            found[function].add(test)
    return {function: sorted((seconds[test], test) for test in tests) for function, tests in found.items()}


def _called(folder: Path) -> Iterator[tuple[str, list[tuple[str, int]]]]:
    """Yield tests, and of each, once for each of its processes, the outermost functions that it executed lines of."""
    modules = json.loads((folder / "modules.json").read_text())
    functions = [
        (begin + function.body[0].lineno, begin + (function.end_lineno or 0) + 1, (module, first_line(function)))
        for module, begin in modules["begins"].items()
        for function in outermost(ast.parse((ROOT / module).read_text()))
    ]
    for path in folder.glob("*.lines"):
        noted = path.read_bytes()
        test = noted[: calls.NAME].rstrip(b"\0").decode(errors="replace")
        yield test, [name for first, end, name in functions if noted.find(1, first, end) >= 0]


def chosen(tests: Sequence[tuple[float, str]], most: float) -> list[str]:
    """The shortest of these tests, whose seconds add up to ``most``."""
    names, sum_of = [], 0.0
    for took, name in tests:
        sum_of += took
        if names and (sum_of > most or len(names) >= AT_ONCE):
            break
        names.append(name)
    return names


def outcome(point: Point, tests: Sequence[str], limit: float) -> tuple[str, str]:
    """Change the product, run these tests, put it back.

    Return "dies", "lives", or "hangs", which counts as noticed; and the test that failed, if one did.
    """
    path = ROOT / point.path
    source = path.read_text()
    path.write_text(point.changed(source))
    try:
        return _end_of_tests(tests, limit)
    finally:
        path.write_text(source)


class Failed:
    """A plugin of pytest that writes the first test that failed to a descriptor."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            os.write(self._descriptor, report.nodeid.encode() + b"\n")


def _end_of_tests(tests: Sequence[str], limit: float) -> tuple[str, str]:
    """Run tests in a fork of this process, which has imported all that takes long but the product."""
    failed, failing = os.pipe()
    if (pid := os.fork()) == 0:
        os.setsid()
        os.chdir(ROOT)
        for number in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), number)
        os._exit(pytest.main([*OPTIONS, *tests], [Failed(failing)]))
    os.close(failing)
    end, interrupted = time.monotonic() + limit, False
    while not (found := os.waitpid(pid, os.WNOHANG))[0]:
        if time.monotonic() > end:
            # Fixtures end what they have started, if an interrupt reaches them.
            os.kill(pid, signal.SIGINT) if not interrupted else os.killpg(pid, signal.SIGKILL)
            interrupted, end = True, time.monotonic() + 30
        time.sleep(0.02)
    by = ""
    os.set_blocking(failed, False)  # a process that a test left behind may have the other end
    with suppress(BlockingIOError):
        by = os.read(failed, 4096).partition(b"\n")[0].decode()
    os.close(failed)
    end = "hangs" if interrupted else "lives" if os.waitstatus_to_exitcode(found[1]) == 0 else "dies"
    return end, by


def _collected() -> set[str]:
    """The tests that there are: some that were recorded may have gone."""
    command = [sys.executable, "-m", "pytest", *OPTIONS, "--collect-only"]
    return set(subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.PIPE, text=True).stdout.splitlines())


def run(folder: Path, count: int, seed: int, seconds: float, part: tuple[int, int]) -> None:
    """Try those of the drawn mutants that are this part's and not tried yet; add how each ends to the folder."""
    tests, there = covering(folder), _collected()
    path = folder / f"results-{seed}-{part[0]}.jsonl"
    tried = len(path.read_text().splitlines()) if path.exists() else 0
    with path.open("a") as results:
        for point in drawn(ROOT, FOLDERS, count, seed)[part[0] :: part[1]][tried:]:
            calling = [each for each in tests.get((point.path, point.function), ()) if each[1] in there]
            names, began = chosen(calling, seconds), time.monotonic()
            end, by = outcome(point, names, 30 + 3 * seconds) if names else ("is not called", "")
            took = round(time.monotonic() - began, 1)
            results.write(
                json.dumps(asdict(point) | {"outcome": end, "by": by, "tests": len(names), "took": took}) + "\n"
            )
            results.flush()
            print(f"{end}: {point.path}:{point.start[0]} {point.kind} ({took} s)", flush=True)


def show(folder: Path) -> None:
    """Print how many mutants die by room and by kind, and those that live."""
    lines = [json.loads(line) for path in sorted(folder.glob("results-*.jsonl")) for line in path.open()]
    for title, name in (("room", lambda line: str(Path(line["path"]).parent)), ("kind", lambda line: line["kind"])):
        ends: dict[str, Counter[str]] = defaultdict(Counter)
        for line in lines:
            ends[name(line)][line["outcome"]] += 1
        print(f"| {title} | die | of |\n| --- | --- | --- |")
        for each, found in sorted(ends.items()):
            print(f"| {each} | {found['dies'] + found['hangs']} | {found.total()} |")
    for line in lines:
        if line["outcome"] not in ("dies", "hangs"):
            print(f"{line['outcome']}: {line['path']}:{line['start'][0]} {line['kind']}: {line['text'][:80]!r}")
    dead = sum(line["outcome"] in ("dies", "hangs") for line in lines)
    print(f"{dead} of {len(lines)} die")


def main() -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.mutants", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("command", choices=("record", "run", "show"))
    parser.add_argument("folder", type=Path, help="where calls, durations and results are")
    parser.add_argument("--count", type=int, default=200, help="how many mutants are drawn")
    parser.add_argument("--seed", type=int, default=1, help="of the draw")
    parser.add_argument("--seconds", type=float, default=60.0, help="seconds of tests for each mutant, at most")
    parser.add_argument("--part", default="0/1", help="I/N: each N-th mutant from the I-th on, counted from 0")
    arguments, options = parser.parse_known_args()
    if arguments.command == "record":
        return record(arguments.folder, options)
    if options:
        parser.error(f"unknown: {' '.join(options)}; only record takes options of pytest")
    if arguments.command == "run":
        index, _, parts = arguments.part.partition("/")
        run(arguments.folder, arguments.count, arguments.seed, arguments.seconds, (int(index), int(parts)))
    else:
        show(arguments.folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
