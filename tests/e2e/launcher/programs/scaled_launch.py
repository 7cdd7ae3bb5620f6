"""fastckpt-run with a second for the minute after which silence is reported: ``scaled_launch.py <its arguments>``."""

import sys

from fastckpt._core.policy import hangs
from fastckpt_run.hangs import process_activity
from fastckpt_run.main import main

hangs.IDLE = 1.0
hangs.FEW = 0  # each wait is reported, though the one before was as long
process_activity._WINDOW = 0.2
if __name__ == "__main__":
    main(sys.argv[1:])
