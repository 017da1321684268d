"""A call whose experts one server holds alone: there is nothing to split, to join or to race, so the calling thread
asks that server itself, as ExpertClient does."""

from __future__ import annotations

import time

from expertd.errors import DeadlineExceededError, ExpertdError
from expertd_client.cluster.call import Call
from expertd_client.cluster.member import Member
from expertd_client.cluster.policy import Verdict, verdict
from expertd_client.cluster.result import ClusterResult
from expertd_client.cluster.split import check_ids
from expertd_client.cluster.surroundings import Surroundings
from expertd_client.deadline import Deadline

__all__ = ["ask_alone"]


def ask_alone(around: Surroundings, call: Call, deadline: Deadline | None) -> ClusterResult | None:
    """The answer.  None: there are several servers, or this one cannot be asked so, or it failed in a way that another
    try may mend: the call flies as others do.  Raises what no try would mend."""
    member = _only_holder(around, call)
    if member is None:
        return None
    tokens = call.host.tokens
    routes = check_ids(call.host.topk_ids, around.members.table(call.layer), call.layer)
    begin_s = time.monotonic()
    member.begun(tokens)
    try:
        if call.traced is not None:
            call.traced.split()
            call.traced.part(member.address, tokens)
        answer = member.exchange.call(call.host, deadline, call.traced)
    except ExpertdError as error:
        member.failed(tokens, error)
        if member.refused:
            around.wake(member)
        late = isinstance(error, DeadlineExceededError) and deadline is not None and deadline.left_s() <= 0
        if late or around.closed or verdict(error) is Verdict.HOPELESS:
            raise
        return None
    except BaseException:
        member.dropped(tokens)
        raise
    if answer is None:
        member.dropped(tokens)
        return None
    seconds = time.monotonic() - begin_s
    member.answered(tokens, seconds, answer)
    if answer.routes_computed != routes:  # it holds something else than it said
        answer.release()
        around.wake(member)
        return None
    return call.answered_by(member, answer, seconds, around.members.epoch)


def _only_holder(around: Surroundings, call: Call) -> Member | None:
    table = around.members.table(call.layer)
    if not table.whole or len(table.holders[0]) != 1 or not call.host.tokens:
        return None
    member = around.members.by_address.get(table.holders[0][0])
    if member is None or not member.usable(time.monotonic()):
        return None
    return None if 0 < member.max_tokens < call.host.tokens else member
