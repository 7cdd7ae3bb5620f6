"""Answers to a mistake: the exception that the user sees, warnings, and logged and printed text."""

import contextlib
import io
import logging
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.mistakes.table import WARNING, WORKS, Mistake, Scene

PACKAGE = f"{Path(__file__).parents[3] / 'fastckpt'}/"


@dataclass
class Answer:
    """What came of a mistake.

    Attributes:
        error: The exception; None if there was none.
        told: Warnings, lines of the log, and what was printed.
    """

    error: BaseException | None
    told: list[str]

    @property
    def text(self) -> str:
        """What was raised, with its notes, or else what was told."""
        if self.error is None or isinstance(self.error, SystemExit):
            return "\n".join(self.told)
        return "".join(traceback.format_exception_only(self.error))

    @property
    def frames(self) -> int:
        """How many frames of ours its traceback shows, the causes' included."""
        if self.error is None or isinstance(self.error, SystemExit):
            return 0
        return "".join(traceback.format_exception(self.error)).count(f'File "{PACKAGE}')


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def answer_of(make: Callable[[Scene], object], scene: Scene) -> Answer:
    """Make a mistake."""
    lines, printed, error = _Lines(), io.StringIO(), None
    logger = logging.getLogger("fastckpt")
    logger.addHandler(lines)
    with warnings.catch_warnings(record=True) as warned, contextlib.redirect_stderr(printed):
        warnings.simplefilter("always")
        try:
            make(scene)
        except (Exception, SystemExit) as raised:  # whatever it is, it is what a newcomer sees
            error = raised
        finally:
            logger.removeHandler(lines)
    ours = [str(each.message) for each in warned if "fastckpt" in each.filename or "fastckpt" in str(each.message)]
    return Answer(error, [*lines.lines, *ours, *scene.printed, printed.getvalue()])


def lacks(answer: Answer, mistake: Mistake) -> list[str]:
    """What the answer to a mistake does not say or do; empty if it is as the table has it."""
    wanted = mistake.answer
    raised = type(answer.error).__name__ if answer.error else "nothing"
    if isinstance(wanted, str) and answer.error is not None:
        return [f"{wanted}, but {raised} was raised: {answer.error}"]
    if wanted == WORKS:
        return [f"silence: {answer.text}"] if any(_ours(line) for line in answer.told) else []
    if isinstance(wanted, type) and not isinstance(answer.error, wanted):
        return [f"{wanted.__name__}, but {raised} was raised: {answer.error}"]
    told = answer.told if wanted == WARNING else [answer.text]
    lacking = [text for text in mistake.says.split(" | ") if not any(text in line for line in told)]
    if answer.frames > 1:
        lacking.append(f"a short traceback: {answer.frames} frames of ours")
    return lacking


def _ours(line: str) -> bool:
    """Whether a line is an answer; that the launcher is missing is told to every script."""
    return bool(line.strip()) and "not started by fastckpt-run" not in line
