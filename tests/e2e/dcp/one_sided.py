"""Loads in which one of two ranks fails, one after the other; what each rank was told goes to ``log.<rank>``."""

import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from fastckpt import Checkpointer
from fastckpt._core.native.folder_checkpointer import FolderCheckpointer, Raw, RequiredFiles
from fastckpt.dcp import SharedMemoryReader, SharedMemoryWriter, reader
from fastckpt.ddp import DdpCheckpointer, SaveResult, StorageType
from fastckpt.errors import ConfigError
from fastckpt.fsdp import FsdpShardCheckpointer

IS_FORKED = "lightning.pytorch" in sys.modules
SOON = 10.0
"""Seconds in which all ranks must have raised."""
Case = Callable[[bool], object]


class OddError(Exception):
    """No error that a damaged file raises."""


def fail(*_: Any, **__: Any) -> None:
    raise OddError("odd")


class Part:
    """Cannot be loaded, nor unpickled, on a rank on which it ``fails``."""

    fails = False

    def state_dict(self) -> dict[str, Any]:
        return {"value": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.fails:
            fail()

    __getstate__, __setstate__ = state_dict, load_state_dict


def failing_at(method: str) -> DefaultLoadPlanner:
    planner = DefaultLoadPlanner()
    setattr(planner, method, fail)
    return planner


def of_dcp(folder: Path) -> dict[str, Case]:
    writer = SharedMemoryWriter(folder / "dcp")
    ours, rank = SharedMemoryReader(writer), dist.get_rank()

    def state(value: float = 0.0) -> dict[str, Any]:
        return {"whole": torch.full((4,), value), "text": str(value), f"of_rank_{rank}": torch.full((3,), value)}

    dcp.save(state(1.0), storage_writer=writer, checkpoint_id="1")

    def load(more: dict[str, Any], planner: DefaultLoadPlanner | None = None) -> None:
        loaded = state() | more
        dcp.load(loaded, storage_reader=ours, planner=planner)
        assert loaded["text"] == "1.0" and all((loaded[name] == 1).all() for name in ("whole", f"of_rank_{rank}"))

    def case(at_victim: dict[str, Any]) -> Case:
        return lambda is_victim: load(at_victim if is_victim else {})

    def planned(method: str) -> Case:
        return lambda is_victim: load({}, failing_at(method) if is_victim else None)

    def loaded_twice(is_victim: bool) -> None:
        ours.find()
        writer.last = writer.last if is_victim else None  # as if one rank had skipped a save
        load({})

    def closed(is_victim: bool) -> None:
        if is_victim:
            writer.close()
        ours.find()

    methods = ("set_up_planner", "create_local_plan", "finish_plan", "load_bytes", "resolve_tensor", "commit_tensor")
    return {
        "key: Missing key": case({"more": torch.zeros(2)}),
        "shape: Size mismatch": case({"whole": torch.zeros(5)}),
        "kind: Invalid checkpoint metadata": case({"whole": "text"}),
        "kind, loaded": case({"text": torch.zeros(2)}),
        "dtype, loaded": case({"whole": torch.zeros(4, dtype=torch.float64)}),
        **{f"{method}: odd": planned(method) for method in methods},
        "found again, loaded": loaded_twice,
        "loaded": case({}),
        "closed: is closed": closed,
    }


def of_shards(folder: Path) -> dict[str, Case]:
    def model(layers: int = 1) -> nn.Sequential:
        return fully_shard(nn.Sequential(*[nn.Linear(4, 4) for _ in range(layers)]))

    def optimizer(of: nn.Module, groups: int = 1) -> torch.optim.Optimizer:
        parameters = [*of.parameters()]
        return torch.optim.SGD([{"params": parameters[each::groups]} for each in range(groups)], lr=0.1)

    checkpointer, made = FsdpShardCheckpointer(folder / "fsdp"), model()
    checkpointer.save_checkpoint(1, made, optimizer(made), storage_type=StorageType.MEMORY)

    def load(of: nn.Module, groups: int = 1) -> None:
        checkpointer.load_checkpoint(of, optimizer(of, groups))

    def hooked(method: str) -> Case:
        def case(is_victim: bool) -> None:
            of = model()
            if is_victim:
                getattr(of, method)(fail)
            load(of)

        return case

    return {
        "layers: the checkpoint does not fit": lambda is_victim: load(model(2 if is_victim else 1)),
        "groups: parameter groups": lambda is_victim: load(model(), 2 if is_victim else 1),
        "load_state_dict: odd": hooked("register_load_state_dict_pre_hook"),
        "state_dict: odd": hooked("register_state_dict_pre_hook"),
        "loaded": lambda _: load(model()),
    }


def of_parts(folder: Path) -> dict[str, Case]:
    def run(fails: bool, *, saves: bool = False) -> None:
        model = fully_shard(nn.Linear(4, 4))
        sgd, Part.fails = torch.optim.SGD(model.parameters(), lr=0.1), fails
        given = {"model": model, "optimizer": sgd, "every": 1, "others": {"part": Part()}, "overlap": False}
        try:
            with Checkpointer(folder / "parts", **given) as one:
                assert one.resume() == (0 if saves else 1)
                if saves:
                    one.step(1)
        finally:
            Part.fails = False

    run(False, saves=True)
    return {"part: odd": run, "loaded": lambda _: run(False)}


def of_files(folder: Path) -> dict[str, Case]:
    checkpointer = DdpCheckpointer(folder / "ddp", weights_only=False)
    checkpointer.save_checkpoint(1, {"w": torch.ones(3)}, rank_state={"trap": Part()}, storage_type=StorageType.MEMORY)
    rank = dist.get_rank()
    native = FolderCheckpointer(folder / "native", RequiredFiles("main.bin", f"own_{rank}.bin"))
    native.save_checkpoint(1, ({"main.bin": Raw(b"1")} if rank == 0 else {}) | {f"own_{rank}.bin": Raw(b"2")})

    def trapped(is_victim: bool) -> None:
        Part.fails = is_victim
        try:
            checkpointer.load_checkpoint()
        finally:
            Part.fails = False

    def opened(*, fails: bool) -> None:
        found = native.find()
        assert found is not None
        try:
            with found:
                if fails:
                    fail()
                dist.barrier()  # as of a framework
        finally:
            if fails:
                dist.barrier()  # which was not waited for

    return {
        "unpickling: odd": trapped,
        "unpickled, loaded": lambda _: checkpointer.load_checkpoint(),
        "opened: odd": lambda is_victim: opened(fails=is_victim),
        "loaded": lambda _: opened(fails=False),
    }


class NoData(DefaultSavePlanner):
    """Fails when the other rank has its part in memory."""

    def resolve_data(self, write_item: Any) -> Any:
        fail()


def of_refused(folder: Path) -> dict[str, Case]:
    """Saves that some ranks make alone, or in which one fails: no load mixes them with the next of their step."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    writer, mesh = SharedMemoryWriter(folder / "refused"), init_device_mesh("cpu", (dist.get_world_size(),))

    def save(value: int, **options: Any) -> None:
        state = {"w": DTensor.from_local(torch.full((5,), value), mesh, [Shard(0)]), "text": str(value)}
        dcp.save(state, storage_writer=writer, checkpoint_id="1", **options)

    def alone(_: bool) -> None:
        for options in ({"no_dist": True}, {"process_group": groups[dist.get_rank()]}, {"use_collectives": False}):
            try:
                save(0, **options)
            except (ConfigError, CheckpointException) as error:
                assert "all must" in str(error) or "all ranks of the job" in str(error), error
            else:
                raise AssertionError(options)

    def again(_: bool) -> None:
        save(2)
        state = {"w": DTensor.from_local(torch.zeros(5, dtype=torch.int64), mesh, [Shard(0)]), "text": ""}
        dcp.load(state, storage_reader=SharedMemoryReader(writer))
        assert torch.equal(state["w"].full_tensor(), torch.full((10,), 2)) and state["text"] == "2"

    return {
        "some ranks alone": alone,
        "no data: odd": lambda is_victim: save(1, planner=NoData() if is_victim else None),
        "all of the second": again,
    }


def of_saves(folder: Path) -> dict[str, Case]:
    """Of Lightning, which this process is a fork with: each has its own rank."""
    assert IS_FORKED and os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] == "1"
    from fastckpt.lightning.saves import Saves

    keepers = [module for module in [*sys.modules.values()] if "rank_zero_only" in getattr(module, "__dict__", ())]
    assert {module.rank_zero_only.rank for module in keepers} == {dist.get_rank()}
    saves = Saves(folder / "lightning")

    def saved_again(is_victim: bool) -> None:
        session = saves._writer
        kept = session.save
        if is_victim:
            session.save = lambda *_: SaveResult(False, 1, "no room here", 1)
        for _ in range(2):
            saves.save(1, {"global_step": 1, "loops": {"fit_loop": {}}}, "", StorageType.MEMORY)
            session.save = kept
        assert session.link.history == max(session.ranks.gather(session.link.history))

    return {"saved again": saved_again}


def outcome(case: Case, *, is_victim: bool) -> str:
    begin = time.monotonic()
    try:
        case(is_victim)
        text = ""
    except (Exception, CheckpointException) as error:
        text = f"{type(error).__name__}: {error}"
    if time.monotonic() - begin > SOON:
        os.write(2, f"it took longer than {SOON:g} s: {text}\n".encode())
        os._exit(1)  # the launcher ends the other rank, which may wait for an hour
    return text


def main() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=SOON))
    reader.TOGETHER = 1.0
    rank, out = dist.get_rank(), Path(sys.argv[1])
    said = [
        {
            f"{make.__name__}, {name}": outcome(case, is_victim=rank == victim)
            for make in (of_dcp, of_shards, of_parts, of_files, of_saves, of_refused)
            for name, case in make(out / f"victim-{victim}").items()
        }
        for victim in (0, 1)
    ]
    (out / f"log.{rank}").write_text(json.dumps(said))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
