"""The page of results: tables made from the recorded runs, between markers, so that no number is typed."""

import re
import statistics
from collections.abc import Iterable, Mapping, Sequence

from benchmarks.harness.benchmark import Benchmark, Figure
from benchmarks.harness.results import ROOT, Run, load

PAGE = ROOT / "docs/evidence/results.md"
IMAGES = ROOT / "docs/images"
SHOWN = 2
"""The newest runs of a benchmark that the page shows: the newest, and the one before."""
WIDE = 0.5
"""A range is given on the page from this part of the median on."""
_BLOCK = re.compile(r"(<!-- results: (\w+) -->\n).*?(<!-- end of results -->)", re.DOTALL)


def shown(value: float) -> str:
    """A number with three digits, or two where these are tens, without an exponent."""
    if value == 0 or abs(value) >= 10:
        return f"{value:,.0f}"
    text = f"{value:.3g}" if abs(value) >= 0.001 else f"{value:.2g}"
    return text if "e" not in text else f"{value:.6f}".rstrip("0")


def summary(values: Sequence[float]) -> str:
    """The median, with the range if there are several values."""
    if not values:
        return "-"
    middle = shown(statistics.median(values))
    to = " to " if min(values) < 0 else "-"
    return middle if len(values) == 1 else f"{middle} ({shown(min(values))}{to}{shown(max(values))})"


def brief(values: Sequence[float]) -> str:
    """The median, with the range if it is wide."""
    if not values:
        return "-"
    middle = statistics.median(values)
    return summary(values) if max(values) - min(values) > WIDE * abs(middle) else shown(middle)


def counted(runs: Sequence[Run]) -> list[Run]:
    """The runs that the page shows: whole ones of the code as it is."""
    return [run for run in runs if not run.label.startswith("before") and not run.is_quick]


def table(benchmark: Benchmark, runs: Sequence[Run], *, details: bool) -> str:
    """A row for each figure: newest run, the one before, and the goal; with details, all figures and ranges."""
    if benchmark.table is not None:
        return benchmark.table(runs)
    newest = [*reversed(runs[-SHOWN:])]
    figures = [figure for figure in benchmark.figures if details or not figure.is_detail]
    titles = [name + size for name, size in zip(("newest", "before it"), _sizes(newest), strict=False)]
    lines = [f"| figure | {' | '.join(titles)} | goal |", "| --- " * (len(newest) + 2) + "|"]
    show = summary if details else brief
    for figure in figures:
        values = [figure.values(run) for run in newest]
        if any(values):
            lines.append(f"| {_name(figure)} | {' | '.join(map(show, values))} | {verdict(figure, values)} |")
    return "\n".join(lines)


def _sizes(runs: Sequence[Run]) -> list[str]:
    """The size of each run's state, if they differ."""
    sizes = [f", {run.gigabytes:g} GB" for run in runs]
    return sizes if len(set(sizes)) > 1 else ["" for _ in sizes]


def _name(figure: Figure) -> str:
    """Return the name of a figure, and its unit; a ratio has none."""
    return figure.what if figure.to or not figure.unit else f"{figure.what}, {figure.unit}"


def verdict(figure: Figure, values: Sequence[Sequence[float]]) -> str:
    """The goal of a figure, and in how many of some runs it was met."""
    if figure.goal is None:
        return ""
    found = [figure.goal.is_met(statistics.median(each)) for each in values if each]
    text = "met" if all(found) else f"met in {sum(found)} of {len(found)}" if any(found) else "**not met**"
    return f"{figure.goal}: {text}" if found else str(figure.goal)


