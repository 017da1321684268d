"""What `nvidia-smi` knows of the GPU that serves, as series: load, memory, heat, clocks, why they are low, errors.

Read through NVML where nvidia-ml-py is installed and the driver has it; a fact that this GPU does not tell is left out.
Everything is read when somebody scrapes, once a second at most.
"""

from __future__ import annotations

import contextlib
import importlib
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

__all__ = ["GpuFacts", "gpu_facts"]

_KEPT_S = 1.0
_THROTTLES = {
    "idle": 0x1,
    "clocks_setting": 0x2,
    "power_cap": 0x4,
    "hw_slowdown": 0x8,
    "sync_boost": 0x10,
    "sw_thermal": 0x20,
    "hw_thermal": 0x40,
    "hw_power_brake": 0x80,
}
"""Bits of NVML's reasons why clocks are not higher."""


def gpu_facts(uuid: str, nvml: Any = None) -> GpuFacts | str:
    """Of the GPU with this UUID ("GPU-..."), or why nothing is known.  nvml: the module pynvml, None = the one
    installed."""
    try:
        nvml = nvml or importlib.import_module("pynvml")
    except ImportError:
        return "nvidia-ml-py is not installed: pip install nvidia-ml-py"
    try:
        nvml.nvmlInit()
        return GpuFacts(nvml, nvml.nvmlDeviceGetHandleByUUID(uuid))
    except nvml.NVMLError as e:
        return f"NVML: {e}"


class GpuFacts(Collector):
    """Series of one GPU."""

    def __init__(self, nvml: Any, handle: Any, clock: Callable[[], float] = time.monotonic) -> None:
        self._nvml, self._handle, self._clock = nvml, handle, clock
        self._lock = threading.Lock()
        self._read_s = float("-inf")
        self._last: list[Metric] = []
        self._xids: dict[int, int] = {}
        self._events: Any = None
        with contextlib.suppress(nvml.NVMLError):  # as far as the driver tells: not in every container
            events = nvml.nvmlEventSetCreate()
            nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, events)
            self._events = events

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        with self._lock:
            now_s = self._clock()
            if now_s - self._read_s >= _KEPT_S:
                self._last, self._read_s = list(self._read()), now_s
            return self._last

    def _read(self) -> Iterable[Metric]:
        for facts in (
            self._load,
            self._memory,
            self._temperature,
            self._power,
            self._clocks,
            self._throttled,
            self._ecc,
        ):
            with contextlib.suppress(self._nvml.NVMLError):
                yield facts()
        if self._events is not None:
            yield self._xid()

    def _load(self) -> Metric:
        u = self._nvml.nvmlDeviceGetUtilizationRates(self._handle)
        text = "Part of the last second in which a kernel ran, or memory was read or written."
        return _gauge("expertd_gpu_utilization_ratio", text, "of", {"compute": u.gpu / 100, "memory": u.memory / 100})

    def _memory(self) -> Metric:
        m = self._nvml.nvmlDeviceGetMemoryInfo(self._handle)
        text = "The GPU's memory, of all processes."
        return _gauge("expertd_gpu_memory_bytes", text, "what", {"total": m.total, "used": m.used, "free": m.free})

    def _temperature(self) -> Metric:
        celsius = self._nvml.nvmlDeviceGetTemperature(self._handle, self._nvml.NVML_TEMPERATURE_GPU)
        return _gauge("expertd_gpu_temperature_celsius", "The GPU's temperature.", "", {"": celsius})

    def _power(self) -> Metric:
        watts = self._nvml.nvmlDeviceGetPowerUsage(self._handle) / 1000
        return _gauge("expertd_gpu_power_watts", "What the GPU takes.", "", {"": watts})

    def _clocks(self) -> Metric:
        hertz = {
            "sm": self._nvml.nvmlDeviceGetClockInfo(self._handle, self._nvml.NVML_CLOCK_SM) * 1e6,
            "memory": self._nvml.nvmlDeviceGetClockInfo(self._handle, self._nvml.NVML_CLOCK_MEM) * 1e6,
        }
        return _gauge("expertd_gpu_clock_hertz", "The GPU's clocks now.", "of", hertz)

    def _throttled(self) -> Metric:
        mask = self._nvml.nvmlDeviceGetCurrentClocksThrottleReasons(self._handle)
        reasons = {name: 1 if mask & bit else 0 for name, bit in _THROTTLES.items()}
        return _gauge("expertd_gpu_throttled", "1: this is why the clocks are not higher.", "reason", reasons)

    def _ecc(self) -> Metric:
        n = self._nvml
        kinds = {"corrected": n.NVML_MEMORY_ERROR_TYPE_CORRECTED, "uncorrected": n.NVML_MEMORY_ERROR_TYPE_UNCORRECTED}
        family = CounterMetricFamily("expertd_gpu_ecc_errors", "Errors of the memory.", labels=("kind",))
        for name, kind in kinds.items():
            family.add_metric((name,), n.nvmlDeviceGetTotalEccErrors(self._handle, kind, n.NVML_VOLATILE_ECC))
        return family

    def _xid(self) -> Metric:
        while True:
            try:
                event = self._nvml.nvmlEventSetWait(self._events, 0)
            except self._nvml.NVMLError:  # the time is over: there is none
                break
            self._xids[int(event.eventData)] = self._xids.get(int(event.eventData), 0) + 1
        text = "Critical errors of the GPU since the server looks, by NVIDIA's number."
        family = CounterMetricFamily("expertd_gpu_xid_errors", text, labels=("xid",))
        for number, n in self._xids.items():
            family.add_metric((str(number),), n)
        return family


def _gauge(name: str, text: str, label: str, values: dict[str, Any]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=(label,) if label else ())
    for key, value in values.items():
        family.add_metric((key,) if label else (), value)
    return family
