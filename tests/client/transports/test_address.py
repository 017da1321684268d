"""Addresses as people write them."""

import asyncio
import json

import numpy as np
import pytest

from expertd.errors import UnavailableError
from expertd.v1 import expert_service_pb2 as pb
from expertd_client import AsyncExpertClient, ExpertClient, ExpertCluster
from expertd_client.cluster.sources import PlacementFile
from expertd_client.transports.address import parse_address, reach
from expertd_client.transports.admin import admin_address
from expertd_client.transports.credentials import Credentials


@pytest.mark.parametrize(
    ("text", "target", "host", "secure"),
    [
        ("experts", "experts:50051", "experts", None),
        ("experts.example:7070", "experts.example:7070", "experts.example", None),
        ("10.0.0.7", "10.0.0.7:50051", "10.0.0.7", None),
        ("dns:7070", "dns:7070", "dns", None),
        ("[::1]", "[::1]:50051", "::1", None),
        ("[fe80::1%eth0]:7070", "[fe80::1%eth0]:7070", "fe80::1%eth0", None),
        ("http://experts", "experts:50051", "experts", False),
        ("http://127.0.0.1:7070/", "127.0.0.1:7070", "127.0.0.1", False),
        ("https://experts", "experts:50051", "experts", True),
        ("https://[::1]:7070", "[::1]:7070", "::1", True),
        ("unix:/run/e.sock", "unix:/run/e.sock", "", None),
        ("unix:///run/e.sock", "unix:/run/e.sock", "", None),
        ("unix:e.sock", "unix:e.sock", "", None),
        ("dns:///experts:7070", "dns:///experts:7070", "experts", None),
        ("ipv6:[::1]:7070", "ipv6:[::1]:7070", "::1", None),
        ("xds:///experts", "xds:///experts", "", None),
    ],
)
def test_what_is_understood(text, target, host, secure):
    found = parse_address(text)
    assert (found.target, found.host, found.secure) == (target, host, secure)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no host"),
        (":7070", "no host"),
        ("experts:", "the port ''"),
        ("experts:0", "the port '0'"),
        ("experts:65536", "from 1 to 65535"),
        ("experts:grpc", "the port 'grpc'"),
        ("experts:７", "the port"),
        ("ex perts", "the host 'ex perts'"),
        ("a,b", "the host 'a,b'"),
        ("::1", r"without brackets, want \[::1\] or \[::1\]:50051"),
        ("a:b:c", "neither a host nor"),
        ("[127.0.0.1]:7070", "which is no IPv6 address"),
        ("[::1]7070", "neither a host nor"),
        ("ftp://experts", "the scheme 'ftp'"),
        ("https://", "no host"),
        ("https://experts/v1", "a path in it"),
        ("https://experts?x=1", "a query in it"),
        ("https://me@experts", "a user in it"),
        ("unix:", "want unix:/path"),
        ("unix://host/path", "want unix:/path"),
        ("unix:/" + "x" * 107, "of 1 to 107 bytes"),
        ("dns:///evil\n:1", "a control character"),
        ("unix-abstract:a\0b", "a control character"),
        ("unix:/a\nb", "a control character"),
        ("ipv4:1.2.3.4:5\r\n", "a control character"),
        ("experts:7070\n", "a control character"),
    ],
)
def test_what_is_not_says_what_is_right(text, why):
    with pytest.raises(ValueError, match=why) as told:
        parse_address(text)
    assert repr(text) in str(told.value)
    assert "want" in str(told.value)


def test_https_is_tls_and_http_is_none(tmp_path):
    assert reach("experts")[1] == Credentials()
    assert reach("https://experts")[1].secure
    own = Credentials(ca=tmp_path / "ca.pem")
    assert reach("https://experts", own)[1] is own
    assert reach("experts", own)[1] is own
    with pytest.raises(ValueError, match="want https:// or no scheme"):
        reach("http://experts", own)


def test_clients_take_them_and_refuse_wrong_ones_where_they_are_made():
    with ExpertClient("http://experts") as client:
        assert client.target == "experts:50051"
    assert AsyncExpertClient("[::1]").target == "[::1]:50051"
    for make in (ExpertClient, AsyncExpertClient, lambda a: ExpertCluster([a])):
        with pytest.raises(ValueError, match="the port 'x'"):
            make("experts:x")


def test_without_a_scheme_no_handshake_and_with_https_one():
    """A listener that speaks neither: what it gets first says what was tried."""
    assert asyncio.run(_first_bytes("http")).startswith(b"PRI * HTTP/2")
    assert asyncio.run(_first_bytes("https"))[:2] == b"\x16\x03"  # a TLS record: handshake


async def _first_bytes(scheme):
    got = asyncio.get_running_loop().create_future()

    async def look(reader, writer):
        if not got.done():
            got.set_result(await reader.read(64))
        writer.close()

    server = await asyncio.start_server(look, "127.0.0.1", 0)
    client = AsyncExpertClient(f"{scheme}://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    with pytest.raises(UnavailableError):
        await client.describe(timeout_s=5)
    await client.close()
    server.close()
    return await got


def test_a_cluster_keeps_its_servers_where_a_file_brings_a_wrong_address(tmp_path):
    path = tmp_path / "placement.json"

    def write(address, epoch):
        placement = {"epoch": epoch, "version": 1, "num_experts": {"0": 8}}
        placement["servers"] = [{"address": address, "layers": {"0": "0-7"}}]
        path.with_suffix(".new").write_text(json.dumps(placement))
        path.with_suffix(".new").replace(path)

    write("127.0.0.1:1", 1)
    with ExpertCluster(PlacementFile(path, every_s=0.01), timeout_s=5) as cluster:
        write("127.0.0.1:x", 2)
        for _ in range(2000):
            if cluster.source_error:
                break
            np.testing.assert_equal(list(cluster.servers), ["127.0.0.1:1"])
            cluster._closing.wait(0.01)
        assert "the port 'x'" in cluster.source_error
        write("127.0.0.1", 3)
        for _ in range(2000):
            if (list(cluster.servers), cluster.source_error) == (["127.0.0.1"], ""):
                break
            cluster._closing.wait(0.01)
        assert (list(cluster.servers), cluster.source_error) == (["127.0.0.1"], "")


@pytest.mark.parametrize(
    ("address", "told", "want"),
    [
        ("https://experts", "0.0.0.0:7071", "experts:7071"),
        ("experts", "[::]:7071", "experts:7071"),
        ("[::1]:50051", "0.0.0.0:7071", "[::1]:7071"),
        ("unix:/run/e.sock", "0.0.0.0:7071", "127.0.0.1:7071"),
        ("experts", "10.0.0.1:7071", "10.0.0.1:7071"),
    ],
)
def test_the_admin_service_of_a_server(address, told, want):
    assert admin_address(address, pb.DescribeResponse(admin_address=told)) == want
