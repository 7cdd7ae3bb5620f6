"""Files that may change while a job runs: its own modules, and where packages are installed."""

import site
import sys
import sysconfig
from collections.abc import Collection, Iterable
from importlib.machinery import ModuleSpec
from pathlib import Path

PACKAGES = frozenset(
    Path(place)
    for place in (
        *(sysconfig.get_path(kind) for kind in ("purelib", "platlib")),
        *site.getsitepackages(),
        *([site.getusersitepackages()] if site.ENABLE_USER_SITE else []),
    )
)
"""Directories in which packages are installed; one changes when a package is added, removed or replaced."""
_LIBRARY = frozenset(Path(sysconfig.get_path(kind)) for kind in ("stdlib", "platstdlib"))


def is_installed(place: Path) -> bool:
    """Return whether a file belongs to an installed package."""
    return any(place.is_relative_to(home) for home in PACKAGES)


def imported(*, besides: Collection[str]) -> set[Path]:
    """The files of own modules that this process has imported, without some packages."""
    specs = [getattr(m, "__spec__", None) for name, m in list(sys.modules.items()) if name.split(".")[0] not in besides]
    files = {Path(s.origin) for s in specs if isinstance(s, ModuleSpec) and s.has_location and s.origin is not None}
    return {path for path in files if not is_installed(path) and not any(map(path.is_relative_to, _LIBRARY))}


class SourceWatch:
    """Detects changes of files and folders."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._states = {path: _state(path) for path in paths}

    def changed(self) -> Path | None:
        """One that has been written, replaced or removed since this was made, or an entry of a folder."""
        return next((path for path, state in self._states.items() if _state(path) != state), None)


def _state(path: Path) -> tuple[int, ...]:
    try:
        found = path.stat()
    except OSError:
        return ()
    # All three: editors replace files (inode), and a copy may keep its time.
    return found.st_mtime_ns, found.st_ino, found.st_size
