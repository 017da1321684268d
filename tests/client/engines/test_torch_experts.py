"""RemoteExperts: torch in, torch out, over a forwarder that computes in this process."""

from __future__ import annotations

import threading
import weakref
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from expertd.errors import (
    BadDtypeError,
    BadResponseError,
    BadShapeError,
    UnavailableError,
    UnsupportedCombinationError,
    WeightsVersionNotHeldError,
)
from expertd.v1 import expert_service_pb2 as pb
from expertd_client.clients.forwarder import AsyncForwarder, Forwarder
from expertd_client.engines.torch_experts import RemoteExperts
from expertd_client.requests.result import ForwardResult
from expertd_client.requests.step_version import StepVersion

H, E = 16, 8
SCALES = torch.linspace(0.5, 2.0, E, dtype=torch.float64)


def expert_sum(x, ids, weights):
    """What Scaling answers, in float64: expert e multiplies with SCALES[e]."""
    factors = torch.where(ids >= 0, SCALES[ids.long().clamp(min=0)] * weights.double(), 0.0).sum(-1, keepdim=True)
    return x.double() * factors


class Scaling(Forwarder):
    """Experts that scale.  seen: requests; held: the experts it computes; log: what happened, in order."""

    def __init__(self, held=range(E)):
        self.held, self.seen, self.log, self.error = torch.tensor(list(held)), [], [], None
        self.serves = 0  # version of the weights

    def forward_request(self, request, *, timeout_s=None):
        self.seen.append((request, timeout_s))
        if self.error is not None:
            raise self.error
        ids = torch.where(torch.isin(request.topk_ids, self.held), request.topk_ids, -1)
        output = expert_sum(request.hidden_states, ids, request.topk_weights).to(request.hidden_states.dtype)
        return ForwardResult(output, None, int((ids >= 0).sum()), pb.Timing(), pb.Load(), 0,
                             weights_version=request.weights_version or self.serves)  # fmt: skip

    def submit_request(self, request, *, timeout_s=None):
        self.log.append("sent")
        future = Noted(self.log)
        try:
            future.set_result(self.forward_request(request, timeout_s=timeout_s))
        except UnavailableError as error:
            future.set_exception(error)
        return future

    def close(self):
        pass


class Noted(Future):
    def __init__(self, log):
        super().__init__()
        self.log = log

    def result(self, timeout=None):
        self.log.append("fetched")
        return super().result(timeout)


@pytest.fixture
def far():
    return Scaling()


def batch(*shape, dtype=torch.float32, top_k=2, ids=torch.int64):
    generator = torch.Generator().manual_seed(sum(shape))
    x = torch.randn(*shape, H, generator=generator).to(dtype)
    return x, torch.randint(0, E, (*shape, top_k), generator=generator).to(ids), torch.rand(*shape, top_k) + 0.5


@pytest.mark.parametrize("shape", [(5,), (2, 3), (1, 1), (2, 1, 3)])
def test_leading_extents_are_tokens(far, shape):
    x, ids, weights = batch(*shape)
    out = RemoteExperts(far, 3).eval()(x, ids, weights)
    assert out.shape == x.shape
    torch.testing.assert_close(out.double(), expert_sum(x, ids, weights))
    assert [(r.layer, r.tokens) for r, _ in far.seen] == [(3, x[..., 0].numel())]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("ids", [torch.int64, torch.int32, torch.int16, torch.uint8])
def test_the_answer_has_the_dtype_of_the_hidden_states(far, dtype, ids):
    x, i, weights = batch(4, dtype=dtype, ids=ids)
    out = RemoteExperts(far, 0).eval()(x, i, weights.to(dtype))
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expert_sum(x, i, weights.to(dtype)), rtol=1e-2, atol=1e-2)


def test_f64_travels_as_f32(far):
    x, ids, weights = batch(4, dtype=torch.float64)
    RemoteExperts(far, 0).eval()(x, ids, weights.double())
    assert far.seen[0][0].hidden_states.dtype == far.seen[0][0].topk_weights.dtype == torch.float32


def test_a_batch_beyond_the_limit_is_cut_and_all_parts_are_under_way_at_once(far):
    x, ids, weights = batch(10)
    out = RemoteExperts(far, 0, max_tokens=4).eval()(x, ids, weights)
    torch.testing.assert_close(out.double(), expert_sum(x, ids, weights))
    assert [r.tokens for r, _ in far.seen] == [4, 4, 2]
    assert far.log == ["sent"] * 3 + ["fetched"] * 3


