"""CONTRIBUTING.md's lists of places: a toy of each kind is added in a copy of the repository, at the places that the
list names and at no other, and then it works and is in the generated pages."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from core_library import needs_core
from safetensors.torch import save_file
from tree import Tree, places

pytestmark = pytest.mark.slow

TOYS = Path(__file__).parent / "toys"


@pytest.fixture
def tree(tmp_path):
    return Tree(tmp_path)


BACKEND = '''
"""Backend `toy`: that of `reference` under another name."""

from dataclasses import replace

from expertd_kernels.backends import reference

__all__ = ["experts", "pack", "unpack"]


def pack(weights, problem):
    return replace(reference.pack(weights, problem), backend="toy")


def unpack(packed):
    return reference.unpack(packed)


def experts(packed, problem):
    made = reference.experts(packed, problem)
    made.backend = "toy"
    return made
'''
BACKEND_ENTRY = """\
    Backend(
        name="toy",
        target="expertd_kernels.backends.toy",
        devices=(DeviceRange("cpu"),),
        schemes=_EVERY_SCHEME,
        summary="a toy",
        compute_dtypes=frozenset({"bf16", "f32"}),
        act_order=True,
        ran=_X86,
    ),
"""
BACKEND_TEST = """
import torch

from expertd_kernels import NAMED_DEVICES, decide, problem_of, reference, relative_error, tolerance
from expertd_kernels.backends import toy
from expertd_kernels.backends.footprint import footprint
from expertd_kernels.sources.synthetic import random_inputs, random_weights


def test_toy():
    w = random_weights("int4_g32", 8, 64, 96)
    problem = problem_of(w, NAMED_DEVICES["cpu-avx512"], top_k=2, packages={})
    assert decide(problem).require().name == "toy"
    packed = toy.pack(w, problem)
    assert footprint("toy", problem, 8).weights_bytes == packed.nbytes
    again = toy.unpack(packed)
    assert torch.equal(again.w13.codes, w.w13.codes) and torch.equal(again.w2.codes, w.w2.codes)
    x, ids, weights = random_inputs(7, 64, 8, 2)
    ids[0] = -1
    out = toy.experts(packed, problem)(x.bfloat16(), ids, weights, out=torch.full((7, 64), float("nan")).bfloat16())
    assert relative_error(out.float(), reference(w, x.bfloat16(), ids, weights)) < tolerance("bf16")
"""


def test_a_backend(tree):
    tree.write("kernels/expertd_kernels/backends/toy.py", BACKEND)
    table = "kernels/expertd_kernels/oracle/table.py"
    tree.insert(table, '    Backend(\n        name="cpu_torch",\n', BACKEND_ENTRY)
    tree.insert(table, '"cpu", "cpu_w4a8", "cpu_torch", "reference"),', '"toy", ')
    tree.insert(
        "kernels/expertd_kernels/backends/footprint.py", '    "cpu_torch": _canonical,\n', '    "toy": _canonical,\n'
    )
    tree.insert(
        "kernels/expertd_kernels/backends/footprint.py",
        '    "cpu_torch": _float_scratch,\n',
        '    "toy": _float_scratch,\n',
    )
    tree.insert("tests/kernels/lesson_cases.py", '    "xpu": _xpu,\n', '    "toy": own,\n')
    tree.write("tests/kernels/backends/test_toy.py", BACKEND_TEST)
    assert tree.touched == places("Add a backend", NAME="toy")

    assert tree.passed("tests/kernels/backends/test_toy.py") == 1
    assert tree.passed("-k", "toy or every_row", "tests/kernels/backends/test_footprint.py") == 2
    assert tree.passed("-k", "toy", "tests/kernels/oracle/test_lessons_computed.py") > 0
    assert "### `toy`" in tree.python("-c", "import pages; print(pages.backends_page())")


READER = '''
"""A toy: int8 codes with a scale for each row, called toy_weight and toy_scale."""

from expertd_kernels.checkpoint.formats import Format
from expertd_kernels.checkpoint.readers.protocol import Layout, Part
from expertd_kernels.weights.scheme import WHOLE, Element, ScaleType, Scheme

__all__ = ["FORMATS", "layout", "read"]


def layout(unit):
    n, k = unit.expect("toy_weight", (unit.n, unit.k), "I8").shape
    return Layout(Scheme(Element.INT8, 1, WHOLE, ScaleType.F32), n, k)


def read(unit):
    return Part(unit.stored("toy_weight"), scales=unit.expect("toy_scale", (unit.n, 1), "F32").read())


FORMATS = (
    Format(
        "toy",
        "toy",
        frozenset({"toy"}),
        {"toy_weight": "I8", "toy_scale": "F32"},
        optional=frozenset(),
        detected_by="`toy_weight`",
        packing="[N, K]",
        scales="[N, 1] F32",
        fixture="toy-qwen3moe1l",
    ),
)
'''
READER_TEST = """
from pathlib import Path

import torch

from expertd_kernels.checkpoint import open_checkpoint

