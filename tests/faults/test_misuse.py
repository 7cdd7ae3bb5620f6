"""Mistakes of users: reported by name in the worker; the next save works, and nothing stays locked."""

from typing import Any

PROGRAM = '''
import sys, threading, traceback
from pathlib import Path
import torch, torch.distributed as dist
from torch.utils.data import DataLoader, Dataset
from fastckpt.ddp import DdpCheckpointer, SaveResult, StorageType

OUT, DIRECTORY = Path(sys.argv[2]), sys.argv[4]  # as train.py has them

class Opaque:
    def __getstate__(self):
        raise ZeroDivisionError("the user's own error")

class Asking(Dataset):
    """Calls a function of the checkpointer in a forked DataLoader worker."""
    def __init__(self, ask): self.ask = ask
    def __len__(self): return 1
    def __getitem__(self, index): return outcome_of(self.ask)

def outcome_of(act):
    try:
        result = act()
    except Exception as error:
        return "".join(traceback.format_exception_only(error)).strip().replace("\\n", " | ")
    return (result.reason or "saved") if isinstance(result, SaveResult) else str(result)

def save(step, extra=None):
    state = {"weights": torch.full((1000,), float(step)), "layers": [{"extra": extra}]}
    return checkpointer.save_checkpoint(step, state, storage_type=StorageType.MEMORY)

dist.init_process_group("gloo")
rank, checkpointer, step = dist.get_rank(), DdpCheckpointer(DIRECTORY), 0
deeds = {
    "save": lambda: save(step + 1),
    "load": checkpointer.load_checkpoint,
    "wait": checkpointer.wait_latest_checkpoint,
    "prepare": lambda: checkpointer.prepare({"weights": torch.ones(3)}),
}
mistakes = {
    "nothing": lambda: save(1),
    "property": lambda: save(step + 1, Opaque()),
    "lock": lambda: save(step + 1, threading.Lock()),
    "twice": lambda: save(step),
    "one-rank": lambda: save(step + 1) if rank == 1 else "nothing",
} | {
    f"forked-{name}": lambda deed=deed: next(iter(DataLoader(Asking(deed), num_workers=1)))[0]
    for name, deed in deeds.items()
}
for name, act in mistakes.items():
    (OUT / f"{name}.{rank}").write_text(outcome_of(act))
    dist.barrier()
    step += 10
    assert save(step), f"the save after {name}"
    dist.barrier()
loaded = checkpointer.load_checkpoint()
assert loaded["weights"][0] == step == checkpointer.loaded_step
checkpointer.close()
dist.barrier()
dist.destroy_process_group()
'''


def test_a_mistake_of_a_script_is_reported_and_the_next_save_works(new_job: Any) -> None:
    job = new_job()
    program = job.folder / "misuse.py"
    program.write_text(PROGRAM)
    job.run(program=str(program), restarts=0)
    told = {path.name: path.read_text() for path in job.folder.glob("*.[01]")}
    where = "fastckpt: state['layers'][0]['extra'], a "
    cannot = "cannot be saved; leave it out, or save plain values or tensors in its place"
    assert told["property.0"] == f"ZeroDivisionError: the user's own error | {where}__main__.Opaque, {cannot}"
    assert told["lock.0"] == f"TypeError: cannot pickle '_thread.lock' object | {where}_thread.lock, {cannot}"
    assert told["property.1"] == told["lock.1"] == "saved", "its own part is in memory; it does not count"
    for rank in (0, 1):
        assert told[f"twice.{rank}"] == "memory already holds this step"
        for name in ("save", "load", "wait", "prepare"):
            assert "belongs to the process that made it, not to one forked from it" in told[f"forked-{name}.{rank}"]
    assert [told["one-rank.0"], told["one-rank.1"]] == ["nothing", "saved"]
    assert job.stored()[0] == 90
