"""Hooks on the models of a worker that see when it arrives at collectives, and when it has waited in them.

DistributedDataParallel starts its reductions in the backward, and waits for them in a callback that autograd calls when
the backward's last node has run. Callbacks run in the order in which they were registered: ours, registered when the
backward begins, runs before that one, and registers another that runs after it. So neither a hook on each parameter nor
the one communication hook is needed. In the forward there is a wait if buffers are broadcast: between the forward hooks
of the wrapper and those of the module in it.

``fully_shard`` gathers parameters in a hook before a module's forward and in one before its backward. It reduces
gradients in a node of autograd between the module's inputs and those given to it. Our hooks are around each of them.

Users script, export and save whole the module in a wrapper: outside of a forward it has no hook. Where a hook would be
copied or pickled with a model, `contextlib.nullcontext` takes its place. That does nothing, and exists without this
library.
"""

import gc
import logging
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from fastckpt._core.memory.step_clock import AWAY, BACKWARD, BETWEEN, DATA, FORWARD, WAIT, StepClock, running
from fastckpt._core.torch_private.tensors import (
    backward_now,
    compile_none_of,
    is_compiled_in_place,
    untraced,
    when_backward_ends,
)

logger = logging.getLogger("fastckpt")

_DEEPEST = 3
"""Levels of containers in which a tensor is looked for."""


class ArrivalHooks:
    """The hooks on all models of this process, until `close`."""

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []

    def __bool__(self) -> bool:
        return bool(self._handles)

    def install(self, models: Iterable[torch.nn.Module]) -> None:
        """Install them on these models, wrappers or parts; those without known collectives get none."""
        try:
            self._install(model for model in models if not is_compiled_in_place(model))
        except Exception as error:  # noqa: BLE001 (a watch never ends its job)
            self.close()
            logger.warning("waits in collectives are not measured: %s", error)

    def _install(self, models: Iterable[torch.nn.Module]) -> None:
        compile_none_of("fastckpt")
        models = list(models)
        for model in models:
            if isinstance(model, DistributedDataParallel):
                self._install_replicated(model)
        sharded = [model for model in models if _is_sharded(model)]
        inner = {id(part) for model in sharded for part in model.modules() if part is not model}
        for model in sharded:
            self._install_sharded(model, is_root=id(model) not in inner)

    def close(self) -> None:
        """Remove them."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        _forget_buffers()

    def _install_replicated(self, model: DistributedDataParallel) -> None:
        broadcasts = model.broadcast_buffers and any(True for _ in model.module.buffers())
        if broadcasts and not is_compiled_in_place(model.module):
            self._handles.append(model.register_forward_pre_hook(_wait_for_buffers))
        else:
            self._handles.append(model.register_forward_pre_hook(_begin_forward))
        self._handles.append(model.register_forward_hook(_await_backward))
        learning = [each for each in model.module.parameters() if each.requires_grad]
        add: Any = learning[0].register_post_accumulate_grad_hook  # DDP refuses a model without any
        self._handles.append(add(_see_last_gradient))

    def _install_sharded(self, model: torch.nn.Module, *, is_root: bool) -> None:
        first = _wait_in_forward if is_root else _wait_inside
        self._handles += [
            model.register_forward_pre_hook(first, prepend=True),
            model.register_forward_pre_hook(_end_gather),
            model.register_forward_hook(_await_gather, prepend=True),
            model.register_forward_hook(_await_end_of_gather),
        ]


def models_in_memory() -> list[torch.nn.Module]:
    """All models of this process that have collectives of their own: it takes some 0.1 us for each object there is."""
    # By type, which runs no code of an object: some answer questions about their class by loading a library.
    kinds = dict[type, bool]()

    def fits(kind: type) -> bool:
        if kind not in kinds:
            kinds[kind] = issubclass(kind, DistributedDataParallel) or _is_sharded_type(kind)
        return kinds[kind]

    return [each for each in gc.get_objects() if fits(type(each))]


def _is_sharded_type(kind: type) -> bool:
    # By name: importing fully_shard takes long, and a job that has such a model has imported it.
    return issubclass(kind, torch.nn.Module) and any(
        base.__name__ == "FSDPModule" and base.__module__.startswith("torch.") for base in kind.__mro__
    )


def _is_sharded(model: torch.nn.Module) -> bool:
    return _is_sharded_type(type(model))


def _first_tensor(found: object, depth: int = _DEEPEST) -> torch.Tensor | None:
    """The first tensor in containers for which a gradient will be computed."""
    if isinstance(found, torch.Tensor):
        return found if found.grad_fn is not None else None
    if not depth:
        return None
    inside: Iterable[object] = ()
    if isinstance(found, dict):
        inside = found.values()
    elif isinstance(found, list | tuple):
        inside = found
    elif (fields := getattr(type(found), "__dataclass_fields__", None)) is not None:
        inside = (getattr(found, name, None) for name in fields)  # one with slots has no dictionary
    return next((tensor for each in inside if (tensor := _first_tensor(each, depth - 1)) is not None), None)


def _on_gradient(tensor: torch.Tensor, hook: Callable[..., None]) -> RemovableHandle:
    """Have a hook called when the gradient of a tensor is known."""
    handle: RemovableHandle = tensor.register_hook(hook)  # type: ignore[no-untyped-call]
    return handle


# --- the hooks


class _Seen:
    """Observations of the first of two hooks around one of torch's, for the second; and the number of the backward."""

    input: torch.Tensor | None = None
    output: torch.Tensor | None = None
    handle: RemovableHandle | None = None
    buffers: RemovableHandle | None = None
    backward = -1


