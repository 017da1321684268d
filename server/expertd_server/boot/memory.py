"""The plan of memory: what a server will take, told from sizes before anything is loaded, and whether that fits.

    plan = plan_memory(config, assignments, device kind, ...)    pure
    require_room(plan, where, free)                              BootError with what would fit

On an accelerator the parts are device memory and there is host memory beside it; on a CPU all of it is host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

from expertd.common.ranges import format_ranges
from expertd_kernels.oracle.devices import named_device
from expertd_server.boot.assignment import Assignment, BootError, WrongOptionError
from expertd_server.config.serve import ServeConfig
from expertd_server.engine.sizes import (
    BATCH_SLOTS,
    MOST_OTHERS,
    MOST_POOLS,
    POOL_BYTES,
    batch_slot_bytes,
    batch_slot_routes,
    graph_count,
    padded,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# Why it is so: decision 72 in DECISIONS.md.
__all__ = [
    "MemoryPlan",
    "by_site",
    "device_bytes",
    "fits_into",
    "free_bytes",
    "give_back",
    "hold",
    "host_text",
    "largest",
    "memory_json",
    "memory_text",
    "most_that_fits",
    "plan_memory",
    "planned_bytes",
    "require_room",
    "settle",
    "site_config",
]

GIB = 1 << 30
CONTEXT_BYTES = {"cuda": 616 << 20, "rocm": 700 << 20, "xpu": 500 << 20, "cpu": 512 << 20}
"""Of an accelerator's driver for a process that computes there: context (on NVIDIA after stacks.py), compiled kernels,
libraries' workspaces.  Of a CPU's process without weights: interpreter, torch, requests under way."""
BOOT_BYTES = {"cuda": 300 << 20}
"""What else a boot takes there until it ends: stacks (stacks.py), cuBLAS's workspaces for the reference, blocks of the
allocator.  210 MiB for Qwen3-30B-A3B, 290 for 20 layers of DeepSeek-V3 (H200)."""
_ALIGNMENT = 512
GRAPH_BYTES = 64 << 10
"""Of a captured graph of a layer's launches: 58 to 60 KiB in the mean of a thousand and two thousand (H200)."""
TABLE_BYTES = 8 * 8 + 8
"""Of a row in a batch's table and among its verdicts, in pinned memory (expertd_kernels/backends/gather/table.py)."""


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes.

    weights   packed, of all layers; scratch: of the largest call; buffers: inputs and outputs of batches under way
    graphs    captured calls, `graph_count` of them once every size has come
    context   of the driver, or of the process on a CPU; most of it is there when the plan is made
    mapped    whether the weights are pages of files, which the kernel may drop and other servers share
    loading   beside the weights loaded so far, while a layer is packed
    pinned    host memory that the accelerator copies from; staging: host memory while layers are read
    limit     that the user set, 0 = none

    Taken as they come, in none of the above and not asked for at the boot.  Where no room is left, a session is refused
    with its reason, and its messages travel inline; a call is launched without a graph.

    shared    most shared memory of callers on this host, pinned where the device is an NVIDIA GPU
    pools     most memory of the device for callers on other GPUs of this host
    others    most memory of graphs of calls that are not known at the boot: other numbers of routes a token

    Of a layer that devices share all of these are sums.

    sites     (name, plan) of each device that holds something; () = there is one
    """

    kind: str
    weights: int
    scratch: int
    buffers: int
    graphs: int
    graph_count: int
    context: int
    loading: int
    pinned: int
    staging: int
    limit: int = 0
    mapped: bool = False
    shared: int = 0
    pools: int = 0
    others: int = 0
    sites: tuple[tuple[str, MemoryPlan], ...] = ()

    def of(self, site: str) -> MemoryPlan | None:
        """The plan of a device; None: it holds nothing."""
        return dict(self.sites).get(site)

    @property
    def serving(self) -> int:
        """While it serves."""
        return self.weights + self.scratch + self.buffers + self.graphs + self.context

    @property
    def peak(self) -> int:
        """The most that cannot be dropped: while it serves, or while the last layer is packed."""
        weights = 0 if self.mapped else self.weights
        return weights + self.scratch + self.context + max(self.buffers + self.graphs, self.loading)

    @property
    def host(self) -> dict[str, int]:
        """Of the host's memory, by what it is: what a container's limit has to allow, also of pages that could be
        dropped.  Of an accelerator without the process, whose libraries depend on the machine."""
        if self.kind != "cpu":
            return {"pinned": self.pinned, "layers being read": self.staging}
        layers = {"layers being read": self.loading}
        return {"weights": self.weights, "scratch": self.scratch, "process": self.context} | layers


def plan_memory(config: ServeConfig, assignments: Sequence[Assignment]) -> MemoryPlan:
    """Of what the assignments' chosen backends take; layers without one count nothing."""
    from expertd_kernels.backends.footprint import canonical_bytes, footprint

    if any(a.parts for a in assignments):
        return _sum([(name, plan_memory(own, these)) for name, own, these in by_site(config, assignments)])
    kind = assignments[0].decision.problem.device.kind
    chosen = [(a, a.decision.chosen, a.decision.problem) for a in assignments if a.decision.chosen is not None]
    tokens = padded(config.max_tokens)
    routes = {a.info.layer: {a.info.top_k, *config.warm_routes} for a, _, _ in chosen}
    weights, scratch, canonical = 0, 0, 0
    for a, row, problem in chosen:
        weights += footprint(row.name, problem, tokens).weights_bytes
        for top_k in routes[a.info.layer]:
            scratch = max(scratch, footprint(row.name, replace(problem, top_k=top_k), tokens).scratch_bytes)
        canonical = max(canonical, canonical_bytes(problem))
    shared = config.shm_memory if config.offers_shm else 0
    if kind == "cpu":
        # a layer is read while the one before is packed; and before it is mapped, it lies there packed
        mapped = config.cache is not None
        loading = (3 if mapped else 2) * canonical
        context = CONTEXT_BYTES[kind]
        return MemoryPlan(kind, weights, scratch, 0, 0, 0, context, loading, 0, 0, config.memory_limit, mapped, shared)
    size = 4 if config.compute == "f32" else 2
    hidden = max((a.info.hidden_size for a, _, _ in chosen), default=0)
    most_routes = max(
        (batch_slot_routes(config.max_tokens, a.info.top_k, a.info.num_experts) for a, _, _ in chosen), default=0
    )
    in_place = all(row.in_place for _, row, _ in chosen)
    taken = {a.info.layer: row.takes_e4m3(problem) for a, row, problem in chosen}
    coded = max((a.info.hidden_size for a, _, _ in chosen if taken[a.info.layer]), default=0)
    buffers = BATCH_SLOTS * batch_slot_bytes(tokens, hidden, most_routes, size, in_place, coded)
    captured = [
        (a.info.hidden_size, routes[a.info.layer], taken[a.info.layer])
        for a, row, _ in chosen
        if row.capturable and kind == "cuda"
    ]
    graphs = graph_count(captured, config.max_tokens)
    return MemoryPlan(
        kind,
        weights,
        scratch,
        buffers,
        graphs * GRAPH_BYTES,
        graphs,
        CONTEXT_BYTES[kind],
        2 * canonical + (BOOT_BYTES.get(kind, 0) if chosen else 0),
        BATCH_SLOTS * batch_slot_bytes(tokens, hidden, most_routes, size, False)
        + (BATCH_SLOTS * tokens * TABLE_BYTES if chosen else 0),
        2 * canonical,
        config.memory_limit,
        shared=shared,
        pools=MOST_POOLS * POOL_BYTES if shared and kind == "cuda" else 0,
        others=MOST_OTHERS * GRAPH_BYTES if graphs else 0,
    )