def goals(benchmarks: Iterable[Benchmark], headings: Mapping[str, str]) -> str:
    """Return a line with the number of goals that the newest runs meet, by benchmark, and one with the machine."""
    lines = []
    facts: dict[str, None] = {}
    for benchmark in benchmarks:
        runs = counted(load(benchmark.name))
        facts |= dict.fromkeys(fact for run in runs[-1:] for fact in _facts(run))
        met = []
        for figure in (each for each in benchmark.figures if each.goal is not None):
            newest = next((values for run in reversed(runs) if (values := figure.values(run))), [])
            met += [figure.goal.is_met(statistics.median(newest))] if newest and figure.goal else []
        if met:
            heading = headings[benchmark.name]
            lines.append(f"[{heading}](#{heading.lower().replace(' ', '-')}) {sum(met)} of {len(met)}")
    return f"Goals met by the newest runs: {', '.join(lines)}.\n\nMachine and versions: {', '.join(facts)}."


def _facts(run: Run) -> list[str]:
    """The machine of a run, and the versions of all but fastckpt, which is given beside each command."""
    machine = [f"{run.machine['cores']} cores", f"{run.machine['memory_gb']} GB", run.machine.get("gpu", "no GPU")]
    return machine + [f"{name} {version}" for name, version in run.versions.items() if name != "fastckpt"]


def section(benchmark: Benchmark, runs: Sequence[Run], *, details: bool = False) -> str:
    """Question, work, table, picture, who could not take part, and the command."""
    parts = [f"{benchmark.question} {benchmark.work}"]
    if runs:
        parts.append(table(benchmark, runs, details=details))
        if benchmark.picture is not None and not details:
            parts.append(f"![{benchmark.name}](../images/bench_{benchmark.name}.svg)")
        missing = {name: reason for run in runs for name, reason in run.missing.items()}
        if missing:
            parts.append("Not run: " + "; ".join(f"{name} ({reason})" for name, reason in missing.items()) + ".")
        parts.append(_conditions(benchmark, runs[-1], details=details))
    else:
        parts.append(f"`python -m benchmarks {benchmark.name}`: not recorded yet.")
    return "\n\n".join(parts) + "\n"


def _conditions(benchmark: Benchmark, run: Run, *, details: bool) -> str:
    """The command of a run, its size, day and version; on the page the command of all contenders."""
    command = run.command if details else f"python -m benchmarks {benchmark.name}"
    size = [f"{run.gigabytes:g} GB"] if benchmark.gigabytes else []
    facts = [*size, run.day, f"fastckpt {run.versions['fastckpt']}"]
    return f"`{command}`: {', '.join(facts)}."


def written(text: str, benchmarks: Mapping[str, Benchmark]) -> str:
    """A page whose marked blocks have the results that are recorded now."""

    headings = _headings(text)

    def block(match: re.Match[str]) -> str:
        if match[2] == "goals":
            return f"{match[1]}\n{goals(benchmarks.values(), headings)}\n\n{match[3]}"
        benchmark = benchmarks[match[2]]
        return f"{match[1]}\n{section(benchmark, counted(load(benchmark.name)))}\n{match[3]}"

    return _BLOCK.sub(block, text)


def _headings(text: str) -> dict[str, str]:
    """The heading above the results of each benchmark."""
    found, heading = {}, ""
    for match in re.finditer(r"^#+ (.+)$|<!-- results: (\w+) -->", text, re.MULTILINE):
        heading = match[1] or heading
        if match[2]:
            found[match[2]] = heading
    return found


def marked(text: str) -> list[str]:
    """The benchmarks whose results a page has."""
    return [match[2] for match in _BLOCK.finditer(text) if match[2] != "goals"]


def write(benchmarks: Mapping[str, Benchmark]) -> None:
    """Write tables and pictures of all that is recorded."""
    PAGE.write_text(written(PAGE.read_text(), benchmarks))
    for name, text in pictures(benchmarks.values()):
        (IMAGES / name).write_text(text)


def pictures(benchmarks: Iterable[Benchmark]) -> list[tuple[str, str]]:
    """Name and text of each picture, drawn from the last recorded run."""
    drawn = [(each, load(each.name)) for each in benchmarks if each.picture is not None]
    return [(f"bench_{each.name}.svg", each.picture(runs[-1]).svg()) for each, runs in drawn if runs and each.picture]
