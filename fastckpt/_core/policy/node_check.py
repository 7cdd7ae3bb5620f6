"""Verdicts of a node check: limits of single checks, pairs of nodes that exchange data, and which node is bad.

Two rounds of pairs as DLRover's network check has them: neighbours first; then each suspect with a node that was good.
A node that fails in both rounds is bad, and one whose rate is below half the median of the others is slow.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from itertools import count
from typing import Any, Self

SHARE = 0.5
"""A node is slow if it has less than this share of the median of the other nodes."""
MOST_SUSPECTS = 4
"""Suspects that a good node takes in the second round, one after the other; it begins with this number times the time
that one takes."""
FLOORS = {"matmul": 0.1, "memory": 0.1, "shm": 16.0, "disk": 1.0, "loopback": 5.0, "pair": 1.0}
"""Values that only a broken node misses, in the unit of the check, by the first word of its name."""

Pair = tuple[int, int]
"""Two nodes; the first connects to the second."""
Rates = Mapping[Pair, float | None]
"""Rates that pairs have measured; None where the exchange has failed."""


class Verdict(StrEnum):
    """The outcome of a check, or of all checks of a node."""

    OK = "ok"
    PROBLEM = "problem"
    UNKNOWN = "unknown"

    @property
    def code(self) -> int:
        """The exit code that node-problem-detector knows for it."""
        return {Verdict.OK: 0, Verdict.PROBLEM: 1, Verdict.UNKNOWN: 2}[self]


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """The verdict on a whole: a problem, if there is one; else unknown, if something is."""
    found = set(verdicts)
    return next((each for each in (Verdict.PROBLEM, Verdict.UNKNOWN) if each in found), Verdict.OK)


@dataclass(frozen=True)
class CheckResult:
    """The result of one check.

    Attributes:
        name: Its name; the first word is the subject.
        verdict: The outcome.
        message: The reason, for people; empty if all is well.
        value: Measured value, more being better; None if nothing was measured.
        unit: Of ``value`` and ``limit``.
        limit: Minimum of ``value``.
        seconds: Duration of the check.
    """

    name: str
    verdict: Verdict
    message: str = ""
    value: float | None = None
    unit: str = ""
    limit: float | None = None
    seconds: float = 0.0

    @property
    def kind(self) -> str:
        """Kind of the check."""
        return self.name.partition(" ")[0]

    def to_record(self) -> dict[str, Any]:
        """Return a JSON object."""
        return asdict(self) | {"verdict": str(self.verdict)}

    @classmethod
    def from_record(cls, record: Any) -> Self:
        """Raises ValueError if ``record`` is no result."""
        try:
            found = cls(**{**record, "verdict": Verdict(record["verdict"])})
        except (KeyError, TypeError) as error:
            raise ValueError(f"it is no result of a check: {error}") from None
        numbers = (found.value, found.limit, found.seconds)
        sound = all(each is None or type(each) in (int, float) for each in numbers)
        if not (sound and isinstance(found.name, str) and isinstance(found.message, str)):
            raise ValueError("it is no result of a check")
        return found


@dataclass(frozen=True)
class CheckLimits:
    """Values that checks have to reach: the user's, else a share of a good node's, else `FLOORS`.

    Attributes:
        given: CheckLimits by the name of a check, or by its first word.
        baseline: Values of a good node by the names of its checks.
        tolerance: The share of a good node's value that will do.
    """

    given: Mapping[str, float]
    baseline: Mapping[str, float]
    tolerance: float = SHARE

    def of(self, name: str) -> float | None:
        """The limit of a check; None if there is none."""
        kind = name.partition(" ")[0]
        for key in (name, kind):
            if key in self.given:
                return self.given[key]
        # Room is not a property of a node: a job that runs takes it.
        if name in self.baseline and kind != "shm":
            return self.tolerance * self.baseline[name]
        return FLOORS.get(kind)

    def missing(self, results: Sequence[CheckResult], kinds: Collection[str]) -> list[CheckResult]:
        """Results of checks of these kinds that have a limit of their own, and were not made.

        A processor, such as a GPU, that is not there any more is a problem; of others nothing is known.
        """
        made = {each.name for each in results}
        named = [
            name for name in dict.fromkeys((*self.given, *self.baseline)) if name not in made and name not in FLOORS
        ]
        found = [CheckResult(name, Verdict.UNKNOWN, "has a limit, and was not checked") for name in named]
        return [
            replace(each, verdict=Verdict.PROBLEM, message="is not there") if each.kind == "matmul" else each
            for each in found
            if each.kind in kinds
        ]

    def apply(self, result: CheckResult) -> CheckResult:
        """The result with its limit, and with the verdict that follows from that."""
        value, limit = result.value, self.of(result.name)
        if value is None or limit is None:
            return result
        result = replace(result, limit=limit)
        if result.verdict is not Verdict.OK or value >= limit:
            return result
        message = f"{in_words(value)} {result.unit}, less than {in_words(limit)}"
        return replace(result, verdict=Verdict.PROBLEM, message=message)


DEFAULT_LIMITS = CheckLimits({}, {})


def in_words(value: float) -> str:
    """A value in three digits or more, without an exponent if it is not tiny."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def summary(results: Sequence[CheckResult], longest: int) -> str:
    """The verdict in one line of at most ``longest`` characters, the worst first."""
    whole = worst(each.verdict for each in results)
    bad = [each for each in results if each.verdict is Verdict.PROBLEM]
    bad += [each for each in results if each.verdict is Verdict.UNKNOWN]
    line = f"{whole}: " + ("; ".join(f"{each.name}: {each.message}" for each in bad) or f"{len(results)} checks passed")
    return line if len(line) <= longest else f"{line[: longest - 3]}..."