def site_config(config: ServeConfig, name: str) -> ServeConfig:
    """As of a server with the device `name` alone, with its part of --memory-limit."""
    limited = not _is_cpu(name) or all(map(_is_cpu, config.devices))
    shared = config.shm_memory if name == config.devices[0] else 0
    limit = config.memory_limit if limited else 0
    alone = replace(config, device=name, split=None, routing_stats=None, move_rate=0, test_part_us=None)
    return replace(alone, memory_limit=limit, shm_memory=shared)


def _is_cpu(name: str) -> bool:
    """Of a device of this machine, or of a product that `expertd explain` is asked about."""
    kind = name.partition(":")[0]
    named = named_device(kind)
    return kind == "cpu" or (named is not None and named.kind == "cpu")


def by_site(
    config: ServeConfig, assignments: Sequence[Assignment]
) -> list[tuple[str, ServeConfig, Sequence[Assignment]]]:
    """(name, its configuration, what it takes) of each device that takes something."""
    if not any(a.parts for a in assignments):
        return [(config.device, config, assignments)]
    out: list[tuple[str, ServeConfig, Sequence[Assignment]]] = []
    for site, name in enumerate(config.devices):
        these = [part for a in assignments for number, part in a.parts if number == site]
        if these:
            out.append((name, site_config(config, name), these))
    return out


