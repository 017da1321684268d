"""skew.py's routing is as uneven as it says, and a plan with replicas makes it even."""

import sys
from pathlib import Path

import numpy as np
import pytest

from expertctl.common.workload import LayerShape
from expertctl.planner.forecast import forecast
from expertctl.planner.plan import plan

sys.path.insert(0, str(Path(__file__).parent))

import skew

SHAPE = LayerShape(0, 256, 64, 4)


@pytest.mark.parametrize("violation", [0.5, 4.0])
def test_routing_is_as_uneven_as_it_says_and_a_plan_makes_it_even(violation):
    load = skew.load_of(skew.weights_for(SHAPE, violation), SHAPE.top_k)
    assert load.max() / load.mean() - 1 == pytest.approx(violation, rel=0.15)
    assert set(np.argsort(-load)[:4].tolist()) == {0, 1, 2, 3}
    p = skew.problem(load, [f"s{n}" for n in range(4)], extra=6)
    planned = forecast(p, plan(p, extra=6).held)
    plain = forecast(p, skew.split(64))
    mean = load.sum() / 4
    assert planned.step_s[0] <= 1.05 * mean
    assert plain.step_s[0] >= (1 + 0.15 * violation) * mean
