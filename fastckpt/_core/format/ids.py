"""The identity of a checkpoint."""

from typing import NamedTuple

from fastckpt.errors import ProtocolError

LARGEST = 2**63 - 1


class SaveId(NamedTuple):
    """Names one saved state: a step number alone is no identity once a job was rolled back.

    Ids order by history, then step; the larger is the newer. Both are whole numbers from 0 to 2**63 - 1.
    """

    history: int
    step: int

    def __str__(self) -> str:
        return f"step {self.step} of history {self.history}"

    def to_json(self) -> dict[str, int]:
        """This id as a JSON object; raises ProtocolError if it could not be read again."""
        return {"history": _number("history", self.history), "step": _number("step", self.step)}

    @classmethod
    def from_json(cls, value: object) -> "SaveId":
        """Read a result of `to_json`; raises ProtocolError with the value for anything else."""
        if not isinstance(value, dict) or set(value) != {"history", "step"}:
            raise ProtocolError(f"a save id is {str(value)[:200]!r}; it must have a history and a step alone")
        return cls(_number("history", value["history"]), _number("step", value["step"]))


def _number(name: str, value: object) -> int:
    if type(value) is not int or not 0 <= value <= LARGEST:
        raise ProtocolError(f"{name} is {str(value)[:40]!r}; it must be a whole number from 0 to {LARGEST}")
    return value
