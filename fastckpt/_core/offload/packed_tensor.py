"""Objects that autograd keeps in place of tensors: each knows the version at which its tensor was saved."""

import torch

from fastckpt._core.offload.forward_pass import Occurrence
from fastckpt._core.offload.saved_storage import SavedStorage, ViewLayout
from fastckpt._core.torch_private.tensors import version_of

NOTICED = "fastckpt.offload noticed it, as autograd does without offloading"
REMEDY = 'Do not change it in place before the backward, or give ActivationOffload(..., consistency="copy").'
NOT_COPIED = "Do not change it in place before the backward, as optimizer.step() changes weights."
"""The remedy for tensors that consistency="copy" does not copy."""


class LeftTensor:
    """A tensor that stays as it is: a weight, a small one, one of an unknown class."""

    __slots__ = ("origin", "remedy", "tensor", "version")

    def __init__(self, tensor: torch.Tensor, kept: torch.Tensor, remedy: str = REMEDY) -> None:
        """Keep ``kept`` for ``tensor``: it shares memory and version with that, or is a copy."""
        self.tensor = kept
        self.remedy = remedy
        self.version = version_of(kept)
        self.origin = _origin(tensor)

    def check(self) -> None:
        """Raise autograd's error if the tensor was changed in place."""
        if version_of(self.tensor) != self.version:
            now = version_of(self.tensor)
            raise _changed(self.tensor.type(), self.tensor.shape, self.origin, (self.version, now), self.remedy)


class PackedTensor:
    """A tensor whose bytes are those of a `SavedStorage`.

    Its probe shares the version counter of the tensor, and no memory. So an in-place change is noticed whenever it
    happened before the unpack, as autograd does it. A check right after the copy alone would miss an operation that
    runs meanwhile, without the GIL: it raises the version when it has written. Unpacked tensors share the counter,
    too: a backward may write to one, and tensors unpacked after that may be in the same memory.
    """

    __slots__ = ("at", "dtype", "layout", "origin", "probe", "saved", "version")

    def __init__(self, tensor: torch.Tensor, saved: SavedStorage, at: Occurrence) -> None:
        self.saved = saved
        self.at = at
        self.dtype = tensor.dtype
        self.layout = ViewLayout(int(tensor.storage_offset()) * tensor.element_size(), tensor.shape, tensor.stride())
        self.origin = _origin(tensor)
        # A copy has a counter of its own: nobody has written to it when it is made.
        self.version = version_of(tensor) if saved.versions is None else 0
        self.probe = (tensor if saved.versions is None else saved.versions).detach()
        self.probe.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)

    def check(self) -> None:
        """Raise autograd's error if the tensor was changed in place."""
        if version_of(self.probe) != self.version:
            now = version_of(self.probe)
            remedy = REMEDY if self.saved.versions is None else NOT_COPIED
            raise _changed(self.probe.type(), self.layout.shape, self.origin, (self.version, now), remedy)

    def tensor(self) -> torch.Tensor:
        """The tensor; its bytes must be in memory."""
        found = self.probe.detach()
        found.data = self.saved.view(self.dtype, self.layout)
        return found


def _origin(tensor: torch.Tensor) -> tuple[str, int] | None:
    """The operation that made a tensor, and which of its outputs it is; the node itself would keep its graph alive."""
    node = tensor.grad_fn
    return (node.name(), tensor.output_nr) if node is not None else None


def _changed(
    kind: str, shape: torch.Size, origin: tuple[str, int] | None, versions: tuple[int, int], remedy: str
) -> RuntimeError:
    saved, found = versions
    made = f", which is output {origin[1]} of {origin[0].removesuffix('Backward0')}," if origin else ""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{kind} {list(shape)}]{made} is at version {found}; expected version {saved} instead. {NOTICED}. {remedy}"
    )
