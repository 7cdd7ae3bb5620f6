"""Terms that the nodes of a job share, and why one that comes later does not fit them. Pure functions."""

from collections.abc import Iterable
from dataclasses import asdict, astuple, dataclass, fields
from typing import Any, NamedTuple, Self

from torch.torch_version import TorchVersion

from fastckpt._core.error_codes import coded


@dataclass(frozen=True)
class JobTerms:
    """Terms that the nodes of a job share; a term is empty if it is not known, or not the same on all of them.

    Attributes:
        version: The version of fastckpt.
        torch: The release of torch, without its build's suffix.
        replicas: `--fast-replicas`.
        nodes: `--nnodes`.
        script: The name of the script, or of the module, that workers run.
    """

    version: str = ""
    torch: str = ""
    replicas: str = ""
    nodes: str = ""
    script: str = ""

    def to_record(self) -> dict[str, str]:
        """Return a JSON object."""
        return {name: value for name, value in asdict(self).items() if value}

    @classmethod
    def from_record(cls, record: Any) -> Self:
        """The terms in a JSON object; a value that is no text is not known."""
        found = record if isinstance(record, dict) else {}
        return cls(**{field.name: text for field in fields(cls) if isinstance(text := found.get(field.name), str)})


UNKNOWN = JobTerms()


class Misfit(NamedTuple):
    """A difference between a node and the members of a job, for which it may not join.

    Attributes:
        text: For people to read.
        waits: True if it joins once none of the members is left.
    """

    text: str
    waits: bool = False


_PRODUCTS = {"version": "fastckpt", "torch": "torch"}
_SETTINGS = {"replicas": "--fast-replicas", "nodes": "--nnodes", "script": "the script"}


def common(terms: Iterable[JobTerms]) -> JobTerms:
    """Return the terms that all of these share."""
    values = [{*each} for each in zip(*map(astuple, terms), strict=True)]
    return JobTerms(*(each.pop() if len(each) == 1 else "" for each in values))


def misfit(own: JobTerms, job: JobTerms) -> Misfit | None:
    """The first difference of a node from the members of a job that it would join; None if it fits them."""
    for name in (*_PRODUCTS, *_SETTINGS):
        mine, theirs = getattr(own, name), getattr(job, name)
        if mine == theirs or not (mine and theirs):
            continue
        if name in _PRODUCTS:
            return _of_versions(_PRODUCTS[name], mine, theirs)
        text = (
            f"{_SETTINGS[name]} is {mine} on this node, and {theirs} on the nodes of the job that it would join: give "
            "all nodes the same, and another job another --rdzv-id"
        )
        return Misfit(coded(text, "FC-050"))
    return None


def _of_versions(product: str, mine: str, theirs: str) -> Misfit:
    # As in a rolling upgrade, where each node comes back with the newer one.
    if TorchVersion(mine) > theirs:
        text = (
            f"this node runs {product} {mine}, and the nodes of the job {theirs}: it waits until none of these is left"
        )
        return Misfit(coded(text, "FC-034"), waits=True)
    text = f"this node runs {product} {mine}, and the nodes of the job {theirs}: install {product} {theirs} here"
    return Misfit(coded(text, "FC-034"))