def _sum(sites: Sequence[tuple[str, MemoryPlan]]) -> MemoryPlan:
    plans = [plan for _, plan in sites]
    names = (f.name for f in fields(MemoryPlan) if f.name not in ("kind", "limit", "mapped", "sites"))
    total = {name: sum(getattr(plan, name) for plan in plans) for name in names}
    limit = sum(p.limit for p in plans) if all(p.limit for p in plans) else 0
    mapped = any(p.mapped for p in plans)
    return MemoryPlan(plans[0].kind, **total, limit=limit, mapped=mapped, sites=tuple(sites))


def fits_into(config: ServeConfig, assignments: Sequence[Assignment], free: int) -> bool:
    """Whether one device takes these.  free: see require_room()."""
    if not assignments:
        return False
    plan = plan_memory(config, assignments)
    room = _room(plan, free)
    return room is None or plan.peak <= room[0]


def most_that_fits(held: int, assignments: Sequence[Assignment], fits: Callable[[Sequence[Assignment]], bool]) -> int:
    """The most experts of each layer, up to `held`, of which fits() says yes."""
    return largest(held, lambda n: fits([_fewer(a, n) for a in assignments]))


def free_bytes(device: torch.device) -> int:
    """Free memory of the device, or on a CPU what this process may still allocate; 0 where it cannot be told."""
    import torch

    from expertd_kernels.native.memory import available_bytes

    if device.type == "cpu":
        return available_bytes()
    try:
        return int(getattr(torch, device.type).mem_get_info(device)[0])
    except (AttributeError, RuntimeError):
        return 0


def require_room(
    plan: MemoryPlan,
    config: ServeConfig,
    assignments: Sequence[Assignment],
    free: int,
    staging_free: int = 0,
    advise: bool = True,
) -> None:
    """BootError where the plan needs more than is free or than --memory-limit, with the most that would fit.  free: of
    the device, with the driver's context and this process already there; staging_free: of the host.  0: not known.
    advise: whether the most that would fit is said."""
    room = _room(plan, free)
    if room is not None and plan.peak > room[0]:
        wrong = WrongOptionError if room[0] == plan.limit else BootError
        advice = f": {_what_fits(plan, config, assignments, free)}" if advise else ""
        raise wrong(f"{_needs(plan)}, and {room[1]}{advice}")
    if plan.kind != "cpu" and staging_free and plan.pinned + plan.staging > staging_free:
        raise BootError(
            f"loading takes {_gib(plan.pinned + plan.staging)} GiB of host memory, of which {_gib(plan.pinned)} stay"
            f" pinned, and {_gib(staging_free)} GiB are free: serve fewer experts of each layer (--shard, --experts)"
        )


def _room(plan: MemoryPlan, free: int) -> tuple[int, str] | None:
    """(bytes that the plan may take, the same in words); None where nothing is known."""
    there = free + plan.context
    if plan.limit and not (free and there < plan.limit):
        less = f", {(plan.peak - plan.limit) / (1 << 20):,.1f} MiB less" if _gib(plan.peak) == _gib(plan.limit) else ""
        allowed = f"{_gib(plan.limit)} GiB" if plan.limit >= GIB // 10 else f"{plan.limit / (1 << 20):,.1f} MiB"
        return plan.limit, f"--memory-limit allows {allowed}{less}"
    return (there, f"{_gib(free)} GiB are free") if free else None


