"""What became of a snapshot."""

from dataclasses import dataclass


@dataclass(frozen=True)
class SaveOutcome:
    """What became of a snapshot.

    Attributes:
        skipped: Why it was not taken; empty if it was.
        trouble: What keeps persists from succeeding at the moment; empty for nothing.
        pending: Whether it is still being finished behind training.
    """

    skipped: str
    trouble: str
    pending: bool = False
