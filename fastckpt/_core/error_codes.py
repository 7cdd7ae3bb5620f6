"""Codes at the end of messages that need a page: each names its entry in docs/errors.md."""

import re

PAGE = "docs/errors.md"
_CODE = re.compile(r"\((FC-\d{3}), " + re.escape(PAGE))


def coded(text: str, code: str) -> str:
    """A message, or the format of one, that ends with its code and the place where that is explained."""
    return f"{text} ({code}, {PAGE}#{code.lower()})"


def code_of(text: str) -> str:
    """The code with which a message ends, or the last one that it quotes; empty if there is none."""
    return next(reversed(_CODE.findall(text)), "")
