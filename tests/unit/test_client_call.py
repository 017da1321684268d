"""The pure parts between a forward() and the wire: the request that is built, when it is sent again, whose fault a
broken connection is."""

import time

import numpy as np
import pytest

from expertd.errors import (
    BadResponseError,
    BadShapeError,
    DrainingError,
    MessageTooLargeError,
    QueueFullError,
    RequestCancelledError,
    UnavailableError,
    UnimplementedError,
)
from expertd.v1 import expert_service_pb2 as pb
from expertd.wire import ForwardResponseView, TensorView
from expertd_client.call import Grouped, make_call, numbered, result_of
from expertd_client.exchange import blame
from expertd_client.retry import NEVER, Retry, pause_s

X, IDS, WEIGHTS = np.ones((3, 8), np.float32), np.ones((3, 2), np.int32), np.ones((3, 2), np.float32)
DEFAULTS = {
    "timeout_s": None,
    "output_dtype": None,
    "router_weight_on_input": False,
    "digest": False,
    "grouped": None,
    "traceparent": "",
}


def call(x=X, ids=IDS, weights=WEIGHTS, layer=4, **options):
    return make_call(layer, x, ids, weights, **{**DEFAULTS, **options})


def test_the_request_says_what_was_asked():
    r = call(output_dtype="bf16", digest=True, router_weight_on_input=True, traceparent="00-a-b-01").request
    assert (r.layer, r.output_dtype, r.output_form) == (4, pb.DATA_TYPE_BF16, pb.OUTPUT_FORM_DIGEST)
    assert (r.router_weight_on_input, r.traceparent, r.grouped) == (True, "00-a-b-01", None)
    assert r.hidden_states.shape == (3, 8)
    assert r.topk_ids.dtype == pb.DATA_TYPE_I32


def test_the_output_dtype_is_that_of_the_input_unless_named():
    assert call().request.output_dtype == pb.DATA_TYPE_F32
    assert call(output_dtype=np.float16).request.output_dtype == pb.DATA_TYPE_F16


def test_grouped_rows_stand_in_place_of_routes():
    r = call(ids=None, weights=None, grouped=Grouped([5, 7], [1, 2])).request
    assert (r.topk_ids, r.topk_weights) == (None, None)
    assert r.grouped == pb.GroupedRows(expert_ids=[5, 7], row_counts=[1, 2])


@pytest.mark.parametrize(
    "wrong", [{"ids": None}, {"weights": None}, {"ids": None, "weights": None}, {"grouped": Grouped([5], [3])}]
)
def test_half_a_routing_is_refused(wrong):
    with pytest.raises(BadShapeError, match="want topk_ids and topk_weights, or grouped alone"):
        call(**wrong)


@pytest.mark.parametrize("wrong", [0, -1, float("nan"), float("inf")])
def test_a_timeout_is_a_positive_number(wrong):
    with pytest.raises(ValueError, match="timeout_s: got"):
        call(timeout_s=wrong)


def test_a_number_and_a_time_are_all_that_is_added():
    options = {"output_dtype": "bf16", "digest": True, "router_weight_on_input": True, "traceparent": "00-a-b-01"}
    for c in (call(**options), call(ids=None, weights=None, grouped=Grouped([5, 7], [1, 2]))):
        sent = numbered(c, 9)
        assert sent is not c.request
        sent.request_id = 0
        assert sent == c.request


def test_the_wire_carries_what_is_left_of_the_time():
    assert numbered(call(), 9).timeout_us == 0
    with_time = call(timeout_s=5.0)
    time.sleep(0.002)
    request = numbered(with_time, 9)
    assert request.request_id == 9
    assert 0 < request.timeout_us <= 4_998_000
    late = call(timeout_s=1e-9)
    time.sleep(0.001)
    assert numbered(late, 10).timeout_us == 1  # 0 would mean no limit


def answer(**fields):
    output = TensorView.of_raw(pb.DATA_TYPE_F32, (3, 8), X.tobytes())
    return ForwardResponseView(**{"request_id": 1, "output": output, "routes_computed": 6, **fields})


def test_an_answer_becomes_a_result():
    result = result_of(answer(timing=pb.Timing(kernel_ns=5), load=pb.Load(queued_tokens=2), placement_epoch=3), call())
    np.testing.assert_array_equal(result.output, X)
    assert (result.routes_computed, result.timing.kernel_ns, result.load.queued_tokens) == (6, 5, 2)
    assert (result.digest, result.placement_epoch) == (None, 3)
    digest = result_of(answer(output=None, digest=pb.Digest(crc32=7)), call(digest=True))
    assert (digest.output, digest.digest.crc32) == (None, 7)


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({"output": None}, {}),
        ({"digest": pb.Digest()}, {}),
        ({}, {"digest": True}),
        ({}, {"output_dtype": "bf16"}),
        ({"output": TensorView.of_raw(pb.DATA_TYPE_F32, (2, 8), bytes(64))}, {}),
    ],
)
def test_an_answer_to_another_question_is_refused(fields, options):
    with pytest.raises(BadResponseError):
        result_of(answer(**fields), call(**options))


def test_nothing_is_sent_again_unless_asked():
    assert pause_s(NEVER, QueueFullError("full"), 1, None) is None


def test_pauses_double_up_to_their_bound_and_end_with_the_tries():
    retry = Retry(attempts=5, pause_s=0.1, max_pause_s=0.3)
    assert [pause_s(retry, DrainingError("x"), n, None) for n in range(1, 6)] == [0.1, 0.2, 0.3, 0.3, None]


def test_the_servers_advice_and_the_callers_time_count():
    retry = Retry(attempts=5, pause_s=0.1, max_pause_s=0.3)
    full = QueueFullError("full", retry_after_us=700_000)
    assert pause_s(retry, full, 1, None) == 0.7
    assert pause_s(retry, full, 1, 0.5) is None
    assert pause_s(retry, QueueFullError("full"), 1, 0.5) == 0.1


def test_what_would_fail_again_is_not_sent_again():
    assert pause_s(Retry(attempts=5), BadShapeError("x"), 1, None) is None


@pytest.mark.parametrize("row", [DrainingError, UnavailableError, UnimplementedError, RequestCancelledError])
def test_an_end_that_holds_for_all_is_everybodys(row):
    first, second = blame(row("why"), "server", 5), blame(row("why"), "server", 5)
    assert type(first) is type(second) is row
    assert first is not second
    assert first.message == "why"


def test_the_fault_of_one_among_several_may_be_retried_by_all():
    error = blame(MessageTooLargeError("5 MiB"), "host:1", 3)
    assert isinstance(error, UnavailableError)
    assert error.retryable
    assert "host:1" in error.message
    assert "MESSAGE_TOO_LARGE" in error.message
    assert isinstance(blame(MessageTooLargeError("5 MiB"), "host:1", 1), MessageTooLargeError)