def test_a_version_of_the_weights_can_be_asked_for_and_is_told(far):
    experts, x = RemoteExperts(far, 3, weights_version=7).eval(), batch(5)
    assert experts.weights_version_seen == 0
    experts(*x)
    assert (far.seen[-1][0].weights_version, experts.weights_version_seen) == (7, 7)
    experts.weights_version, far.serves = 0, 9
    experts.wait(experts.start(*x))
    assert (far.seen[-1][0].weights_version, experts.weights_version_seen) == (0, 9)


def test_parts_of_two_versions_become_parts_of_one(far):
    experts, x = RemoteExperts(far, 3, max_tokens=2).eval(), batch(5)
    send = far.submit_request

    def switches(request, **options):
        far.serves += 1
        return send(request, **options)

    far.submit_request = switches
    torch.testing.assert_close(experts(*x).double(), expert_sum(*x))
    assert [r.weights_version for r, _ in far.seen] == [0, 0, 0, 3, 3]
    assert experts.weights_version_seen == 3


def test_a_token_with_ids_below_minus_one_alone_is_sent_so_that_the_server_refuses_it(far):
    x, ids, weights = batch(3)
    ids[0], ids[1, 0], ids[1, 1] = torch.tensor([-2, -5]), -1, -2
    with pytest.raises(BadResponseError):  # this forwarder leaves them out; a server raises
        RemoteExperts(far, 0).eval()(x, ids, weights)
    torch.testing.assert_close(far.seen[0][0].topk_ids, ids)


def test_a_client_of_asyncio_is_refused_when_the_module_is_made():
    class Looped(AsyncForwarder):
        pass

    with pytest.raises(UnsupportedCombinationError, match="forwarder: got a Looped, want one without asyncio"):
        RemoteExperts(Looped(), 0)


def test_without_a_gpu_there_are_no_replays_to_check(far, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: pytest.fail("torch may be built without CUDA"))
    assert RemoteExperts(far, 0).check() is None


@pytest.mark.parametrize("max_tokens", [1, 2, 4096])
def test_tokens_without_a_route_are_not_sent_and_get_zeros(far, max_tokens):
    x, ids, weights = batch(2, 3)
    ids[0, 1], ids[1, 2], ids[1, 0, 0] = -1, -1, -1
    out = RemoteExperts(far, 0, max_tokens=max_tokens).eval()(x, ids, weights)
    torch.testing.assert_close(out.double(), expert_sum(x, ids, weights))
    assert sum(r.tokens for r, _ in far.seen) == 4
    assert not out[0, 1].any()


@pytest.mark.parametrize("tokens", [0, 3])
def test_nothing_to_compute_is_not_sent(far, tokens):
    x, ids, weights = batch(tokens)
    out = RemoteExperts(far, 0).eval()(x, torch.full_like(ids, -1), weights)
    assert out.shape == x.shape
    assert not out.any()
    assert not far.seen


def test_a_route_that_nobody_computed_is_an_error():
    x, ids, weights = batch(4)
    ids %= 7
    ids[2, 1] = 7
    with pytest.raises(BadResponseError, match="layer 5: routes computed: got 7, want 8"):
        RemoteExperts(Scaling(range(7)), 5).eval()(x, ids, weights)


def test_other_work_fits_between_start_and_wait(far):
    experts = RemoteExperts(far, 0, timeout_s=2.5).eval()
    x, ids, weights = batch(4)
    first, second = experts.start(x, ids, weights), experts.start(x * 2, ids, weights)
    far.log.append("meanwhile")
    for call, factor in ((second, 2), (first, 1)):
        torch.testing.assert_close(experts.wait(call).double(), expert_sum(x * factor, ids, weights))
    assert far.log == ["sent", "sent", "meanwhile", "fetched", "fetched"]
    assert [timeout for _, timeout in far.seen] == [2.5, 2.5]
    with pytest.raises(UnsupportedCombinationError, match="fetched once"):
        experts.wait(first)


