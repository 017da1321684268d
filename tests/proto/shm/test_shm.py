"""Regions and the client's side of them, against a server of a few lines of Python."""

import contextlib
import ctypes as C
import fcntl
import gc
import itertools
import mmap
import os
import select
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from waiting import until_asleep, until_inside

from expertd.shm import layout
from expertd.shm.client import Client
from expertd.shm.in_flight import NoRoomError, SessionEndedError
from expertd.shm.layout import Completion, DeviceCalls, Submission, Tensors
from expertd.shm.library import LibraryMissingError, library
from expertd.shm.region import Region, RegionError, peer_uid, supported

try:
    library()
    BUILT = ""
except LibraryMissingError as e:
    BUILT = str(e)

pytestmark = [
    pytest.mark.skipif(bool(supported() or BUILT), reason=supported() or BUILT or "supported"),
    pytest.mark.timeout(30),
]


class Control(C.Structure):
    _fields_ = [
        ("magic", C.c_char * 8),
        ("version", C.c_uint32),
        ("entries", C.c_uint32),
        ("arena_offset", C.c_uint64),
        ("arena_bytes", C.c_uint64),
        ("pad0", C.c_char * 32),
        ("client_sleeps", C.c_uint32),
        ("pad1", C.c_char * 60),
        ("server_sleeps", C.c_uint32),
        ("pad2", C.c_char * 60),
        ("taken", C.c_uint64),
        ("pad3", C.c_char * 56),
        ("ended", C.c_uint32),
    ]


class Server:
    """The other side, as slow as it is plain."""

    def __init__(self, region):
        self.region = region
        self.bell = region.ring_here()
        self.control = Control.from_address(region.address)
        self.control.version, self.control.entries = 2, region.entries
        self.control.arena_offset, self.control.arena_bytes = layout.arena_offset(region.entries), region.arena_bytes
        self.control.magic = b"expshm01"
        at = region.address + layout.PAGE
        self.submissions = (Submission * region.entries).from_address(at)
        self.completions = (Completion * region.entries).from_address(at + region.entries * C.sizeof(Submission))
        self.taken = self.answered = 0

    def take(self):
        s = self.submissions[self.taken % self.region.entries]
        if s.seq != self.taken + 1:
            return None
        copy = Submission.from_buffer_copy(s)
        self.taken += 1
        self.control.taken = self.taken
        return copy

    def answer(self, id, routes=1, reason=b"", text=b""):
        c = self.completions[self.answered % self.region.entries]
        c.id, c.routes_computed, c.refused, c.name, c.text = id, routes, int(bool(reason)), reason, text
        self.answered += 1
        c.seq = self.answered
        if self.control.client_sleeps:
            self.bell.send(b".")

    def serve(self, until, delay_s=0.0):
        while not until.is_set():
            s = self.take()
            if s is None:
                time.sleep(0.0001)
            elif s.kind != layout.CANCEL:
                time.sleep(delay_s)
                self.answer(s.id, s.tokens)


@pytest.fixture
def both():
    region = Region.create(1 << 20, entries=8)
    server = Server(region)
    client = Client(region)
    yield server, client
    client.end()
    client.close()
    server.bell.close()


def serving(server, **how):
    stop = threading.Event()
    thread = threading.Thread(target=server.serve, args=(stop,), kwargs=how)
    thread.start()
    return lambda: (stop.set(), thread.join())


def test_layout_is_the_same_in_python_and_in_cpp():
    sizes = (C.c_uint64 * 12)()
    library().sizes(sizes)
    assert list(sizes) == [
        layout.PAGE,
        C.sizeof(Submission),
        C.sizeof(Completion),
        Completion.text.offset,
        Submission.trace.offset,
        layout.arena_offset(256),
        Submission.number.offset,
        *(layout.CALLS_OFFSET + getattr(DeviceCalls, word).offset for word in ("called", "answered", "calls")),
        *(layout.CALLS_OFFSET + getattr(DeviceCalls, word).offset for word in ("last", "failure")),
    ]


