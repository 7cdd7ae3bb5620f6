"""Code blocks of a page of the documentation, and the marks above them."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
SHELL = ("console", "bash", "sh")
RUNS = (*SHELL, "python", "diff")
"""Kinds of blocks that are run."""
KINDS = {*RUNS, "", "text", "yaml", "json", "toml", "ini", "dockerfile"}
"""Those, and kinds that are read only."""
_BLOCK = re.compile(r"^(?P<marks>(?:<!-- [^\n]* -->\n)*)```(?P<kind>\w*)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE)
_MARK = re.compile(r"<!-- (?P<name>runs in|not run): (?P<value>.*) -->")
_FILE = re.compile(r"# (?P<file>[\w./-]+\.(?:py|json))\n")


@dataclass(frozen=True)
class Block:
    """One block: its kind, its text, the line of the page at which it begins, and its marks."""

    page: str
    line: int
    kind: str
    text: str
    runs_in: str = ""
    not_run: str = ""

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def code(self) -> str:
        """What is executed: of a diff, what is there afterwards."""
        if self.kind != "diff":
            return self.text
        return "".join(line[1:] for line in self.text.splitlines(keepends=True) if line[0] in " +")

    @property
    def file(self) -> str:
        """The file that the block is, as its first line says; empty if it is none."""
        match = _FILE.match(self.code)
        return match["file"] if match and self.kind in ("python", "diff") else ""


def blocks_of(page: str) -> list[Block]:
    """The blocks of a page that are to be run, or marked."""
    text, found = (ROOT / page).read_text(), []
    for match in _BLOCK.finditer(text):
        if match["kind"] in RUNS:
            marks = {mark["name"]: mark["value"].strip() for mark in _MARK.finditer(match["marks"])}
            line = text.count("\n", 0, match.start("kind")) + 1
            where = marks.get("runs in", ""), marks.get("not run", "")
            found.append(Block(page, line, match["kind"], match["text"], *where))
    return found


def kinds_of(page: str) -> set[str]:
    """The kinds of all blocks of a page, also of indented ones, which no test runs: these as "indented"."""
    opened = re.findall(r"^( *)```([^\n`]*)$", (ROOT / page).read_text(), re.MULTILINE)[::2]
    return {"indented" if indent and kind in RUNS else kind for indent, kind in opened}


@dataclass(frozen=True)
class Command:
    """A line of a console block, and what the page shows of its output."""

    line: str
    shown: list[str]


def commands_of(block: Block) -> list[Command]:
    """The commands of a console block; a bash block is one, without output."""
    if block.kind != "console":
        return [Command(block.text, [])]
    found: list[Command] = []
    for line in block.text.replace("\\\n", "").splitlines():
        if line.startswith("$ "):
            found.append(Command(line[2:], []))
        else:
            found[-1].shown.append(line)
    return found


def missing(shown: list[str], printed: str) -> list[str]:
    """Lines of a page that are not in the output, in their order; numbers, times and sizes may differ.

    Workers are unbuffered: a rank's line may have that of another one before its end, and so be a part of a line.
    """
    left, lost = iter([_form(line) for line in printed.splitlines()]), []
    for line in shown:
        if line.strip() not in ("", "...") and not any(_form(line) in each for each in left):
            lost.append(line)
            break  # what follows it was looked for, too
    return lost


def _form(line: str) -> str:
    """What stays the same from run to run."""
    text = re.sub(r"\bno step\b", "1 step", " ".join(line.split())).replace("steps", "step")
    text = re.sub(r"\d[\d,.:]*(e-?\d+)?", "#", text)
    return re.sub(r"# (ms|s|min)\b", "# s", re.sub(r"# ([kKMGT]?i?B|bytes)\b", "# B", re.sub(r"-+", "-", text)))