def below_the_others(values: Mapping[int, float], share: float = SHARE) -> frozenset[int]:
    """The nodes whose value is below a share of the median of all others; none if there is only one."""
    order = sorted(values, key=lambda node: values[node])

    def median_without(place: int) -> float:
        def other(number: int) -> float:
            return values[order[number if number < place else number + 1]]

        rest = len(order) - 1
        return (other((rest - 1) // 2) + other(rest // 2)) / 2

    if len(order) < 2:
        return frozenset()
    return frozenset(node for place, node in enumerate(order) if values[node] < share * median_without(place))


def first_pairs(nodes: Sequence[int]) -> list[Pair]:
    """The pairs of the first round: neighbours; of an odd number, the last three are each with each."""
    pairs = list(zip(nodes[::2], nodes[1::2], strict=False))
    if len(nodes) % 2 and len(nodes) > 1:
        pairs += [(nodes[-2], nodes[-1]), (nodes[-3], nodes[-1])]
    return pairs


def second_pairs(nodes: Sequence[int], first: Rates) -> list[Pair]:
    """The pairs of the second round.

    Each suspect, which had no good exchange or a slow one, is with a good node, with another one than before if there
    is one. A good one takes `MOST_SUSPECTS` at most. Good nodes without a suspect are with each other.
    """
    suspects = _suspects(nodes, first)
    good = [node for node in nodes if node not in suspects]
    if not good:
        return []
    met = {frozenset(pair) for pair in first}
    load, pairs, turn = Counter[int](), list[Pair](), count()
    for suspect in (node for node in nodes if node in suspects):
        # A node was with two others at most: one of three in a row is new, if there are three.
        choice = [good[next(turn) % len(good)] for _ in range(min(3, len(good)))]
        choice.sort(key=lambda node: (load[node], frozenset((suspect, node)) in met))
        if load[choice[0]] < MOST_SUSPECTS:
            load[choice[0]] += 1
            pairs.append((suspect, choice[0]))
    free = [node for node in good if not load[node]]
    half = len(free) // 2
    pairs += [pair for pair in zip(free[:half], free[half:], strict=False) if frozenset(pair) not in met]
    return pairs


@dataclass(frozen=True)
class NodeVerdict:
    """The outcome of the exchanges of a node.

    Attributes:
        verdict: A problem if it had no good exchange in two rounds, the second one with a good node. Unknown if that is
            not certain, or a link between two nodes that are good otherwise has failed.
        rate: The best that it reached.
        is_slow: True if that is below `SHARE` of the median of the others.
        failed: The nodes with which an exchange has failed.
    """

    verdict: Verdict
    rate: float | None
    is_slow: bool
    failed: tuple[int, ...]


def judge(nodes: Sequence[int], first: Rates, second: Rates) -> dict[int, NodeVerdict]:
    """The verdict on each of these nodes by the measurements of its pairs in both rounds."""
    rates = [*first.items(), *second.items()]
    best, partners = _best(rates), _failed(rates)
    again = {node for pair, rate in second.items() if rate is None for node in pair}
    slow = below_the_others(best)
    bad = {node for node in nodes if node not in best and node in again}

    def verdict(node: int) -> Verdict:
        if node in bad:
            return Verdict.PROBLEM
        is_alone = len(nodes) == 1
        sound = is_alone or (node in best and all(other in bad for other in partners.get(node, ())))
        return Verdict.OK if sound else Verdict.UNKNOWN

    return {
        node: NodeVerdict(verdict(node), best.get(node), node in slow, tuple(dict.fromkeys(partners.get(node, ()))))
        for node in nodes
    }


def _suspects(nodes: Sequence[int], first: Rates) -> frozenset[int]:
    best = _best(first.items())
    return below_the_others(best) | {node for node in nodes if node not in best}


def _best(rates: Iterable[tuple[Pair, float | None]]) -> dict[int, float]:
    found = dict[int, float]()
    for pair, rate in rates:
        if rate is not None:
            for node in pair:
                found[node] = max(rate, found.get(node, 0.0))
    return found


def _failed(rates: Iterable[tuple[Pair, float | None]]) -> dict[int, list[int]]:
    found = dict[int, list[int]]()
    for (one, other), rate in rates:
        if rate is None:
            found.setdefault(one, []).append(other)
            found.setdefault(other, []).append(one)
    return found
