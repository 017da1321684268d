"""What a server holds is changed in two phases through AdminService while it serves."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack
from functools import cache

import grpc
import pytest
import torch

from expertd.errors import (
    ChangePendingError,
    ChangeRefusedError,
    ChangeUnknownError,
    LayerNotHeldError,
    MalformedMessageError,
    from_rpc_error,
)
from expertd.v1 import admin_service_pb2 as pb
from expertd.v1 import admin_service_pb2_grpc as stubs
from expertd_client import ExpertClient
from expertd_kernels import reference, relative_error, tolerance
from expertd_kernels.sources.synthetic import random_inputs
from expertd_kernels.weights.digest import expert_digests
from expertd_server.boot.assignment import BootError, open_source
from expertd_server.config.serve import ConfigError, ServeConfig
from expertd_server.config.values import Address, Ranges
from expertd_server.host.host import Host
from expertd_server.residence import residence

pytestmark = pytest.mark.timeout(60)

H, E, K = 256, 8, 2
HERE = Address("127.0.0.1", 0)
TINY = {"synthetic": "tiny:int4_g128", "device": "cpu", "backend": "reference", "listen": HERE, "admin_listen": HERE}
TINY |= {"threads": 1}


@cache
def digests_of(layer: int) -> list[int]:
    return expert_digests(open_source(ServeConfig(**TINY)).load(layer, range(E))).tolist()


class Admin:
    """A server with the experts 0-3 of layer 0, and its AdminService."""

    def __init__(self, host: Host, client: ExpertClient, stub) -> None:
        self.host, self.client, self.stub = host, client, stub
        self.x, self.ids, self.w = random_inputs(16, H, E, K, seed=3)

    def call(self, method: str, **fields):
        """The answers of a method.  Raises rows of the error table."""
        kind = getattr(pb, f"{method}Request")
        try:
            answer = getattr(self.stub, method)(kind(**fields), timeout=30)
            return list(answer) if method == "Prepare" else answer
        except grpc.RpcError as e:
            raise from_rpc_error(e) from None

    def held(self) -> dict[int, list[int]]:
        """As Describe says, with the digests of just those experts' weights."""
        layers = self.client.describe().layers
        held = {x.layer: [e for r in x.held for e in range(r.first, r.first + r.count)] for x in layers}
        for x in layers:
            assert list(x.weight_digests) == [digests_of(x.layer)[e] for e in held[x.layer]]
        return held

    def check(self, weights, held) -> None:
        """It computes with these experts of layer 0."""
        answer = self.client.forward(0, self.x, self.ids, self.w)
        mine = torch.isin(self.ids, torch.tensor(sorted(held)))
        assert answer.routes_computed == int(mine.sum())
        want = reference(weights, self.x, torch.where(mine, self.ids, -1).int(), self.w)
        assert relative_error(torch.as_tensor(answer.output).float(), want) <= tolerance("bf16")


@pytest.fixture(scope="module")
def weights():
    return open_source(ServeConfig(**TINY)).load(0, range(E))


@pytest.fixture
def admin():
    with ExitStack() as stack:
        host = Host(ServeConfig(**TINY, layers=Ranges.parse("0"), experts=Ranges.parse("0-3")))
        stack.callback(host.close)
        client = stack.enter_context(ExpertClient(host.start()))
        host.ready(60)
        channel = stack.enter_context(grpc.insecure_channel(client.describe().admin_address))
        yield Admin(host, client, stubs.AdminServiceStub(channel))


