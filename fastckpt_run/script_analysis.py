"""Static analysis of a training script: its imports, in order, and its modules' changes of the environment."""

import ast
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from importlib.machinery import PathFinder
from pathlib import Path

from fastckpt_run.preload.environment import READ_BY_LIBRARIES
from fastckpt_run.preload.source_watch import SourceWatch

_UNKNOWN = "*"
_COMPILERS = {_UNKNOWN, "PATH", "CC", "CXX", "CPATH", "CPLUS_INCLUDE_PATH", "LIBRARY_PATH", "HOME", "TMPDIR"}
"""Variables on which the choice and the success of a compiler depend, and where it has its caches."""
_MOST = 300
"""Sources that are read, at most: it takes a second, and no deeper recursion than Python allows."""


@dataclass
class Script:
    """A script as its source shows it.

    Attributes:
        folder: Folder in which Python looks for its modules first; None if there is no source to read.
        module: Its name, if it is run by that.
        tree: Its source.
        path: Path of the source.
    """

    folder: Path | None = None
    module: str = ""
    tree: ast.Module | None = None
    path: Path | None = None

    @cached_property
    def imports(self) -> list[tuple[str, list[str]]]:
        """Modules that it imports at its top level, each with the names that it takes from it."""
        return [found for statement in statements(self._body) for found in _imports(statement, "")]

    @cached_property
    def first_imports(self) -> list[tuple[str, list[str]]]:
        """Return the imports before any statement that could have an effect on them."""
        found: list[tuple[str, list[str]]] = []
        for statement in statements(self._body):
            if _has_effect(statement):
                break
            found += _imports(statement, "")
        return found

    @property
    def sets(self) -> set[str]:
        """Variables set before the last import, its own modules' included; ``*`` for one whose name is not written."""
        return self._walk.sets

    def argv(self, arguments: list[str]) -> list[str]:
        """sys.argv while the script runs with this command line."""
        return [str(self.path), *arguments[2:]] if self.module else arguments

    def has_changed(self) -> bool:
        """True if the script, or one of its own modules, has changed since it was read."""
        return self._walk.watch.changed() is not None

    @property
    def needs_packages(self) -> bool:
        """True if it seems to import more than Python's own library, which takes no time."""
        return any(name.partition(".")[0] not in sys.stdlib_module_names for name, _ in self.imports)

    @property
    def compiles(self) -> bool:
        """True if it, or a module of its own, calls torch.compile, and none sets variables that compilers may read."""
        sets = self._walk.anywhere
        return self._walk.compiles and not any(name in _COMPILERS or READ_BY_LIBRARIES.fullmatch(name) for name in sets)

    @property
    def unsettling(self) -> str:
        """The reason why its imports must not come before its first effects; empty if they may."""
        for name in sorted(self.sets):
            if name == _UNKNOWN or READ_BY_LIBRARIES.fullmatch(name):
                what = "variables" if name == _UNKNOWN else name
                return f"the script sets {what} before it imports"
        return ""

    def contradicts(self, read: Iterable[str], late: Iterable[str]) -> str:
        """The reason why imports that read these variables came too early; ``late`` ones are for the compiler only."""
        if early := self.sets.intersection(read):
            return f"the script sets {min(early)} before it imports"
        if early := self._walk.anywhere.intersection(late):
            return f"the script sets {min(early)}, which torch reads when it needs its compiler"
        return ""

    @property
    def _body(self) -> list[ast.stmt]:
        return self.tree.body if self.tree is not None else []

    @cached_property
    def _walk(self) -> "_Walk":
        walk = _Walk(self.folder)
        walk.enter(self.module)
        if self.tree is not None and self.path is not None:
            walk.run(self.path, self.tree)
        return walk


class _Walk:
    """Follows a script from import to import as Python would, into the modules of its folder.

    Attributes:
        sets: Variables set before an import that comes later.
        anywhere: Variables that anything in these sources sets.
        compiles: True if anything in them calls torch.compile.
        watch: Of these sources.
    """

    def __init__(self, folder: Path | None) -> None:
        self.sets: set[str] = set()
        self.anywhere: set[str] = set()
        self.compiles = False
        self._folder = folder
        self._pending: set[str] = set()
        self._seen: set[Path] = set()

    @cached_property
    def watch(self) -> SourceWatch:
        return SourceWatch(self._seen)

    def enter(self, module: str) -> None:
        """Run the files of the script's folder that are run when ``module`` is imported."""
        if self._folder is None:
            return
        place = self._folder
        for part in filter(None, module.split(".")):
            for path in (place / part / "__init__.py", place / f"{part}.py"):
                unread = path not in self._seen and len(self._seen) < _MOST
                if unread and (tree := parsed(source_of(path))) is not None:
                    self.run(path, tree)
            place /= part

    def run(self, path: Path, tree: ast.Module) -> None:
        """Run the top level of a module, once."""
        if path in self._seen:
            return
        self._seen.add(path)
        self.anywhere.update(name for statement in tree.body for name in _sets(statement))
        self.compiles = self.compiles or any(map(_compiles, ast.walk(tree)))
        functions = {f.name: set(_sets(f)) for f in tree.body if isinstance(f, ast.FunctionDef)}
        for statement in statements(tree.body):
            # A variable matters if it is set before a later import: the pending ones precede this one.
            if found := list(_imports(statement, self._package(path))):
                self.sets |= self._pending
            for module, names in found:
                for name in (module, *(f"{module}.{name}" for name in names)):
                    self.enter(name)
            self._pending.update(_sets(statement), *(functions.get(name, ()) for name in _called(statement)))

    def _package(self, path: Path) -> str:
        """The package that the modules beside a file belong to."""
        if self._folder is None or not path.is_relative_to(self._folder):
            return ""
        return ".".join(path.parent.relative_to(self._folder).parts)


