"""attach() and detach(): every family, with the float32 reference of this process as its experts."""

from __future__ import annotations

import pytest
import torch
from tiny_models import FAMILIES, Local, generate, save, tiny_model, tiny_multimodal_model
from torch import nn

from expertd.errors import PlacementError, UnsupportedCombinationError
from expertd.v1 import expert_service_pb2 as pb
from expertd_client.engines.served import misfits
from expertd_client.engines.torch_experts import RemoteExperts
from expertd_client.transformers import attach, detach, load_without_experts
from expertd_client.transformers.find import find_experts

PROMPTS = torch.tensor([[3, 4, 5, 9, 11, 50, 23]])


def relative(a, b):
    return float((a.double() - b.double()).norm() / b.double().norm())


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    """(model, its checkpoint), of one family; a test leaves the model as it was."""
    model = tiny_model("qwen3_moe")
    return model, save(model, tmp_path_factory.mktemp("qwen"))


@pytest.fixture
def far(qwen):
    return Local(qwen[1])


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_says_the_same_with_experts_elsewhere(family, tmp_path):
    model = tiny_model(family)
    far = Local(save(model, tmp_path))
    assert {far.source.info(layer).top_k for layer in far.source.layers} == {2}
    with torch.inference_mode():
        logits, tokens = model(PROMPTS).logits, generate(model, PROMPTS, 6)
        with attach(model, far) as attached:
            assert relative(model(PROMPTS).logits, logits) <= 2e-6
            assert torch.equal(generate(model, PROMPTS, 6), tokens)
        # one call a layer: for the prompt's logits, for the prompt again and for each further token
        assert far.tokens == [7] * 2 * len(attached.layers) + [1] * 5 * len(attached.layers)
        assert torch.equal(model(PROMPTS).logits, logits)
        frontend = load_without_experts(tmp_path, far, dtype=torch.float32)
        assert type(frontend) is type(model)
        assert relative(frontend(PROMPTS).logits, logits) <= 2e-6
        assert not [name for name, _ in frontend.named_parameters() if "experts." in name and "shared" not in name]


def test_the_experts_decide_what_is_said(qwen, tmp_path):
    """Else equal tokens would show nothing."""
    model, _ = qwen
    other = Local(save(tiny_model("qwen3_moe", seed=1), tmp_path))
    with torch.inference_mode():
        tokens = generate(model, PROMPTS, 16)
        with attach(model, other):
            assert not torch.equal(generate(model, PROMPTS, 16), tokens)


def test_padding_is_not_sent(qwen, far):
    model, _ = qwen
    ids = torch.tensor([[0, 0, 0, 7, 8], [3, 4, 5, 6, 7]])
    mask = (ids != 0).long()
    with torch.inference_mode():
        logits, tokens = model(ids, attention_mask=mask).logits, generate(model, ids, 6, mask)
        with attach(model, far):
            got = model(ids, attention_mask=mask).logits
            assert far.tokens == [7, 7]
            assert relative(got[mask.bool()], logits[mask.bool()]) <= 2e-6
            far.tokens.clear()
            assert torch.equal(generate(model, ids, 6, mask), tokens)
            assert far.tokens == [7, 7] + [2, 2] * 5
            far.tokens.clear()
            model(torch.tensor([[5, 6, 7, 8, 9, 1, 2, 3, 4, 5]]))  # as many tokens, no mask: nothing of the old one
            assert far.tokens == [10, 10]


def test_a_language_model_inside_of_another_model(tmp_path):
    model = tiny_multimodal_model()
    far = Local(save(model, tmp_path))
    ids = torch.tensor([[0, 0, 5, 9, 11, 50, 23]])
    mask = (ids != 0).long()
    with torch.inference_mode():
        logits = model(ids, attention_mask=mask).logits[:, 2:]
        with attach(model, far) as attached:
            assert attached.layers == {n: f"model.language_model.layers.{n}.mlp.experts" for n in range(2)}
            assert relative(model(ids, attention_mask=mask).logits[:, 2:], logits) <= 2e-6
        assert far.tokens == [5, 5]
        frontend = load_without_experts(tmp_path, far, dtype=torch.float32)
        assert relative(frontend(ids, attention_mask=mask).logits[:, 2:], logits) <= 2e-6


def test_the_compiler_makes_one_graph_of_it(qwen, far):
    model, _ = qwen
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1]])
    with torch.inference_mode():
        logits = model(PROMPTS, attention_mask=mask, use_cache=False).logits
        with attach(model, far):
            compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
            got = compiled(PROMPTS, attention_mask=mask, use_cache=False).logits
    assert relative(got[:, 2:], logits[:, 2:]) <= 2e-6
    assert far.tokens == [5, 5]