def test_nothing_is_served_of_a_change_until_it_is_committed(admin, weights):
    answers = admin.call("Prepare", change="a", layers={"0": "2-7", "1": "0"})
    assert (answers[-1].layers, answers[-1].done) == (2, 2)
    assert answers[-1].memory.weights_bytes > admin.client.describe().memory.weights_bytes
    assert admin.held() == {0: [0, 1, 2, 3]}
    admin.check(weights, range(4))
    status = admin.call("Status")
    assert (status.change, status.state, status.done) == ("a", pb.CHANGE_STATE_PREPARED, 2)
    admin.call("Commit", change="a", epoch=7)
    assert admin.held() == {0: [2, 3, 4, 5, 6, 7], 1: [0]}
    admin.check(weights, range(2, 8))
    assert admin.client.describe().placement_epoch == admin.call("Status").placement_epoch == 7
    admin.call("Commit", change="a")  # the answer to the first one was lost
    assert admin.call("Status").state == pb.CHANGE_STATE_UNSPECIFIED


def test_an_aborted_change_leaves_what_was(admin, weights):
    admin.call("Prepare", change="a", layers={"0": "0-7"})
    admin.call("Abort", change="a")
    admin.call("Abort", change="never")
    with pytest.raises(ChangeUnknownError, match="change 'a': got none, want it; prepare it again"):
        admin.call("Commit", change="a")
    admin.check(weights, range(4))
    admin.host.residence.add(0, experts=[5])  # nothing holds others up
    admin.check(weights, [0, 1, 2, 3, 5])


def test_one_change_at_a_time_and_the_same_one_again(admin):
    admin.call("Prepare", change="a", layers={"0": "0-4"})
    assert admin.call("Prepare", change="a", layers={"0": "0-4"})[-1].done == 1
    with pytest.raises(ChangePendingError, match="change 'b': got change 'a', prepared, want none"):
        admin.call("Prepare", change="b", layers={"0": "0-5"})
    with pytest.raises(ChangePendingError, match="change 'a' with other experts"):
        admin.call("Prepare", change="a", layers={"0": "0-5"})
    admin.call("Commit", change="a")
    assert admin.held() == {0: [0, 1, 2, 3, 4]}


def test_a_change_that_nobody_commits_is_let_go_of(admin):
    admin.call("Prepare", change="a", layers={"0": "0-4"}, keep_s=1)
    end_s = time.monotonic() + 10
    while admin.call("Status").change and time.monotonic() < end_s:
        time.sleep(0.05)
    admin.call("Prepare", change="b", layers={"0": "0-5"})


def test_what_goes_is_computed_while_clients_turn_away(admin, weights):
    admin.call("Prepare", change="a", layers={"0": "0-1"})
    ended: list[float] = []
    commit = threading.Thread(
        target=lambda: (admin.call("Commit", change="a", linger_ms=3000), ended.append(time.monotonic()))
    )
    begin_s = time.monotonic()
    commit.start()
    while admin.held() != {0: [0, 1]}:
        assert not ended, "Describe names them no more at once, not after the time that clients are given"
    admin.check(weights, range(4))
    assert admin.call("Status").state == pb.CHANGE_STATE_COMMITTING
    with pytest.raises(ChangePendingError):
        admin.call("Abort", change="a")
    commit.join(20)
    assert ended[0] - begin_s >= 3.0
    admin.check(weights, range(2))


def test_a_layer_that_goes_whole_is_told_no_more(admin):
    admin.call("Prepare", change="a", layers={"0": ""})
    admin.call("Commit", change="a", linger_ms=50)
    assert admin.held() == {}
    with pytest.raises(LayerNotHeldError):
        admin.client.forward(0, admin.x, admin.ids, admin.w)


def test_memory_is_accounted_for_before_anything_is_loaded(admin, monkeypatch, weights):
    monkeypatch.setattr(residence, "boot_layer", lambda *a, **k: pytest.fail("it loaded"))
    planned = admin.call("Prepare", change="a", layers={"0": "0-7"}, dry_run=True)[-1].memory
    assert planned.weights_bytes > admin.client.describe().memory.weights_bytes
    assert admin.call("Status").change == ""
    monkeypatch.setattr(residence, "free_bytes", lambda device: 1 << 20)
    for dry in (True, False):
        with pytest.raises(ChangeRefusedError, match="GiB are free"):
            admin.call("Prepare", change="a", layers={"0": "0-7"}, dry_run=dry)
    admin.check(weights, range(4))