FIXTURE = Path(__file__).parents[3] / "fixtures" / "toy-qwen3moe1l"


def test_toy():
    source = open_checkpoint(FIXTURE)
    w = source.load(0, range(4))
    assert w.w13.scheme.name == "int8_channel"
    want = torch.load(FIXTURE / "expected.pt")
    assert torch.equal(w.w2.dequantize(), want)
"""
E_, H, I = 4, 64, 32


def test_a_format(tree):
    tree.write("kernels/expertd_kernels/checkpoint/readers/toy.py", READER)
    tree.insert("kernels/expertd_kernels/checkpoint/formats.py", '"refused")\n"""Modules of', '"toy", ')
    tree.write("tests/fixtures/toy-qwen3moe1l/PROVENANCE.md", "A toy.\n")
    tree.write("tests/kernels/checkpoint/readers/test_toy.py", READER_TEST)
    folder = tree.root / "tests/fixtures/toy-qwen3moe1l"
    torch.save(_checkpoint(folder), folder / "expected.pt")
    touched = {path.removesuffix("/PROVENANCE.md") for path in tree.touched}
    assert touched == places("Add a format", NAME="toy", FIXTURE="toy-qwen3moe1l")

    assert tree.passed("tests/kernels/checkpoint/readers/test_toy.py") == 1
    assert "## `toy`" in tree.python("-c", "import pages; print(pages.formats_page())")


