"""Ways in which libraries put averaged weights in the place of a model's for an evaluation, and back.

Each is a generator: it stops where the evaluation would be. Of diffusers and torch_ema there are the lines that write.
"""

from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

Way = Callable[[nn.Module], Iterator[None]]


def averages(model: nn.Module) -> list[torch.Tensor]:
    return [torch.full_like(each, 0.25, requires_grad=False) for each in model.parameters()]


def diffusers(model: nn.Module) -> Iterator[None]:
    """EMAModel's store, copy_to and restore."""
    shadow, parameters = averages(model), list(model.parameters())
    stored = [each.detach().cpu().clone() for each in parameters]
    for average, each in zip(shadow, parameters, strict=True):
        each.data.copy_(average.to(each.device).data)
    yield
    for kept, each in zip(stored, parameters, strict=True):
        each.data.copy_(kept.data)


def diffusers_foreach(model: nn.Module) -> Iterator[None]:
    shadow, parameters = averages(model), list(model.parameters())
    stored = [each.detach().cpu().clone() for each in parameters]
    torch._foreach_copy_([each.data for each in parameters], shadow)
    yield
    torch._foreach_copy_([each.data for each in parameters], stored)


def torchcontrib(model: nn.Module) -> Iterator[None]:
    """SWA's swap_swa_sgd, called twice."""
    buffers = averages(model)

    def swap() -> None:
        for each, buffer in zip(model.parameters(), buffers, strict=True):
            kept = torch.empty_like(each.data)
            kept.copy_(each.data)
            each.data.copy_(buffer)
            buffer.copy_(kept)

    swap()
    yield
    swap()


def lightning(model: nn.Module) -> Iterator[None]:
    """WeightAveraging of Lightning, on_validation_epoch_start and on_validation_epoch_end: the library's own lines."""
    from lightning.pytorch.callbacks import WeightAveraging

    callback = WeightAveraging(multi_avg_fn=get_ema_multi_avg_fn(0.5))
    callback._average_model = AveragedModel(model)
    for each in callback._average_model.parameters():
        each.data.fill_(0.25)
    callback._swap_models(model)  # type: ignore[arg-type]
    yield
    callback._swap_models(model)  # type: ignore[arg-type]


def numpy(model: nn.Module) -> Iterator[None]:
    stored = [each.detach().clone() for each in model.parameters()]
    for each in model.parameters():
        each.detach().numpy().fill(0.25)
    yield
    for each, kept in zip(model.parameters(), stored, strict=True):
        each.detach().numpy()[...] = kept.numpy()


UNCOUNTED: dict[str, Way] = {
    "diffusers": diffusers,
    "diffusers, foreach": diffusers_foreach,
    "torchcontrib": torchcontrib,
    "lightning": lightning,
    "numpy": numpy,
}
"""Torch counts none of their writes."""


def loaded(model: nn.Module) -> Iterator[None]:
    """torch's AveragedModel, by state dicts."""
    average, kept = AveragedModel(model), {name: each.clone() for name, each in model.state_dict().items()}
    for each in average.parameters():
        each.data.fill_(0.25)
    model.load_state_dict(average.module.state_dict())
    yield
    model.load_state_dict(kept)


def without_gradients(model: nn.Module) -> Iterator[None]:
    kept = [each.detach().clone() for each in model.parameters()]
    with torch.no_grad():
        for each in model.parameters():
            each.fill_(0.25)
    yield
    with torch.no_grad():
        for each, old in zip(model.parameters(), kept, strict=True):
            each.copy_(old)


COUNTED: dict[str, Way] = {"state dicts": loaded, "no_grad": without_gradients}


def timm(model: nn.Module) -> Iterator[None]:
    """ModelEmaV3: the averages are a model of their own, which is evaluated."""
    average = AveragedModel(model).module
    torch._foreach_lerp_([each.data for each in average.parameters()], [e.data for e in model.parameters()], weight=0.1)
    yield


def functional(model: nn.Module) -> Iterator[None]:
    names = [name for name, _ in model.named_parameters()]
    torch.func.functional_call(model, dict(zip(names, averages(model), strict=True)), torch.ones(8, 4))
    yield


def pointers(model: nn.Module) -> Iterator[None]:
    kept = [each.data for each in model.parameters()]
    for each, average in zip(model.parameters(), averages(model), strict=True):
        each.data = average
    yield
    for each, old in zip(model.parameters(), kept, strict=True):
        each.data = old


def vectors(model: nn.Module) -> Iterator[None]:
    kept = nn.utils.parameters_to_vector(model.parameters()).detach()
    nn.utils.vector_to_parameters(torch.full_like(kept, 0.25), model.parameters())
    yield
    nn.utils.vector_to_parameters(kept, model.parameters())


HARMLESS: dict[str, Way] = {"timm": timm, "functional_call": functional, ".data =": pointers, "vectors": vectors}
"""They write to no memory that is copied."""
