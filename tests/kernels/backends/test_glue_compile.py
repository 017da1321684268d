"""The kernels of backends/glue.py compiled for sm_90 with the arguments of real calls; that needs no device."""

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from expertd_kernels import Activation, ActivationKind
from expertd_kernels.backends import glue
from expertd_kernels.backends.glue_space import capacity
from expertd_kernels.backends.portable import route
from expertd_kernels.backends.triton_launch import OPTIONS

TARGET = GPUTarget("cuda", 90, 32)
TYPES = {
    torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int32: "*i32", torch.float8_e4m3fn: "*fp8e4nv",
}  # fmt: skip
KINDS = [Activation(), Activation(limit=7.0), Activation.parse("swigluoai"), Activation(ActivationKind.GELU_AND_MUL),
         Activation(ActivationKind.GELU_TANH_AND_MUL), Activation(ActivationKind.RELU2)]  # fmt: skip
H, I = 512, 384


class Recorder:
    """Stands in for a kernel: keeps what it is started with."""

    def __init__(self, kernel, seen):
        self.kernel, self.seen = kernel, seen

    def __getitem__(self, grid):
        assert 0 < len(grid) <= 2
        assert all(n > 0 for n in grid)
        assert len(grid) < 2 or grid[1] <= 65535
        return lambda *args, **constants: self.seen.append((self.kernel, args, constants))


@pytest.fixture
def seen(monkeypatch):
    found = []
    for name in ("place_rows", "gather_rows", "activate_rows", "combine_rows"):
        monkeypatch.setattr(glue, name, Recorder(getattr(glue, name), found))
    for name in ("count", "scan"):
        monkeypatch.setattr(route, name, Recorder(getattr(route, name), found))
    return found


def start(tokens, rounded, activation, mapped):
    """Every launch of a call, as the rows make it."""
    rows = capacity(tokens * 4, 16, 128)
    read = torch.float8_e4m3fn if rounded else torch.bfloat16
    shapes = {
        "x": ((rows, H), read), "h": ((rows, activation.segments * I), torch.bfloat16), "a": ((rows, I), read),
        "y": ((rows, H), torch.bfloat16), "s": ((4, rows), torch.float32),
    }  # fmt: skip
    x = torch.zeros(tokens, H, dtype=torch.bfloat16)
    ids, weights = torch.zeros(tokens, 4, dtype=torch.int32), torch.ones(tokens, 4)
    call = glue.Glue(x, ids, weights, 16, shapes, 128)
    call.soft = False
    places = call.place(128, routes=not mapped, experts=mapped, blocks=not mapped)
    at, scale = (places if mapped else None), (call.parts["s"] if rounded else None)
    call.gather(places, call.parts["x"], scale)
    bias = torch.zeros(16, activation.segments * I)
    call.activate(call.parts["h"], call.parts["a"], activation, at, bias, scale)
    call.combine(call.parts["y"], torch.empty_like(x), not rounded, at, torch.zeros(16, H) if mapped else None)


def compiled(kernel, args, constants):
    """Shared bytes of a kernel as its call would compile it."""
    options = {name: constants.pop(name) for name in ("num_warps", *OPTIONS)}
    signature, attributes = {}, {}
    for i, name in enumerate(kernel.arg_names):
        value = constants[name] if name in constants else args[i]
        if isinstance(value, torch.Tensor):
            signature[name] = TYPES[value.dtype]
            attributes[(i,)] = [["tt.divisibility", 16]]
        elif kernel.params[i].is_constexpr:
            signature[name] = "constexpr"
            constants[name] = value
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    return compile(source, target=TARGET, options=options).metadata.shared


@pytest.mark.parametrize("tokens", [3, 600])
@pytest.mark.parametrize(("rounded", "mapped"), [(False, False), (False, True), (True, True)])
def test_all_kernels_of_a_call_compile(seen, tokens, rounded, mapped):
    start(tokens, rounded, KINDS[0], mapped)
    names = [kernel.__name__ for kernel, _, _ in seen]
    many = ["count", "scan"] if tokens * 4 > route.FUSED_ROUTES else []
    assert names == [*many, "place_rows", "gather_rows", "activate_rows", "combine_rows"]
    for kernel, args, constants in seen:
        assert compiled(kernel, args, dict(constants)) <= 48 * 1024


@pytest.mark.parametrize("activation", KINDS[1:], ids=lambda a: a.name)
def test_every_activation_compiles(seen, activation):
    start(3, True, activation, True)
    kernel, args, constants = next(s for s in seen if s[0].__name__ == "activate_rows")
    assert compiled(kernel, args, dict(constants)) <= 48 * 1024
