"""What a layer is expected to take, from what servers measured."""

import numpy as np
import pytest

from expertctl.planner.expected import Part, Surface, expected, parts_of, speed_of
from expertctl.planner.problem import Place, Problem
from expertd.v1 import expert_service_pb2 as pb


def made(start, expert, route, most=8):
    """A surface of a device that takes so long to start, for each expert, and for each route."""
    grid = [(e, e * r) for e in (1, 2, 4, most) for r in (1, 4, 16, 64)]
    return Surface(tuple((e, n, start + expert * e + route * n) for e, n in grid))


def problem(experts, servers, load=None):
    load = np.ones((1, experts)) if load is None else np.array([load], np.float64)
    return Problem((3,), (experts,), load, tuple(Place(f"s{i}", 1.0, experts) for i in range(servers)))


def test_a_surface_is_its_points_and_lies_between_and_beyond_them_in_proportion():
    s = made(10, 5, 0.1)
    for e, n in ((1, 1), (8, 512), (3, 12), (6, 60), (8, 1024), (12, 48)):
        assert s(np.array([e]), np.array([n]))[0] == pytest.approx(10 + 5 * e + 0.1 * n), (e, n)
    assert s(np.array([0]), np.array([0]))[0] == 0, "a part without routes takes no time"


def test_a_surface_of_one_point_grows_with_its_routes_and_experts():
    s = Surface(((4, 4, 100.0),))
    assert s(np.array([4, 4, 8, 2]), np.array([4, 8, 8, 2])).tolist() == [100, 200, 200, 100]


def test_a_layer_takes_as_long_as_its_slowest_part():
    fast, slow = made(10, 1, 0), made(100, 10, 0)
    parts = {"s0": {3: [Part("cuda:0", frozenset(range(4)), fast), Part("cpu", frozenset(range(4, 8)), slow)]}}
    p, held = problem(8, 1), np.ones((1, 1, 8), np.bool_)
    one, many = expected(p, held, parts, 2, (1, 64))
    assert many.layer_us == pytest.approx(140), "all four experts of the slow part"
    assert 10 < one.layer_us < 120, "a token reaches the slow part now and then"
    assert many.tokens_per_s == pytest.approx(64 / 140e-6)
    hot = problem(8, 1, [1e6] * 4 + [0] * 4)
    assert expected(hot, held, parts, 2, (64,))[0].layer_us == pytest.approx(14), "the used experts are on the fast one"


def test_parts_of_several_servers_compute_at_once_and_replicas_share_the_routes():
    both = {f"s{i}": {3: [Part("cpu", frozenset(range(8)), made(0, 0, 1))]} for i in range(2)}
    held = np.zeros((1, 2, 8), np.bool_)
    held[0, 0] = True
    assert expected(problem(8, 2), held, both, 2, (64,))[0].layer_us == pytest.approx(128)
    held[:] = True
    assert expected(problem(8, 2), held, both, 2, (64,))[0].layer_us == pytest.approx(64, rel=0.1)
    held[:] = False
    held[0, 0, :4] = held[0, 1, 4:] = True
    assert expected(problem(8, 2), held, both, 2, (64,))[0].layer_us == pytest.approx(64, rel=0.2)


def test_nothing_is_expected_of_servers_that_did_not_measure_or_of_experts_that_are_nowhere():
    parts = {"s0": {3: [Part("cpu", frozenset(range(8)), made(1, 1, 1))]}}
    held = np.ones((1, 2, 8), np.bool_)
    assert expected(problem(8, 2), held, parts, 2) == []
    held[0, :, 7] = held[0, 1] = False
    assert expected(problem(8, 2), held, parts, 2) == []


def test_parts_come_from_what_servers_describe_and_give_their_speed():
    points = [pb.SurfacePoint(experts=e, routes=n, microseconds=n) for e in (1, 2, 4) for n in (e, 64 * e)]
    part = pb.LayerPart(device="cpu", held=[pb.ExpertRange(first=2, count=4)], surface=points)
    layers = [pb.Layer(layer=3, top_k=2, parts=[part]), pb.Layer(layer=4, parts=[pb.LayerPart(device="cpu")])]
    found = parts_of({"a": pb.DescribeResponse(layers=layers), "old": pb.DescribeResponse()})
    assert list(found) == ["a"]
    assert list(found["a"]) == [3], "layer 4 was not measured"
    assert found["a"][3][0].held == {2, 3, 4, 5}
    assert speed_of(found["a"], 2) == pytest.approx(1e6)
    assert speed_of({}, 2) == 0
