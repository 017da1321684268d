"""Layers whose experts are shared among devices and the host's processors: csrc/joined.cpp computes a batch of one.

    space = JoinedSpace(sites)                    what all such layers of a server use in turns
    experts = join(space, parts, held, ...)       one layer, for an engine that computes on the host

Every part gets the whole batch, with the routes of other parts' experts as -1; all parts compute at once, and their
sums are added in f32 and rounded once.  A device's part is brought there and back as the device executor does it
(device.py): collect, experts, deliver and a word, from the third time on as a CUDA graph.
"""

from __future__ import annotations

import ctypes as C
import logging
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from expertd.shm.pool import Pool, PoolError
from expertd_kernels.backends.gather.table import BF16, F32, WORDS, info
from expertd_kernels.common.protocol import Direct, DirectExperts, Experts
from expertd_kernels.oracle.probe import device_fault
from expertd_server.engine.core import library
from expertd_server.engine.executor import CpuExecutor
from expertd_server.engine.executors import graphs_refusal
from expertd_server.engine.graphs import GraphPool, free_now
from expertd_server.engine.plain import compute_stream
from expertd_server.engine.request import Array
from expertd_server.engine.sizes import batch_slot_routes, padded

# Why it is so: decision 175 in DECISIONS.md.
__all__ = ["JoinedExecutor", "JoinedExperts", "JoinedSpace", "Part", "PartTimes", "Site", "join"]

log = logging.getLogger(__name__)

_NO_POOL = "devices share the layers: batches are formed in the host's memory"
_WORTH = 2
"""A size is captured when it has come this often."""


@dataclass(frozen=True, eq=False)
class Site:
    """Where a part computes.

    name    as in --device: "cuda:0", "cpu", "cpu:1"
    node    memory node of the host's processors, None = all, or a device
    stream  of an accelerator; None on the host
    """

    name: str
    device: torch.device
    node: int | None = None
    stream: Any = None

    @classmethod
    def of(cls, name: str, device: torch.device, node: int | None = None) -> Site:
        """With a stream of its own."""
        return cls(name, device, node, compute_stream(device))


class Part(NamedTuple):
    """A part of a layer.

    site        its number
    experts     of its own slots; held: those slots in the layer's, ascending
    capturable  see ServedLayer
    """

    site: int
    experts: Experts
    held: Sequence[int]
    capturable: bool = False


class PartTimes(NamedTuple):
    """Of one site so far."""

    calls: int
    routes: int
    ns: int


class JoinedPart(C.Structure):
    """csrc/joined.h: JoinedPart."""

    _fields_ = [
        *((name, C.c_void_p) for name in ("call", "context", "experts", "slots", "table", "done")),
        *((name, C.c_void_p) for name in ("hidden", "ids", "weights", "out")),
        ("device_slots", C.c_uint64),
        ("stream", C.c_void_p),
        ("rows", C.c_uint64),
        ("routes", C.c_uint64),
    ]


