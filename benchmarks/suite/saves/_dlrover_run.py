"""dlrover-run of DLRover 0.6.1, with the one line that torch 2.13 needs."""

import runpy

from benchmarks.suite.restarts._restart_launch import mend_for_dlrover

if __name__ == "__main__":
    mend_for_dlrover()
    runpy.run_module("dlrover.trainer.torch.elastic_run", run_name="__main__", alter_sys=True)
