"""What both commands start at: a torch that is missing or too old is told in one sentence, without a traceback."""

import sys
from importlib import import_module


def launch() -> None:
    """The command fastckpt-run."""
    _start("fastckpt-run", "fastckpt_run.main")


def tools() -> None:
    """The command fastckpt."""
    _start("fastckpt", "fastckpt_run.cli")


def _start(command: str, module: str) -> None:
    try:
        import_module("fastckpt")
        main = import_module(module).main
    except ImportError as error:
        if error.name != "torch":
            raise
        print(f"{command}: error: {error}", file=sys.stderr)
        sys.exit(2)
    main()