class JoinedSpace:
    """sites: by number; dtype: of hidden states, bf16 or f32; tokens: of the largest batch.  Used by one thread at a
    time."""

    def __init__(self, sites: Sequence[Site], dtype: torch.dtype, tokens: int) -> None:
        self.sites, self.dtype, self.tokens = tuple(sites), dtype, tokens
        self._lib = _library()
        self.address: int = self._lib.expertd_joined_space(len(self.sites))
        self._end = weakref.finalize(self, self._lib.expertd_joined_space_free, self.address)
        self._end.atexit = False
        self._memories: dict[int, _Memory] = {}

    @property
    def accelerators(self) -> list[torch.device]:
        """Those of the sites."""
        return [s.device for s in self.sites if s.device.type != "cpu"]

    @property
    def graph_bytes(self) -> int:
        """Of devices' memory, what captured graphs took."""
        return sum(memory.graph_bytes for memory in self._memories.values())

    def drop_graphs(self) -> None:
        """Drop all that is captured, while nothing computes."""
        for site, memory in self._memories.items():
            for user in tuple(memory.users):
                user.drop_graphs(site)
            memory.graph_bytes = 0

    def times(self) -> list[PartTimes]:
        """Of each site."""
        found = (C.c_uint64 * (3 * len(self.sites)))()
        self._lib.expertd_joined_times(self.address, found)
        return [PartTimes(*found[i : i + 3]) for i in range(0, len(found), 3)]

    def memory(self, site: int, top_k: int, num_experts: int, hidden_size: int) -> _Memory:
        """That of an accelerator, with room for the largest batch of a layer of these sizes."""
        routes = batch_slot_routes(self.tokens, top_k, num_experts)
        memory = self._memories.get(site)
        if memory is None or not memory.holds(routes, hidden_size):
            users: Iterable[JoinedExperts] = () if memory is None else memory.users
            room = (
                (routes, hidden_size)
                if memory is None
                else (max(routes, memory.routes), max(hidden_size, memory.columns))
            )
            memory = self._memories[site] = _memory_of(self.sites[site], padded(self.tokens), *room, self.dtype)
            for user in tuple(users):
                user.move(site, memory)
        return memory


class _Memory:
    """Memory of a device and of the host for a batch's part there; on any device that torch knows.

    users: layers that compute there; graph_bytes: see JoinedSpace
    """

    graph_bytes = 0

    def __init__(self, site: Site, tokens: int, routes: int, columns: int, dtype: torch.dtype) -> None:
        self.site, self.tokens, self.routes, self.columns, self.dtype = site, tokens, routes, columns, dtype
        self.users: weakref.WeakSet[JoinedExperts] = weakref.WeakSet()
        kinds = (tokens * columns, dtype), (routes, torch.int32), (routes, torch.float32), (tokens * columns, dtype)
        pinned = site.device.type != "cpu"
        self.host = [torch.zeros(n, dtype=kind, pin_memory=pinned) for n, kind in kinds]
        self.here = [torch.empty(n, dtype=kind, device=site.device) for n, kind in kinds]

    def holds(self, routes: int, columns: int) -> bool:
        """Whether there is as much room."""
        return routes <= self.routes and columns <= self.columns

    def rows(self, memory: Sequence[Tensor], rows: int, H: int, k: int) -> list[Tensor]:
        """Hidden states [rows, H], ids and weights [rows, k], output [rows, H] of self.host or self.here."""
        return [t[: rows * n].view(rows, n) for t, n in zip(memory, (H, k, k, H), strict=True)]

    def begin(self, part: _DevicePart, batch: tuple[Tensor, Tensor, Tensor], on_input: bool) -> Callable[[], Tensor]:
        """Launch a part of a batch; what is returned waits for it, and gives its sums [M, H] on the host."""
        M, k = batch[1].shape
        if self.site.stream is not None:
            self.site.stream.synchronize()  # a batch that failed half-way may have left its part there
        host, here = self.rows(self.host, M, part.H, k), self.rows(self.here, M, part.H, k)
        for to, t in zip(host, (batch[0], part.mapped(batch[1]), batch[2]), strict=False):
            to.copy_(t)
        with self.streaming():
            for device, t in zip(here[:3], host[:3], strict=True):
                device.copy_(t, non_blocking=True)
            part.experts(*here[:3], router_weight_on_input=on_input, out=here[3])
            host[3].copy_(here[3], non_blocking=True)

        def end() -> Tensor:
            if self.site.stream is not None:
                self.site.stream.synchronize()
            return host[3]

        return end

    def streaming(self) -> Any:
        """On the site's stream."""
        if self.site.stream is None:
            return torch.inference_mode()
        return getattr(torch, self.site.device.type).stream(self.site.stream)


