"""Import the workers' modules in the template, and find out whether that made it unfit for forking."""

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.machinery import PathFinder, all_suffixes
from pathlib import Path

from fastckpt_run.preload import compiler, import_effects
from fastckpt_run.preload.environment import PER_WORKER, recorded
from fastckpt_run.preload.fork_safety import Traces, seeds_counted
from fastckpt_run.preload.source_watch import is_installed

BASE = ("torch", "torch._dynamo", "torch.nn.parallel", "torch.distributed", "fastckpt", "fastckpt.ddp")
"""Modules that every worker of a job imports: torch._dynamo with its first optimizer, which takes a second."""
_UNFIT = ("fastckpt.huggingface",)
"""Our modules for frameworks that read the rank, or start threads: a template with them would be replaced."""
_LONGEST = 1000
"""Characters of an error that are shown, at most."""


@dataclass(frozen=True)
class ImportPlan:
    """Modules to import besides the base, as (name, names imported from it), and those in the script's folder.

    Attributes:
        asked: Modules that the user named; they may come from anywhere.
        found: Modules that the script imports; only installed ones are imported, up to the first that is not.
        folder: Folder in which the script finds modules before all others; empty if that is not known.
        argv: Value of sys.argv in workers.
        compiles: True if the script calls torch.compile.
    """

    asked: list[tuple[str, list[str]]] = field(default_factory=list)
    found: list[tuple[str, list[str]]] = field(default_factory=list)
    folder: str = ""
    argv: list[str] = field(default_factory=list)
    compiles: bool = False

    def without(self, module: str) -> "ImportPlan":
        """This plan without a module."""
        if module == compiler.MODULE and self.compiles:
            return replace(self, compiles=False)
        asked, found = ([m for m in modules if m[0] != module] for modules in (self.asked, self.found))
        return replace(self, asked=asked, found=found)


@dataclass(frozen=True)
class ImportOutcome:
    """The outcome of a plan: ``fault`` and the module that is to blame (empty: all), or none.

    ``read`` names the variables that imports have read, and ``late`` those that torch reads when it needs its compiler.
    """

    module: str = ""
    fault: str = ""
    read: list[str] = field(default_factory=list)
    late: list[str] = field(default_factory=list)


def preload(receive: Callable[[], ImportPlan]) -> ImportOutcome:
    """Import the base, and the modules of the plan that is received then; the first fault ends it."""
    # 1. import the base, recording which variables are read   2. refuse if that left traces that no fork may inherit
    # 3. the script's modules one by one, so that a fault has a name   4. modules that the script's folder would shadow
    start = Traces()
    with recorded() as read, seeds_counted():
        # torch alone first: its reads at import and those of its compiler later are judged apart.
        importlib.import_module(BASE[0])
        at_once = set(read)
        for name in BASE:
            importlib.import_module(name)
        late = set(read) - at_once
        if fault := next(iter((*_reads_of_rank(read), *Traces().base_faults(start))), ""):
            return ImportOutcome("", f"importing torch {fault}")
        plan = receive()
        if plan.compiles:  # outside of the script's folder: these modules are all torch's
            before = Traces()
            compiler.prepare()
            late |= set(read) - at_once
            if fault := next(iter((*_reads_of_rank(read), *Traces().faults(before))), ""):
                return ImportOutcome(compiler.MODULE, fault)
        sys.argv = plan.argv
        with _in_script_folder(plan.folder):
            now = Traces()
            for name, attributes in [*plan.asked, *_installed(plan)]:
                before = now
                fault = _import(name, attributes)
                now = Traces()
                faults = *_reads_of_rank(read), *import_effects.unknown(), *now.faults(before)
                if fault := fault or next(iter(faults), ""):
                    return ImportOutcome(name, fault)
    if shadowed := plan.folder and next(_shadowed(Path(plan.folder)), ""):
        return ImportOutcome("", f"{shadowed} has the name of a module that torch imports")
    return ImportOutcome(read=sorted(read), late=sorted(late))


@contextmanager
def _in_script_folder(folder: str) -> Iterator[None]:
    """Have modules found where the script finds them, while this lasts."""
    if not folder or sys.flags.safe_path:
        yield
        return
    sys.path.insert(0, folder)
    yield
    # By identity: the same text may be in the path for another reason.
    sys.path[:] = [entry for entry in sys.path if entry is not folder]


def _installed(plan: ImportPlan) -> Iterator[tuple[str, list[str]]]:
    """Modules of a plan up to the first that is not installed, or unfit: its effect on later ones is unknown."""
    for module in plan.found:
        if module[0] in _UNFIT or not _is_installed(module[0], plan.folder):
            return
        yield module


def _import(name: str, attributes: list[str]) -> str:
    """Import a module; the reason if it cannot be."""
    try:
        # With a fromlist, submodules that the script names by `from package import module` are imported, too.
        __import__(name, fromlist=attributes)
    except BaseException as error:  # noqa: BLE001 (a module of the user's may raise anything)
        return f"raised {traceback.format_exception_only(error)[-1].strip()[:_LONGEST]}"
    return ""


def _reads_of_rank(read: set[str]) -> Iterator[str]:
    return (f"read the variable {name}, which differs between workers" for name in read if PER_WORKER.fullmatch(name))


def _is_installed(module: str, folder: str) -> bool:
    """Return whether a script in ``folder`` finds a module in Python or an installed package: others may change."""
    top = module.partition(".")[0]
    spec = PathFinder.find_spec(top, [folder]) if folder else None
    if spec is not None and spec.loader is not None:
        return False
    # A fastckpt that was found here is the agent's, which its workers keep, wherever it is.
    if top in sys.stdlib_module_names or top == "fastckpt" or module in sys.modules:
        return True
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return False
    places = [spec.origin, *(spec.submodule_search_locations or [])] if spec is not None else []
    return any(is_installed(Path(place)) for place in places if place)


def _shadowed(folder: Path) -> Iterator[Path]:
    """Modules in ``folder`` which a fresh process would find there, and not those that are imported already."""
    suffixes = all_suffixes()
    for path in folder.iterdir() if folder.is_dir() else ():
        name, _, suffix = path.name.partition(".")
        if name not in sys.modules or name == "__main__" or (f".{suffix}" not in suffixes and suffix):
            continue
        spec = getattr(sys.modules[name], "__spec__", None)
        origin = Path((spec.origin if spec is not None else None) or "")
        found = bool(suffix) or (path / "__init__.py").exists()
        if found and origin.is_absolute() and not origin.is_relative_to(folder):
            yield path