def test_a_change_that_fails_while_it_is_prepared_changes_nothing(admin, monkeypatch, weights):
    def fails(*args, **kwargs):
        raise BootError("layer 0: the disk is gone")

    with monkeypatch.context() as m:
        m.setattr(residence, "boot_layer", fails)
        with pytest.raises(ChangeRefusedError, match="the disk is gone"):
            admin.call("Prepare", change="a", layers={"0": "0-7"})
    admin.check(weights, range(4))
    assert admin.call("Prepare", change="a", layers={"0": "0-7"})[-1].done == 1, "and can be asked for again"


def test_an_abort_ends_a_preparation(admin, monkeypatch):
    begun, go_on, real = threading.Event(), threading.Event(), residence.boot_layer

    def slow(*args, **kwargs):
        begun.set()
        assert go_on.wait(20)
        return real(*args, **kwargs)

    monkeypatch.setattr(residence, "boot_layer", slow)
    failed: list[BaseException] = []

    def prepare() -> None:
        try:
            admin.call("Prepare", change="a", layers={"0": "0-7", "1": "0-7"})
        except ChangeRefusedError as e:
            failed.append(e)

    caller = threading.Thread(target=prepare)
    caller.start()
    assert begun.wait(20)
    threading.Timer(0.2, go_on.set).start()
    admin.call("Abort", change="a")
    caller.join(20)
    assert "aborted" in str(failed[0])
    assert admin.call("Status").change == ""


@pytest.mark.parametrize(
    ("error", "text", "fields"),
    [
        (ChangeRefusedError, "layer 9 has no experts", {"layers": {"9": "0"}}),
        (ChangeRefusedError, "got the experts 6-9, want some of 0 to 7", {"layers": {"0": "6-9"}}),
        (ChangeRefusedError, "fingerprint: got other", {"layers": {"0": "1"}, "fingerprint": "other"}),
        (MalformedMessageError, "layers: got none", {}),
        (MalformedMessageError, "want numbers and ranges", {"layers": {"0": "x"}}),
        (MalformedMessageError, "layer 1 once more", {"layers": {"0-1": "1", "1": "2"}}),
        (MalformedMessageError, "want at most 0", {"layers": {str(n): "0-65535" for n in range(17)}}),
        (MalformedMessageError, "1048576 numbers, want at most 65536", {"layers": {"0": "0-1048575"}}),
        (MalformedMessageError, "characters, want at most 1048576", {"layers": {"0" * n: "0" for n in range(1, 2000)}}),
        (MalformedMessageError, "PrepareRequest.change: got 257 char", {"layers": {"0": "1"}, "change": "x" * 257}),
        (MalformedMessageError, "1048576 numbers, want at most 16384", {"layers": {"0-1048575": "0"}}),
        (MalformedMessageError, "want at most 16384", {"layers": {",".join(["0-1048575"] * 2000): "0"}}),
        (MalformedMessageError, "want at most 4096 ranges", {"layers": {"0": ",".join(["0-1048575"] * 5000)}}),
        (MalformedMessageError, "PrepareRequest.change", {"layers": {"0": "1"}, "change": ""}),
    ],
)
def test_what_cannot_be_is_refused_by_name(admin, error, text, fields):
    begun = time.process_time()
    with pytest.raises(error, match=text):
        admin.call("Prepare", **{"change": "a", **fields})
    assert time.process_time() - begun < 5, "nothing is expanded before it is bounded"
    assert admin.held() == {0: [0, 1, 2, 3]}


def test_a_host_that_is_closed_lets_go_of_what_is_prepared(admin):
    admin.call("Prepare", change="a", layers={"0": "0-7"})
    admin.host.close()
    names = {t.name for t in threading.enumerate()}
    assert not {n for n in names if n.startswith("expertd-change")}