def test_the_error_of_a_part_is_the_error_of_the_call(far):
    far.error = UnavailableError("gone")
    with pytest.raises(UnavailableError, match="gone"):
        RemoteExperts(far, 0, max_tokens=2).eval()(*batch(4))


def test_gradients_and_training_are_refused(far):
    experts = RemoteExperts(far, 0).eval()
    x, ids, weights = batch(2)
    for inputs in ((x.requires_grad_(), ids, weights), (x.detach(), ids, weights.requires_grad_())):
        for call in (experts, experts.start):
            with pytest.raises(UnsupportedCombinationError, match=r"require gradients.*inference_mode"):
                call(*inputs)
        with torch.no_grad():
            assert not experts(*inputs).requires_grad
    with pytest.raises(UnsupportedCombinationError, match=r"call model\.eval\(\)"):
        experts.train()(x.detach(), ids, weights.detach())
    assert len(far.seen) == 2


@pytest.mark.parametrize(("ids", "weights"), [((3, 2), (4, 2)), ((4, 2), (4, 1)), ((4,), (4,))])
def test_shapes_that_do_not_fit_are_named(far, ids, weights):
    with pytest.raises(BadShapeError, match=r"to \[4, 16\], want both \[4, top_k\]"):
        RemoteExperts(far, 0).eval()(torch.ones(4, H), torch.ones(ids, dtype=torch.int64), torch.ones(weights))


def test_a_limit_below_one_token_is_refused(far):
    with pytest.raises(ValueError, match="max_tokens: got 0"):
        RemoteExperts(far, 0, max_tokens=0)


class Block(torch.nn.Module):
    """A layer as an engine of one's own writes it: a shared expert while the routed ones are under way."""

    def __init__(self, far):
        super().__init__()
        self.router = torch.nn.Linear(H, E)
        self.shared = torch.nn.Linear(H, H)
        self.first, self.second = RemoteExperts(far, 0), RemoteExperts(far, 1)

    def forward(self, x):
        weights, ids = self.router(x).softmax(-1).topk(2)
        started = self.first.start(x, ids, weights)
        shared = self.shared(x).relu()
        return self.second(self.first.wait(started, shared) + shared, ids, weights)


def test_the_compiler_keeps_each_call_as_one_node(far):
    torch.manual_seed(0)
    block, graphs = Block(far).eval(), []

    def backend(graph, inputs):
        from torch._dynamo.backends.debugging import aot_eager

        graphs.append([node for node in graph.graph.nodes if "expertd" in str(node.target)])
        return aot_eager(graph, inputs)

    compiled = torch.compile(block, fullgraph=True, backend=backend)
    for tokens in (3, 3, 5):
        x = torch.randn(tokens, H)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), block(x))
    for start, wait, forward in graphs:
        assert [str(n.target) for n in (start, wait, forward)] == ["expertd.start", "expertd.wait", "expertd.forward"]
        assert start in wait.args
        assert wait.args[2] is not None, "nothing keeps the waiting behind the shared expert"


@pytest.mark.parametrize("op", ["forward", "start"])
def test_the_fake_implementations_say_what_comes(far, op):
    experts = RemoteExperts(far, 0).eval()
    call = getattr(torch.ops.expertd, op).default
    torch.library.opcheck(call, (*batch(3), experts._number), test_utils=("test_schema", "test_faketensor"))


def test_the_fake_wait_says_what_comes(far):
    experts = RemoteExperts(far, 0).eval()
    x, ids, weights = batch(2, 3)
    real = torch.ops.expertd.wait(experts.start(x.mT.contiguous().mT, ids, weights).ticket, x, None, experts._number)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        fake = torch.ops.expertd.wait(torch.tensor(1), x.mT.contiguous().mT, None, experts._number)
    assert (fake.shape, fake.dtype, fake.stride()) == (real.shape, real.dtype, real.stride())


# ---- a call like the last one ----------------------------------------------------------------------------------------


def test_a_call_like_the_last_one_sends_its_own_values(far):
    experts = RemoteExperts(far, 3, weights_version=7).eval()
    for seed in range(3):
        x, ids, weights = batch(5)
        x, ids = x + seed, (ids + seed) % E
        torch.testing.assert_close(experts(x, ids, weights).double(), expert_sum(x, ids, weights))
        request, _ = far.seen[-1]
        assert (request.layer, request.dtypes, request.weights_version) == (3, far.seen[0][0].dtypes, 7)
        assert request.hidden_states is x
        with pytest.raises(AttributeError):
            request.layer = 4


