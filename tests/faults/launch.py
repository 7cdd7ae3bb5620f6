"""fastckpt-run with faults in the agent: ``launch.py <out> <fastckpt-run's arguments>``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from fastckpt_run.main import main
from tests.faults.faults import from_text, inject_in_agent

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    inject_in_agent(from_text((folder / "faults").read_text()), folder)
    main(sys.argv[2:])
