"""Where options come from, what wins, and what is refused."""

from __future__ import annotations

import argparse
import dataclasses

import pytest

from expertd_server.config.options import GROUPS, MOST_USED, OPTIONS, TESTS
from expertd_server.config.parsers import size, size_text
from expertd_server.config.resolve import add_flags, resolve
from expertd_server.config.serve import ConfigError, ServeConfig
from expertd_server.config.values import Address, Ranges, Shard, parse_backend


def config(*flags: str, env: dict[str, str] | None = None) -> ServeConfig:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return resolve(parser.parse_args(flags), env or {})


def test_the_table_and_the_class_have_the_same_options():
    assert {o.name for o in OPTIONS} == {f.name for f in dataclasses.fields(ServeConfig)}


def test_flag_before_environment_before_file_before_default(tmp_path):
    file = tmp_path / "expertd.toml"
    file.write_text('synthetic = "tiny:bf16"\nmax-tokens = 10\nmax_queue_tokens = 20\ngrace-s = 1.5\nthreads = 3\n')
    env = {"EXPERTD_MAX_TOKENS": "11", "EXPERTD_THREADS": "4", "EXPERTD_CONFIG": str(file)}
    c = config("--threads", "5", env=env)
    assert (c.threads, c.max_tokens, c.max_queue_tokens, c.grace_s) == (5, 11, 20, 1.5)
    assert c.max_wait_us == ServeConfig.max_wait_us == 0
    assert c.listen == Address("127.0.0.1", 50051), "loopback unless told otherwise"


def test_a_source_on_the_command_line_goes_before_one_in_the_environment(tmp_path):
    c = config("--synthetic", "tiny:bf16", env={"EXPERTD_CHECKPOINT": str(tmp_path)})
    assert (c.synthetic, c.checkpoint) == ("tiny:bf16", None)
    c = config("--checkpoint", str(tmp_path), "--experts", "1", env={"EXPERTD_SYNTHETIC": "x", "EXPERTD_SHARD": "0/2"})
    assert (c.synthetic, c.checkpoint, c.shard) == (None, tmp_path, None)


def test_it_is_frozen_and_prints_itself_as_a_file_that_gives_the_same(tmp_path):
    c = config(
        "--synthetic", "tiny:bf16", "--shard", "2/8", "--layers", "0-3,7", "--listen", "[::1]:0", "--grace-s", "2.5"
    )
    with pytest.raises(dataclasses.FrozenInstanceError):
        c.threads = 1  # type: ignore[misc]
    file = tmp_path / "printed.toml"
    file.write_text(str(c))
    assert config("--config", str(file)) == c


def test_the_oracle_and_the_cache_can_be_set_from_each_place(tmp_path):
    assert (ServeConfig(synthetic="a:b").oracle, ServeConfig(synthetic="a:b").cache) == ("order", None)
    file = tmp_path / "expertd.toml"
    file.write_text(f'synthetic = "tiny:bf16"\noracle = "measure"\ncopies = 2\ncache = "{tmp_path}"\n')
    c = config("--config", str(file))
    assert (c.oracle, c.copies, c.cache) == ("measure", 2, tmp_path)
    file.write_text(str(c))
    assert config("--config", str(file)) == c
    env = {"EXPERTD_ORACLE": "order", "EXPERTD_COPIES": "1", "EXPERTD_CACHE": "/elsewhere"}
    c = config("--config", str(file), env=env)
    assert (c.oracle, c.copies, str(c.cache)) == ("order", 1, "/elsewhere")
    assert config("--config", str(file), "--copies", "1", "--oracle", "order", env={}).oracle == "order"


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ((), "got neither"),
        (("--synthetic", "a:b", "--checkpoint", "x"), "got both"),
        (("--synthetic", "a:b", "--shard", "8/8"), "RANK from 0 to COUNT - 1"),
        (("--synthetic", "a:b", "--shard", "1/2", "--experts", "0"), "--experts and --shard"),
        (("--synthetic", "a:b", "--layers", "3-1"), "--layers: got '3-1'"),
        (("--synthetic", "a:b", "--layers", "0-99999999999"), "below 2^20"),
        (("--synthetic", "a:b", "--listen", "50051"), "want HOST:PORT"),
        (("--synthetic", "a:b", "--listen", "h:70000"), "want HOST:PORT"),
        (("--synthetic", "a:b", "--max-tokens", "0"), "whole number from 1 to 1048576"),
        (("--synthetic", "a:b", "--max-tokens", "2000000"), "--max-tokens: got '2000000', want a whole number"),
        (("--synthetic", "a:b", "--max-in-flight", "9" * 5000), "want a whole number from 1 to 2147483647"),
        (("--synthetic", "a:b", "--max-tokens", "many"), "got 'many'"),
        (("--synthetic", "a:b", "--warm-up-routes", "0-1"), "want numbers from 1 on"),
        (("--synthetic", "a:b", "--compute-dtype", "fp8"), "want bf16 or float32"),
        (("--synthetic", "a:b", "--activations", "rounded"), "want weight-only or checkpoint"),
        (("--synthetic", "a:b", "--deterministic", "yes"), "want no or runs or batches"),
        (("--synthetic", "a:b", "--grace-s", "-1"), "want seconds"),
        (("--synthetic", "a:b", "--backend", "layers.0-2=cpu,layer.3=x"), "--backend: got"),
        (("--synthetic", "a:b", "--layer-template", "t"), "--layer-template"),
        (("--synthetic", "a:b", "--oracle", "guess"), "want order or measure"),
        (("--synthetic", "a:b", "--oracle", "measure", "--copies", "3"), "want 1 or 2"),
        (("--synthetic", "a:b", "--copies", "2"), "want --oracle measure"),
        (("--synthetic", "a:b", "--device", "cuda:0,cpu,cuda"), "got cuda:0 more than once"),
        (("--synthetic", "a:b", "--device", "auto,cpu"), "got auto beside others"),
        (("--synthetic", "a:b", "--device", "cpu,cpu:0"), "cpu is every memory node"),
        (("--synthetic", "a:b", "--device", "cuda,cpu", "--oracle", "measure"), "--oracle measure"),
        (
            ("--synthetic", "a:b", "--device", "cuda,cpu", "--split", "3"),
            "got 1 number, want one for each of 2 devices",
        ),
        (("--synthetic", "a:b", "--split", "3,x"), "want a number of experts for each device"),
        (("--synthetic", "a:b", "--split", "3"), "--split: got it with --device auto"),
        (("--synthetic", "a:b", "--routing-stats", "f"), "--routing-stats: got it with --device auto"),
    ],
)
def test_refusals_name_the_option_what_was_got_and_what_is_wanted(flags, says):
    with pytest.raises(ConfigError, match=r"want|which it describes") as e:
        config(*flags)
    assert says in str(e.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("max-token = 3", "the nearest is max-tokens"),
        ("zebra = 3", "got the key 'zebra'"),
        ("max-tokens = true", "max-tokens: got 'yes'"),
        ("max-tokens = [1]", "want a string, a number, true or false"),
        ("max-tokens = 0", "max-tokens: got '0'"),
        ("max_queue_tokens = 0", "max_queue_tokens: got '0'"),
        ("max-tokens = ", "is no TOML"),
    ],
)
def test_a_file_with_a_mistake_is_refused_and_named(tmp_path, text, says):
    file = tmp_path / "bad.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as e:
        config("--synthetic", "a:b", "--config", str(file))
    assert says in str(e.value)
    assert str(file) in str(e.value)


