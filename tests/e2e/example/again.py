"""Runs examples to their end, one rank each, and starts each once more: forks a child for each start.

Usage: again.py FOLDER NAME OPTIONS... [, NAME OPTIONS...]
"""

import hashlib
import itertools
import json
import os
import runpy
import sys
from pathlib import Path

from tests.support.ports import free_port

ROOT = Path(__file__).parents[3]
HEAVY = {
    "deepspeed_gpt2": "tests.e2e.deepspeed.gloo",
    "accelerate": "fastckpt.accelerate",
    "lightning": "fastckpt.lightning",
}


def start(script: Path, options: list[str], out: Path) -> bool:
    """Whether this is the child, which runs the script when it returns; the parent has waited for its good end."""
    if (child := os.fork()) == 0:
        ranks = dict.fromkeys(("RANK", "LOCAL_RANK", "GROUP_RANK"), "0") | dict.fromkeys(
            ("WORLD_SIZE", "LOCAL_WORLD_SIZE"), "1"
        )
        os.environ |= ranks | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        os.dup2(os.open(out, os.O_WRONLY | os.O_CREAT, 0o600), 1)
        sys.argv = [str(script), *options]
        return True
    _, status = os.waitpid(child, 0)
    if status:
        sys.exit(f"{out.name}: status {status}")
    kept = {
        str(path.relative_to(out.parent)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in out.parent.glob(f"{script.parent.name}-checkpoints/[!.]*/**/*")
        if path.is_file()
    }
    out.with_suffix(f"{out.suffix}-files").write_text(json.dumps(kept))
    return False


def main() -> Path | None:
    """The script to run, if this is a child."""
    folder, rest = Path(sys.argv[1]), sys.argv[2:]
    examples = [list(group) for is_end, group in itertools.groupby(rest, ",".__eq__) if not is_end]
    __import__("fastckpt.fsdp")
    for name, *_ in examples:
        __import__(HEAVY.get(name, "torch"))
    for name, *options in examples:
        for turn in ("first", "second"):
            script = ROOT / "examples" / name / "train.py"
            if start(script, options, folder / f"{name}.{turn}"):
                return script
    return None


if script := main():
    runpy.run_path(str(script), run_name="__main__")