class _GraphMemory(_Memory):
    """Of an NVIDIA GPU: a batch begins at a table in pinned memory and ends with a word there."""

    def __init__(self, site: Site, tokens: int, routes: int, columns: int, dtype: torch.dtype) -> None:
        super().__init__(site, tokens, routes, columns, dtype)
        self.table = torch.zeros(tokens, WORDS, dtype=torch.int64, pin_memory=True)
        self.verdicts = torch.zeros(tokens, 2, dtype=torch.int32, pin_memory=True)
        self.done = torch.zeros(16, dtype=torch.int32, pin_memory=True)
        self._pool = GraphPool()
        self._driver = C.CDLL("libcuda.so.1")
        self._works = True

    def begin(self, part: _DevicePart, batch: tuple[Tensor, Tensor, Tensor], on_input: bool) -> Callable[[], Tensor]:
        M, k = batch[1].shape
        self.site.stream.synchronize()  # a batch that failed half-way may have left its part there
        rows = padded(M) if part.capturable else M
        host = self.rows(self.host, M, part.H, k)
        for to, t in zip(host, batch, strict=False):
            to.copy_(t)
        table = self.table.numpy()
        for word, t in zip((0, 1, 2, 3), host, strict=True):
            table[:M, word] = t.data_ptr() + np.arange(M) * (t.shape[1] * t.element_size())
        kind = F32 if self.dtype is torch.float32 else BF16
        table[:M, 4] = info(k, part.layer_slots, hidden=kind, out=kind)
        table[M:rows, 4] = 0
        table[:M, 6], table[:M, 5], table[:M, 7] = part.slots_here.data_ptr(), 0, 0
        with self.streaming():
            body = self._body(part, rows, k, on_input)
            body()

        def end() -> Tensor:
            self.site.stream.synchronize()
            if part.capturable and self._works and part.comes_often((rows, k, on_input)):
                with self.streaming():
                    self._capture(part, (rows, k, on_input), body)
            return host[3]

        return end

    def _body(self, part: _DevicePart, rows: int, k: int, on_input: bool) -> Callable[[], None]:
        from expertd_kernels.backends.gather.kernels import collect, deliver, signal  # needs Triton

        hidden, slots, weights, out = self.rows(self.here, rows, part.H, k)

        def body() -> None:
            collect(self.table, rows, hidden, slots, weights, self.verdicts)
            part.experts(hidden, slots, weights, router_weight_on_input=on_input, out=out)
            deliver(self.table, rows, out)
            signal(self.done[:1])

        return body

    def _capture(self, part: _DevicePart, size: tuple[int, int, bool], body: Callable[[], None]) -> None:
        free = free_now()
        graph, made = torch.cuda.CUDAGraph(keep_graph=True), C.c_void_p()
        try:
            self._pool.record(graph, body)
            raw = C.c_void_p(graph.raw_cuda_graph())
            if error := self._driver.cuGraphInstantiateWithFlags(C.byref(made), raw, C.c_ulonglong(0)):
                raise RuntimeError(f"instantiating a graph: CUDA error {error}")
        except RuntimeError as e:
            self._works = False
            log.warning("a call could not be captured in a CUDA graph; continuing without graphs: %s", e)
            return
        self.graph_bytes += max(0, free - free_now())
        assert made.value is not None
        part.add_graph(size, graph, made.value, self._driver)


def _memory_of(site: Site, tokens: int, routes: int, columns: int, dtype: torch.dtype) -> _Memory:
    why = graphs_refusal(site.device)
    if why:
        log.info("parts on %s are launched one by one: %s", site.name, why)
    return (_Memory if why else _GraphMemory)(site, tokens, routes, columns, dtype)