def started(experts, x, ids, weights):
    """As experts(), with ids that are overwritten meanwhile."""
    ids = ids.clone()
    call = experts.start(x, ids, weights)
    ids.fill_(E)
    return experts.wait(call)


@pytest.mark.parametrize("call", [RemoteExperts.__call__, started])
def test_tokens_without_a_route_are_left_out_but_in_the_first_call_like_the_last_one(far, call):
    experts, (x, ids, weights) = RemoteExperts(far, 0).eval(), batch(5)
    padded = ids.clone()
    padded[1], padded[2, 0] = -1, -1
    for routes in (ids, padded, padded, ids, ids, padded, torch.full_like(ids, -1), ids):
        torch.testing.assert_close(call(experts, x, routes, weights).double(), expert_sum(x, routes, weights))
    assert [r.tokens for r, _ in far.seen] == [5, 5, 4, 5, 5, 5, 5]


def test_after_a_call_with_ids_of_minus_one_the_next_is_looked_at_before_it_is_sent(far):
    experts, (x, ids, weights) = RemoteExperts(far, 0).eval(), batch(5)
    for row in (ids[2, :1], ids[1]):
        row.fill_(-1)
        torch.testing.assert_close(experts(x, ids, weights).double(), expert_sum(x, ids, weights))
    assert [r.tokens for r, _ in far.seen] == [5, 4]


@pytest.mark.parametrize("call", [RemoteExperts.__call__, started])
def test_a_route_that_nobody_computed_is_an_error_in_a_call_like_the_last_one(call):
    experts, (x, ids, weights) = RemoteExperts(Scaling(range(7)), 5).eval(), batch(4)
    ids %= 7
    call(experts, x, ids, weights)
    ids[0, 0], ids[2, 1] = -1, 7
    with pytest.raises(BadResponseError, match="layer 5: routes computed: got 6, want 7"):
        call(experts, x, ids, weights)


class Operations(TorchDispatchMode):
    """Names of those of torch."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def test_a_call_like_the_last_one_is_sent_without_an_operation_of_torch(far):
    experts, x = RemoteExperts(far, 0).eval(), batch(5)
    experts(*x)
    forward, before = far.forward_request, []

    def sent(request, **options):
        before.append(list(seen.names))
        return forward(request, **options)

    far.forward_request = sent
    with Operations() as seen:
        experts(*x)
    assert before == [[]]
    assert seen.names, "the mode sees nothing"


def test_a_call_unlike_the_last_one_is_checked(far):
    experts, (x, ids, weights) = RemoteExperts(far, 0).eval(), batch(5)
    experts(x, ids, weights)
    with pytest.raises(BadShapeError):
        experts(x, ids[:4], weights[:4])
    with pytest.raises(BadDtypeError):
        experts(x, ids.float(), weights)
    with pytest.raises(UnsupportedCombinationError, match="gradients"):
        experts(x.clone().requires_grad_(), ids, weights)
    for other in ((x.double(), ids, weights), (x, ids.short(), weights), (x.view(1, 5, H), ids[None], weights[None])):
        for _ in range(2):
            torch.testing.assert_close(experts(*other).double(), expert_sum(*other))
    experts.max_tokens, experts.layer, far.log = 3, 6, []
    torch.testing.assert_close(experts(x, ids, weights).double(), expert_sum(x, ids, weights))
    assert [(r.layer, r.tokens) for r, _ in far.seen[-2:]] == [(6, 3), (6, 2)]


def test_a_call_like_the_last_one_keeps_no_tensors(far):
    experts, (x, ids, weights) = RemoteExperts(far, 0).eval(), batch(5)
    experts(x, ids, weights)
    far.seen.clear()
    there = weakref.ref(x)
    del x
    assert there() is None


def test_a_forwarder_expects_a_call_before_it_is_checked(far):
    far.expect = lambda: far.log.append(f"expects number {len(far.seen) + 1}")
    experts, x = RemoteExperts(far, 0).eval(), batch(5)
    experts(*x)
    experts.wait(experts.start(*x))
    assert far.log == ["expects number 1", "expects number 2", "sent", "fetched"]


def test_threads_may_call_one_module_at_the_same_time(far):
    experts, together = RemoteExperts(far, 0).eval(), threading.Barrier(4, timeout=20)

    def one_thread(tokens):
        x, ids, weights = batch(tokens)
        for n in range(30):
            together.wait()
            ids[0] = -1 if n % 5 == 4 else 1
            call = experts.start(x, ids, weights)
            for got in (experts(x * 2, ids, weights), experts.wait(call) * 2):
                torch.testing.assert_close(got.double(), expert_sum(x * 2, ids, weights))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(one_thread, (3, 3, 4, 5)))


# ---- one version of the weights for a step ---------------------------------------------------------------------------


class Switching(Scaling):
    """Serves the next version after each answer, or as `serves` is set; holds what `gone` has not."""

    def __init__(self, switches=True):
        super().__init__()
        self.serves, self.switches, self.gone = 1, switches, set()

    def forward_request(self, request, *, timeout_s=None):
        if request.weights_version in self.gone:
            self.seen.append((request, timeout_s))
            raise WeightsVersionNotHeldError(f"got {request.weights_version}, want {self.serves}")
        answer = super().forward_request(request, timeout_s=timeout_s)
        self.serves += self.switches
        return answer

    def asked(self):
        """The versions that were asked for since the last time."""
        found = [request.weights_version for request, _ in self.seen]
        self.seen.clear()
        return found


class Layers(torch.nn.Module):
    """Three layers; began: whether the shared expert's place is taken by start() and wait()."""

    def __init__(self, far, version, began):
        super().__init__()
        self.layers = torch.nn.ModuleList([RemoteExperts(far, n, weights_version=version) for n in range(3)])
        self.began = began

    def forward(self, x, ids, weights):
        for layer in self.layers:
            x = x + (layer.wait(layer.start(x, ids, weights), x) if self.began else layer(x, ids, weights))
        return x


