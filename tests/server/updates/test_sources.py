"""The layers of a new version are of the kind that is served, or refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import trained

from expertd_kernels.checkpoint import open_checkpoint
from expertd_kernels.checkpoint.writer import quantize_checkpoint
from expertd_kernels.weights.quantize import scheme_named
from expertd_kernels.weights.scheme import ActivationQuant
from expertd_server.boot.assignment import BootError
from expertd_server.updates.sources import GoneSource, alike, checkpoint_of


@pytest.fixture
def plain(tmp_path: Path):
    return open_checkpoint(trained.saved(tmp_path / "plain", trained.step(1)))


@pytest.fixture
def fp8(plain, tmp_path: Path):
    quantize_checkpoint(plain, tmp_path / "fp8", scheme_named("e4m3_block128"))
    return open_checkpoint(tmp_path / "fp8")


def test_what_is_quantized_anew_rounds_activations_as_the_served_checkpoint_asks(plain, fp8):
    made = alike(plain, 0, fp8.info(0))
    assert made.info(0).w13 == fp8.info(0).w13
    assert made.info(0).checkpoint_activation is ActivationQuant.E4M3_GROUP128
    assert made.load(0, [1]).checkpoint_activation is ActivationQuant.E4M3_GROUP128
    static = replace(fp8.info(0), static_scales=True)  # their scales belong to the served weights
    assert alike(plain, 0, static).info(0).checkpoint_activation is ActivationQuant.NONE


def test_what_is_as_served_already_is_read_as_it_is(plain, fp8):
    assert alike(fp8, 0, fp8.info(0)) is fp8
    assert alike(plain, 0, plain.info(0)) is plain


def test_two_schemes_in_a_layer_are_not_guessed(plain, fp8):
    mixed = replace(fp8.info(0), w2=scheme_named("int8"))
    with pytest.raises(BootError, match="e4m3_block128 and int8_channel are served of its two"):
        alike(plain, 0, mixed)


def test_a_source_that_is_gone_says_why_and_still_knows_its_checkpoint(plain):
    gone = GoneSource(plain, "because")
    assert gone.info(1) == plain.info(1)
    assert checkpoint_of(gone) is plain
    with pytest.raises(ValueError, match="because"):
        gone.load(0)
