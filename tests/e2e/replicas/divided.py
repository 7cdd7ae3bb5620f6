"""An optimizer whose state is divided over the ranks, in frameworks that save it from one of them."""

import json
import os
import sys
import warnings
from pathlib import Path

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

sys.path.insert(0, str(Path(__file__).parents[3]))
from fastckpt import Checkpointer
from fastckpt.errors import ConfigError
from tests.e2e.replicas.unlike import Divided

warnings.filterwarnings("ignore")


def optimizer_of(model: nn.Module, *, unlike: bool) -> torch.optim.Optimizer:
    return Divided(model.parameters()) if unlike else torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)


def small() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(7, 13), nn.BatchNorm1d(13), nn.Linear(13, 5))


def by_accelerate(folder: Path, *, unlike: bool) -> str:
    from accelerate import Accelerator

    from fastckpt.accelerate import AccelerateCheckpointer

    accelerator, module = Accelerator(cpu=True), small()
    model, optimizer = accelerator.prepare(module, optimizer_of(module, unlike=unlike))
    checkpointer = AccelerateCheckpointer(accelerator, folder)
    checkpointer.load_state()
    accelerator.backward(model(torch.randn(4, 7)).square().mean())
    optimizer.step()
    try:
        return str(checkpointer.save_state(1).saved)
    finally:
        checkpointer.close()


def by_deepspeed(folder: Path, *, unlike: bool) -> str:
    from fastckpt.deepspeed import DeepSpeedCheckpointer
    from tests.e2e.deepspeed import gloo  # noqa: F401 (for what it does)
    from tests.e2e.deepspeed.engines import config, engine_of, train

    engine = engine_of(small(), config(0))
    checkpointer = DeepSpeedCheckpointer(engine, folder)
    checkpointer.load_checkpoint(folder)
    train(engine)
    if unlike and dist.get_rank() == 1:
        for state in engine.optimizer.state.values():
            state["exp_avg"].add_(1.0)
    try:
        return str(checkpointer.save_checkpoint(folder).saved)
    finally:
        checkpointer.close()


def by_trainer(folder: Path, *, unlike: bool) -> str:
    from transformers import TrainingArguments

    from fastckpt.huggingface import FastCheckpointTrainer
    from tests.e2e.huggingface.stock import Sentences, make_model

    arguments = TrainingArguments(
        str(folder), use_cpu=True, max_steps=1, save_steps=1, report_to="none", disable_tqdm=True,
        per_device_train_batch_size=2,
    )  # fmt: skip
    model = make_model("ddp")
    optimizer = optimizer_of(model, unlike=unlike)
    trainer = FastCheckpointTrainer(model, arguments, train_dataset=Sentences(1, 16), optimizers=(optimizer, None))
    trainer.train()
    return "True"


def by_dcp(folder: Path, *, unlike: bool) -> str:
    from fastckpt.dcp.writer import SharedMemoryWriter

    writer = SharedMemoryWriter(folder)
    of_rank = {f"loader of {dist.get_rank()}": torch.ones(dist.get_rank() + 1)}
    state = {"weight": torch.ones(3) + (dist.get_rank() if unlike else 0), "note": dist.get_rank(), **of_rank}
    try:
        dcp.save(state, storage_writer=writer, checkpoint_id="1")
        return str(bool(writer.result))
    except dcp.api.CheckpointException as error:
        raise error.failures[dist.get_rank()][0] from error
    finally:
        writer.close()


def by_hsdp(folder: Path, *, unlike: bool) -> str:
    """Two replicas of one shard."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicas", "shards"))
    model = fully_shard(nn.Linear(7, 5), mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    with Checkpointer(folder, model=model, optimizer=optimizer, every=1) as checkpointer:
        checkpointer.resume()
        model(torch.randn(4, 7)).square().mean().backward()
        optimizer.step()
        if unlike and dist.get_rank() == 1:
            model.weight._local_tensor.detach().add_(1.0)
        return str(checkpointer.step(1).saved)


def main() -> None:
    said: dict[str, str] = {}
    for way in sys.argv[2:]:
        for unlike in (False, True):
            name = f"{way}, {'unlike' if unlike else 'equal'}"
            try:
                said[name] = globals()[way](Path(sys.argv[1]) / name, unlike=unlike)
            except ConfigError as error:
                said[name] = str(error)
            dist.barrier()
    (Path(sys.argv[1]) / f"said.{dist.get_rank()}").write_text(json.dumps(said))


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.barrier()
    dist.destroy_process_group()
