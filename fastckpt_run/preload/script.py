"""What a script imports, and what it does to the environment before, read from its source."""

import ast
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
from pathlib import Path

from fastckpt_run.preload.environment import READ_BY_LIBRARIES

_UNKNOWN = "*"


@dataclass
class Script:
    """A script as its source shows it.

    Attributes:
        folder: Where Python looks for its modules first; None if there is no source to read.
        imports: Modules that it imports at its top level, each with the names that it takes from it.
        first_imports: Those before any statement that could have an effect on them.
        sets: Variables that it sets before its last import; ``*`` for one whose name is not written there.
    """

    folder: Path | None = None
    imports: list[tuple[str, list[str]]] = field(default_factory=list)
    first_imports: list[tuple[str, list[str]]] = field(default_factory=list)
    sets: set[str] = field(default_factory=set)

    @property
    def needs_packages(self) -> bool:
        """Whether it seems to import more than Python's own library, which takes no time."""
        return any(name.partition(".")[0] not in sys.stdlib_module_names for name, _ in self.imports)

    @property
    def unsettling(self) -> str:
        """Why its imports must not come before what it does first; empty if they may."""
        for name in sorted(self.sets):
            if name == _UNKNOWN or READ_BY_LIBRARIES.fullmatch(name):
                what = "variables" if name == _UNKNOWN else name
                return f"the script sets {what} before it imports"
        return ""


def read(arguments: Sequence[str]) -> Script:
    """The script of a command line such as ``["train.py", ...]`` or ``["-m", "package.train", ...]``."""
    module = arguments[0] == "-m"
    path = _source(arguments[1]) if module else Path(arguments[0])
    if path is None:
        return Script()
    folder = Path.cwd() if module else path.resolve().parent
    if path.is_dir():
        path, folder = path / "__main__.py", path
    try:
        tree = ast.parse(path.read_bytes())
    except SyntaxError:
        return Script(folder)
    except (OSError, ValueError, RecursionError):  # a zip file, for one
        return Script()
    script = Script(folder)
    pending: set[str] = set()
    first = True
    for statement in _top_level(tree.body):
        found = list(_imports(statement))
        first = first and not _has_effect(statement)
        script.imports += found
        if first:
            script.first_imports += found
        if found:
            script.sets |= pending
        pending |= set(_sets(statement))
    return script


def _source(module: str) -> Path | None:
    """Where the source of a module is, found without importing the packages that it is in."""
    path: list[str] | None = [str(Path.cwd()), *sys.path[1:]]
    spec = None
    parts = module.split(".")
    for count in range(1, len(parts) + 1):
        spec = None
        with suppress(ImportError, ValueError, OSError):
            spec = PathFinder.find_spec(".".join(parts[:count]), path)
        if spec is None:
            return None
        path = list(spec.submodule_search_locations or [])
    if spec is not None and spec.submodule_search_locations is not None:
        return _source(f"{module}.__main__")
    return Path(spec.origin) if spec is not None and spec.origin is not None else None


def _top_level(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that run when the script does, without those that only may."""
    for statement in body:
        match statement:
            case ast.Try():
                yield from _top_level(statement.body)
            case ast.With():
                yield from _top_level(statement.body)
            case ast.If() if _is_main(statement.test):
                yield from _top_level(statement.body)
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                continue
            case _:
                yield statement


def _has_effect(statement: ast.stmt) -> bool:
    """Whether a statement does more than import, or give a name to a value."""
    kinds = (ast.Call, ast.Attribute, ast.Subscript, ast.Delete, ast.Raise, ast.For, ast.While, ast.If, ast.Assert)
    return any(isinstance(node, kinds) for node in ast.walk(statement))


def _is_main(test: ast.expr) -> bool:
    return isinstance(test, ast.Compare) and isinstance(test.left, ast.Name) and test.left.id == "__name__"


def _imports(statement: ast.stmt) -> Iterator[tuple[str, list[str]]]:
    match statement:
        case ast.Import():
            yield from ((alias.name, []) for alias in statement.names)
        case ast.ImportFrom(module=str(module), level=0):
            yield module, [alias.name for alias in statement.names if alias.name != "*"]


def _sets(statement: ast.stmt) -> Iterator[str]:
    """Names of the variables of the environment that a statement may set."""
    for node in ast.walk(statement):
        match node:
            case ast.Subscript(value=target, slice=key, ctx=ast.Store() | ast.Del()) if _is_environ(target):
                yield _text(key)
            case ast.AugAssign(target=target) if _is_environ(target):
                yield _UNKNOWN
            case ast.Call(func=ast.Attribute(value=target, attr=method)) if _is_environ(target):
                yield from _set_by(method, node)
            case ast.Call(func=ast.Attribute(attr="putenv" | "unsetenv") | ast.Name(id="load_dotenv")):
                yield _UNKNOWN


def _set_by(method: str, call: ast.Call) -> Iterator[str]:
    match method, call.args:
        case (("setdefault" | "pop"), [key, *_]):
            yield _text(key)
        case "update", [ast.Dict(keys=keys)]:
            yield from map(_text, keys)
        case (("update" | "clear" | "popitem"), [*positional]):
            yield from (keyword.arg or _UNKNOWN for keyword in call.keywords)
            if positional or not call.keywords:
                yield _UNKNOWN


def _is_environ(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute | ast.Name) and getattr(node, "attr", getattr(node, "id", "")) == "environ"


def _text(key: ast.expr | None) -> str:
    return key.value if isinstance(key, ast.Constant) and isinstance(key.value, str) else _UNKNOWN
