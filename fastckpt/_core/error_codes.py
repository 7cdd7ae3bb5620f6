"""Codes at the end of messages that need a page: each names its entry in docs/errors.md."""

import re
from dataclasses import dataclass

PAGE = "docs/errors.md"
_CODE = re.compile(r"\((FC-\d{3}), " + re.escape(PAGE))


@dataclass(frozen=True)
class ErrorPage:
    """The page of a code.

    Attributes:
        code: As `coded` takes it.
        title: The fault in a few words.
        messages: As users see them, with ``<...>`` for values that differ; none if no message has the code any more.
        cause: The usual causes, and the job's reaction.
        remedies: Steps to repair it.
        lost: The lost work.
    """

    code: str
    title: str
    messages: tuple[str, ...]
    cause: str
    remedies: tuple[str, ...]
    lost: str


def coded(text: str, code: str) -> str:
    """A message, or the format of one, that ends with its code and the place where that is explained."""
    return f"{text} ({code}, {PAGE}#{code.lower()})"


def code_of(text: str) -> str:
    """The code with which a message ends, or the last one that it quotes; empty if there is none."""
    return next(reversed(_CODE.findall(text)), "")


def read_pages() -> dict[str, ErrorPage]:
    """The pages of all codes, in their order."""
    # Here, as workers and agents import this module, and never read the pages.
    import tomllib
    from importlib.resources import files

    table = tomllib.loads((files("fastckpt._core") / "error_codes.toml").read_text("utf-8"))
    return {
        code: ErrorPage(
            code=code,
            title=page["title"],
            messages=tuple(page["messages"].splitlines()),
            cause=page["cause"],
            remedies=tuple(page["remedies"]),
            lost=page["lost"],
        )
        for code, page in table.items()
    }
