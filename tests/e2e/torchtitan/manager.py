"""The checkpoint manager of docs/guides/torchtitan.md."""

import sys
import types

from tests.docs.blocks import blocks_of

[_BLOCK] = [block for block in blocks_of("docs/guides/torchtitan.md") if block.runs_in]


def fast_checkpoint_manager() -> type:
    """Its class, of the module that the page has a user write."""
    module = sys.modules[_BLOCK.file[:-3]] = types.ModuleType(_BLOCK.file[:-3])
    exec(compile("\n" * _BLOCK.line + _BLOCK.code, _BLOCK.page, "exec"), module.__dict__)
    return module.FastCheckpointManager