_seen = _Seen()


class _Hook:
    """A hook that gets the clock, and torch's arguments, the module first; a failure of it ends the watch alone."""

    __torch_unserializable__ = True
    """True: torch leaves the hook out, without a warning, when it saves a tensor that has it."""

    def __init__(self, hook: Callable[[StepClock, Any, Any, Any], None]) -> None:
        self._hook = hook

    @untraced
    def __call__(self, first: Any = None, second: Any = None, third: Any = None) -> None:
        """Call it, if there is a clock."""
        clock = running.clock
        if clock is not None:
            try:
                self._hook(clock, first, second, third)
            except Exception as error:  # noqa: BLE001 (a watch never ends its job)
                running.clock = None
                logger.warning("slow ranks are not detected any more: %s", error)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[object, str]]:
        """Copy, or pickle, something that does nothing instead."""
        return getattr, (nullcontext(), "__exit__")


def _watching(hook: Callable[[StepClock, Any, Any], None]) -> _Hook:
    """A hook that needs no module."""
    return _Hook(lambda clock, _, second, third: hook(clock, second, third))


@_watching
def _begin_forward(clock: StepClock, args: Any, _: Any) -> None:
    _open_forward(clock, FORWARD)


@_watching
def _wait_in_forward(clock: StepClock, args: Any, _: Any) -> None:
    _open_forward(clock, WAIT)
    _seen.input = _first_tensor(args)


@_Hook
def _wait_for_buffers(clock: StepClock, model: Any, args: Any, _: Any) -> None:
    _forget_buffers()  # of a forward that failed before it
    _open_forward(clock, WAIT)
    if clock.part == WAIT:
        _seen.buffers = model.module.register_forward_pre_hook(_end_wait_for_buffers)


@_Hook
def _end_wait_for_buffers(clock: StepClock, model: Any, args: Any, _: Any) -> None:
    _forget_buffers()
    if clock.part == WAIT:
        clock.enter(BACKWARD if clock.in_backward else FORWARD)


@_watching
def _wait_inside(clock: StepClock, args: Any, _: Any) -> None:
    if clock.part != AWAY:
        clock.enter(WAIT)
        _seen.input = _first_tensor(args)


@_watching
def _end_wait(clock: StepClock, _: Any, __: Any) -> None:
    if clock.part == WAIT:
        clock.enter(BACKWARD if clock.in_backward else FORWARD)


@_watching
def _end_gather(clock: StepClock, args: Any, _: Any) -> None:
    given, _seen.input = _seen.input, None
    if clock.part != WAIT:
        return
    taken = None if given is None or clock.in_backward else _first_tensor(args)
    if given is not None and taken is not None and taken is not given:
        # The node between both reduces the gradients of the module.
        _on_gradient(taken, _wait_in_backward)
        _on_gradient(given, _end_wait)
    clock.enter(BACKWARD if clock.in_backward else FORWARD)


@_watching
def _await_backward(clock: StepClock, _: Any, output: Any) -> None:
    if clock.part != AWAY and (tensor := _first_tensor(output)) is not None:
        _on_gradient(tensor, _begin_backward)


@_watching
def _await_gather(clock: StepClock, _: Any, output: Any) -> None:
    if clock.part != AWAY and (tensor := _first_tensor(output)) is not None:
        _seen.output, _seen.handle = tensor, _on_gradient(tensor, _wait_in_backward)


@_watching
def _await_end_of_gather(clock: StepClock, _: Any, output: Any) -> None:
    given, handle, _seen.output, _seen.handle = _seen.output, _seen.handle, None, None
    if given is None or handle is None or (tensor := _first_tensor(output)) is None:
        return
    if tensor is given:
        _on_gradient(tensor, _end_wait)
    else:  # it was cast: the gradient of this one comes before that of the other
        handle.remove()
        _on_gradient(tensor, _begin_backward)


@_watching
def _begin_backward(clock: StepClock, _: Any, __: Any) -> None:
    _open_backward(clock)


@_watching
def _wait_in_backward(clock: StepClock, _: Any, __: Any) -> None:
    _open_backward(clock)
    clock.enter(WAIT)


@_watching
def _arrive(clock: StepClock, _: Any, __: Any) -> None:
    clock.arrive()
    when_backward_ends(_leave)


@_watching
def _leave(clock: StepClock, _: Any, __: Any) -> None:
    clock.end_backward()


@_watching
def _see_last_gradient(clock: StepClock, _: Any, __: Any) -> None:
    if clock.in_backward and backward_now() != _seen.backward:
        when_backward_ends(_arrive_inside)


@_watching
def _arrive_inside(clock: StepClock, _: Any, __: Any) -> None:
    clock.arrive()
    when_backward_ends(_end_wait)


def _forget_buffers() -> None:
    handle, _seen.buffers = _seen.buffers, None
    if handle is not None:
        handle.remove()


def _open_forward(clock: StepClock, part: int) -> None:
    if not torch.is_grad_enabled():
        if clock.part in (BETWEEN, DATA):  # else it is a part of a step, such as a teacher's
            clock.pause()
    elif clock.in_backward:  # activations are computed again
        clock.enter(WAIT if part == WAIT else BACKWARD)
    else:
        clock.begin_forward(part)


def _open_backward(clock: StepClock) -> None:
    if not clock.in_backward:
        clock.in_backward = True
        clock.enter(BACKWARD)
        _seen.backward = backward_now()
        when_backward_ends(_arrive)