def test_it_listens_beyond_this_host_with_tls_and_rights_alone(tmp_path):
    where = Address("10.0.0.1", 7071)
    pair = {"tls_cert": tmp_path / "c", "tls_key": tmp_path / "k"}
    for more in ({"insecure": True}, pair, {"callers": tmp_path / "f"}):
        with pytest.raises(ConfigError, match=r"--admin-listen 10\.0\.0\.1:7071"):
            ServeConfig(**{**TINY, "admin_listen": where, **more})
    ServeConfig(**{**TINY, "admin_listen": where, **pair, "callers": tmp_path / "f"})


def test_only_callers_with_the_right_admin_may(tmp_path):
    callers = tmp_path / "callers.toml"
    token = {name: f"{name}-{name}-{name}-{name}" for name in ("boss", "user")}
    callers.write_text(
        f'[callers.boss]\ntokens = ["{token["boss"]}"]\nrights = ["admin"]\n'
        f'[callers.user]\ntokens = ["{token["user"]}"]\nrights = ["call", "describe"]\n'
    )
    host = Host(ServeConfig(**TINY, layers=Ranges("none", ()), callers=callers))
    try:
        host.start()
        host.ready(60)
        with grpc.insecure_channel(host._describe.admin_address) as channel:
            stub = stubs.AdminServiceStub(channel)
            found = {}
            for name in ("boss", "user", "nobody"):
                metadata = [("authorization", f"Bearer {token[name]}")] if name in token else []
                try:
                    stub.Status(pb.StatusRequest(), metadata=metadata, timeout=10)
                    list(stub.Prepare(pb.PrepareRequest(change="a", layers={"0": "1"}), metadata=metadata, timeout=30))
                    found[name] = ""
                except grpc.RpcError as e:
                    found[name] = from_rpc_error(e).reason
        assert found == {"boss": "", "user": "PERMISSION_DENIED", "nobody": "UNAUTHENTICATED"}
        assert host._changes.job is not None
    finally:
        host.close()


def test_a_server_that_closes_does_not_linger(admin):
    admin.call("Prepare", change="a", layers={"0": "0-1"})
    commit = threading.Thread(target=lambda: admin.host._changes.commit("a", linger_s=30.0))
    commit.start()
    while admin.call("Status").state != pb.CHANGE_STATE_COMMITTING:
        time.sleep(0.005)
    begin_s = time.monotonic()
    admin.host.close()
    commit.join(10)
    assert time.monotonic() - begin_s < 10
    assert not commit.is_alive()


def test_what_was_changed_is_held_after_a_restart(tmp_path):
    file = tmp_path / "held.json"

    def hold(**more) -> Host:
        host = Host(ServeConfig(**{**TINY, "layers": Ranges.parse("0"), "experts": Ranges.parse("0-3"), **more}))
        hosts.append(host)
        host.start()
        host.ready(60)
        return host

    def held(host: Host) -> dict[int, tuple[int, ...]]:
        return {n: tuple(b.assignment.held) for n, b in host.residence.booted.items()}

    hosts: list[Host] = []
    try:
        first = hold(held=file)
        assert not file.exists(), "until something is changed the options say it"
        first._changes.prepare("a", {0: (2, 5), 1: range(8)}).ended.wait(20)
        first._changes.commit("a", epoch=9)
        first.close()
        second = hold(held=file)
        assert held(second) == {0: (2, 5), 1: tuple(range(8))}
        assert second._describe(False).placement_epoch == second._changes.epoch == 9
        second.residence.remove(0, 1)
        second.close()
        assert held(hold(held=file)) == {}
        assert held(hold()) == {0: (0, 1, 2, 3)}
        with pytest.raises(BootError, match=r"--held .*: got the fingerprint .* another model's; delete it"):
            hold(held=file, synthetic="tiny-oss:mxfp4")
        file.write_text("{")
        with pytest.raises(BootError, match="cannot be read"):
            hold(held=file)
    finally:
        for host in hosts:
            host.close()
