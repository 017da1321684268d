"""expertctl apply: a cluster of real servers is moved while it is called, resumed, and taken back."""

from __future__ import annotations

import json
import threading
from contextlib import ExitStack, closing

import in_process
import numpy as np
import pytest

from expertctl.bench.faults.load import LoadClients
from expertctl.cli import main
from expertctl.common.workload import LayerShape, drawn
from expertctl.planner.observe import ask
from expertctl.rebalancing.rebalance import Options, Progress, Rebalancer, RebalancingFailedError
from expertctl.rebalancing.steps import holdings
from expertd.errors import UnauthenticatedError, UnavailableError
from expertd.placement import Placement, Server
from expertd_client import Credentials, ExpertCluster
from expertd_client.cluster import PlacementFile, members
from expertd_client.transports.grpc.sync import GrpcTransport
from expertd_server.boot.assignment import BootError
from expertd_server.config.serve import ServeConfig
from expertd_server.config.values import Address, Ranges
from expertd_server.engine.engine import Engine
from expertd_server.host.host import Host
from expertd_server.residence import residence
from expertd_server.views.metrics_http import MetricsHttp

pytest.importorskip("cryptography", reason="makes certificates; pip install cryptography (the extra `test` has it)")

from certificates import Authority

pytestmark = pytest.mark.timeout(300)

HERE = Address("127.0.0.1", 0)
TINY = {
    "synthetic": "tiny:int4_g128", "device": "cpu", "listen": HERE, "admin_listen": HERE, "threads": 1,
    "expert_metrics": True,
}  # fmt: skip
COUNTS = {0: 8, 1: 8}
QUICK = Options(at_once=1, settle_s=1.3)


@pytest.fixture
def clients_ask_often(monkeypatch):
    """Fifty times a second instead of once: a move leaves them 1.3 s to hear of it, and this machine may be busy."""
    monkeypatch.setattr(members, "PROBE_S", 0.02)


@pytest.fixture
def hosts():
    """Three servers: experts 0-3, 4-7 and none."""
    with ExitStack() as stack:
        made = []
        for experts in ("0-3", "4-7", None):
            layers = None if experts else Ranges("none", ())
            host = Host(ServeConfig(**TINY, experts=Ranges.parse(experts) if experts else None, layers=layers))
            stack.callback(host.close)
            host.start()
            made.append(host)
        for host in made:
            host.ready(60)
        yield made


def placed(hosts, *held: str, epoch=5) -> Placement:
    """held: of each server, the experts of both layers."""
    ids = [Ranges.parse(text).numbers if text else () for text in held]
    servers = [Server(h.address, dict.fromkeys(COUNTS, e) if e else {}) for h, e in zip(hosts, ids, strict=True)]
    return Placement(tuple(servers), COUNTS, epoch)


def held(hosts) -> dict:
    return holdings(Placement.from_describe(ask([h.address for h in hosts])))


def move(then: Placement, options=QUICK, changed=lambda progress: None) -> int:
    progress = Progress()
    progress.changed = lambda: changed(progress)
    with closing(Rebalancer(then, options=options)) as mover:
        return mover.run(progress)


def callers(stack, cluster, threads=2) -> LoadClients:
    request = drawn(np.random.default_rng(0), 8, LayerShape(0, 256, 8, 2), 0.0)
    expected = np.asarray(cluster.forward_request(request).output, np.float32)
    return stack.enter_context(LoadClients(cluster, request, expected, 2e-2, threads))


@pytest.mark.slow  # clients are given a second for each of four changes
def test_experts_move_under_load_and_no_call_fails(hosts, clients_ask_often):
    then = placed(hosts, "0-2", "4-6", "3,7,0")
    with ExitStack() as stack:
        addresses = [h.address for h in hosts]
        cluster = stack.enter_context(ExpertCluster(addresses, transport=GrpcTransport))
        load = callers(stack, cluster)
        assert load.all_go_on(60)
        before = len(load.calls)
        assert move(then) == 6
        assert len(load.calls) > before, "it was called meanwhile"
        assert held(hosts) == holdings(then)
        request = drawn(np.random.default_rng(1), 8, LayerShape(1, 256, 8, 2), 0.0)
        answer = cluster.forward_request(request)
        assert {p.server for p in answer.parts} <= set(addresses)
        assert hosts[2].address in {p.server for p in answer.parts}, "traffic follows"
        assert load.all_go_on(60)
        assert not load.failures
    assert move(then) == 0, "nothing is left to do"
    epochs = {a: d.placement_epoch for a, d in ask(addresses).items()}
    assert epochs[addresses[0]] == epochs[addresses[1]] == 5


