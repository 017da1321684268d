"""Experts that a model holds fused have the names and values of its checkpoint."""

from types import SimpleNamespace

import pytest
import torch

from expertd.errors import UnsupportedCombinationError
from expertd_client.weights import expert_tensors

E, H, I = 3, 10, 4


def model(**other):
    experts = torch.nn.Module()
    experts.gate_up_proj = torch.nn.Parameter(torch.randn(E, 2 * I, H))
    experts.down_proj = torch.nn.Parameter(torch.randn(E, H, I))
    for name, value in other.items():
        setattr(experts, name, value)
    mlp = torch.nn.Module()
    mlp.experts, mlp.gate = experts, torch.nn.Linear(H, E)
    return torch.nn.ModuleDict({"mlp": mlp})


def test_names_and_values_are_those_of_a_checkpoint():
    made = model()
    found = dict(expert_tensors(made))
    names = ("gate_proj", "up_proj", "down_proj")
    assert list(found) == [f"mlp.experts.{e}.{name}.weight" for e in range(E) for name in names]
    fused = made["mlp"].experts
    for e in range(E):
        gate, up, down = (found[f"mlp.experts.{e}.{name}.weight"] for name in names)
        torch.testing.assert_close(torch.cat([gate, up]), fused.gate_up_proj[e])
        torch.testing.assert_close(down, fused.down_proj[e])
        assert gate.data_ptr() == fused.gate_up_proj[e].data_ptr()


@pytest.mark.parametrize("other", [{"has_bias": True}, {"is_transposed": True}, {"is_concatenated": False},
                                   {"gate_up_proj": torch.nn.Parameter(torch.zeros(E, H, 2 * I))}])  # fmt: skip
def test_another_layout_is_refused(other):
    with pytest.raises(UnsupportedCombinationError, match=r"mlp\.experts: got .*; .*save_pretrained"):
        list(expert_tensors(model(**other)))


def test_a_model_without_experts_is_refused():
    with pytest.raises(UnsupportedCombinationError, match="no module `experts`"):
        list(expert_tensors(SimpleNamespace(named_modules=lambda: [("", None)])))