def _checkpoint(folder):
    """Written there; what w2 is in it, [E, H, I] f32."""
    g, tensors, w2 = torch.Generator().manual_seed(1), {}, []
    for e in range(E_):
        for name, n, k in (("gate", I, H), ("up", I, H), ("down", H, I)):
            codes = torch.randint(-127, 128, (n, k), dtype=torch.int8, generator=g)
            scales = torch.rand(n, 1, generator=g) + 0.5
            module = f"model.layers.0.mlp.experts.{e}.{name}_proj"
            tensors |= {f"{module}.toy_weight": codes, f"{module}.toy_scale": scales}
        w2.append(codes.float() * scales)
    save_file(tensors, folder / "model.safetensors")
    sizes = {"hidden_size": H, "moe_intermediate_size": I, "num_experts": E_, "num_experts_per_tok": 2}
    config = {
        "model_type": "qwen3_moe",
        "num_hidden_layers": 1,
        "quantization_config": {"quant_method": "toy"},
        **sizes,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return torch.stack(w2)


@needs_core
def test_a_transport(tree):
    for side in ("server", "client"):
        folder, tests = f"{side}/expertd_{side}/transports", f"tests/{side}/transports/unix/test_unix.py"
        tree.write(f"{folder}/unix/__init__.py", (TOYS / f"unix_{side}.py").read_text())
        tree.write(tests, (TOYS / f"unix_{side}_tests.py").read_text())
    table = "server/expertd_server/transports/table.py"
    tree.insert(table, '    Entry("shm", ', '    Entry("unix", unix_listener),\n')
    tree.insert(table, '\n__all__ = ["TRANSPORTS"', "from expertd_server.transports.unix import unix_listener\n")
    table = "client/expertd_client/transports/table.py"
    tree.insert(table, '    Entry("shm", ', '    Entry("unix", UnixTransport, AsyncUnixTransport),\n')
    imported = "from expertd_client.transports.unix import AsyncUnixTransport, UnixTransport\n"
    tree.insert(table, '\n__all__ = ["TRANSPORTS"', imported)
    touched = {re.sub("/unix/.*", "/unix", path) for path in tree.touched}
    assert touched == places("Add a transport", NAME="unix")

    assert tree.passed("tests/server/transports/unix", "tests/client/transports/unix") == 4


RPC = """\
  // A toy: the text comes back.
  rpc Greet(GreetRequest) returns (GreetResponse);
"""
RPC_MESSAGES = """\
// A toy.
message GreetRequest {
  // Comes back; "" = nothing to say.
  string text = 1;
}

// A toy.
message GreetResponse {
  // That of the request.
  string text = 1;
}

"""
RPC_HANDLER = '''\
    async def greet(self, data: bytes, context: Any) -> bytes:
        """GreetRequest -> GreetResponse."""
        rpc = Rpc(self._service.metrics.calls, "unary", "Greet")
        return await self.tell(rpc, data, context, DESCRIBE, self._greeted)

    def _greeted(self, data: bytes) -> bytes:
        return pb.GreetResponse(text=bounds.read(pb.GreetRequest, data).text).SerializeToString()

'''
RPC_CLIENT = '''\
    def greet(self, text: str, *, timeout_s: float = 10.0) -> str:
        """A toy."""
        answer: _Reply[pb.GreetResponse] = _Reply()
        self._transport.unary("Greet", pb.GreetRequest(text=text), pb.GreetResponse, timeout_s, False, answer)
        return answer.result().text

'''
RPC_ASYNC = '''\
    async def greet(self, text: str, *, timeout_s: float = 10.0) -> str:
        """A toy."""
        answer: _Reply[pb.GreetResponse] = _Reply()
        transport, request = self._open()[0], pb.GreetRequest(text=text)
        transport.unary("Greet", request, pb.GreetResponse, timeout_s, False, answer)
        return (await answer.future).text

'''
RPC_TEST = """
import pytest
from in_process import hosts

from expertd.errors import MalformedMessageError
from expertd_client import AsyncExpertClient, ExpertClient
from expertd_client.transports.in_process import ServicerTransport


async def test_greet():
    with hosts(synthetic="tiny:bf16") as serve:
        address = serve().address
        with ExpertClient(address) as client:
            assert client.greet("hello") == "hello"
            with pytest.raises(MalformedMessageError):
                client.greet("x" * 300)
        async with AsyncExpertClient(address) as client:
            assert await client.greet("hello") == "hello"
"""


@needs_core
def test_an_rpc(tree):
    proto = "proto/expertd/v1/expert_service.proto"
    tree.insert(proto, "}\n\n// Element types by their OCP", RPC)
    tree.insert(proto, "// Element types by their OCP", RPC_MESSAGES)
    bounds = "proto/expertd/common/bounds.py"
    tree.insert(bounds, "    pb.DescribeRequest: 256,\n", "    pb.GreetRequest: 256,\n")
    tree.insert(bounds, '    "Timing.backend": 256,\n', '    "GreetRequest.text": 200,\n')
    service = "server/expertd_server/transports/grpc/service.py"
    tree.insert(
        service,
        '                "Describe": grpc.unary_unary',
        '                "Greet": grpc.unary_unary_rpc_method_handler(self.greet),\n',
    )
    tree.insert(service, "    async def describe(self,", RPC_HANDLER)
    tree.insert("client/expertd_client/clients/client.py", "    def describe(\n", RPC_CLIENT)
    tree.insert("client/expertd_client/clients/async_client.py", "    async def describe(\n", RPC_ASYNC)
    tree.write("tests/rpc/server/test_server_greet.py", RPC_TEST)
    assert tree.touched == places("Add an RPC", NAME="greet")

    for made in tree.root.glob("proto/expertd/v1/expert_service_pb2*"):
        made.unlink()  # a link to the repository's own
    protoc = ("-m", "grpc_tools.protoc", "-Iproto", "--python_out=proto", "--pyi_out=proto", "--grpc_python_out=proto")
    tree.python(*protoc, proto)  # as `make proto`
    assert tree.passed("tests/rpc/server/test_server_greet.py") == 1


METRIC = """\
        self._toys = Counter("expertd_toys", "Toys, by color.", ("color",), registry=r)
"""
METRIC_METHOD = '''\
    def toy(self, color: str) -> None:
        """A toy."""
        self._toys.labels(color).inc()

'''


def test_a_metric(tree):
    metrics = "server/expertd_server/views/metrics.py"
    tree.insert(metrics, '        self._boot = Gauge("expertd_boot_seconds"', METRIC)
    tree.insert(metrics, "    def trouble(self, kind: str)", METRIC_METHOD)
    tree.insert("docs/metrics_page.py", "    metrics.plan({", '    metrics.toy("red")\n')
    test = 'def test_toy(metrics):\n    metrics.toy("red")\n    http = MetricsHttp(metrics, "127.0.0.1", 0)\n    try:\n'
    test += (
        '        assert Scrape(http)("expertd_toys_total", color="red") == 1\n    finally:\n        http.close()\n\n\n'
    )
    tree.insert("tests/server/views/test_metrics.py", "def test_a_scrape_sees_batches_experts_and_calls", test)
    assert tree.touched == places("Add a metric")

    assert tree.passed("-k", "toy", "tests/server/views/test_metrics.py") == 1
    page = tree.python("-c", "import metrics_page; print(metrics_page.markdown(''))")
    assert "| `expertd_toys_total` | counter |" in page


OPTION_TEST = """\
def test_toys():
    assert config("--synthetic", "tiny:bf16").toys == 3
    with pytest.raises(ConfigError, match="EXPERTD_TOYS: got '10', want a whole number from 1 to 9"):
        config("--synthetic", "tiny:bf16", env={"EXPERTD_TOYS": "10"})


"""


def test_an_option(tree):
    entry = '            Option("toys", whole(1, 9), "N", "toys to play with"),\n'
    before = '            Option("experts", '
    tree.insert("server/expertd_server/config/options.py", before, entry)
    tree.insert("server/expertd_server/config/serve.py", "    threads: int = 0\n", "    toys: int = 3\n")
    tree.insert("tests/server/config/test_resolve.py", "def test_the_table_and_the_class", OPTION_TEST)
    assert tree.touched == places("Add an option of `expertd serve`")

    assert tree.passed("tests/server/config/test_resolve.py") > 1
    assert "### `--toys N`" in tree.python("-c", "import pages; print(pages.options_page())")
    assert "- toys\n" in tree.python("-c", "import pages; print(pages.chart_options())")
