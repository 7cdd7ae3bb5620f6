"""Distinguish a script that can never start from one that began and failed."""

import ast
import builtins
import re
import sys
from pathlib import Path

from fastckpt_run.failures.tracebacks import last_traceback
from fastckpt_run.script_analysis import parsed, source_of, statements

_BROKEN = re.compile(r"(ModuleNotFoundError|ImportError|SyntaxError|IndentationError|TabError)(: |$)")
_LIBRARY = re.compile(r"\.so\b")
"""Words of an ImportError of a shared library, which another rank may be building just then."""
_NO_MODULE = re.compile(r"/.*: (No module named \S+|Error while finding module specification for .*)")
_USAGE = re.compile(r"^usage: ", re.IGNORECASE | re.MULTILINE)
_REFUSED = re.compile(r"(\S.*: )?error: ", re.IGNORECASE)
_FRAME = re.compile(r'  File "(?P<file>[^<].*)", line (?P<line>\d{1,9}), in (?P<function>.+)')
_IN_CHILD = ", in spawn_main"
"""Ends a line of the traceback of a process that multiprocessing spawned."""
_REFUSED_ARGUMENTS = 2
"""The exit code of argparse, click and others for arguments that they do not understand."""
_HARMLESS = {*sys.stdlib_module_names, "torch"}
"""Modules that do not train by themselves: a script may call their functions before its imports are over."""


def why_not_started(words: str, exitcode: int) -> str:
    """The reason why a worker whose stderr ended with ``words`` can never start; empty unless that is certain.

    Certain are arguments that a parser refused, and errors of imports, or of syntax, in those lines at the top of
    a script before which it cannot have trained. An import inside a function or after the training may fail late.
    """
    lines = words.rstrip().splitlines()
    last = lines[-1] if lines else ""
    # Exit code 2 alone proves nothing: any script may use it. A usage text before an error line is argparse's.
    if exitcode == _REFUSED_ARGUMENTS:
        return last if _REFUSED.match(last) and _USAGE.search(words) else ""
    if exitcode == 1 and (found := _NO_MODULE.fullmatch(last)):
        return found[1]
    broken = exitcode == 1 and _BROKEN.match(last) and not _LIBRARY.search(last)
    return last if broken and _was_starting(last_traceback(words), last) else ""


def _was_starting(traceback: list[str], error: str) -> bool:
    """Return whether a traceback leads through a script's first imports, or the script was not compiled."""
    # A spawned child, such as a loader worker, imports the script again: the rank itself may have trained for long.
    if any(line.endswith(_IN_CHILD) for line in traceback):
        return False
    frames = [found for line in traceback if (found := _FRAME.fullmatch(line))]
    if not frames:
        return not error.startswith(("ImportError", "ModuleNotFoundError"))
    # The outermost module frame is the script; its imports may be nested as deep as they like.
    script = next((frame for frame in frames if frame["function"] == "<module>"), None)
    return script is not None and is_among_first_imports(source_of(Path(script["file"])), int(script["line"]))


def mentions_fastckpt(script: Path) -> bool:
    """Return whether a script names this library, so that a checkpointer of it can be expected."""
    return b"fastckpt" in (source_of(script) or b"")


def broken_syntax(script: Path) -> str:
    """The syntax error of a script that Python would have to compile; empty if there is none."""
    try:
        ast.parse(source_of(script) or b"", str(script))
    except SyntaxError as error:
        return f"{type(error).__name__}: {error}"
    except (ValueError, RecursionError):
        pass  # Python itself will report it
    return ""


def is_among_first_imports(source: bytes | str | None, line: int) -> bool:
    """Return whether line ``line`` of a script imports or raises, and nothing before it can have trained."""
    tree = parsed(source)
    harmless = {*dir(builtins)} - {"exec", "eval", "compile", "__import__"}
    for statement in statements(tree.body if tree else (), perhaps=True):
        if statement.lineno <= line <= (statement.end_lineno or statement.lineno):
            return isinstance(statement, ast.Import | ast.ImportFrom | ast.Raise)
        if isinstance(statement, ast.Import | ast.ImportFrom):
            harmless |= _names(statement)
        elif _may_train(statement, harmless):
            return False
    return False


def _names(statement: ast.Import | ast.ImportFrom) -> set[str]:
    """The names that an import binds to harmless modules and their members."""
    module = statement.module if isinstance(statement, ast.ImportFrom) else None
    return {
        alias.asname or alias.name.partition(".")[0]
        for alias in statement.names
        if (module or alias.name).partition(".")[0] in _HARMLESS
    }


def _may_train(statement: ast.stmt, harmless: set[str]) -> bool:
    """Return whether a statement has a loop, or calls a function not known to be harmless."""
    if isinstance(statement, ast.For | ast.AsyncFor | ast.While | ast.With | ast.AsyncWith):
        return True
    calls = (node.func for node in ast.walk(statement) if isinstance(node, ast.Call))
    return any(root is not None and root not in harmless for root in map(_root, calls))


def _root(function: ast.expr) -> str | None:
    """The first name in an expression such as ``a.b[0].c``; None if it begins with a value."""
    while isinstance(function, ast.Attribute | ast.Subscript):
        function = function.value
    if isinstance(function, ast.Name):
        return function.id
    return None if isinstance(function, ast.Constant | ast.Call) else ""
