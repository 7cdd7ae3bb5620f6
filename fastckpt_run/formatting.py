"""Formatting of reports for people: durations, causes of lost time, failures."""

from collections.abc import Sequence

from fastckpt._core.report import goodput as g
from fastckpt._core.report.frequency import DecidedIntervals
from fastckpt._core.report.launches import Failure
from fastckpt._core.report.report import Recovery
from fastckpt_run.failures.deaths import describe

CAUSES = {
    g.USEFUL: "useful steps",
    g.STALL: "stalled by saves",
    g.REPEATED: "repeated steps",
    g.INTERRUPTED: "interrupted steps",
    g.DETECTION: "noticing a failure",
    g.STOP: "stopping workers",
    g.RENDEZVOUS: "rendezvous",
    g.SPARE: "waiting as a spare",
    g.START: "starting workers",
    g.IMPORTS: "imports",
    g.SETUP: "set-up",
    g.RESUME: "resume",
    g.END: "end",
    g.DOWN: "no agent",
    g.UNEXPLAINED: "unexplained",
}
"""Each cause, in two or three words; docs/reference/events.md has the definitions."""


def duration(nanoseconds: int | None) -> str:
    """A time for people, such as ``4 min 10 s``; ``?`` for None."""
    if nanoseconds is None:
        return "?"
    if nanoseconds < 1e9:
        return f"{nanoseconds / 1e6:.3g} ms" if nanoseconds < 999.5e6 else "1.00 s"
    seconds = nanoseconds / 1e9
    if seconds < 99.95:
        return f"{seconds:.3g} s"
    minutes, hours, days = seconds / 60, seconds / 3600, seconds / 86400
    if minutes < 100:
        return _two(int(minutes), "min", int(seconds) % 60, "s")
    return (
        _two(int(hours), "h", int(minutes) % 60, "min") if hours < 100 else _two(int(days), "d", int(hours) % 24, "h")
    )


def _two(number: int, unit: str, rest: int, smaller: str) -> str:
    return f"{number} {unit} {rest} {smaller}" if rest else f"{number} {unit}"


def share(part: int, whole: int) -> str:
    """A part, in percent."""
    return f"{100 * part / whole:.2f} %" if whole else "?"


def part(value: float | None) -> str:
    """A part of training time, in percent; ``-`` if it is not known."""
    return "-" if value is None else f"{value:.2%}".replace("%", " %")


def frequency(decisions: Sequence[DecidedIntervals]) -> str:
    """The intervals that the last of some decisions chose, and the last measured cost of checkpoints."""
    last = decisions[-1]
    if last.memory is None or last.storage is None:
        return f"none yet: what checkpoints cost is measured since step {last.step:,}"
    text = f"a snapshot every {count(last.memory, 'step')}, a persist every {last.storage:,}"
    measured = next((one for one in reversed(decisions) if one.overhead is not None), None)
    if measured is None:
        return text
    bound = "" if measured.bound is None else f", of {part(measured.bound)} at most"
    return f"{text}; checkpoints cost {part(measured.overhead)} of training lately{bound}"


def rate(number: float) -> str:
    """A number per second, with its unit."""
    return f"{number:.3g}" if number < 999.5 else f"{number:,.0f}"


def count(number: int, what: str, many: str = "") -> str:
    """A number of things, in words."""
    return f"{number:,} {what if number == 1 else many or what + 's'}"


def goodput(part: float | None) -> str:
    """The useful part of all time."""
    return "unknown: no steps were reported" if part is None else f"{100 * part:.2f} %"


def failure(one: Recovery, *, nodes: int = 1) -> str:
    """A name for a failure; with its node, if there are several."""
    return what(one) if nodes == 1 else f"node {one.node}: {what(one, host=one.host)}"


def what(one: Recovery | Failure, *, host: str = "") -> str:
    """A failure and its cause, as far as that is known; with its host, if one is given."""
    there, place, why = f" on {host}" if host else "", f" in {one.frame}" if one.frame else "", awaited(one)
    if one.kind == "died":
        cause = f", {one.exception.removesuffix('.')}{place and ','}" if one.exception else ""
        return f"rank {one.rank} died{there}: {describe(one.exitcode)}{cause}{place}{why}"
    if one.kind == "hung":
        who = f"rank {one.rank}" if one.rank >= 0 else "the job"
        return f"{who} hung{there} for {duration(one.silent)}{place}{why}"
    return "the agent died" if one.kind == "agent" else f"stopped for another node{why}"


def awaited(one: Recovery | Failure) -> str:
    """The rank of another node for which it waited, if the job hung, as the end of a sentence."""
    found = one.awaited
    if found is None:
        return ""
    if found.rank < 0:
        return f", perhaps waiting for a rank on {found.host}, from where no answer came"
    return f", waiting for rank {found.rank} on {found.host}" + (f" in {found.place}" if found.place else "")


def where(one: Recovery | Failure) -> str:
    """The host on which it failed, and the file that has its stderr, if there is one."""
    return f"on {one.host}" + (f", log {one.log}" if one.log else "")


def recovery(one: Recovery) -> str:
    """A description of the recovery that followed a failure."""
    if one.step is None:
        return "did not go on"
    whence = f"step {one.step} in {one.tier}" if one.tier else "the beginning"
    back = f" after {duration(one.first_step)}" if one.first_step is not None else ""
    return f"went on{back} from {whence}, {count(one.repeated, 'step')} repeated"
