"""A small training by transformers' own Trainer, without anything of fastckpt; logs as tests/faults/train.py does.

Each rank appends a line of JSON for all that happens to ``<out>/log.<rank>``, and at the end writes the digest of its
weights, its optimizer and its random generator to ``<out>/end.<rank>``.
"""

import argparse
import gc
import json
import os
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import DistributedType
from torch.distributed.tensor import DTensor
from torch.utils.data import Dataset
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

sys.path.insert(0, str(Path(__file__).parents[3]))
from tests.faults.diary import Log, digest, parser_of_all

warnings.filterwarnings("ignore")


def parse_arguments(*given: str) -> argparse.Namespace:
    parser = parser_of_all()
    parser.add_argument("--kind", default="fast", help="of train.py: fast, or own, which has methods of its own")
    parser.add_argument("--way", default="ddp", help="ddp, fsdp2, fsdp2-full, fsdp1, lora, deepspeed")
    parser.add_argument("--resume", default="True", help="True, last, none or a path")
    parser.add_argument("--stage", type=int, default=2, help="of ZeRO")
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--eval", type=int, default=0)
    parser.add_argument("--best", type=int, default=0, help="the step that is evaluated as the best; 0: it is measured")
    parser.add_argument("--overlap", action="store_true")
    parser.add_argument("--kill-after", type=int, default=0, help="die with the agent after this step")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=JSON", help="of TrainingArguments")
    return parser.parse_args(given or None)


