"""Points of a module at which it can be changed, and the changes: pure functions of its source."""

import ast
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_COMPUTED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
}
_SILENT = ("logger", "warnings", "metrics")
"""Objects whose calls only report: a mutant without one is noticed by nobody, and need not be."""


@dataclass(frozen=True)
class Point:
    """A change of a module.

    Attributes:
        path: The module, relative to the root of the repository.
        function: The line at which the outermost function around it begins, decorators included, as in its code object.
        start: The line, from 1, and the column in bytes of its UTF-8, from 0, at which the changed text begins.
        end: The same of its end.
        text: The text that takes its place.
        kind: The change, in words.
    """

    path: str
    function: int
    start: tuple[int, int]
    end: tuple[int, int]
    text: str
    kind: str

    def changed(self, source: str) -> str:
        """The source with this change."""
        lines = source.encode().splitlines(keepends=True)
        (first, left), (last, right) = self.start, self.end
        middle = lines[first - 1][:left] + self.text.encode() + lines[last - 1][right:]
        return b"".join([*lines[: first - 1], middle, *lines[last:]]).decode()


def points(path: str, source: str) -> list[Point]:
    """All changes of a module's functions, in the order of their lines."""
    tree = ast.parse(source)
    found = [point for function in outermost(tree) for point in _of_function(path, function)]
    return sorted(found, key=lambda point: (point.start, point.end, point.text))


def drawn(root: Path, folders: Sequence[str], count: int, seed: int) -> list[Point]:
    """So many points of the modules in these folders, or files, drawn by a seed: each point is as likely as any."""
    paths = sorted({path for folder in folders for path in _modules(root / folder)})
    every = [each for path in paths for each in points(str(path.relative_to(root)), path.read_text())]
    return random.Random(seed).sample(every, min(count, len(every)))


def _modules(place: Path) -> list[Path]:
    return [place] if place.is_file() else [*place.rglob("*.py")]


def first_line(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """The line at which a function begins, decorators included, as in its code object."""
    return min([function.lineno, *(each.lineno for each in function.decorator_list)])


def outermost(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield the functions of a module that are in no other one."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
        else:
            yield from outermost(node)


def _of_function(path: str, function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[Point]:
    began = first_line(function)
    for statement in function.body:
        for node in _live(statement):
            for part, text, kind in _changes(node):
                start, end = (part.lineno, part.col_offset), (part.end_lineno or 0, part.end_col_offset or 0)
                yield Point(path, began, start, end, text, kind)


def _live(node: ast.AST) -> Iterator[ast.AST]:
    """A node and those in it, without what only reports, is a text, or is an annotation."""
    if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr) or _only_reports(node):
        return
    yield node
    for name, value in ast.iter_fields(node):
        if name not in ("annotation", "returns", "decorator_list"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from _live(child)


def _only_reports(node: ast.AST) -> bool:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return True
    call = node.value if isinstance(node, ast.Expr) else node
    place = call.func if isinstance(call, ast.Call) else None
    while isinstance(place, ast.Attribute):
        place = place.value
    return isinstance(place, ast.Name) and place.id in _SILENT


def _changes(node: ast.AST) -> Iterator[tuple[ast.stmt | ast.expr, str, str]]:
    """The part that is changed, the text that takes its place, and the kind of the change."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        other = ast.Compare(node.left, [_COMPARED[type(node.ops[0])]()], node.comparators)
        yield node, f"({ast.unparse(other)})", "comparison"
    elif isinstance(node, ast.BoolOp):
        swapped = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield node, f"({ast.unparse(ast.BoolOp(swapped, node.values))})", "and/or"
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node, f"bool({ast.unparse(node.operand)})", "not"
    elif isinstance(node, ast.BinOp) and type(node.op) in _COMPUTED:
        computed = ast.BinOp(node.left, _COMPUTED[type(node.op)](), node.right)
        yield node, f"({ast.unparse(computed)})", "operator"
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float):
        changed = not node.value if isinstance(node.value, bool) else node.value + 1
        yield node, repr(changed), "constant"
    elif isinstance(node, ast.If | ast.IfExp) and isinstance(node.test, ast.Name | ast.Attribute | ast.Call):
        yield node.test, f"(not {ast.unparse(node.test)})", "condition"
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield node, "pass", "call left out"
    elif isinstance(node, ast.Break | ast.Continue):
        yield node, "continue" if isinstance(node, ast.Break) else "break", "break/continue"
    elif isinstance(node, ast.Return) and node.value is not None and not _is_none(node.value):
        yield node, "return None", "return"


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None
