"""The page of results: tables made from the recorded runs, between markers, so that no number is typed."""

import re
import statistics
from collections.abc import Iterable, Mapping, Sequence

from benchmarks.harness.benchmark import Benchmark, Figure
from benchmarks.harness.results import ROOT, Run, load

PAGE = ROOT / "docs/evidence/benchmarks.md"
IMAGES = ROOT / "docs/images"
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


def table(benchmark: Benchmark, runs: Sequence[Run]) -> str:
    """A row for each figure: its runs beside each other, and the goal."""
    if benchmark.table is not None:
        return benchmark.table(runs)
    lines = ["| figure | " + " | ".join(_title(run) for run in runs) + " | goal |", "| --- " * (len(runs) + 2) + "|"]
    lines += [_row(figure, runs) for figure in benchmark.figures]
    return "\n".join(lines)


def _title(run: Run) -> str:
    return f"{run.label or run.day}{', quick' if run.is_quick else ''}"


def _row(figure: Figure, runs: Sequence[Run]) -> str:
    cells = [_cell(figure, run) for run in runs]
    return f"| {_name(figure)} | {' | '.join(cells)} | {figure.goal or ''} |"


def _name(figure: Figure) -> str:
    """Return the name of a figure, and its unit; a ratio has none."""
    return figure.what if figure.to or not figure.unit else f"{figure.what}, {figure.unit}"


def _cell(figure: Figure, run: Run) -> str:
    values = figure.values(run)
    text = summary(values)
    return f"**{text}**" if values and figure.goal and figure.goal.is_met(statistics.median(values)) else text


def goals(benchmarks: Iterable[Benchmark]) -> str:
    """A row for each figure that has a goal: the last three whole runs, and in how many it was met; no quick ones."""
    lines = ["| figure | goal | the last runs | met |", "| --- | --- | --- | --- |"]
    for benchmark in benchmarks:
        recorded = load(benchmark.name)
        runs = [run for run in recorded if not run.label.startswith("before") and not run.is_quick][-3:]
        for figure in (each for each in benchmark.figures if each.goal is not None):
            found = [(run, values) for run in runs if (values := figure.values(run))]
            met = sum(figure.goal.is_met(statistics.median(values)) for _, values in found if figure.goal)
            cells = ", ".join(shown(statistics.median(values)) for _, values in found) or "-"
            link = f"[{_name(figure)}](#{benchmark.name.replace('_', '-')})"
            lines.append(f"| {link} | {figure.goal} | {cells} | {f'{met} of {len(found)}' if found else '-'} |")
    return "\n".join(lines)


def section(benchmark: Benchmark, runs: Sequence[Run]) -> str:
    """Question, work, table, picture, who could not take part, and the command."""
    parts = [f"{benchmark.question} {benchmark.work}"]
    if runs:
        parts.append(table(benchmark, runs))
        if benchmark.picture is not None:
            parts.append(f"![{benchmark.name}](../images/bench_{benchmark.name}.svg)")
        missing = {name: reason for run in runs for name, reason in run.missing.items()}
        if missing:
            parts.append("Not run: " + "; ".join(f"{name} ({reason})" for name, reason in missing.items()) + ".")
        parts.append(_conditions(benchmark, runs))
    else:
        parts.append("Not recorded yet.")
    return "\n\n".join(parts) + "\n"


def _conditions(benchmark: Benchmark, runs: Sequence[Run]) -> str:
    """The command, and the sizes, days and machine of the runs; versions are those of the last one."""
    run = runs[-1]
    sizes = [f"{each.gigabytes:g} GB" for each in runs]
    size = sizes[0] if len(set(sizes)) == 1 else ", ".join(sizes) + ", in the order of the columns"
    facts = [f"{run.machine['cores']} cores", f"{run.machine['memory_gb']} GB", run.machine.get("gpu", "no GPU")]
    versions = [f"{name} {version}" for name, version in run.versions.items()]
    parts = [*([size] if benchmark.gigabytes else []), "recorded " + ", ".join(sorted({each.day for each in runs}))]
    return f"`{run.command}`: {'; '.join([*parts, ', '.join([*facts, *versions])])}."


def written(text: str, benchmarks: Mapping[str, Benchmark]) -> str:
    """A page whose marked blocks have the results that are recorded now."""

    def block(match: re.Match[str]) -> str:
        if match[2] == "goals":
            return f"{match[1]}\n{goals(benchmarks.values())}\n\n{match[3]}"
        benchmark = benchmarks[match[2]]
        return f"{match[1]}\n{section(benchmark, load(benchmark.name))}\n{match[3]}"

    return _BLOCK.sub(block, text)


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
