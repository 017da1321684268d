"""How a session from GPU to GPU (session.py) is asked for and opened, by a thread or in an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError

import torch

from expertd.errors import ExpertdError, UnavailableError
from expertd.shm.cuda import device_uuid
from expertd.shm.pool import Pool, PoolError
from expertd.shm.region import host_id
from expertd.v1 import expert_service_pb2 as pb
from expertd_client.device.session import DeviceSession
from expertd_client.exchange.session import unanswered
from expertd_client.transports.protocol import Transport
from expertd_client.transports.shm.connection import enter_session

__all__ = ["NAME", "ask_for_session", "await_session", "device_index", "open_session"]

NAME = "cuda_ipc"
"""As the contract calls it in SessionOffer."""
_SAME_GPU = (
    "the server computes on this very GPU: two processes take turns on one, which costs milliseconds a call;"
    " send messages, or say same_gpu where MPS lets both run at once"
)
_OPEN_S = 10.0


def device_index(device: int | str) -> int:
    """Of "cuda:1", 1, or "cuda" (the current one)."""
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return torch.cuda.current_device() if index is None else index


def ask_for_session(transport: Transport, device: int, *, same_gpu: bool, timeout_s: float) -> DeviceSession:
    """See ExpertClient.device_session."""
    said: Future[pb.SessionAnswer] = Future()
    connection = transport.connect(*_into(said))
    try:
        connection.offer(_offer())
        return open_session(_accepted(said.result(timeout_s)), device, same_gpu=same_gpu)
    except FutureTimeoutError:
        raise unanswered(transport.target, timeout_s) from None
    finally:
        connection.close()


async def await_session(transport: Transport, device: int, *, same_gpu: bool, timeout_s: float) -> DeviceSession:
    """ask_for_session() in an event loop: a thread of the loop's opens the session.  Who is cancelled meanwhile leaves
    none behind."""
    loop = asyncio.get_running_loop()
    said: asyncio.Future[pb.SessionAnswer] = loop.create_future()
    connection = transport.connect(*_into(said))
    try:
        connection.offer(_offer())
        answer = _accepted(await asyncio.wait_for(said, timeout_s))
        opening = Future[DeviceSession]()
        threading.Thread(target=_open_into, args=(opening, answer, device, same_gpu), daemon=True).start()
        return await asyncio.wrap_future(opening)
    except asyncio.TimeoutError:
        raise unanswered(transport.target, timeout_s) from None
    finally:
        connection.close()


def _offer() -> pb.SessionOffer:
    return pb.SessionOffer(transports=[NAME], host_id=host_id())


def _into(
    said: Future[pb.SessionAnswer] | asyncio.Future[pb.SessionAnswer],
) -> tuple[Callable[[object], None], Callable[[ExpertdError], None]]:
    """What a connection is to call: the server's answer, or its end, goes into `said`."""

    def deliver(message: object) -> None:
        if isinstance(message, pb.SessionAnswer) and not said.done():
            said.set_result(message)

    def closed(error: ExpertdError) -> None:
        if not said.done():
            said.set_exception(error)

    return deliver, closed


def _open_into(opening: Future[DeviceSession], answer: pb.SessionAnswer, device: int, same_gpu: bool) -> None:
    """A session for whoever waits for `opening`; where nobody does any more, it is closed."""
    try:
        session = open_session(answer, device, same_gpu=same_gpu)
    except BaseException as error:
        if opening.set_running_or_notify_cancel():
            opening.set_exception(error)
        return
    if opening.set_running_or_notify_cancel():
        opening.set_result(session)
    else:
        session.close()


def _accepted(answer: pb.SessionAnswer) -> pb.SessionAnswer:
    """Raises UnavailableError with the server's reason where it is not."""
    reason = next((v.reason for v in answer.verdicts if v.transport == NAME and not v.accepted), "")
    if reason or not answer.token:
        raise UnavailableError(f"cuda_ipc: {reason or 'the server does not know it'}")
    return answer


def open_session(answer: pb.SessionAnswer, device: int, *, same_gpu: bool = False) -> DeviceSession:
    """The session that the server accepted, for a GPU of this process.  Raises UnavailableError with the reason why it
    cannot be had, after which messages can travel any other way."""
    sock, client = enter_session(answer)
    pool = None
    try:
        sock.settimeout(_OPEN_S)
        pool = Pool.receive(sock, device)
        if pool.uuid == device_uuid(device) and not same_gpu:
            raise PoolError(_SAME_GPU)
        return DeviceSession(sock, client, pool)
    except (OSError, PoolError) as e:
        if pool is not None:
            pool.close()
        sock.close()
        client.end()
        client.close()
        raise UnavailableError(f"cuda_ipc: {e}") from e
