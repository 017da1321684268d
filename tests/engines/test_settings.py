"""Who computes an engine's experts, as its user writes it."""

from __future__ import annotations

import json

import pytest

from expertd.errors import PlacementError, UnsupportedCombinationError
from expertd.v1 import expert_service_pb2 as pb
from expertd_client.clients.client import ExpertClient
from expertd_client.cluster import ExpertCluster
from expertd_client.engines import settings as module
from expertd_client.engines.served import Found
from expertd_client.engines.settings import Settings, connection_to, settings_of
from expertd_client.transports.credentials import Credentials


def test_nobody_asked():
    assert settings_of(None, {}) is None
    assert settings_of(None, {"EXPERTD_ADDRESS": ""}) is None
    assert settings_of(None, {"EXPERTD_CLIENT": '{"timeout_s": 5}'}) is None


@pytest.mark.parametrize(
    ("given", "servers"),
    [
        ("a:1", ("a:1",)),
        ("a:1, b:2", ("a:1", "b:2")),
        (["a:1", "b:2"], ("a:1", "b:2")),
        ({"address": ["a:1"]}, ("a:1",)),
        ("/etc/placement.json", ("/etc/placement.json",)),
    ],
)
def test_addresses(given, servers):
    assert settings_of(given, {"EXPERTD_ADDRESS": "elsewhere:1"}) == Settings(servers)
    if isinstance(given, str):
        assert settings_of(None, {"EXPERTD_ADDRESS": given}) == Settings(servers)


def test_options_are_the_same_in_both_places():
    options = {"timeout_s": 5, "start_timeout_s": 7.5, "ca": "ca.pem", "token_file": "token", "graphs": True}
    wanted = Settings(("a:1",), 5.0, 7.5, Credentials(ca="ca.pem", token_file="token"), graphs=True)
    assert settings_of({"address": "a:1", **options}, {}) == wanted
    assert settings_of(None, {"EXPERTD_ADDRESS": "a:1", "EXPERTD_CLIENT": json.dumps(options)}) == wanted


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "configuration: address: got None"),
        ("", "configuration: address: got ''"),
        (["a:1", 7], "address: got"),
        ({"address": "a:1", "timeout": 5}, "configuration: option: got 'timeout', want one of address, tls, graphs, "),
        ({"address": "a:1", "timeout_s": 0}, "timeout_s: got 0, want a number of seconds > 0"),
        ({"address": "a:1", "timeout_s": True}, "timeout_s: got True"),
        ({"address": "a:1", "ca": 3}, "ca: got 3, want a string"),
        ({"address": "a:1", "tls": "yes"}, "tls: got 'yes', want true or false"),
        ({"address": "a:1", "graphs": 1}, "graphs: got 1, want true or false"),
        ({"address": "a:1,b:2", "graphs": True}, "graphs: got 'a:1,b:2', want one server"),
        ({"address": "placement.json", "graphs": True}, "graphs: got 'placement.json', want one server"),
        ({"address": "a:1", "key": "k"}, "configuration: credentials: got one of certificate and key"),
    ],
)
def test_what_is_wrong_is_said(given, said):
    with pytest.raises(UnsupportedCombinationError, match=r".*") as raised:
        settings_of(given, {})
    assert said in str(raised.value)


@pytest.mark.parametrize("text", ["{", "[1]", '"a"'])
def test_an_environment_that_is_no_object(text):
    with pytest.raises(UnsupportedCombinationError, match="EXPERTD_CLIENT: got"):
        settings_of(None, {"EXPERTD_ADDRESS": "a:1", "EXPERTD_CLIENT": text})


def test_one_connection_for_all_layers_of_a_process(monkeypatch):
    one = Settings(("127.0.0.1:9",), timeout_s=3)
    assert connection_to(one) is connection_to(Settings(("127.0.0.1:9",), timeout_s=3))
    assert isinstance(connection_to(one).forwarder, ExpertClient)
    monkeypatch.setattr(module.os, "getpid", lambda: -1)  # a process that was forked has its own
    assert connection_to(one) is not module._CONNECTIONS[next(iter(module._CONNECTIONS))]


def test_several_servers_and_a_placement_are_a_cluster(tmp_path):
    path = tmp_path / "placement.json"
    path.write_text("{")
    with pytest.raises(PlacementError):  # it was read
        connection_to(Settings((str(path),)))
    several = connection_to(Settings(("127.0.0.1:9", "127.0.0.1:10")))
    assert isinstance(several.forwarder, ExpertCluster)
    several.forwarder.close()


def test_a_server_of_another_model_is_refused(monkeypatch):
    layer = pb.Layer(layer=3, num_experts=8, intermediate_size=32, held=[pb.ExpertRange(first=0, count=8)])
    said = pb.DescribeResponse(layers=[layer], model=pb.Model(hidden_size=16), limits=pb.Limits(max_tokens=128))
    asked = []
    monkeypatch.setattr(ExpertClient, "describe", lambda self, **options: asked.append(options) or said)
    connection = connection_to(Settings(("127.0.0.1:11",), start_timeout_s=9))
    assert connection.max_tokens(Found("layers.3", 3, 8, 16, 32)) == 128
    assert asked == [{"wait_for_ready": True, "timeout_s": 9}]
    with pytest.raises(PlacementError, match=r"127\.0\.0\.1:11: layer 3: got 8 experts"):
        connection.max_tokens(Found("layers.3", 3, 8, 16, 64))
    with pytest.raises(PlacementError, match="layer 4: got a server of layers 3"):
        connection.max_tokens(Found("layers.4", 4, 8, 16, 32))