class _DevicePart:
    """A part on an accelerator.  H: columns; layer_slots: of the whole layer; slots_here: on the device, [layer_slots +
    1] int32; add: told of the graphs (rows, top_k, on_input, address)."""

    def __init__(self, part: Part, slots: Array, H: int, device: torch.device, add: Callable[..., None]) -> None:
        self.experts, self.capturable, self.H, self.layer_slots = part.experts, part.capturable, H, len(slots) - 1
        self._slots = torch.from_numpy(slots)
        self.slots_here = self._slots.to(device)
        self._add, self._seen = add, Counter[tuple[int, int, bool]]()
        self._graphs: list[_Graph] = []

    def mapped(self, ids: Tensor) -> Tensor:
        """The layer's slots as this part's own."""
        return self._slots[ids.long()]

    def comes_often(self, size: tuple[int, int, bool]) -> bool:
        """Whether that size is to be captured now, having come once more."""
        self._seen[size] += 1
        return self._seen[size] == _WORTH

    def add_graph(self, size: tuple[int, int, bool], graph: Any, made: int, driver: Any) -> None:
        """Keep a graph of that size, until this part is gone."""
        self._graphs.append(_Graph(graph, made, driver))
        self._add(*size, made)

    def clear(self) -> None:
        """Drop the graphs: they hold addresses that are no more."""
        self._graphs.clear()
        self._seen.clear()


class _Graph:
    """An executable graph of the driver, destroyed with this."""

    def __init__(self, graph: Any, made: int, driver: Any) -> None:
        self._graph, self._made, self._driver = graph, made, driver

    def __del__(self) -> None:
        self._driver.cuGraphExecDestroy(C.c_void_p(self._made))


class JoinedExperts:
    """Experts of a layer in parts; see protocol.Experts.  Tensors are the host's.

    held: slots of the layer; H: columns
    """

    def __init__(self, space: JoinedSpace, parts: Sequence[Part], held: int, H: int, top_k: int) -> None:
        self.backend = "+".join(dict.fromkeys(p.experts.backend for p in parts))
        self._space, self._parts, self._H, self._top_k = space, tuple(parts), H, top_k
        self._slots = [_slots(p.held, held) for p in parts]
        self._lib = _library()
        wide = space.dtype is torch.float32
        self._joined: int = self._lib.expertd_joined(space.address, H, held, wide)
        end = weakref.finalize(self, self._lib.expertd_joined_free, self._joined)
        end.atexit = False
        self._devices: dict[int, _DevicePart] = {}
        self._memories: dict[int, _Memory] = {}
        for part, slots in zip(parts, self._slots, strict=True):
            if space.sites[part.site].device.type == "cpu":
                self._add_host(part, slots)
            else:
                self._add_device(part, slots, held)

    def _add_host(self, part: Part, slots: Array) -> None:
        if isinstance(part.experts, DirectExperts):
            d = part.experts.direct()
            about = JoinedPart(call=d.function, context=d.context, experts=d.experts, slots=slots.ctypes.data)
            self._lib.expertd_joined_part(self._joined, part.site, C.byref(about))

    def _add_device(self, part: Part, slots: Array, held: int) -> None:
        site, joined, lib = part.site, self._joined, self._lib

        def add(rows: int, k: int, on_input: bool, made: int) -> None:
            lib.expertd_joined_graph(joined, site, rows, k, on_input, made)

        device = self._space.sites[site].device
        self._devices[site] = _DevicePart(part, slots, self._H, device, add)
        memory = self._space.memory(site, self._top_k, held, self._H)
        self.move(site, memory)

    def move(self, site: int, memory: _Memory) -> None:
        """That site's batches lie in `memory` from now on."""
        index = next(i for i, p in enumerate(self._parts) if p.site == site)
        self._memories[site] = memory
        memory.users.add(self)
        self.drop_graphs(site)
        about = JoinedPart(slots=self._slots[index].ctypes.data)
        if isinstance(memory, _GraphMemory):
            about.hidden, about.ids, about.weights, about.out = (t.data_ptr() for t in memory.host)
            about.table, about.done = memory.table.data_ptr(), memory.done.data_ptr()
            about.device_slots = self._devices[site].slots_here.data_ptr()
            about.stream = memory.site.stream.cuda_stream
            about.rows, about.routes = memory.tokens, memory.routes
        self._lib.expertd_joined_part(self._joined, site, C.byref(about))

    def drop_graphs(self, site: int) -> None:
        """Of this layer there."""
        self._lib.expertd_joined_clear(self._joined, site)
        self._devices[site].clear()

    def __call__(
        self,
        hidden_states: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        *,
        router_weight_on_input: bool = False,
        out: Tensor | None = None,
    ) -> Tensor:
        """See protocol.Experts."""
        batch = (hidden_states, topk_ids, topk_weights)
        ends = [self._memories[site].begin(part, batch, router_weight_on_input) for site, part in self._devices.items()]
        sums = torch.zeros(hidden_states.shape, dtype=torch.float32)
        for part, slots in zip(self._parts, self._slots, strict=True):
            if part.site not in self._devices:
                sums += _on_host(part.experts, batch, slots, router_weight_on_input)
        for end in ends:
            sums += end()
        out = torch.empty_like(hidden_states) if out is None else out
        return out.copy_(sums)


