# ruff: noqa: N802, N815 - names of NVML
"""What NVML tells of a GPU, by a driver that is played."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry

from expertd_server.views.gpu_metrics import GpuFacts, gpu_facts


class NvmlError(Exception):
    pass


class Nvml:
    """The functions of pynvml that are asked.  missing: those that this GPU does not have."""

    NVMLError = NvmlError
    NVML_TEMPERATURE_GPU, NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_VOLATILE_ECC = 0, 1, 2, 0
    NVML_MEMORY_ERROR_TYPE_CORRECTED, NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvmlEventTypeXidCriticalError = 0, 1, 8

    def __init__(self, missing=()) -> None:
        self.missing, self.reads, self.xids = set(missing), 0, []

    def _ask(self, name, value):
        if name in self.missing:
            raise NvmlError(f"{name}: Not Supported")
        return value

    def nvmlInit(self):
        self._ask("init", None)

    def nvmlDeviceGetHandleByUUID(self, uuid):
        if uuid != "GPU-1":
            raise NvmlError("Not Found")
        return "handle"

    def nvmlDeviceGetUtilizationRates(self, handle):
        assert handle == "handle"
        self.reads += 1
        return self._ask("load", SimpleNamespace(gpu=75, memory=50))

    def nvmlDeviceGetMemoryInfo(self, _):
        return self._ask("memory", SimpleNamespace(total=100, used=60, free=40))

    def nvmlDeviceGetTemperature(self, _, sensor):
        return self._ask("temperature", 61)

    def nvmlDeviceGetPowerUsage(self, _):
        return self._ask("power", 650_500)

    def nvmlDeviceGetClockInfo(self, _, which):
        return self._ask("clocks", {1: 1980, 2: 3201}[which])

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, _):
        return self._ask("throttled", 0x4 | 0x20)

    def nvmlDeviceGetTotalEccErrors(self, _, kind, counter):
        return self._ask("ecc", {0: 3, 1: 1}[kind])

    def nvmlEventSetCreate(self):
        return self._ask("events", "events")

    def nvmlDeviceRegisterEvents(self, handle, kinds, events):
        assert (kinds, events) == (8, "events")

    def nvmlEventSetWait(self, events, timeout_ms):
        if not self.xids:
            raise NvmlError("Timeout")
        return SimpleNamespace(eventData=self.xids.pop())


def values(facts: GpuFacts):
    """value(name, **labels), and all names."""
    registry = CollectorRegistry()
    registry.register(facts)
    names = {s.name for m in registry.collect() for s in m.samples}
    return (lambda name, **labels: registry.get_sample_value(f"expertd_gpu_{name}", labels)), names


def test_every_fact_is_a_series():
    nvml = Nvml()
    nvml.xids = [79, 31, 79]
    facts = gpu_facts("GPU-1", nvml)
    assert isinstance(facts, GpuFacts)
    value, _ = values(facts)
    assert value("utilization_ratio", of="compute") == 0.75
    assert value("memory_bytes", what="used") == 60
    assert value("temperature_celsius") == 61
    assert value("power_watts") == 650.5
    assert value("clock_hertz", of="sm") == 1.98e9
    assert (value("throttled", reason="power_cap"), value("throttled", reason="hw_slowdown")) == (1, 0)
    assert value("ecc_errors_total", kind="uncorrected") == 1
    assert (value("xid_errors_total", xid="79"), value("xid_errors_total", xid="31")) == (2, 1)


@pytest.mark.parametrize("missing", ["load", "memory", "temperature", "power", "clocks", "throttled", "ecc", "events"])
def test_what_a_gpu_does_not_tell_is_left_out_and_nothing_else(missing):
    nvml, full = Nvml([missing]), Nvml()
    nvml.xids = [79]
    full.xids = [79]
    facts, all_facts = gpu_facts("GPU-1", nvml), gpu_facts("GPU-1", full)
    assert isinstance(facts, GpuFacts)
    assert isinstance(all_facts, GpuFacts)
    assert len(values(all_facts)[1] - values(facts)[1]) == 1


def test_the_driver_is_asked_once_a_second():
    nvml, now_s = Nvml(), 10.0
    facts = GpuFacts(nvml, "handle", lambda: now_s)
    for _ in range(3):
        list(facts.collect())
    assert nvml.reads == 1
    now_s = 11.1
    list(facts.collect())
    assert nvml.reads == 2


def test_no_driver_and_no_such_gpu_are_sentences():
    assert gpu_facts("GPU-1", Nvml(["init"])) == "NVML: init: Not Supported"
    assert gpu_facts("GPU-2", Nvml()) == "NVML: Not Found"