def test_clients_that_follow_a_file_follow_the_move(hosts, tmp_path, clients_ask_often):
    path = tmp_path / "placement.json"
    path.write_text(placed(hosts, "0-3", "4-7", "", epoch=1).to_json())
    then = placed(hosts, "", "4-7", "0-3")
    with ExitStack() as stack:
        cluster = stack.enter_context(ExpertCluster(PlacementFile(path), transport=GrpcTransport))
        load = callers(stack, cluster)
        assert move(then, Options(at_once=2, settle_s=1.3, publish=path)) == 8
        assert load.all_go_on(60)
        assert not load.failures
        assert cluster.source_error == ""
    assert Placement.from_json(path.read_text()) == Placement(then.servers, COUNTS, 5, hosts_fingerprint(hosts))


def hosts_fingerprint(hosts) -> str:
    return next(iter(ask([hosts[0].address]).values())).model.fingerprint


def test_what_a_step_cannot_do_is_taken_back(hosts, monkeypatch):
    before, real = held(hosts), residence.boot_layer

    def no_more(a, *args, **kwargs):
        if a.info.layer == 1 and a.held == (0, 1, 2, 3, 4):
            raise BootError("layer 1: the disk is gone")
        return real(a, *args, **kwargs)

    monkeypatch.setattr(residence, "boot_layer", no_more)
    with pytest.raises(RebalancingFailedError, match=r"the disk is gone; everything is held as before") as e:
        move(placed(hosts, "0-4", "5-7", ""), Options(at_once=1, settle_s=0.05))
    assert hosts[0].address in str(e.value)
    assert held(hosts) == before
    with pytest.raises(RebalancingFailedError, match="the disk is gone; 1 steps are done and stay"):
        move(placed(hosts, "0-4", "5-7", ""), Options(at_once=1, settle_s=0.05, keep=True))
    assert held(hosts)[hosts[0].address] == {0: (0, 1, 2, 3, 4), 1: (0, 1, 2, 3)}
    monkeypatch.undo()
    assert move(placed(hosts, "0-4", "5-7", ""), Options(settle_s=0.05)) == 1, "the other layer is there already"


def test_a_move_that_is_stopped_goes_on_where_it_was(hosts):
    then = placed(hosts, "0-4", "5-7", "")

    def stop(progress) -> None:
        if progress.text.startswith("step 2") and threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt

    with pytest.raises(RebalancingFailedError, match="stopped after 1 of 2 steps; the same command goes on"):
        move(then, Options(at_once=1, settle_s=0.05), stop)
    assert held(hosts)[hosts[0].address] == {0: (0, 1, 2, 3, 4), 1: (0, 1, 2, 3)}
    assert move(then, Options(at_once=1, settle_s=0.05)) == 1
    assert held(hosts) == holdings(then) | {hosts[2].address: {}}


def test_a_server_that_dies_on_the_way_costs_no_expert_its_holder(hosts):
    """Its experts went to the third one in step 1, and stay there: the one that had them is gone."""
    then = placed(hosts, "", "4-7", "0-3")
    gone = hosts[0]

    def die(progress) -> None:
        if (
            progress.text.startswith("step 2")
            and gone.address
            and threading.current_thread() is threading.main_thread()
        ):
            gone.close()

    with pytest.raises(RebalancingFailedError, match=f"everything is held as before, but at {gone.address}, which"):
        move(then, Options(at_once=1, settle_s=0.05, timeout_s=2.0), die)
    now = held(hosts[1:])
    assert now[hosts[2].address][0] == (0, 1, 2, 3)
    assert now[hosts[1].address] == dict.fromkeys(COUNTS, (4, 5, 6, 7))


def test_what_others_have_prepared_is_in_the_way_until_it_is_let_go_of(hosts):
    then = placed(hosts, "0-4", "5-7", "")
    hosts[0]._changes.prepare("somebody's", {0: range(6)}).ended.wait(20)
    with pytest.raises(RebalancingFailedError, match=r"got change .somebody's., prepared"):
        move(then, Options(settle_s=0.05))
    assert hosts[0]._changes.job is not None, "and is not ours to let go of"
    assert move(then, Options(settle_s=0.05, abort=True)) == 2


def test_room_is_asked_for_before_anything_is_moved(hosts, monkeypatch):
    monkeypatch.setattr(residence, "free_bytes", lambda device: 1)
    with pytest.raises(RebalancingFailedError, match=r"GiB are free.*; nothing was moved"):
        move(placed(hosts, "0-4", "5-7", ""))