def one_call(layer, x, ids, weights, began):
    return layer.wait(layer.start(x, ids, weights)) if began else layer(x, ids, weights)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("began", [False, True])
def test_all_calls_of_a_step_are_of_the_version_that_its_first_answer_had(began, compiled):
    far, step = Switching(), StepVersion()
    model = Layers(far, step, began).eval()
    run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    with torch.inference_mode():
        for first in (1, 4, 7):
            step.begin()
            run(*batch(4))
            assert far.asked() == [0, first, first]
            assert [layer.weights_version_seen for layer in model.layers] == [first] * 3
            assert step.number == first


def test_a_step_that_begins_inside_of_what_is_compiled_is_one_of_its_own_too():
    far, step = Switching(), StepVersion()
    model = Layers(far, step, began=False).eval()

    @torch.compile(backend="aot_eager")
    def run(x, ids, weights):
        step.begin()
        return model(x, ids, weights)

    with torch.inference_mode():
        for first in (1, 4):
            run(*batch(4))
            assert far.asked() == [0, first, first]
            assert step.number == first, "it began after its calls"


@pytest.mark.parametrize("began", [False, True])
def test_without_a_begin_the_next_step_has_the_same_version(began):
    far, step = Switching(), StepVersion()
    layers = Layers(far, step, began).eval()
    layers(*batch(4))
    layers(*batch(4))
    assert far.asked() == [0, 1, 1, 1, 1, 1]


@pytest.mark.parametrize("began", [False, True])
def test_the_first_layer_with_a_route_chooses(began):
    far, step = Switching(), StepVersion()
    x, ids, weights = batch(4)
    first, second, third = Layers(far, step, began).eval().layers
    one_call(first, x, torch.full_like(ids, -1), weights, began)
    one_call(second, x, ids, weights, began)
    one_call(third, x, ids, weights, began)
    assert far.asked() == [0, 1]


def test_calls_that_are_under_way_together_become_one_version_whatever_was_overwritten_meanwhile():
    far, step = Switching(), StepVersion()
    layers = Layers(far, step, began=True).eval().layers
    sent = batch(4)
    tensors = [[t.clone() for t in sent] for _ in layers]
    under_way = [layer.start(*mine) for layer, mine in zip(layers, tensors, strict=True)]
    for x, ids, weights in tensors:
        x.fill_(7), ids.fill_(0), weights.fill_(3)
    for layer, call in zip(layers, under_way, strict=True):
        torch.testing.assert_close(layer.wait(call).double(), expert_sum(*sent))
        assert layer.weights_version_seen == 1
    assert far.asked() == [0, 0, 0, 1, 1]


