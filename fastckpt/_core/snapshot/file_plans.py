"""Plans the files of each save, and remembers their skeletons and sizes for the next."""

from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from fastckpt._core.format.manifest import NAME as MANIFEST
from fastckpt._core.format.plan import Plan, Planner
from fastckpt._core.format.raw import Raw, RawPlanner
from fastckpt._core.format.safetensors import SafetensorsPlanner, Tensors
from fastckpt._core.memory.slots import LONGEST_NAME, is_image
from fastckpt.errors import ConfigError

REMEMBERED = 64
"""Files that are not in the last save, of which skeletons and sizes are remembered."""


def check_names(names: Collection[str]) -> None:
    """Raise ConfigError if one checkpoint cannot have files of these relative names."""
    for name in names:
        around = {str(directory) for directory in Path(name).parents}
        if not is_image(name) or name == MANIFEST or not around.isdisjoint(names):
            raise ConfigError(
                f"a checkpoint cannot have a file called {name!r}: give a relative path of at most {LONGEST_NAME} "
                f"bytes that can be printed, none of whose parts begins with a dot, which is not {MANIFEST}, and lies "
                "in no other file."
            )


class FilePlans:
    """Planners and sizes of a writer's files, by name.

    Attributes:
        sizes: Bytes of their images in the last save.
    """

    def __init__(self, *, weights_only: bool) -> None:
        self.sizes: dict[str, int] = {}
        self._weights_only = weights_only
        self._planners: dict[tuple[str, type], Any] = {}

    def plan(self, states: Mapping[str, Any]) -> tuple[dict[str, Plan], dict[str, int]]:
        """Plan a save; a state is a `Plan` itself if it was planned elsewhere. Raises NotLoadable.

        Returns the plans, and the sizes of their images: the last save's that fit, so that mappings are kept.
        """
        plans = {
            name: state if isinstance(state, Plan) else self._planner(name, state).plan(state)
            for name, state in states.items()
        }
        return plans, {name: self._size(name, plan) for name, plan in plans.items()}

    def _size(self, name: str, plan: Plan) -> int:
        last = self.sizes.get(name)
        # A file of another size is another file: the agent would reserve it, and this worker map and fault it in again.
        return last if last is not None and plan.skeleton.fits(last) else plan.skeleton.capacity()

    def keep(self, sizes: Mapping[str, int]) -> None:
        """Remember the sizes of a save; those of other files, and planners, only while there are few.

        Names may contain the number of the step.
        """
        self.sizes |= sizes
        # Only beyond twice the files of a save, so that two sets of names that alternate both keep their skeletons.
        if len(self.sizes) > 2 * len(sizes) + REMEMBERED:
            self.sizes = dict(sizes)
            self._planners = {key: planner for key, planner in self._planners.items() if key[0] in sizes}

    def _planner(self, name: str, state: Any) -> Any:
        """The planner of the file of this name, of the kind that the state asks for."""
        # By kind, too: a name that was a torch.save file may hold
        # safetensors in the next save, which have another planner.
        key = name, type(state) if isinstance(state, Tensors | Raw) else object
        if key not in self._planners:
            makers = {Tensors: SafetensorsPlanner, Raw: RawPlanner}
            self._planners[key] = makers.get(key[1], partial(Planner, weights_only=self._weights_only))()
        return self._planners[key]