def test_requests_and_answers_many_times_round_the_rings(both):
    server, client = both
    stop = serving(server)
    answer = Completion()
    for n in range(1, 60):
        ticket = client.submit(Submission(kind=layout.FORWARD, tokens=n))
        assert client.wait(ticket, answer, timeout_ns=5 * 10**9)
        assert (answer.routes_computed, answer.refused) == (n, 0)
        client.release(ticket)
    stop()


def test_threads_share_a_session_and_each_gets_its_own_answer(both):
    server, client = both
    stop = serving(server)
    wrong = []

    def caller(first):
        answer = Completion()
        for n in range(first, first + 50):
            while not (ticket := client.submit(Submission(kind=layout.FORWARD, tokens=n))):
                time.sleep(0.0005)
            if not client.wait(ticket, answer, timeout_ns=10 * 10**9) or answer.routes_computed != n:
                wrong.append(n)
            client.release(ticket)

    threads = [threading.Thread(target=caller, args=(1000 * i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    stop()
    assert not wrong


def test_a_refusal_comes_with_reason_and_text(both):
    server, client = both
    ticket = client.submit(Submission(kind=layout.FORWARD))
    server.answer(server.take().id, reason=b"BAD_SHAPE", text=b"topk_ids: got 9, want 1 to 8")
    answer = Completion()
    assert client.wait(ticket, answer)
    assert (answer.refused, answer.name, answer.text) == (1, b"BAD_SHAPE", b"topk_ids: got 9, want 1 to 8")


def test_no_more_requests_in_flight_than_entries(both):
    server, client = both
    tickets = [client.submit(Submission(kind=layout.FORWARD)) for _ in range(8)]
    assert all(tickets)
    assert client.submit(Submission(kind=layout.FORWARD)) == 0
    server.answer(server.take().id)
    assert client.wait(tickets[0], Completion())
    client.release(tickets[0])
    assert client.submit(Submission(kind=layout.FORWARD)) != 0


def test_a_request_that_finds_no_ticket_leaves_no_block(both):
    _, client = both
    values = C.create_string_buffer(64)
    tensors = Tensors(hidden=C.addressof(values), hidden_bytes=64, out_bytes=64)
    for _ in range(8):
        client.send(Submission(kind=layout.FORWARD), tensors)
    for _ in range(3):
        with pytest.raises(NoRoomError, match="8 requests are in flight"):
            client.send(Submission(kind=layout.FORWARD), tensors)
    assert client.blocks == 8


def test_a_server_that_takes_nothing_is_not_overrun(both):
    """Eight entries: cancels need room, too, and get none rather than an entry that was not taken."""
    server, client = both
    for _ in range(8):
        client.submit(Submission(kind=layout.FORWARD, tokens=7))
    client.abandon(client._ids[0])  # an id of nobody
    first = server.submissions[0].id
    client.abandon(first)
    assert [server.submissions[i].tokens for i in range(8)] == [7] * 8


@pytest.mark.timeout(120)
def test_a_submission_is_whole_when_its_number_is_seen():
    """The server may look between any two instructions of the client."""
    ours, theirs = socket.socketpair()
    region = Region.create(8192, entries=4)
    server = Server(region)
    program = str(Path(__file__).with_name("steps.py"))
    with ours, theirs:
        region.send(ours)
        child = subprocess.Popen([sys.executable, program, str(theirs.fileno())], pass_fds=[theirs.fileno()])
        try:
            seen = bytes_when_numbered(child.pid, server.submissions[1], 2)
        finally:
            child.kill()  # or has ended
            child.wait()
    s = Submission.from_buffer_copy(seen)
    assert (s.kind, s.layer, s.tokens, s.top_k, s.hidden, s.out, s.deadline_ns) == (layout.FORWARD, 2, 2, 2, 2, 2, 2)
    assert s.id
    assert s.id != server.submissions[0].id
    server.bell.close()
    region.close()


def bytes_when_numbered(pid, submission, seq):
    """What is in its entry after the instruction that writes its number.  Skips where nobody may trace."""
    ptrace, single_step = C.CDLL(None).ptrace, 9
    number = C.c_uint64.from_address(C.addressof(submission))
    while number.value != seq:
        _, status = os.waitpid(pid, 0)
        if not os.WIFSTOPPED(status):
            pytest.skip("no process may be traced here")
        if number.value != seq and ptrace(single_step, pid, None, None):
            pytest.skip("no process may be traced here")
    return bytes(submission)


def test_an_abandoned_request_keeps_its_block_until_it_is_answered(both):
    server, client = both
    block = client.take(1000)
    ticket = client.submit(Submission(kind=layout.FORWARD), block)
    assert not client.wait(ticket, Completion(), timeout_ns=1_000_000, spin_ns=0)
    client.abandon(ticket)
    assert client.blocks == 1, "the server may still write there"
    kinds = [server.take(), server.take()]
    assert [s.kind for s in kinds] == [layout.FORWARD, layout.CANCEL]
    assert kinds[0].id == kinds[1].id == ticket
    server.answer(ticket, reason=b"CANCELLED")
    other = client.submit(Submission(kind=layout.FORWARD))
    server.answer(server.take().id)
    assert client.wait(other, Completion())
    assert client.blocks == 0


def test_a_request_that_is_given_up_after_its_answer_leaves_no_ticket(both):
    server, client = both
    ticket = client.submit(Submission(kind=layout.FORWARD), client.take(1000), announced=True)
    server.answer(server.take().id)
    assert list(client.drain()) == [ticket]
    client.abandon(ticket)
    assert (client.taken, client.blocks) == (0, 0)


def test_blocks_do_not_overlap_and_come_back(both):
    _, client = both
    sizes = [1, 256, 257, 4096, 100_000]
    taken = [client.take(n) for n in sizes]
    spans = sorted((at, at + n) for at, n in zip(taken, sizes, strict=True))
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
    assert client.take(1 << 20) is None
    assert client.take(1 << 63) is None
    for at in (taken[1], taken[3], taken[0], taken[4], taken[2], taken[2]):  # in any order, one of them twice
        client.give(at)
    assert client.blocks == 0
    assert client.take(client.region.arena_bytes) == 0


def test_an_event_loop_is_rung_for_what_it_would_miss(both):
    server, client = both
    assert list(client.drain()) == []
    ticket = client.submit(Submission(kind=layout.FORWARD), announced=True)
    server.answer(server.take().id)
    assert select.select([client.region.bell], [], [], 0)[0], "it rang"
    assert list(client.drain()) == [ticket]
    assert client.wait(ticket, Completion(), timeout_ns=0)


def test_who_looks_by_himself_is_not_rung(both):
    server, client = both
    assert not client.drain()
    assert server.control.client_sleeps
    assert not client.poll()
    assert not server.control.client_sleeps
    ticket = client.submit(Submission(kind=layout.FORWARD), announced=True)
    server.answer(server.take().id)
    assert list(client.poll()) == [ticket]
    client.release(ticket)
    assert not client.drain()
    assert server.control.client_sleeps, "from here on it is"


def test_one_that_reads_no_more_wakes_the_one_that_watches(both):
    """Who waits for his own answer reads for all, so who watches sleeps; then nobody would read."""
    server, client = both
    watched, waited = (client.submit(Submission(kind=layout.FORWARD), announced=a) for a in (True, False))
    got = []
    waits = threading.Thread(target=lambda: client.wait(waited, Completion(), 20 * 10**9, 0))
    watches = threading.Thread(target=lambda: got.extend(client.watch(15 * 10**9)))
    for thread in (waits, watches):
        thread.start()
        until_asleep(thread)
    server.answer(waited)
    waits.join(20)
    until_asleep(watches)
    server.answer(watched)
    watches.join(20)
    assert got == [watched]


def test_no_bell_waits_whatever_the_sockets_flags_say(both):
    """Both ends of these are blocking; nobody reads what the client rings, and one byte is there to be heard."""
    server, client = both
    bell = client.region.bell
    assert os.get_blocking(bell)
    with socket.socket(fileno=os.dup(bell)) as ours, contextlib.suppress(BlockingIOError):
        while True:
            ours.send(b".", socket.MSG_DONTWAIT)
    server.control.server_sleeps = 1
    server.bell.send(b".")
    done = []

    def calls():
        done.append(client.submit(Submission(kind=layout.FORWARD)))
        done.append(list(client.drain()))

    thread = threading.Thread(target=calls, daemon=True)
    thread.start()
    thread.join(20)
    assert len(done) == 2
    assert done[0]
    assert not server.control.server_sleeps, "it rang"


def test_the_end_reaches_everybody_who_waits(both):
    server, client = both
    ticket = client.submit(Submission(kind=layout.FORWARD))
    raised = []

    def waits():
        try:
            client.wait(ticket, Completion())
        except SessionEndedError:
            raised.append(1)

    threads = [threading.Thread(target=waits) for _ in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        until_inside(t, "wait")
    server.control.ended = 1
    server.bell.send(b".")
    for t in threads:
        t.join(20)
    assert raised == [1, 1, 1]
    assert client.submit(Submission(kind=layout.FORWARD)) == 0


def test_answers_to_nobody_are_passed_over(both):
    server, client = both
    for id in (0, 1, 12345, 2**64 - 1):
        server.answer(id)
    ticket = client.submit(Submission(kind=layout.FORWARD))
    server.answer(server.take().id, routes=5)
    answer = Completion()
    assert client.wait(ticket, answer)
    assert answer.routes_computed == 5


def test_answers_to_former_requests_of_a_ticket_are_passed_over(both):
    """Of eight tickets: an id that is eight more or less is the same one, before or afterwards."""
    server, client = both
    first = client.submit(Submission(kind=layout.FORWARD))
    server.answer(server.take().id)
    assert client.wait(first, Completion())
    client.release(first)
    ticket, answer = client.submit(Submission(kind=layout.FORWARD)), Completion()
    assert server.take().id == ticket
    for id in (first, ticket + 8, ticket - 8):
        server.answer(id, routes=7)
    server.answer(ticket, routes=5)
    assert client.wait(ticket, answer)
    assert answer.routes_computed == 5


def test_a_region_goes_over_a_socket_and_both_see_the_same_memory():
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with ours, theirs:
        made = Region.create(8192, entries=4)
        assert peer_uid(theirs) == os.getuid()
        made.send(ours)
        got = Region.receive(theirs)
        made.view(100, 5)[:] = b"hello"
        assert bytes(got.view(100, 5)) == b"hello"
        assert got.arena_bytes == made.arena_bytes >= 8192
        made.ring_by(ours)
        os.write(made.bell, b".")
        assert os.read(got.bell, 2) == b"."
        made.close()
        assert bytes(got.view(100, 5)) == b"hello", "it lives as long as somebody maps it"
        got.close()


def test_its_size_is_sealed():
    region = Region.create(8192, entries=4)
    fd = region._fds[0]
    for size in (4096, region.bytes + 4096):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)
    wanted = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    assert fcntl.fcntl(fd, fcntl.F_GET_SEALS) & wanted == wanted
    region.close()


def forged(header=None, fds=None, seal=True, size=None):
    """Something else than a region, over a socket."""
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    memory = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    true_size = layout.region_bytes(4, 8192)
    os.ftruncate(memory, true_size)
    if seal:
        fcntl.fcntl(memory, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    import struct

    data = header if header is not None else struct.pack("<8sQI4x", b"expshm01", size or true_size, 4)
    socket.send_fds(ours, [data], fds if fds is not None else [memory])
    os.close(memory)
    return ours, theirs


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ({"header": b"nonsense" * 3}, "version"),
        ({"header": b"short"}, "bytes"),
        ({"fds": []}, "descriptors"),
        ({"seal": False}, "not sealed"),
        ({"size": 1 << 40}, "another size"),
        ({"size": 4096}, "another size"),
    ],
)
def test_what_is_no_region_is_refused_and_leaks_nothing(how, text):
    gc.collect()  # engines of other tests have descriptors
    before = len(os.listdir("/proc/self/fd"))
    ours, theirs = forged(**how)
    with ours, theirs, pytest.raises(RegionError, match=text):
        Region.receive(theirs)
    assert len(os.listdir("/proc/self/fd")) == before


def test_memory_that_is_not_there_is_said():
    with pytest.raises(RegionError, match="shared memory of"):
        Region.create(1 << 50)


def test_a_thousand_sessions_leave_nothing():
    def facts():
        with open("/proc/self/maps") as maps:
            gc.collect()  # engines of other tests have descriptors
            return len(os.listdir("/proc/self/fd")), sum("expertd" in line for line in maps)

    before = facts()
    for _ in range(1000):
        region = Region.create(4096, entries=4)
        server = Server(region)
        client = Client(region)
        client.end()
        client.close()
        server.bell.close()
    assert facts() == before


def test_a_view_keeps_the_memory_after_the_session():
    region = Region.create(mmap.PAGESIZE, entries=4)
    view = region.view(0, 4)
    region.close()
    view[:] = b"fine"
    assert bytes(view) == b"fine"


def test_one_that_sleeps_is_not_forgotten_by_one_that_spins(both):
    """Who spins holds the lock of those who read, now and then, so that who sleeps does not read himself."""
    server, client = both
    late = []
    for _ in range(20):
        spins, sleeps = client.submit(Submission(kind=layout.FORWARD)), client.submit(Submission(kind=layout.FORWARD))
        while server.take():
            pass
        came = {}

        def wait(ticket, spin_ns, came=came):
            client.wait(ticket, Completion(), 5 * 10**9, spin_ns)
            came[ticket] = time.monotonic()

        threads = [threading.Thread(target=wait, args=args) for args in ((spins, 2 * 10**9), (sleeps, 0))]
        for t in threads:
            t.start()
            time.sleep(0.003)
        server.answer(spins)
        threads[0].join()
        time.sleep(0.001)
        answered = time.monotonic()
        server.answer(sleeps)
        threads[1].join()
        late.append(came[sleeps] - answered)
        client.release(spins)
        client.release(sleeps)
    assert sorted(late)[len(late) // 2] < 0.025, "half of 50 ms: a sleeper looks by itself after 100"


def test_a_server_that_sleeps_is_rung_for_a_request_that_is_expected_and_once(both):
    server, client = both
    client.expect()
    assert select.select([server.bell], [], [], 0)[0] == [], "it is awake"
    server.control.server_sleeps = 1
    client.expect()
    assert server.bell.recv(9) == b"\0"
    assert server.control.server_sleeps == 0
    assert client.submit(Submission(kind=layout.FORWARD, tokens=1))
    assert select.select([server.bell], [], [], 0)[0] == [], "it was rung for already"


def test_what_is_done_beside_a_call_happens_when_the_request_is_there_and_before_it_is_waited_for(both):
    server, client = both
    answer, request, found = Completion(), Submission(kind=layout.FORWARD, tokens=1), []

    def beside():
        found.append(server.take())
        server.answer(found[0].id, 7)

    ticket = client.call_beside(request, Tensors(out_bytes=64), answer, -1, 0, beside)
    assert (found[0].id, found[0].out, answer.routes_computed) == (ticket, request.out, 7)
    client.release(ticket)
    assert (client.taken, client.blocks) == (0, 0)


def test_a_call_whose_time_is_over_is_still_under_way(both):
    _, client = both
    ticket = client.call_beside(Submission(), Tensors(out_bytes=64), Completion(), 0, 0, lambda: None)
    assert ticket < 0
    assert client.taken == 1
    client.abandon(-ticket)


def test_a_call_that_fails_beside_is_taken_back(both):
    server, client = both
    answer = Completion()
    with pytest.raises(KeyboardInterrupt):
        client.call_beside(Submission(kind=layout.FORWARD), Tensors(out_bytes=64), answer, -1, 0, interrupted)
    sent, cancel = server.take(), server.take()
    assert (cancel.kind, cancel.id) == (layout.CANCEL, sent.id)
    server.answer(sent.id)
    client.drain()
    assert (client.taken, client.blocks) == (0, 0)


def interrupted():
    raise KeyboardInterrupt


def test_what_finds_no_room_is_not_sent_and_nothing_is_done_beside_it(both):
    server, client = both
    with pytest.raises(NoRoomError):
        client.call_beside(Submission(), Tensors(out_bytes=1 << 30), Completion(), -1, 0, interrupted)
    assert server.take() is None
    client.end()
    with pytest.raises(NoRoomError, match="over"):
        client.call_beside(Submission(), Tensors(out_bytes=64), Completion(), -1, 0, interrupted)