def _needs(plan: MemoryPlan) -> str:
    """Which parts make the peak."""
    where = "host" if plan.kind == "cpu" else "device"
    if plan.mapped or plan.peak > plan.serving:
        weights = "" if plan.mapped else f"weights {_gib(plan.weights)}, "
        parts = f"{weights}scratch {_gib(plan.scratch)}, packing a layer {_gib(plan.loading)}"
        return f"loading takes {_gib(plan.peak)} GiB of {where} memory ({parts}, context {_gib(plan.context)})"
    return f"serving takes {_gib(plan.serving)} GiB of {where} memory ({_parts(plan)})"


def _parts(plan: MemoryPlan) -> str:
    names = {"weights": "weights (mapped)" if plan.mapped else "weights", "scratch": "scratch", "buffers": "buffers",
             "graphs": "graphs", "context": "process" if plan.kind == "cpu" else "context"}  # fmt: skip
    return ", ".join(f"{word} {_gib(getattr(plan, name))}" for name, word in names.items() if getattr(plan, name))


def _what_fits(plan: MemoryPlan, config: ServeConfig, assignments: Sequence[Assignment], free: int) -> str:
    """The largest number of layers, and the largest number of experts of each layer, that would."""

    held = min(len(a.held) for a in assignments)
    layers = largest(len(assignments), lambda n: fits_into(config, assignments[:n], free))
    experts = most_that_fits(held, assignments, lambda these: fits_into(config, these, free))
    options = []
    if layers:
        numbers = format_ranges(a.info.layer for a in assignments[:layers])
        options.append(f"the first {layers} of {len(assignments)} layers would fit (--layers {numbers})")
    if experts:
        shards = -(-held // experts)
        options.append(f"{experts} of {held} experts of each layer would fit (--shard 0/{shards})")
    if not options and plan.limit and plan.context >= plan.limit:
        whose = "process" if plan.kind == "cpu" else "driver"
        return f"the {whose} alone takes {_gib(plan.context)} GiB: allow more (--memory-limit)"
    if not options:
        return "not even one layer would fit; lower --max-tokens, or use a scheme with fewer bits (--quantize)"
    return "; ".join(options)


def _fewer(a: Assignment, experts: int) -> Assignment:
    problem = replace(a.decision.problem, num_experts=experts)
    return replace(a, held=a.held[:experts], decision=replace(a.decision, problem=problem))


def largest(upper: int, fits: Callable[[int], bool]) -> int:
    """The largest n <= upper that fits, 0 if none does; what fits n fits less."""
    low, high = 0, upper
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def hold(plan: MemoryPlan, device: torch.device) -> None:
    """Take the scratch of the stream that is current, before graphs are captured there, and let this process allocate
    no more than the limit."""
    import torch

    from expertd_kernels.backends.scratch import reserve

    if device.type == "cpu":
        return  # the kernels' own memory grows to what it needs, once for the process
    if plan.limit and device.type == "cuda":
        total = torch.cuda.mem_get_info(device)[1]
        torch.cuda.set_per_process_memory_fraction(min(1.0, max(0, plan.limit - plan.context) / total), device)
    reserve(device, plan.scratch)


def settle(tensors: dict[str, Tensor], device: torch.device) -> None:
    """Move those on the device together into one block of memory that is theirs.  Where packing put them torch's
    allocator keeps whole blocks from the device for good: 224 MiB for scales of 28, 20 for any of 1 to 10."""
    import torch

    give_back(device)
    here = {name: t for name, t in tensors.items() if t.device.type == device.type}
    sizes = [-(-t.nbytes // _ALIGNMENT) * _ALIGNMENT for t in here.values()]
    block, at = torch.empty(sum(sizes), dtype=torch.uint8, device=device), 0
    for (name, t), size in zip(here.items(), sizes, strict=True):
        tensors[name] = block[at : at + t.nbytes].view(t.dtype).view(t.shape).copy_(t)
        at += size


def give_back(device: torch.device) -> None:
    """To the device what torch keeps of memory that packing and checking a layer took: others may share it.

    On NVIDIA cuBLAS's workspaces, too, 32 MiB and more for each stream and thread on which the reference was computed.
    No captured graph has one: rows that are captured call no cuBLAS."""
    import torch

    if device.type == "cpu":
        return
    drop_workspaces = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)  # torch's notes on CUDA name it
    if device.type == "cuda" and drop_workspaces is not None:
        drop_workspaces()
    getattr(torch, device.type).empty_cache()


def device_bytes(device: torch.device) -> dict[str, int]:
    """What an accelerator's memory is used for now.  free: says the driver; reserved: by torch's allocator in this
    process; allocated: of that, by tensors."""
    import torch

    api = getattr(torch, device.type)
    return {
        "free": free_bytes(device),
        "reserved": int(api.memory_reserved(device)),
        "allocated": int(api.memory_allocated(device)),
    }


def planned_bytes(plan: MemoryPlan) -> dict[str, int]:
    """What the plan counts, by what it is."""
    names = ("weights", "scratch", "buffers", "graphs", "context", "pinned", "shared", "pools")
    return {name: getattr(plan, name) for name in names}


def memory_text(plan: MemoryPlan, free: int) -> list[str]:
    """For people.  free: 0 = not known."""
    where = "host memory" if plan.kind == "cpu" else "device memory"
    known = f", free {_gib(free)}" if free else ""
    limit = f", limit {_gib(plan.limit)}" if plan.limit else ""
    count = f"; at most {plan.graph_count} graphs" if plan.graph_count else ""
    lines = [f"{where} in GiB: {_parts(plan)}; total {_gib(plan.serving)}{limit}{known}{count}"]
    if plan.kind == "cpu":
        lines.append(f"peak while loading in GiB: {_gib(plan.peak)}")
    else:
        lines.append(
            f"peak while loading in GiB: {_gib(plan.peak)} of device memory; of host memory {_gib(plan.pinned)} pinned"
            f" and {_gib(plan.staging)} for layers that are being read"
        )
    if plan.shared:
        pinned = "pinned " if plan.pools else ""
        pools = f" and {_gib(plan.pools)} of device memory for clients on other GPUs" if plan.pools else ""
        lines.append(
            f"additional memory for clients on this host, allocated when they connect, in GiB: at most"
            f" {_gib(plan.shared)} of {pinned}shared memory{pools}"
        )
    if plan.others:
        lines.append(
            "additional memory for other numbers of routes per token, allocated when they are used, in GiB: at most"
            f" {_gib(plan.others)} for graphs"
        )
    return lines


def host_text(plans: Sequence[MemoryPlan]) -> str:
    """For people who set a container's limit.  plans: of all devices of the process."""
    unknown = any(plan.kind != "cpu" for plan in plans)
    parts: dict[str, int] = {}
    for plan in plans:
        for name, nbytes in plan.host.items():
            parts[name] = nbytes if name == "process" else parts.get(name, 0) + nbytes
    if unknown:
        parts.pop("process", None)
    words = ", ".join(f"{name} {_gib(nbytes)}" for name, nbytes in parts.items() if nbytes)
    more = " and the process" if unknown else ""
    return f"host memory, as the limit of a container: {_gib(sum(parts.values()))} GiB{more} ({words})"


def memory_json(plan: MemoryPlan, free: int) -> dict[str, int]:
    """Bytes by name."""
    return {
        "weights": plan.weights,
        "scratch": plan.scratch,
        "buffers": plan.buffers,
        "graphs": plan.graphs,
        "context": plan.context,
        "serving": plan.serving,
        "peak": plan.peak,
        "pinned": plan.pinned,
        "staging": plan.staging,
        "host": sum(plan.host.values()),
        "limit": plan.limit,
        "shared": plan.shared,
        "pools": plan.pools,
        "others": plan.others,
        "free": free,
    }


def _gib(nbytes: int) -> str:
    return f"{nbytes / GIB:.2f}"