def test_a_missing_file_is_refused():
    with pytest.raises(ConfigError, match=r"nowhere\.toml: cannot be read"):
        config("--synthetic", "a:b", "--config", "nowhere.toml")


def test_foreign_variables_do_no_harm():
    """A Kubernetes service called expertd puts EXPERTD_PORT and the like into every container."""
    assert config("--synthetic", "a:b", env={"EXPERTD_PORT": "tcp://10.0.0.1:80", "EXPERTD_SERVICE_HOST": "10.0.0.1"})


def test_backend_pins():
    pin = parse_backend("layers.0-2=triton,layers.5=cpu,*=auto")
    assert [pin(n) for n in (0, 2, 3, 5)] == ["triton", "triton", None, "cpu"]
    assert parse_backend("reference")(17) == "reference"
    assert parse_backend("auto")(17) is None
    assert parse_backend("layers.0-1,4=cpu")(4) == "cpu"
    assert parse_backend("layers.0=cpu")(1) is None, "layers without a match are the oracle's"
    assert pin.names == {"triton", "cpu"}
    assert pin.layers == {0, 1, 2, 5}


def test_shards_cover_every_expert_once_and_differ_by_one_at_most():
    for experts in (7, 8, 60, 128):
        for count in (1, 3, 8):
            parts = [Shard(rank, count).experts(experts) for rank in range(count)]
            assert [e for p in parts for e in p] == list(range(experts))
            assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize("experts", [1, 7, 60, 128, 257, 512])
@pytest.mark.parametrize("shards", [("0/2", "3/6", "4/6", "5/6"), ("0/3", "1/3", "4/6", "10/12", "11/12")])
def test_shards_of_different_counts_leave_no_expert_out_and_hold_none_twice(experts, shards):
    parts = [Shard.parse(shard).experts(experts) for shard in shards]
    assert [e for p in parts for e in p] == list(range(experts))


def test_ranges_are_sorted_and_without_repeats():
    assert Ranges.parse("7,0-3,2").numbers == (0, 1, 2, 3, 7)


@pytest.mark.parametrize("text", ["0", "1", "1536", "20GiB", "512MiB", "3KiB", "2TiB"])
def test_sizes_are_shown_as_people_write_them(text):
    n = size(text)
    assert size(size_text(n)) == n
    assert size_text(n) == text


def test_a_size_does_not_wrap_in_64_bits():
    assert size("4194304TiB") == 1 << 62
    with pytest.raises(ValueError, match="want at most 4194304TiB"):
        size("16777216TiB")


def test_help_begins_with_the_six_most_needed_options_and_groups_the_rest():
    parser = argparse.ArgumentParser(prog="expertd serve")
    add_flags(parser)
    text = parser.format_help().partition("options:")[2]
    order = [
        text.index(f"\n  {flag} ")
        for flag in ("--checkpoint", "--synthetic", "--device", "--shard", "--listen", "--cache")
    ]
    titles = [text.index(f"\n{title}:") for title, _ in GROUPS if title != MOST_USED]
    assert order + titles == sorted(order + titles)
    assert len(dict(GROUPS)[MOST_USED]) == 6
    assert "(default: 4GiB)" in " ".join(text.split())
    assert [o.name for o in dict(GROUPS)[TESTS]] == ["test_route_us", "test_part_us"]
