"""Compares the models of all ranks where one of them is saved for all: pipeline stages are not one model."""

import hashlib
from collections.abc import Iterable

import torch
from torch.nn import Module

from fastckpt._core.client.collective import Agreement
from fastckpt._core.torch_private.tensors import local_part
from fastckpt.errors import ConfigError

SAMPLE = 16
"""Elements of each parameter that are compared."""


def other_weights(model: Module, ranks: Agreement, *, shapes: bool = True) -> int | None:
    """The first rank that has other values in its parameters than rank 0, by samples; None if there is none.

    Raises ConfigError, in all ranks, if one has parameters of other names, or of other ``shapes``.
    """
    named = [(name, parameter) for name, parameter in model.named_parameters() if not parameter.is_meta]
    layout = _digest(f"{name} {tuple(parameter.shape) if shapes else ''};".encode() for name, parameter in named)
    first = f"{len(named)} parameters, {named[0][0]} the first" if named else "none"
    reports = ranks.gather([layout, first, _digest(_sampled(parameter) for _, parameter in named)])
    for rank, (other, what, _) in enumerate(reports):
        if other != reports[0][0]:
            raise ConfigError(
                f"rank {rank} has another model than rank 0 ({what}; rank 0: {reports[0][1]}), and one is saved for "
                "all. Where ranks have pipeline stages, give stage= to Checkpointer or FsdpShardCheckpointer, which "
                "says whose state a rank saves"
            )
    return next((rank for rank, (*_, values) in enumerate(reports) if values != reports[0][2]), None)


def _sampled(parameter: torch.Tensor) -> bytes:
    sample = local_part(parameter).detach().reshape(-1)[:SAMPLE]
    return bytes(sample.cpu().clone().view(torch.uint8).numpy())  # a storage that numpy has seen cannot be resized


def _digest(pieces: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()