class DirectJoinedExperts(JoinedExperts):
    """The same, where every part on the host can be called without Python."""

    def direct(self) -> Direct:
        """See protocol.DirectExperts.  What has no graph yet is refused, and then called as it is."""
        function = C.cast(self._lib.expertd_joined_call, C.c_void_p).value
        assert function is not None
        return Direct(function, self._joined, self._joined)


class JoinedExecutor(CpuExecutor):
    """space: where the layers' parts compute."""

    def __init__(self, compute_dtype: str, space: JoinedSpace) -> None:
        super().__init__(compute_dtype)
        self._space = space

    @property
    def graph_bytes(self) -> int:
        return self._space.graph_bytes

    def drop_graphs(self) -> None:
        self._space.drop_graphs()

    def pool(self, nbytes: int) -> Pool:
        raise PoolError(_NO_POOL)

    def pool_refusal(self) -> str:
        return _NO_POOL

    def fault(self) -> str:
        return next(filter(None, map(device_fault, self._space.accelerators)), "")


def join(space: JoinedSpace, parts: Sequence[Part], held: int, H: int, top_k: int) -> JoinedExperts:
    """The experts of a layer with so many slots, of parts of different sites."""
    on_host = [p.experts for p in parts if space.sites[p.site].device.type == "cpu"]
    kind = DirectJoinedExperts if all(isinstance(e, DirectExperts) for e in on_host) else JoinedExperts
    return kind(space, parts, held, H, top_k)


def _slots(held: Sequence[int], layer_slots: int) -> Array:
    """[layer_slots + 1] int32: the part's slot of each of the layer's, -1 = another part's."""
    table = np.full(layer_slots + 1, -1, np.int32)
    table[np.asarray(held, np.int64)] = np.arange(len(held), dtype=np.int32)
    return table


def _on_host(experts: Experts, batch: tuple[Tensor, Tensor, Tensor], slots: Array, on_input: bool) -> Tensor:
    x, ids, w = batch
    own = torch.from_numpy(slots)[ids.long()]
    dtype = torch.float32 if isinstance(experts, DirectExperts) else x.dtype
    return experts(x, own, w, router_weight_on_input=on_input, out=torch.empty(x.shape, dtype=dtype)).float()


def _library() -> Any:
    lib = library()
    p, u32 = C.c_void_p, C.c_uint32
    for name, result, arguments in (
        ("_space", p, (u32,)),
        ("_space_free", None, (p,)),
        ("_times", None, (p, p)),
        ("", p, (p, u32, u32, u32)),
        ("_free", None, (p,)),
        ("_part", None, (p, u32, p)),
        ("_graph", None, (p, u32, u32, u32, u32, p)),
        ("_clear", None, (p, u32)),
        ("_call", C.c_int32, (p, p, p)),
    ):
        function = getattr(lib, "expertd_joined" + name)
        function.restype, function.argtypes = result, arguments
    return lib
