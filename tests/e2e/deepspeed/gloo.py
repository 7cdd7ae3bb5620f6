"""Has DeepSpeed talk over gloo, not by kernels of its own in shared memory.

These it compiles when it starts on a processor for the first time, for minutes; and where a process is killed
meanwhile, each later one waits for its lock.
"""

import deepspeed

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