class Sentences(Dataset):
    def __init__(self, seed: int, number: int) -> None:
        self.number = number
        self.tokens = torch.randint(50, (number, 8), generator=torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


class Words:
    """A processing class, as far as Trainer asks for one."""

    model_input_names = ("input_ids",)
    padding_side = "right"

    def save_pretrained(self, folder: str) -> None:
        Path(folder, "words.json").write_text(json.dumps({"words": 50}))
        Path(folder, "words.bin").write_bytes(bytes(range(50)))


class Saying(TrainerCallback):
    def __init__(self, args: argparse.Namespace, log: Log) -> None:
        self.args, self.log, self.trainer = args, log, None
        self.told = self.pending = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        restarts = torch.tensor(int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")))
        if dist.is_initialized():
            dist.all_reduce(restarts)
        step = max(0, state.global_step)
        tier = getattr(self.trainer, "loaded_from", "")
        self.log(loaded=step, tier=tier, pid=os.getpid(), start=[int(os.environ["FAULTS_LAUNCH"]), int(restarts)])

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
        if "loss" in logs:
            self.log(step=state.global_step, loss=float(logs["loss"]).hex())

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.tell()
        if state.global_step == self.args.kill_after != 0:
            if dist.is_initialized():
                dist.barrier()
            if args.process_index == 0:
                os.kill(os.getppid(), signal.SIGKILL)
            signal.pause()

    def tell(self) -> None:
        result = getattr(self.trainer, "last_save", None)
        if self.pending:
            self.log(saved=self.pending)
            self.pending = 0
        if result is None or result.step == self.told:
            return
        self.told = result.step
        if result.pending:
            self.pending = result.step
            self.log(pending=result.step)
        else:
            self.log(**({"saved": result.step} if result.saved else {"skipped": result.step, "reason": result.reason}))


class Told(Trainer):
    """Evaluates to what it is told: how far it is from the best step."""

    best = 0

    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        metrics = {"eval_loss": float(abs(self.state.global_step - self.best))}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics


def make_model(way: str) -> Any:
    torch.manual_seed(3)
    config = GPT2Config(
        n_layer=2, n_embd=16, n_head=2, vocab_size=50, n_positions=16, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.2, embd_pdrop=0.1, attn_pdrop=0.1,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    if way.startswith("lora"):
        from peft import LoraConfig, get_peft_model

        lora = LoraConfig(r=4, lora_alpha=8, target_modules=["c_attn"], lora_dropout=0.1, fan_in_fan_out=True)
        model = get_peft_model(model, lora)
    return model


def training_arguments(args: argparse.Namespace) -> TrainingArguments:
    more: dict[str, Any] = {}
    if args.way.startswith("fsdp"):
        version = 1 if args.way == "fsdp1" else 2
        kind = "FULL_STATE_DICT" if args.way.endswith("full") else "SHARDED_STATE_DICT"
        config = {"fsdp_version": version, "state_dict_type": kind, "transformer_layer_cls_to_wrap": ["GPT2Block"]}
        more |= {"fsdp": "full_shard auto_wrap", "fsdp_config": config}
    if args.way == "deepspeed":
        from tests.e2e.deepspeed import gloo  # noqa: F401 (for what it does)

        # accelerate would not see the other ranks without a GPU
        PartialState(cpu=True, backend="gloo")
        PartialState._shared_state["distributed_type"] = DistributedType.DEEPSPEED
        more |= {
            "accelerator_config": {"use_configured_state": True},
            "deepspeed": {
                "train_micro_batch_size_per_gpu": 4,
                "gradient_accumulation_steps": args.accumulate,
                "zero_optimization": {"stage": args.stage},
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
                "zero_allow_untested_optimizer": True,
            },
        }
    if args.eval:
        more |= {"eval_strategy": "steps", "eval_steps": args.eval}
    more |= {name: json.loads(value) for name, _, value in (each.partition("=") for each in args.set)}
    return TrainingArguments(
        **{
            "output_dir": args.checkpoint_dir, "per_device_train_batch_size": 4, "max_steps": args.steps,
            "save_steps": args.disk, "logging_steps": 1, "learning_rate": 1e-2, "report_to": [],
            "use_cpu": args.way != "deepspeed",
            "ddp_backend": "gloo" if "RANK" in os.environ else None, "disable_tqdm": True, "seed": 1,
            "gradient_accumulation_steps": args.accumulate,
            "warmup_steps": 3, **more,
        }
    )  # fmt: skip


def make_trainer(
    args: argparse.Namespace, kind: type = Trainer, callback: Saying | None = None, **options: Any
) -> Trainer:
    """A trainer of the class ``kind``, with what its constructor takes beside."""
    arguments = training_arguments(args)
    if args.way.startswith("fsdp"):
        # accelerate would leave FSDP out without a GPU; it works on processors, over gloo
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    if args.best:
        kind = type("Told", (Told, kind) if kind is not Trainer else (Told,), {"best": args.best})
    return kind(
        model=make_model(args.way),
        args=arguments,
        train_dataset=Sentences(5, 88),
        eval_dataset=Sentences(6, 16),
        processing_class=Words(),
        callbacks=[callback] if callback else None,
        **options,
    )


def whole(node: Any) -> Any:
    if isinstance(node, DTensor):
        return node.full_tensor().detach()
    if isinstance(node, torch.Tensor):
        return node.detach()
    if isinstance(node, dict | list | tuple):
        return {key: whole(each) for key, each in (node.items() if isinstance(node, dict) else enumerate(node))}
    return node


def run(args: argparse.Namespace, kind: type = Trainer, before: Callable[[int], None] = print, **options: Any) -> None:
    rank = int(os.environ.get("RANK", "0"))
    callback = Saying(args, Log(args.out, rank))
    trainer = callback.trainer = make_trainer(args, kind, callback, **options)
    before(rank)
    trainer.train(resume_from_checkpoint={"True": True, "none": None}.get(args.resume, args.resume))
    callback.tell()
    state = [trainer.model.state_dict(), trainer.optimizer.state_dict(), torch.get_rng_state()]
    (args.out / f"end.{rank}").write_text(digest(whole(state)))
    if dist.is_initialized():
        del trainer, callback.trainer
        gc.collect()
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    run(parse_arguments())
    assert "fastckpt.huggingface" not in sys.modules
