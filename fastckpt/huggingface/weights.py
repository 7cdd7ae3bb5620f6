"""Lays out a model's weight files as its own ``save_pretrained`` does, straight from its live tensors."""

import inspect
import json
from collections.abc import Mapping
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict, unwrap_model
from transformers.utils import is_peft_available

from fastckpt._core.native.folder_checkpointer import Raw, Tensors
from fastckpt.huggingface._private import has_adapters, ignored_keys

METADATA = {"format": "pt"}
WEIGHTS, INDEX, ADAPTER = "model.safetensors", "model.safetensors.index.json", "adapter_model.safetensors"


def is_adapted(model: nn.Module) -> bool:
    """Return whether it is a model of PEFT, which saves its adapters only."""
    if not is_peft_available():
        return False
    from peft import PeftModel

    return isinstance(model, PeftModel)


def objection(model: nn.Module) -> str:
    """The reason why only the model's own ``save_pretrained`` can save it; empty if there is none."""
    if any(parameter.is_meta or hasattr(parameter, "device_mesh") for parameter in model.parameters()):
        return "its parameters are sharded or offloaded"
    if is_adapted(model):
        from peft import PeftModel

        return "it has its own save_pretrained" if "save_pretrained" in _own_methods(model, PeftModel) else ""
    if not isinstance(model, PreTrainedModel):
        return "" if _has_own_storages(model) else "its parameters share memory"
    reasons = {
        "it has its own save_pretrained": "save_pretrained" in _own_methods(model, PreTrainedModel),
        "it is quantized": getattr(model, "hf_quantizer", None) is not None,
        "it has adapters": has_adapters(model),
        "it is offloaded": bool({"cpu", "disk"} & {*map(str, (getattr(model, "hf_device_map", None) or {}).values())}),
    }
    return ", and ".join(reason for reason, holds in reasons.items() if holds)


class Weights:
    """Remembers how a model is laid out, as long as its tensors stay where they are: that takes longer than to look."""

    def __init__(self) -> None:
        self._seen: list[Any] | None = None
        self._objection = ""
        self._files: dict[str, Any] = {}

    @property
    def layout(self) -> object:
        """The same as long as the model is laid out alike."""
        return self._seen

    def objection(self, model: nn.Module) -> str:
        """Same as `objection`."""
        self._look(model)
        return self._objection

    def files(self, model: nn.Module) -> dict[str, Any]:
        """Same as `weight_files`, of the model of which `objection` was asked last."""
        return self._files or weight_files(model)

    def _look(self, model: nn.Module) -> None:
        tensors = [(name, each) for name, each in model.state_dict().items() if isinstance(each, torch.Tensor)]
        seen = [(name, each.data_ptr(), each.dtype, each.shape, each.stride()) for name, each in tensors]
        if seen == self._seen:
            return
        self._seen, self._files, self._objection = seen, {}, objection(model)
        if not self._objection:
            live = {each.untyped_storage().data_ptr() for _, each in tensors}
            files = weight_files(model)
            parts = [part for file in files.values() if isinstance(file, Tensors) for part in file.tensors.values()]
            # A part that was copied, such as one that was made contiguous, must be made again for each save.
            if all(part.untyped_storage().data_ptr() in live for part in parts):  # none is a copy
                self._files = files


def weight_files(model: nn.Module, max_shard_size: int | str = "") -> dict[str, Any]:
    """The weight files of a model to which there is no `objection`, by their names; their tensors are the live ones.

    Args:
        model: The model, not wrapped.
        max_shard_size: As for ``save_pretrained``; empty for its default.
    """
    if is_adapted(model):
        return _adapters(model)
    if not isinstance(model, PreTrainedModel):
        return {WEIGHTS: Tensors(model.state_dict(), METADATA)}
    size = max_shard_size or inspect.signature(model.save_pretrained).parameters["max_shard_size"].default
    state = unwrap_model(model).state_dict()
    for name in ignored_keys(model):
        state.pop(name, None)
    # The same functions in the same order as save_pretrained: names and files must be those that it would write.
    state = revert_weight_conversion(model, remove_tied_weights_from_state_dict(state, model))
    pattern = WEIGHTS.replace(".", "{suffix}.")
    split = split_torch_state_dict_into_shards(state, filename_pattern=pattern, max_shard_size=size)
    files: dict[str, Any] = {
        file: _tensors({name: state[name] for name in names}) for file, names in split.filename_to_tensors.items()
    }
    if split.is_sharded:
        metadata = {"total_parameters": model.num_parameters(), **split.metadata}
        index = {"metadata": metadata, "weight_map": split.tensor_to_filename}
        files[INDEX] = Raw((json.dumps(index, indent=2, sort_keys=True) + "\n").encode(), may_end_with_spaces=True)
    return files


def _adapters(model: nn.Module) -> dict[str, Any]:
    from peft import get_peft_model_state_dict

    return {
        ADAPTER if name == "default" else f"{name}/{ADAPTER}": _tensors(
            get_peft_model_state_dict(model, adapter_name=name)
        )
        for name in model.peft_config  # type: ignore[union-attr]
    }


def _tensors(state: Mapping[str, torch.Tensor]) -> Tensors:
    return Tensors({name: tensor.contiguous() for name, tensor in state.items()}, METADATA)


def _own_methods(model: nn.Module, parent: type) -> set[str]:
    """Attributes of a model, of its class, or of the classes between this and its parent."""
    kinds = (each for each in type(model).__mro__ if issubclass(each, parent) and each is not parent)
    return {*vars(model), *(name for each in kinds for name in vars(each))}


def _has_own_storages(model: nn.Module) -> bool:
    tensors = [tensor for tensor in model.state_dict().values() if isinstance(tensor, torch.Tensor) and tensor.numel()]
    return len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == len(tensors)
