"""Models of many kinds, each with a step that enters a context around its forwards; small, random, on the CPU."""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

Around = Callable[[], AbstractContextManager[Any]]
Step = Callable[[nn.Module, Around], None]
WIDTH, LENGTH, BATCH = 256, 128, 8
"""One activation of this shape has a MiB in floats of 32 bits."""


@dataclass(frozen=True)
class Case:
    """A model, and a step that leaves gradients in its parameters."""

    make: Callable[[], nn.Module]
    step: Step
    budget: str = "4MiB"


def floats(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3), device="cpu").to(torch.get_default_device())


def sequence() -> torch.Tensor:
    return floats(BATCH, LENGTH, WIDTH)


# --- models


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.norm1, self.norm2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        found = F.relu(self.norm1(self.first(value)), inplace=True)
        found = self.norm2(self.second(found))
        found += value
        return F.relu(found, inplace=True)


def resnet() -> nn.Module:
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))
    return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), *(Residual(16) for _ in range(3)), *head)


def block(activation: type[nn.Module] = nn.GELU) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), activation(), nn.Dropout(0.3))


def perceptron(activation: type[nn.Module] = nn.GELU) -> nn.Module:
    return nn.Sequential(*(block(activation) for _ in range(6)))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True, dropout=0.2)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return self.cells(value)[0]


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(block() for _ in range(6))
        self._reentrant = reentrant

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        value = value.requires_grad_()
        for each in self.layers:
            value = checkpoint(each, value, use_reentrant=self._reentrant)
        return value


class Squared(torch.autograd.Function):
    """A user's own function, which saves an input and a result."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        result = value * value
        ctx.save_for_backward(value, result)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        value, result = ctx.saved_tensors
        return gradient * (2 * value + 0 * result)


class Mixed(nn.Module):
    """Frequencies, complex numbers, masks, expanded and transposed tensors, a tied weight, views of one storage."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, 3 * WIDTH)
        self.back = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        q, k, v = self.project(value).chunk(3, -1)
        waves = torch.fft.fft(q, dim=1) * torch.fft.fft(k, dim=1).conj()
        value = v * torch.fft.ifft(waves, dim=1).real
        value = torch.where(value > 0, value, value.mean(-1, keepdim=True).expand_as(value) * 0.1)
        value = Squared.apply(value.transpose(1, 2)).transpose(1, 2)
        return self.back(F.linear(value.cumsum(1) / LENGTH, self.back.weight.t()))


def layer(activation: str = "gelu") -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, 0.1, activation, batch_first=True, norm_first=True)


# --- steps


def pictures(model: nn.Module, around: Around) -> None:
    with around():
        loss = F.cross_entropy(model(floats(8, 3, 64, 64)), torch.arange(8))
    loss.backward()


def plain(model: nn.Module, around: Around) -> None:
    with around():
        loss = model(sequence()).square().mean()
    loss.backward()


def two_forwards_before_a_backward(model: nn.Module, around: Around) -> None:
    losses = []
    for scale in (1.0, 1.5):
        with around():
            losses.append(model(sequence() * scale).square().mean())
    losses[0].backward()
    losses[1].backward()


def twice_through_one_graph(model: nn.Module, around: Around) -> None:
    with around():
        loss = model(sequence()).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()


def gradient_penalty(model: nn.Module, around: Around) -> None:
    value = sequence().requires_grad_()
    with around():
        loss = model(value).square().mean()
    (gradient,) = torch.autograd.grad(loss, value, create_graph=True)
    (loss + gradient.square().sum()).backward()


def backward_within(model: nn.Module, around: Around) -> None:
    with around():
        model(sequence()).square().mean().backward()


def autocast(model: nn.Module, around: Around) -> None:
    with around(), torch.autocast(torch.get_default_device().type, torch.bfloat16):
        loss = model(sequence()).float().square().mean()
    loss.backward()


def compiled(model: nn.Module, around: Around) -> None:
    run = torch.compile(model, backend="aot_eager", dynamic=False)
    with around():
        loss = run(sequence()).square().mean()
    loss.backward()


def sharded(model: nn.Module, around: Around) -> None:
    """Of a group of one: weights are gathered for each layer, and freed after it."""
    for each in (*model, model):
        fully_shard(each)
    plain(model, around)


CASES = {
    "ResNet": Case(resnet, pictures, "8MiB"),
    "dropout": Case(perceptron, plain),
    "LSTM": Case(Recurrent, plain),
    "checkpointed": Case(lambda: Checkpointed(reentrant=False), plain),
    "checkpointed, reentrant, backward within": Case(lambda: Checkpointed(reentrant=True), backward_within),
    "two forwards before a backward": Case(perceptron, two_forwards_before_a_backward),
    "retain_graph": Case(perceptron, twice_through_one_graph),
    "double backward": Case(perceptron, gradient_penalty, "8MiB"),
    "autocast": Case(lambda: nn.Sequential(layer(), layer(), layer()), autocast),
    "complex, tied, expanded": Case(lambda: nn.Sequential(Mixed(), Mixed()), plain, "8MiB"),
    "sparse activations": Case(lambda: perceptron(nn.ReLU), plain),
    "compiled": Case(perceptron, compiled),
    "fully_shard": Case(perceptron, sharded),
}


def gradients(case: Case, model: nn.Module, around: Around, seed: int) -> list[torch.Tensor]:
    """The gradients of one step; buffers such as those of BatchNorm stay as they were."""
    model = copy.deepcopy(model)
    torch.manual_seed(seed)
    case.step(model, around)
    found = [weight.grad for weight in model.parameters() if weight.grad is not None]
    return [each.to_local() if isinstance(each, DTensor) else each for each in found]