def test_the_command(hosts, tmp_path, capsys):
    path = tmp_path / "then.json"
    path.write_text(placed(hosts, "0-4", "5-7", "").to_json())
    assert main(["apply", str(path), "--dry-run"]) == 0
    assert "every server has enough memory" in capsys.readouterr().out
    assert held(hosts)[hosts[0].address][0] == (0, 1, 2, 3)
    assert main(["apply", str(path), "--settle", "0.05"]) == 0
    assert "2 experts moved; epoch 5 is in effect" in capsys.readouterr().out
    assert held(hosts)[hosts[0].address][0] == (0, 1, 2, 3, 4)
    assert main(["apply", str(path), "--settle", "0.05", "--abort"]) == 0
    assert "no prepared change was there to be discarded\n0 experts moved" in capsys.readouterr().out
    hosts[0]._changes.prepare("somebody's", {0: range(6)}).ended.wait(20)
    assert main(["apply", str(path), "--settle", "0.05", "--abort"]) == 0
    assert f"a prepared change was discarded at {hosts[0].address}\n0 experts moved" in capsys.readouterr().out
    path.write_text(placed(hosts, "0-4", "6-7", "").to_json())
    assert main(["apply", str(path)]) == 2
    assert "placement: experts 5 of layers 0-1 have no server; want a server for each expert" in capsys.readouterr().err


def test_a_server_without_the_service_is_named(hosts):
    with in_process.hosts(**TINY) as serve:
        host = serve(admin_listen=None)
        with pytest.raises(UnavailableError, match=r"AdminService: got none, want one; start the server with --admin"):
            Rebalancer(placed([host], "0-7"))


def test_a_plan_of_running_servers_is_applied(hosts, tmp_path, capsys):
    """From their counters to other replicas, by the two commands."""
    with closing(ExpertCluster([h.address for h in hosts], transport=GrpcTransport)) as cluster:
        for n in range(20):
            cluster.forward_request(drawn(np.random.default_rng(n), 8, LayerShape(n % 2, 256, 8, 2), 1.5))
    pages = [MetricsPage(h) for h in hosts]
    try:
        facts = {h.address: {"metrics": page.where, "experts": 6} for h, page in zip(hosts, pages, strict=True)}
        (tmp_path / "servers.json").write_text(json.dumps(facts))
        placement = tmp_path / "placement.json"
        command = ["plan", "--servers", str(tmp_path / "servers.json"), "--max-moves", "4", "-o", str(placement)]
        assert main([*command, "--record", str(tmp_path / "loads.json")]) == 0
    finally:
        for page in pages:
            page.close()
    loads = json.loads((tmp_path / "loads.json").read_text())
    assert {n: sum(row) for n, row in loads.items()} == {"0": 160.0, "1": 160.0}
    assert loads["0"][0] == max(loads["0"]), "expert 0 is the one that is asked for most"
    then = Placement.from_json(placement.read_text())
    assert 0 < sum(len(e) for e in holdings(then)[hosts[2].address].values()) <= 4
    assert main(["apply", str(placement), "--settle", "0.05"]) == 0
    assert held(hosts) == holdings(then)
    assert "experts moved" in capsys.readouterr().out


class MetricsPage:
    """A server's metrics over HTTP."""

    def __init__(self, host: Host) -> None:
        if isinstance(host.engine, Engine):
            host.engine.delivery.report(scraped=True)
        self._http = MetricsHttp(host.metrics, "127.0.0.1", 0)
        self.where = f"127.0.0.1:{self._http.port}"
        self.close = self._http.close


def test_over_tls_with_a_token(tmp_path):
    ca = Authority(tmp_path / "pki")
    certificate, key = ca.sign("localhost")
    (tmp_path / "callers.toml").write_text('[callers.boss]\ntokens = ["boss-boss-boss-boss"]\nrights = ["admin"]\n')
    (tmp_path / "token").write_text("boss-boss-boss-boss\n")
    tls = {"tls_cert": certificate, "tls_key": key, "callers": tmp_path / "callers.toml"}
    with in_process.hosts(**TINY, **tls) as serve:
        host = serve(experts=Ranges.parse("0-6"))
        credentials = Credentials(ca=ca.ca, token_file=tmp_path / "token")
        with closing(Rebalancer(placed([host], "0-7"), credentials, Options(settle_s=0.05))) as mover:
            assert mover.run(Progress()) == 2
            assert mover.now(mover.then).servers == mover.then.servers
        with pytest.raises(UnauthenticatedError):
            Rebalancer(placed([host], "0-7"), Credentials(ca=ca.ca))
