"""What the server says of itself: the answer of Describe."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from expertd.common.dtypes import DTYPE_NUMBER, HIDDEN_DTYPES
from expertd.common.ranges import runs
from expertd.v1 import expert_service_pb2 as pb
from expertd_kernels.oracle.advice import advice
from expertd_kernels.oracle.decision import Decision
from expertd_server.boot.layers import Booted
from expertd_server.boot.memory import MemoryPlan, free_bytes
from expertd_server.engine.admission import Limits
from expertd_server.engine.convert import output_dtypes

if TYPE_CHECKING:
    import torch

__all__ = ["Describer", "describe_layer", "memory_message"]


def describe_layer(b: Booted, leaving: Collection[int] = ()) -> pb.Layer:
    """relative errors of the self-check stand in the verdicts of the backends that serve.  leaving: experts that are
    held still, and not named."""
    served, info, decision = b.served, b.assignment.info, b.assignment.decision
    held = [e for e in served.held if e not in leaving]
    return pb.Layer(
        layer=served.layer,
        num_experts=served.num_experts,
        held=[pb.ExpertRange(first=a, count=b - a + 1) for a, b in runs(held)],
        top_k=served.top_k,
        intermediate_size=served.intermediate_size,
        weight_scheme=decision.problem.scheme_name,
        activation_scheme=decision.problem.activation_quant.value,
        checkpoint_activation_scheme=info.checkpoint_activation.value,
        activation=info.activation.name,
        backend=served.backend,
        verdicts=[
            pb.BackendVerdict(
                backend=v.backend,
                eligible=v.eligible,
                refusals=v.refusals,
                microseconds=v.microseconds or 0.0,
                relative_error=b.errors.get(v.backend, v.relative_error or 0.0),
                grade=v.grade.name.lower(),
                times=[pb.CallTime(tokens=m, microseconds=us) for m, us in v.times],
            )
            for v in decision.verdicts
        ],
        chosen_by=b.assignment.chosen_by,
        plan=[pb.PlanEntry(max_tokens=most or 0, backend=name) for most, name in served.plan],
        from_cache=b.from_cache,
        advice=_advice(decision),
        weight_digests=[d for e, d in zip(served.held, b.digests, strict=True) if e not in leaving],
    )


def _advice(decision: Decision) -> pb.Advice | None:
    found = advice(decision)
    if found is None:
        return None
    return pb.Advice(backend=found.backend, needs=found.needs, command=found.command, text=str(found))


def memory_message(plan: MemoryPlan) -> pb.Memory:
    """Without what is free."""
    return pb.Memory(
        weights_bytes=plan.weights,
        scratch_bytes=plan.scratch,
        buffers_bytes=plan.buffers,
        graphs_bytes=plan.graphs,
        context_bytes=plan.context,
        pinned_bytes=plan.pinned,
        limit_bytes=plan.limit,
        weights_mapped=plan.mapped,
        shared_bytes=plan.shared,
        pools_bytes=plan.pools,
        loading_bytes=plan.loading,
    )


class Describer:
    """The answer of Describe, from the last update().  load: asked for each answer.  The rest: what never changes.

    admin_address, placement_epoch, versions   as in DescribeResponse; set before an update()
    """

    def __init__(
        self,
        load: Callable[[], pb.Load],
        *,
        instance_id: str,
        version: str,
        family: str,
        fingerprint: str,
        hidden_size: int,
        limits: Limits,
        transports: Sequence[str] = (),
        memory_limit: int = 0,
    ) -> None:
        self._load, self._limit, self.fingerprint = load, memory_limit, fingerprint
        self._always = pb.DescribeResponse(
            instance_id=instance_id,
            version=version,
            model=pb.Model(family=family, fingerprint=fingerprint, hidden_size=hidden_size),
            limits=pb.Limits(
                max_tokens=limits.max_tokens,
                max_message_bytes=limits.max_message_bytes,
                max_requests_in_flight=limits.max_in_flight,
            ),
            input_dtypes=[DTYPE_NUMBER[d] for d in HIDDEN_DTYPES],
            output_dtypes=[DTYPE_NUMBER[d] for d in output_dtypes()],
            transports=transports,
        )
        self.admin_address = ""
        self.placement_epoch = 0
        self.versions: Sequence[pb.WeightVersion] = ()
        self.update((), None, None)

    def update(
        self,
        booted: Sequence[Booted],
        memory: MemoryPlan | None,
        device: torch.device | None,
        leaving: Mapping[int, Collection[int]] = MappingProxyType({}),
    ) -> None:
        """What is held now, and where; device: None = free memory is not told; leaving: what is not told, by layer."""
        full, brief = pb.DescribeResponse(), pb.DescribeResponse()
        full.CopyFrom(self._always)
        full.admin_address, full.placement_epoch = self.admin_address, self.placement_epoch
        full.versions.extend(self.versions)
        layers = (describe_layer(b, leaving.get(b.served.layer, ())) for b in booted)
        full.layers.extend(layer for layer in layers if layer.held)
        if memory is not None:
            full.memory.CopyFrom(memory_message(memory))
        elif self._limit:
            full.memory.limit_bytes = self._limit
        brief.CopyFrom(full)
        for layer in brief.layers:
            layer.ClearField("verdicts")
        self._answers = {False: brief, True: full}, device

    def __call__(self, decisions: bool) -> pb.DescribeResponse:
        """decisions: with the verdicts of the oracle."""
        answers, device = self._answers
        out = pb.DescribeResponse()
        out.CopyFrom(answers[decisions])
        out.load.CopyFrom(self._load())
        if device is not None:
            out.memory.free_bytes = free_bytes(device)
        return out