def test_training_and_gradients_are_refused(qwen, far):
    model, _ = qwen
    with attach(model, far):
        with pytest.raises(UnsupportedCombinationError, match="no gradients; call it under"):
            model(PROMPTS)
        model.train()
        try:
            with torch.no_grad(), pytest.raises(UnsupportedCombinationError, match=r"call model\.eval\(\)"):
                model(PROMPTS)
        finally:
            model.eval()
    assert not far.tokens


def test_detach_puts_the_same_modules_back(qwen, far):
    model, _ = qwen
    before = dict(model.named_modules())
    attach(model, far)
    assert isinstance(model.model.layers[1].mlp.experts, RemoteExperts)
    detach(model)
    assert dict(model.named_modules()) == before
    assert not model.model._forward_pre_hooks
    with pytest.raises(UnsupportedCombinationError, match="want a model that was attached"):
        detach(model)


def test_what_is_attached_already_is_told(qwen, far):
    model, _ = qwen
    with attach(model, far), pytest.raises(UnsupportedCombinationError, match=r"compute already, .* detach\(model\)"):
        attach(model, far)


def test_what_was_not_kept_cannot_be_put_back(tmp_path):
    model = tiny_model("mixtral")
    far = Local(save(model, tmp_path))
    attach(model, far, keep=False)
    with pytest.raises(UnsupportedCombinationError, match="loaded without its experts"):
        detach(model)
    assert isinstance(model.model.layers[0].mlp.experts, RemoteExperts)


def test_a_dense_model_is_refused():
    with pytest.raises(UnsupportedCombinationError, match="Linear: got no experts"):
        attach(nn.Linear(2, 2), "127.0.0.1:1")


def experts(**marks):
    module = nn.Module()
    module.down_proj = nn.Parameter(torch.empty(4, 8, 16))
    all_marks = {"has_gate": True, "has_bias": False, "is_transposed": False, "is_concatenated": True}
    for name, value in {**all_marks, "has_post_expert_norm": False, **marks}.items():
        setattr(module, name, value)
    return module


def holder(**modules):
    """A module with these at the places that their names say, "a_0_experts" for a.0.experts."""
    root = nn.Module()
    for path, module in modules.items():
        *folders, last = path.split("_")
        place = root
        for folder in folders:
            if not hasattr(place, folder):
                place.add_module(folder, nn.Module())
            place = getattr(place, folder)
        place.add_module(last, module)
    return root


def test_sizes_are_those_of_the_weights():
    found = find_experts(holder(a_layers_3_experts=experts(), a_layers_5_experts=experts(is_transposed=True)))
    sizes = {n: (f.name, f.experts, f.hidden_size, f.intermediate_size) for n, f in found.items()}
    assert sizes == {3: ("a.layers.3.experts", 4, 8, 16), 5: ("a.layers.5.experts", 4, 16, 8)}


@pytest.mark.parametrize(
    ("model", "match"),
    [
        (holder(layers_0_experts=experts(has_post_expert_norm=True)), "layers.0.experts: got experts with a norm"),
        (holder(experts=experts()), "experts: got no number in its name"),
        (holder(a_0_experts=experts(), b_0_experts=experts()), r"two modules: a\.0\.experts and b\.0\.experts"),
    ],
)
def test_experts_that_a_server_cannot_stand_for_are_refused(model, match):
    with pytest.raises(UnsupportedCombinationError, match=match):
        find_experts(model)


def described(layer=0, num_experts=4, held=4, hidden=8, intermediate=16):
    span = [pb.ExpertRange(first=0, count=held)]
    one = pb.Layer(layer=layer, num_experts=num_experts, held=span, intermediate_size=intermediate)
    return pb.DescribeResponse(model=pb.Model(hidden_size=hidden), layers=[one])


@pytest.mark.parametrize(
    ("said", "match"),
    [
        (described(layer=1), r"here: layer 0: got a server of layers 1, want the experts of layers\.0\.experts"),
        (described(num_experts=8), "got 8 experts"),
        (described(held=3), r"3 held.*; name the servers"),
        (described(hidden=16), "hidden size 16"),
        (described(intermediate=8), "intermediate size 8"),
    ],
)
def test_a_server_of_something_else_is_refused(said, match):
    found = find_experts(holder(layers_0_experts=experts())).values()
    misfits(found, described(), "here")
    with pytest.raises(PlacementError, match=match):
        misfits(found, said, "here")