def read(arguments: Sequence[str]) -> Script:
    """The script of a command line such as ``["train.py", ...]`` or ``["-m", "package.train", ...]``."""
    try:
        here = Path.cwd()
    except FileNotFoundError:  # it was removed
        return Script()
    module = arguments[1] if arguments[0] == "-m" else ""
    path = _source(module, here) if module else Path(arguments[0])
    if path is None:
        return Script()
    folder = here if module else path.resolve().parent
    if path.is_dir():
        path, folder = path / "__main__.py", path
    tree = parsed(source_of(path))
    return Script(folder, module, tree, path.absolute()) if tree is not None or path.suffix == ".py" else Script()


def source_of(path: Path) -> bytes | None:
    """The bytes of a regular file; None if there is none that can be read."""
    try:
        return path.read_bytes() if path.is_file() else None  # a pipe can be read only once, by the worker
    except (OSError, ValueError):  # a name that no file can have
        return None


def parsed(source: bytes | str | None) -> ast.Module | None:
    """A source; None if there is none, or none that Python could compile."""
    if source is None:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):  # a zip file, for one
        return None


def _source(module: str, here: Path) -> Path | None:
    """The source of a module, found without importing the packages that it is in."""
    # With -m the first entry of the search path is the working directory, not that of this command.
    path: list[str] | None = [str(here), *sys.path[1:]]
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
        return _source(f"{module}.__main__", here)
    return Path(spec.origin) if spec is not None and spec.origin is not None else None


def statements(body: Iterable[ast.stmt], *, perhaps: bool = False) -> Iterator[ast.stmt]:
    """The statements of a module in the order in which they run, without those in functions and classes.

    Args:
        perhaps: Whether to give also those that may run, in branches and handlers, and a ``with`` as one statement.
    """
    for statement in body:
        match statement:
            case ast.Try() if perhaps:
                handled = [inner for handler in statement.handlers for inner in handler.body]
                parts = [*statement.body, *handled, *statement.orelse, *statement.finalbody]
                yield from statements(parts, perhaps=True)
            case ast.Try():
                yield from statements(statement.body)
            case ast.With() if not perhaps:
                yield from (ast.copy_location(ast.Expr(item.context_expr), statement) for item in statement.items)
                yield from statements(statement.body)
            case ast.If() if perhaps or _is_main(statement.test):
                yield from statements([*statement.body, *(statement.orelse if perhaps else ())], perhaps=perhaps)
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                continue
            case _:
                yield statement


def _has_effect(statement: ast.stmt) -> bool:
    """Return whether a statement does more than import, or bind a name to a value."""
    kinds = (ast.Call, ast.Attribute, ast.Subscript, ast.Delete, ast.Raise, ast.For, ast.While, ast.If, ast.Assert)
    return any(isinstance(node, kinds) for node in ast.walk(statement))


def _is_main(test: ast.expr) -> bool:
    return isinstance(test, ast.Compare) and isinstance(test.left, ast.Name) and test.left.id == "__name__"


def _imports(statement: ast.stmt, package: str) -> Iterator[tuple[str, list[str]]]:
    """Modules that a statement imports, relative ones only if the package is known that it is in."""
    match statement:
        case ast.Import():
            yield from ((alias.name, []) for alias in statement.names)
        case ast.ImportFrom(module=str(module), level=0):
            yield module, [alias.name for alias in statement.names if alias.name != "*"]
        case ast.ImportFrom(module=module, level=level) if package:
            parents = package.split(".")[: 1 - level or None]
            yield ".".join([*parents, *([module] if module else [])]), [alias.name for alias in statement.names]


def _compiles(node: ast.AST) -> bool:
    """Return whether a node is `torch.compile`, or has a library call it."""
    match node:
        case ast.Attribute(value=ast.Name(id="torch"), attr="compile"):
            return True
        case ast.ImportFrom(module="torch", level=0):
            return any(alias.name == "compile" for alias in node.names)
        case ast.keyword(arg="torch_compile", value=value):
            return not (isinstance(value, ast.Constant) and not value.value)
    return False


def _called(statement: ast.stmt) -> Iterator[str]:
    """Names of functions that a statement calls."""
    calls = (node.func for node in ast.walk(statement) if isinstance(node, ast.Call))
    yield from (function.id for function in calls if isinstance(function, ast.Name))


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
            case ast.Call(
                func=ast.Attribute(attr=("putenv" | "unsetenv" | "load_dotenv")) | ast.Name(id="load_dotenv")
            ):
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


def option_values(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The values among the arguments of a script, each with the option before it; empty for one without."""
    for before, argument in zip(["", *arguments], arguments, strict=False):
        option, equals, value = argument.partition("=") if argument.startswith("-") else (before, "", argument)
        if equals or not argument.startswith("-"):
            yield (option if option.startswith("-") else ""), value
