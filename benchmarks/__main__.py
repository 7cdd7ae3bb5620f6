"""The benchmarks, by name or all of them: contenders take turns in fresh processes, each figure by its limit.

python -m benchmarks [NAME ...] [--only TEXT] [--quick] [--rounds N] [--gigabytes G] [--record [--label LABEL]]
python -m benchmarks --list
python -m benchmarks --page      # tables and pictures of docs/evidence, from what is recorded
"""

import argparse
import importlib
import math
import pkgutil
import shlex
import signal
import sys
import time
from datetime import UTC, datetime

from benchmarks import suite
from benchmarks.harness import page, results, turn
from benchmarks.harness.benchmark import Benchmark
from benchmarks.harness.machine import machine, versions

COPIES = 4
"""States that a job needs at least: its own, and three slots."""


def modules() -> dict[str, str]:
    """The modules of the suite's benchmarks, by name."""
    found = [each for each in pkgutil.walk_packages(suite.__path__, f"{suite.__name__}.") if not each.ispkg]
    names = {each.name.rpartition(".")[2]: each.name for each in found}
    return {name: names[name] for name in sorted(names) if not name.startswith("_")}


def benchmarks() -> dict[str, Benchmark]:
    """All of the suite, by name."""
    return {name: importlib.import_module(module).BENCHMARK for name, module in modules().items()}


def parsed(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m benchmarks", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="which; all, if none is given")
    parser.add_argument("--list", action="store_true", help="list them with their questions")
    parser.add_argument("--page", action="store_true", help="write tables and pictures from what is recorded")
    parser.add_argument("--quick", action="store_true", help="one round, small states")
    parser.add_argument("--only", default="", metavar="TEXT", help="contenders whose names contain it")
    parser.add_argument("--rounds", type=int, help="how often each contender has its turn")
    parser.add_argument("--gigabytes", type=float, help="size of the state")
    parser.add_argument("--record", action="store_true", help="add the run to docs/evidence/benchmarks/NAME.jsonl")
    parser.add_argument("--label", default="", help="title of the run in the table; the day, if none is given")
    options = parser.parse_args(arguments)
    if unknown := set(options.names) - benchmarks().keys():
        parser.error(f"no benchmark is called {', '.join(sorted(unknown))}; there are {', '.join(benchmarks())}")
    chosen = [each for name in options.names or benchmarks() for each in benchmarks()[name].contenders]
    if not any(options.only in each.name for each in chosen):
        parser.error(f"--only {options.only!r}: there are {'; '.join(each.name for each in chosen)}")
    if options.rounds is not None and options.rounds < 1:
        parser.error(f"--rounds is {options.rounds}; give 1 or more")
    if options.gigabytes is not None and not 0 < options.gigabytes < math.inf:
        parser.error(f"--gigabytes is {options.gigabytes}; give more than 0")
    if options.gigabytes is not None and COPIES * options.gigabytes > (memory := machine()["memory_gb"]):
        parser.error(f"--gigabytes is {options.gigabytes:g}; a state and three slots of it exceed memory, {memory} GB")
    if options.record and not results.is_writable():
        parser.error(f"--record: {results.FOLDER} cannot be written")
    if options.page and (options.record or options.names):
        parser.error("--page is given alone: it writes all tables and pictures, from what is recorded")
    return options


def run(benchmark: Benchmark, options: argparse.Namespace) -> results.Run:
    """Have the contenders take turns; who takes the first one changes from round to round."""
    quick = min(benchmark.gigabytes, max(0.1, benchmark.gigabytes / 10)) if options.quick else benchmark.gigabytes
    command = ["python", "-m", "benchmarks", benchmark.name, *(["--quick"] if options.quick else [])]
    command += ["--only", options.only] if options.only else []
    command += [f"--{name}={value:g}" for name in ("rounds", "gigabytes") if (value := getattr(options, name))]
    done = results.Run(
        options.label,
        shlex.join(command),
        datetime.now(UTC).date().isoformat(),
        options.quick,
        options.gigabytes or quick,
        machine(),
        versions(),
    )
    asked = [each for each in benchmark.contenders if options.only in each.name]
    done.missing = {each.name: reason for each in asked if (reason := each.missing())}
    present = [each for each in asked if each.name not in done.missing]
    if options.quick and not options.only:
        present = [each for each in present if each.quick]
    rounds = options.rounds or (1 if options.quick else benchmark.rounds)
    for number in range(rounds if present else 0):
        first = number % len(present)
        for contender in present[first:] + present[:first]:
            begin = time.monotonic()
            values = turn.take(modules()[benchmark.name], contender.name, done.gigabytes, options.quick, number)
            seconds = round(time.monotonic() - begin, 1)
            done.samples.append(
                {"contender": contender.name, "round": number, "seconds": seconds, "values": _rounded(values)}
            )
            print(f"{benchmark.name}: round {number + 1}, {contender.name}: {seconds} s", file=sys.stderr, flush=True)
    return done


def _rounded(values: dict[str, list[float]]) -> dict[str, list[float]]:
    """Five digits: more is noise, and would be the most of the files."""
    return {key: [float(f"{value:.5g}") for value in found] for key, found in values.items()}


def main(arguments: list[str]) -> None:
    options = parsed(arguments)
    known = benchmarks()
    if options.list:
        print("\n".join(f"{name:24} {each.question}" for name, each in known.items()))
    elif options.page:
        page.write(known)
    else:
        for name in options.names or known:
            done = run(known[name], options)
            print(page.section(known[name], [done], details=True), flush=True)
            if options.record:
                results.record(name, done)


def _stop(number: int, frame: object) -> None:
    """End by an exception, so that processes and folders of the turn go too."""
    sys.exit(128 + number)


if __name__ == "__main__":
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # shells start background processes without the first
        signal.signal(each, _stop)
    main(sys.argv[1:])
