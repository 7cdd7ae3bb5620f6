"""The lines of `fastckpt doctor`, and the input of its checks."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, Self

from fastckpt._core.config import Settings

_SECRETS = (
    (re.compile(r"(://)[^/@\s]+@"), r"\1***@"),
    (re.compile(r"(?i)([?&;](?:sig|signature|token|key|secret|password|credential)[^=&\s]*=)[^&\s]+"), r"\1***"),
)
"""Parts of URLs that open a store to whoever reads them."""


class Severity(StrEnum):
    """The state of a line's subject."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True)
class Diagnosis:
    """One line: the subject, its state, the finding, and the remedy."""

    name: str
    state: Severity
    found: str
    remedy: str = ""

    def to_record(self) -> dict[str, Any]:
        """Return a JSON object, without secrets."""
        return asdict(self) | {
            "state": str(self.state),
            "found": without_secrets(self.found),
            "remedy": without_secrets(self.remedy),
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Self:
        """Read a result of `to_record`."""
        return cls(record["name"], Severity(record["state"]), record["found"], record["remedy"])


@dataclass(frozen=True)
class Subject:
    """Subject of the checks: a directory, a rendezvous, and the settings of a job.

    Attributes:
        directory: A checkpoint directory, a path or URL; empty for none.
        endpoints: Endpoints of a rendezvous, as --rdzv-endpoint has them; empty for none.
        settings: Settings of the job, as variables of the environment.
        nodes: Nodes of the launch, if that is known; 0 if not.
        ranks: Ranks on each of them; 0 if that is not known.
    """

    directory: str = ""
    endpoints: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)
    nodes: int = 0
    ranks: int = 0

    @property
    def job(self) -> Settings:
        """The settings."""
        return Settings.from_environment(self.settings)


def ok(name: str, found: str) -> Diagnosis:
    """A line on a subject in order."""
    return Diagnosis(name, Severity.OK, found)


def warning(name: str, found: str, remedy: str) -> Diagnosis:
    """A line on a subject that costs something, or may."""
    return Diagnosis(name, Severity.WARNING, found, remedy)


def problem(name: str, found: str, remedy: str) -> Diagnosis:
    """A line on a fault that keeps a job from running, or loses checkpoints."""
    return Diagnosis(name, Severity.PROBLEM, found, remedy)


def of_error(name: str, error: Exception) -> Diagnosis:
    """A problem that an error of ours describes: its text ends with the remedy."""
    found, _, remedy = re.sub(r"\s+", " ", str(error)).partition(". " if ". " in str(error) else "; ")
    return problem(name, found, remedy or "Repair what it names, and look again")


def worst_of(lines: Iterable[Diagnosis]) -> Severity:
    """The state of a whole."""
    found = {line.state for line in lines}
    return next((state for state in (Severity.PROBLEM, Severity.WARNING) if state in found), Severity.OK)


def without_secrets(text: str) -> str:
    """A text without secrets in its URLs."""
    for pattern, replacement in _SECRETS:
        text = pattern.sub(replacement, text)
    return text