def test_the_parts_of_a_call_that_is_cut_become_one_version_whatever_was_overwritten_meanwhile():
    far = Switching()
    experts, (x, ids, weights) = RemoteExperts(far, 0, max_tokens=2).eval(), batch(4)
    want = expert_sum(x, ids, weights)
    call = experts.start(x, ids, weights)
    x.fill_(7), ids.fill_(0), weights.fill_(3)
    torch.testing.assert_close(experts.wait(call).double(), want)
    assert far.asked() == [0, 0, 2]


@pytest.mark.parametrize("began", [False, True])
def test_a_call_that_is_cut_chooses_the_newest_of_its_parts(began):
    far, step = Switching(), StepVersion()
    first, second = (RemoteExperts(far, n, max_tokens=2, weights_version=step).eval() for n in range(2))
    sent = batch(5)
    torch.testing.assert_close(one_call(first, *sent, began).double(), expert_sum(*sent))
    one_call(second, *sent, began)
    assert far.asked() == [0, 0, 0, 3, 3, 3, 3, 3]


@pytest.mark.parametrize("began", [False, True])
def test_a_step_of_older_weights_than_the_one_before_is_asked_for_once_more_and_refused(began):
    far, step = Switching(switches=False), StepVersion()
    layer, far.serves = RemoteExperts(far, 5, weights_version=step).eval(), 2
    one_call(layer, *batch(4), began)
    far.serves = 1
    step.begin()
    one_call(layer, *batch(4), began)  # another server held it still
    assert (far.asked(), layer.weights_version_seen) == ([0, 0, 2], 2)
    far.gone = {2}
    step.begin()
    with pytest.raises(WeightsVersionNotHeldError, match=r"layer 5: .*got 1, want 2.*set StepVersion\.least to 0"):
        one_call(layer, *batch(4), began)
    step.least = 0
    step.begin()
    one_call(layer, *batch(4), began)
    assert layer.weights_version_seen == 1


def test_a_version_that_is_gone_in_the_middle_of_a_step_is_an_error_and_the_next_step_begins_anew():
    far, step = Switching(switches=False), StepVersion()
    first, second, _ = Layers(far, step, began=False).eval().layers
    first(*batch(4))
    far.serves, far.gone = 2, {1}
    with pytest.raises(WeightsVersionNotHeldError, match="got 1, want 2"):
        second(*batch(4))
    step.begin()
    first(*batch(4)), second(*batch(4))
    assert (first.weights_version_seen, second.weights_version_seen) == (2, 2)


@pytest.mark.parametrize("began", [False, True])
@pytest.mark.parametrize("last", ["padding", "nothing", "refused"])
def test_the_version_of_a_call_that_has_no_answer_is_none(far, last, began):
    far.serves = 7
    experts, (x, ids, weights) = RemoteExperts(far, 0).eval(), batch(3)
    one_call(experts, x, ids, weights, began)
    assert experts.weights_version_seen == 7
    if last == "refused":
        far.error = UnavailableError("gone")
        with pytest.raises(UnavailableError):
            one_call(experts, x, ids, weights, began)
    elif last == "padding":
        one_call(experts, x[:1], torch.full_like(ids[:1], -1), weights[:1], began)
    else:
        one_call(experts, x[:0], ids[:0], weights[:0], began)
    assert experts.weights_version_seen == 0


@pytest.mark.parametrize("version", [7, StepVersion()])
def test_a_call_with_a_version_does_not_go_from_gpu_to_gpu_and_a_capture_says_so(far, monkeypatch, version):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    far.device_transport = lambda device: pytest.fail("where the version is not told")
    experts = RemoteExperts(far, 0, weights_version=version)
    x, ids, weights = torch.ones(2, H), torch.zeros(2, 1, dtype=torch.int32), torch.ones(2, 1)
    with pytest.raises(UnsupportedCombinationError, match=r"CUDA graph.*weights_version=.*not go from GPU to GPU"):
        experts._between_gpus(0, (x, ids, weights), lambda transport: pytest.fail("where the version is not told"))
