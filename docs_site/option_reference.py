"""Makes docs/reference/options.md from the settings of the launcher, and from torchrun's parser."""

import inspect
import re
from argparse import SUPPRESS, Action
from dataclasses import Field, fields
from typing import Any

from fastckpt._core.config import AGENT_VARIABLE, SECRET_VARIABLE, Settings, variable
from fastckpt_run.options import PREFIX, LauncherParser

HEAD = """\
# Options and variables

Made from the settings of the launcher by `make docs-reference`. Each setting is an option of `fastckpt-run`, anywhere before the
script and with its name in full, or a variable; the option counts before the variable. Without `fastckpt-run` there are the
variables alone, for a script under torchrun. A variable that looks like one of these and is none is reported.

## Options of fastckpt

| option | variable | default | meaning |
| --- | --- | --- | --- |
"""
VARIABLES = f"""
Yes or no, as a variable: 1, true, yes, on; 0, false, no, off.

| variable | meaning |
| --- | --- |
| `{SECRET_VARIABLE}` | the secret of the job itself, where it is not in a file (`{PREFIX}-secret-file`); never logged |
| `{AGENT_VARIABLE}` | set by fastckpt-run for its workers: the address of their agent |
| `TMPDIR` | where files go that are too large for memory: downloads from remote stores, and arenas with `{PREFIX}-no-memory` |
| `OMP_NUM_THREADS` | as for torch; sums are rounded alike only with as many threads as when the state was saved |

## Options of torchrun

Every option of torchrun is taken, and means what it means there; `PET_*` variables, too. `fastckpt-run --help` describes them:
"""
OTHERWISE = """
Of these some take more than with torchrun ([several nodes](launcher.md#several-nodes)):

| option | with fastckpt-run |
| --- | --- |
| `--rdzv-backend c10d` | a rendezvous of ours, in torch's TCPStore; `c10d-torch` is torch's own |
| `--rdzv-endpoint` | with `c10d` one endpoint, or several with commas in between: any of these hosts can hold the store |
| `--rdzv-conf` | with `c10d`: `join_timeout` (600 s), `last_call_timeout` (30 s), `read_timeout` (60 s), `is_host`, `store_type`, `keep_alive_interval`, `keep_alive_max_attempt` |
| `--max-restarts` | as with torchrun; a job that makes no progress is ended before (`--fast-max-stalls`), progress can give restarts back (`--fast-restart-budget`) |
| `--version` | prints the versions of fastckpt and torch |
"""


def document() -> str:
    """The text of the page."""
    meanings = dict(re.findall(r"^    (\w+): (.+)$", inspect.getdoc(Settings) or "", re.MULTILINE))
    rows = "".join(_row(field, meanings[field.name]) for field in fields(Settings))
    parser = LauncherParser()
    theirs = [action for action in parser._actions if action.option_strings and action not in parser.ours.values()]
    listed = ", ".join(f"`{_longest(action)}`" for action in theirs if action.help is not SUPPRESS)
    return f"{HEAD}{rows}{VARIABLES}{listed}.\n{OTHERWISE}"


def _row(field: Field[Any], meaning: str) -> str:
    name = f"{PREFIX}-{field.name.replace('_', '-')}"
    if isinstance(field.default, bool):
        other = f"{PREFIX}-no-{field.name.replace('_', '-')}"
        option, default = f"`{name}`, `{other}`", "yes" if field.default else "no"
    else:
        kind = {int: "INTEGER", float: "NUMBER", str: "TEXT"}[type(field.default)]
        option, default = f"`{name} {kind}`", f"`{field.default}`" if field.default != "" else "none"
        option += f", `{PREFIX}-no-preload`" if field.name == "preload" else ""
    meaning = re.sub(r"docs/(?:reference/)?([\w/]+\.md)", _link, meaning).replace("|", "\\|")
    return f"| {option} | `{variable(field.name)}` | {default} | {meaning} |\n"


def _link(found: re.Match[str]) -> str:
    inside = found[0].startswith("docs/reference/")
    return f"[{found[1]}]({'' if inside else '../'}{found[1]})"


def _longest(action: Action) -> str:
    """An option as people write it: torchrun has each with hyphens and with underscores."""
    return max((flag for flag in action.option_strings if "_" not in flag), key=len)
