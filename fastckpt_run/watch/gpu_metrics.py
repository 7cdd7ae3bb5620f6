"""Metrics of this host's GPUs, by NVIDIA's management library, where there are some."""

import logging
from collections.abc import Iterator
from typing import Any

from fastckpt_run.watch.metric_values import MetricValues

logger = logging.getLogger("fastckpt.launcher")

_Value = tuple[str, float, tuple[str, ...]]


class GpuMetrics:
    """Reads GPUs through nvidia-ml-py (extra ``watch``); without the package, a driver or a GPU there are no values.

    A value that a GPU does not give, such as one of a MIG instance, is left out. A driver that hangs keeps the caller.

    Attributes:
        why_none: Reason why there are no values; empty if there are some.
    """

    def __init__(self) -> None:
        self.why_none = "nobody has looked for GPUs yet"
        self._library: Any = None
        self._handles: list[tuple[str, Any]] = []

    def collect(self) -> MetricValues:
        """The values of all GPUs; looks for them until there are some."""
        found = MetricValues()
        if not self._handles and not self._open():
            return found
        for gpu, handle in self._handles:
            for read in (self._utilization, self._memory, self._temperature):
                try:
                    for name, value, labels in read(handle):
                        found.add(name, value, gpu, *labels)
                except self._library.NVMLError as error:
                    logger.debug("GPU %s does not give a value: %s", gpu, error)
        return found

    def _open(self) -> bool:
        """Find the GPUs; whether there are some."""
        try:
            import pynvml
        except ImportError:
            self.why_none = "nvidia-ml-py is not installed (pip install 'nvidia-ml-py>=12.535')"
            return False
        try:
            pynvml.nvmlInit()
            count = pynvml.nvmlDeviceGetCount()
            self._handles = [(str(index), pynvml.nvmlDeviceGetHandleByIndex(index)) for index in range(count)]
        except pynvml.NVMLError as error:  # no driver, a container without it, or no right to use it
            self.why_none = f"NVIDIA's driver does not answer: {error}"
            return False
        self._library = pynvml
        self.why_none = "" if self._handles else "the driver knows no GPU"
        return bool(self._handles)

    def _utilization(self, handle: Any) -> Iterator[_Value]:
        yield "gpu_utilization_ratio", self._library.nvmlDeviceGetUtilizationRates(handle).gpu / 100, ()

    def _memory(self, handle: Any) -> Iterator[_Value]:
        memory = self._library.nvmlDeviceGetMemoryInfo(handle)
        yield "gpu_memory_bytes", memory.total - memory.free, ("used",)
        yield "gpu_memory_bytes", memory.free, ("free",)

    def _temperature(self, handle: Any) -> Iterator[_Value]:
        kind = self._library.NVML_TEMPERATURE_GPU
        yield "gpu_temperature_celsius", self._library.nvmlDeviceGetTemperature(handle, kind), ()
