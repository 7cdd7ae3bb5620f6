"""Names of the states of a pipeline's stages: each stage has a place of its own in a checkpoint of all."""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from fastckpt._core.arguments import shown
from fastckpt.dcp.flattening import Value
from fastckpt.errors import ConfigError

_NAMED = re.compile(r"stage=([\w-]+)/")


class StageNames:
    """Puts the name of a rank's stage before all names of its state in a checkpoint, and takes it away in a load.

    Args:
        stage: Its name, equal on the ranks that share this stage: a number or a word. None: there are no stages.

    Raises ConfigError if it is neither.

    Attributes:
        name: The stage's; empty without stages.
    """

    def __init__(self, stage: int | str | None) -> None:
        self.name = "" if stage is None else str(stage)
        is_name = isinstance(stage, int | str) and not isinstance(stage, bool)
        if stage is not None and not (is_name and _NAMED.fullmatch(f"stage={stage}/")):
            raise ConfigError(
                f"stage is {shown(stage)}; give what the ranks of a pipeline stage call it, alike: a number, or a word "
                "of letters, digits, _ and -, such as stage=pipeline_mesh.get_local_rank()"
            )
        self._prefix = f"stage={stage}/" if self.name else ""

    def named(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The entries of a state by their names in the checkpoint."""
        return {f"{self._prefix}{name}": value for name, value in state.items()}

    def as_values(self, common: Mapping[str, Any]) -> dict[str, Any]:
        """Entries that the ranks of a stage have in common, as values that the checkpoint keeps as they are."""
        return {name: Value(value) for name, value in common.items()}

    def own(self, metadata: Metadata) -> Metadata:
        """Entries of a checkpoint that belong to this stage, by their names there."""
        if not self.name:
            return metadata
        kinds, places = metadata.state_dict_metadata, metadata.planner_data or {}
        return replace(
            metadata,
            state_dict_metadata={self._bare(name): kind for name, kind in kinds.items() if self._has(name)},
            planner_data={self._bare(n): (self._bare(p[0]), *p[1:]) for n, p in places.items() if self._has(n)},
            storage_data=self.own_places(metadata.storage_data),
        )

    def own_places(self, places: Mapping[MetadataIndex, Any]) -> dict[MetadataIndex, Any]:
        """Places of this stage's tensors and values, by their names there."""
        found = ((index, place) for index, place in places.items() if self._has(index.fqn))
        return {replace(index, fqn=self._bare(index.fqn)): place for index, place in found}

    def check(self, saved: Collection[str], given: Iterable[str]) -> None:
        """Raise ConfigError, in all ranks, unless the ranks have the stages that were saved."""
        now = {*given} - {""}
        if now == {*saved}:
            return
        text = f"the checkpoint has {_listed(saved)}, and this job {_listed(now)}"
        raise ConfigError(f"{text}: give each rank the stage that it has as stage=, as when it was saved, with as many")

    def _has(self, name: str) -> bool:
        return name.startswith(self._prefix)

    def _bare(self, name: str) -> str:
        return name[len(self._prefix) :]


def stages_in(names: Iterable[str]) -> set[str]:
    """The stages that these names in a checkpoint are of."""
    return {match[1] for name in names if (match := _NAMED.match(name))}


def _listed(stages: Collection[str]) -> str:
    """List names, in the order of numbers if they are numbers."""
    if not stages:
        return "no stages"
    return f"the stages {', '.join(sorted(stages, key=lambda each: (len(each), each)))}"
