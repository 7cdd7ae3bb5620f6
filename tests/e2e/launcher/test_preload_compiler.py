"""Preloading of torch's compiler for scripts that compile: same results as in a fresh process, nothing left behind."""

import os
import sys
from contextlib import suppress
from pathlib import Path
from unittest.mock import Mock

import pytest

from fastckpt_run.preload import compiler
from fastckpt_run.script_analysis import read
from tests.e2e.launcher.preloading import Starter, template

COMPILED = """
import os, sys, threading
before = "torch._inductor.compile_fx" in sys.modules
import torch
children = open(f"/proc/self/task/{os.getpid()}/children").read().split()
kept = len(children), threading.active_count(), os.environ.get("TORCHINDUCTOR_CACHE_DIR")
torch.manual_seed(3)
# aot_eager needs no C++ compiler; it takes the same way through dynamo and aot_autograd
model = torch.compile(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()), backend="aot_eager")
loss = model(torch.ones(2, 8)).square().sum()
loss.backward()
gradients = [p.grad.double().sum().item().hex() for p in model.parameters()]
print(loss.item().hex(), *gradients, *kept)
print(before, file=sys.stderr)
"""


SOURCES = [
    ("import torch\nmodel = torch.compile(f())", True),
    ("import torch\ndef main():\n  if x:\n    return torch.compile(y, mode='max-autotune')", True),
    ("from transformers import TrainingArguments\nTrainingArguments(torch_compile=True)", True),
    ("from transformers import TrainingArguments\nTrainingArguments(torch_compile=False)", False),
    ("import re, torch\nre.compile('x')", False),
    ("import model", True),
    ("import torch, os\ntorch.compile(x)\nos.environ['TORCHINDUCTOR_CACHE_DIR'] = 'x'", False),
    ("import torch, os\ntorch.compile(x)\nos.environ.update(x)", False),
    ("import torch, os\ntorch.compile(x)\nos.environ['CXX'] = 'clang++'", False),
    ("import torch, os\ntorch.compile(x)\nos.environ['TOKENIZERS_PARALLELISM'] = 'x'", True),
]


def test_scripts_that_compile_are_found_unless_they_set_what_the_compiler_may_read(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("import torch\nf = torch.compile(max)")
    for source, compiles in SOURCES:
        (tmp_path / "train.py").write_text(source)
        assert read([str(tmp_path / "train.py")]).compiles is compiles, source


@pytest.mark.campaign
def test_a_forked_worker_has_the_compiler_and_computes_what_a_fresh_one_does(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(COMPILED)
    with template(str(script), "math") as preloader:
        executed, forked = Starter(tmp_path, preloader).both(str(script))
        assert executed.wait() == (0, executed.text("out"), "False\n")
        assert forked.wait() == (0, executed.text("out"), "True\n")
    assert executed.text("out").split()[3:5] == ["0", "1"]  # children, threads


def test_a_template_builds_nothing_and_asks_where_the_caches_are(tmp_path: Path, monkeypatch) -> None:
    instructions = pytest.importorskip("torch._inductor.cpu_vec_isa")
    builder = pytest.importorskip("torch._inductor.cpp_builder").CppBuilder
    build, asked = builder.build, list[str]()

    def find() -> None:
        asked.append(os.environ[compiler.CACHES])
        with suppress(Exception):  # as torch does
            builder.build(None)
        asked.append("built")

    monkeypatch.setattr(instructions, "valid_vec_isa_list", find)
    monkeypatch.setenv(compiler.CACHES, str(tmp_path / "caches"))
    compiler.prepare()
    assert asked == [str(tmp_path / "caches")]
    assert builder.build is build
    assert compiler.MODULE in sys.modules


@pytest.mark.parametrize("lacks", ["names", "a C compiler"])
def test_a_torch_with_other_names_or_no_c_compiler_is_left_to_the_workers(monkeypatch, lacks: str) -> None:
    pytest.importorskip(compiler.MODULE)
    instructions = pytest.importorskip("torch._inductor.cpu_vec_isa")
    missing = pytest.importorskip("torch._inductor.exc").InvalidCxxCompiler
    if lacks == "names":
        monkeypatch.setitem(sys.modules, "torch._inductor.cpu_vec_isa", None)
    else:
        monkeypatch.setattr(instructions, "valid_vec_isa_list", Mock(side_effect=missing))
    monkeypatch.delenv(compiler.CACHES, raising=False)
    compiler.prepare()
    assert compiler.CACHES not in os.environ
