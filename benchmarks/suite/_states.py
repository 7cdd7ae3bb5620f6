"""States that are saved: a GPT-2 with AdamW of a given size, and many small tensors."""

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from examples.gpt2.model import GPT


def gpt2(gigabytes: float, dropout: float = 0.1) -> "GPT":
    """A GPT-2 of 12 layers that takes, with its AdamW, about that many bytes."""
    from examples.gpt2.model import GPT, GPTConfig

    width = max(1, round((gigabytes / 1.49) ** 0.5 * 12)) * 64
    return GPT(GPTConfig(vocab_size=50257, n_layer=12, n_head=width // 64, n_embd=width, dropout=dropout))


def gpt2_with_adamw(gigabytes: float) -> dict[str, Any]:
    """A GPT-2 of 12 layers and its AdamW, of about that size, as state_dict() gives them: 593 tensors."""
    model = gpt2(gigabytes)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 0}


def many_tensors(count: int) -> dict[str, Any]:
    """A model and AdamW of ``count`` small tensors."""
    parameters = [torch.nn.Parameter(torch.randn(64)) for _ in range(count // 4)]
    optimizer = torch.optim.AdamW(parameters)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    model = {f"layer{i}.weight": parameter.detach() for i, parameter in enumerate(parameters)}
    return {"model": model, "optimizer": optimizer.state_dict(), "step": 0}


def many_parameters(count: int) -> torch.nn.Module:
    """A model of ``count`` small parameters."""
    model = torch.nn.Module()
    for number in range(count):
        model.register_parameter(f"layer{number}", torch.nn.Parameter(torch.randn(64)))
    return model


def tensors(node: Any) -> list[torch.Tensor]:
    """All tensors of a state."""
    if isinstance(node, torch.Tensor):
        return [node]
    children = node.values() if isinstance(node, dict) else node if isinstance(node, list | tuple) else ()
    return [tensor for child in children for tensor in tensors(child)]


def storages(state: Any) -> list[torch.Tensor]:
    """One tensor of bytes over each storage of a state."""
    found = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors(state)}
    return [torch.empty(0, dtype=torch.uint8).set_(storage) for storage in found.values()]
