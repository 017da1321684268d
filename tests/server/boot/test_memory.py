"""The plan of memory: its sum, what it says of it, and a server that does not fit is refused before it loads."""

import json
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from expertd_kernels.backends.footprint import canonical_bytes, footprint
from expertd_kernels.common.problem import NAMED_DEVICES
from expertd_kernels.native.memory import available_bytes, cgroup_limit_bytes
from expertd_kernels.oracle.probe import assumed_packages
from expertd_kernels.oracle.table import BACKENDS
from expertd_kernels.sources.synthetic import SyntheticModel
from expertd_kernels.weights.scheme import ActivationQuant
from expertd_server.boot import memory as module
from expertd_server.boot.assignment import BootError, assign_layers, open_source
from expertd_server.boot.memory import give_back, host_text, memory_json, memory_text, plan_memory, require_room, settle
from expertd_server.boot.prepare import Workshop
from expertd_server.commands.cli import main
from expertd_server.config.resolve import resolve
from expertd_server.config.serve import ConfigError, ServeConfig
from expertd_server.config.values import Address
from expertd_server.engine.sizes import batch_slot_routes, graph_count
from expertd_server.host.host import Host
from expertd_server.residence import residence
from expertd_server.residence.residence import Residence

GIB = 1 << 30
QWEN = "qwen3-30b-a3b:int4_g128"


def made(device="sm90", synthetic=QWEN, **more):
    config = ServeConfig(synthetic=synthetic, **more)
    source = open_source(config)
    return config, assign_layers(config, source, NAMED_DEVICES[device], assumed_packages(BACKENDS))


def test_a_whole_model_on_a_gpu_takes_its_packed_bytes_and_little_more():
    config, assignments = made()
    plan = plan_memory(config, assignments)
    each = [footprint("gluon_sm90", a.decision.problem, 4096) for a in assignments]
    assert plan.weights == sum(f.weights_bytes for f in each) == pytest.approx(13.9 * GIB, rel=0.01)
    assert plan.scratch == max(f.scratch_bytes for f in each), "once for all layers"
    routes = batch_slot_routes(4096, 8, 128)
    assert plan.buffers == 2 * (4096 * 2 * 2048 + 8 * routes), "outputs where inputs were"
    assert plan.pinned == 2 * (4096 * (2 * 2 * 2048 + 72) + 8 * routes), (
        "host memory, and a line of the table for a row"
    )
    assert plan.graph_count == graph_count([(2048, [8], False)] * 48, 4096)
    assert plan.serving < plan.weights + 1.5 * GIB
    assert plan.loading == 2 * canonical_bytes(assignments[0].decision.problem) + module.BOOT_BYTES["cuda"]
    assert plan.peak == plan.weights + plan.scratch + plan.context + plan.loading


def test_layers_that_take_e4m3_have_room_for_codes_and_scales_and_as_many_graphs(monkeypatch):
    info = SyntheticModel.info

    def plan(scheme, how, **more):
        rounded = lambda *which: replace(info(*which), checkpoint_activation=how)  # noqa: E731
        monkeypatch.setattr(SyntheticModel, "info", rounded)
        return plan_memory(*made(synthetic=f"qwen3-30b-a3b:{scheme}", **more))

    plain = plan("e4m3_block128", ActivationQuant.E4M3_GROUP128)
    coded = plan("e4m3_block128", ActivationQuant.E4M3_GROUP128, activations="checkpoint")
    by_row = plan("e4m3_channel", ActivationQuant.E4M3_TOKEN, activations="checkpoint")
    assert coded.buffers - plain.buffers == 2 * 4096 * (2048 + 4 * 16)
    assert by_row.buffers == plain.buffers
    assert coded.graph_count == by_row.graph_count == plain.graph_count == graph_count([(2048, [8], True)] * 48, 4096)


def test_what_callers_may_take_is_told_and_not_asked_for():
    plan = plan_memory(*made())
    assert (plan.shared, plan.pools) == (4 * GIB, 16 * (64 << 20))
    for more in ({"shm": "off"}, {"listen": Address("0.0.0.0", 0), "insecure": True}):
        without = plan_memory(*made(**more))
        assert (without.shared, without.pools) == (0, 0)
        assert (without.serving, without.peak, without.pinned) == (plan.serving, plan.peak, plan.pinned)
        assert not any("clients" in line for line in memory_text(without, 0))
    assert plan_memory(*made(listen=Address("0.0.0.0", 0), insecure=True, shm="on", shm_memory=GIB)).shared == GIB
    on_a_cpu = plan_memory(*made(device="cpu-avx2"))
    assert (on_a_cpu.shared, on_a_cpu.pools) == (4 * GIB, 0)
    assert memory_text(on_a_cpu, 0)[-1].startswith("additional memory for clients on this host, allocated when they")
    assert memory_text(on_a_cpu, 0)[-1].endswith("in GiB: at most 4.00 of shared memory")
    assert memory_json(plan, 0)["pools"] == GIB


def test_other_numbers_of_routes_and_wider_activations_count():
    plan = plan_memory(*made())
    more = plan_memory(*made(warm_up_routes=module_ranges("1,16")))
    assert more.scratch > 1.9 * plan.scratch
    assert more.graph_count == graph_count([(2048, [1, 8, 16], False)] * 48, 4096)
    assert plan_memory(*made(max_tokens=70)).buffers == 2 * (96 * 2 * 2048 + 8 * batch_slot_routes(70, 8, 128)), (
        "batches are padded"
    )


@pytest.mark.parametrize(
    ("synthetic", "more"),
    [(QWEN, {}), ("deepseek-v3:e4m3_block128", {"layers": "3-22", "shard": "0/8"})],
    ids=["qwen3", "deepseek"],
)
def test_beside_the_packed_weights_there_is_at_most_a_gib_and_a_half(synthetic, more):
    if more:
        more = {"layers": module_ranges(more["layers"]), "shard": module_shard(more["shard"])}
    plan = plan_memory(*made(synthetic=synthetic, max_tokens=4096, **more))
    assert 0.5 * GIB < plan.serving - plan.weights <= 1.5 * GIB
    assert plan.others == 1024 * module.GRAPH_BYTES
    assert any("other numbers of routes per token" in line for line in memory_text(plan, 0))


def test_a_row_that_cannot_compute_in_place_has_outputs_of_their_own():
    one, other = (plan_memory(*made(backend=row)) for row in ("gluon_sm90", "triton"))
    assert other.buffers - one.buffers == 2 * 4096 * 2 * 2048


def module_ranges(text):
    from expertd_server.config.values import Ranges

    return Ranges.parse(text)


def test_what_would_fit_is_said_in_layers_and_in_experts():
    config, assignments = made()
    plan = plan_memory(config, assignments)
    require_room(plan, config, assignments, plan.peak - plan.context)
    with pytest.raises(BootError) as e:
        require_room(plan, config, assignments, 8 * GIB)
    text = str(e.value)
    assert "8.00 GiB are free" in text
    layers = int(text.split("the first ")[1].split()[0])
    assert f"(--layers 0-{layers - 1})" in text
    for n, fits in ((layers, True), (layers + 1, False)):
        p = plan_memory(config, assignments[:n])
        assert (p.peak <= 8 * GIB + p.context) == fits
    experts = int(text.split("; ")[1].split()[0])
    for n, fits in ((experts, True), (experts + 1, False)):
        p = plan_memory(*made(experts=module_ranges(f"0-{n - 1}")))
        assert (p.peak <= 8 * GIB + p.context) == fits
    shard = text.split("--shard 0/")[1].rstrip(")")
    assert plan_memory(*made(shard=module_shard(f"0/{shard}"))).peak <= 8 * GIB + plan.context


def module_shard(text):
    from expertd_server.config.values import Shard

    return Shard.parse(text)


def test_a_limit_counts_the_driver_and_less_of_both_decides():
    config, assignments = made(memory_limit=10 * GIB)
    plan = plan_memory(config, assignments)
    with pytest.raises(BootError, match=r"--memory-limit allows 10.00 GiB: the first \d+ of 48 layers would fit"):
        require_room(plan, config, assignments, 70 * GIB)
    short, assignments = made(memory_limit=plan.peak - (1 << 19))
    short_plan = plan_memory(short, assignments)
    with pytest.raises(BootError, match=r"--memory-limit allows \d+\.\d\d GiB, 0\.5 MiB less: "):
        require_room(short_plan, short, assignments, 70 * GIB)
    with pytest.raises(BootError, match=r"3.00 GiB are free"):
        require_room(plan, config, assignments, 3 * GIB)
    config, assignments = made(memory_limit=20 * GIB)
    require_room(plan_memory(config, assignments), config, assignments, 70 * GIB)
    require_room(plan_memory(config, assignments), config, assignments, 0)


def test_not_even_one_layer_and_host_memory_for_reading():
    config, assignments = made(synthetic="deepseek-v3:bf16", layers=module_ranges("3"))
    plan = plan_memory(config, assignments)
    with pytest.raises(BootError, match=r"not even one layer would fit|experts of each layer would"):
        require_room(plan, config, assignments, 1 * GIB)
    with pytest.raises(BootError, match=r"loading takes .* GiB of host memory, of which .* stay pinned"):
        require_room(plan, config, assignments, 70 * GIB, staging_free=2 * GIB)


@pytest.mark.parametrize(("device", "who"), [("cpu-avx512", "process"), ("sm90", "driver")])
def test_a_limit_below_what_no_layer_takes_is_to_be_raised(device, who):
    config, assignments = made(device, memory_limit=1 << 20)
    plan = plan_memory(config, assignments)
    want = rf"--memory-limit allows 1\.0 MiB: the {who} alone takes \d\.\d\d GiB: allow more \(--memory-limit\)$"
    with pytest.raises(BootError, match=want):
        require_room(plan, config, assignments, 70 * GIB)


def test_a_cpu_has_one_memory_and_a_cache_maps_weights():
    config, assignments = made("cpu-avx512")
    plan = plan_memory(config, assignments)
    assert (plan.buffers, plan.graphs, plan.pinned, plan.staging) == (0, 0, 0, 0)
    with pytest.raises(BootError, match=r"GiB of host memory \(weights 13\.\d+"):
        require_room(plan, config, assignments, 4 * GIB)
    mapped = plan_memory(*made("cpu-avx512", cache=Path("somewhere")))
    assert mapped.mapped
    assert mapped.peak < 3 * GIB, "pages of a file can be dropped"
    require_room(mapped, *made("cpu-avx512", cache=Path("somewhere")), 4 * GIB)
    with pytest.raises(BootError, match=r"loading takes 1\.\d+ GiB of host memory \(scratch"):
        require_room(mapped, *made("cpu-avx512", cache=Path("somewhere")), GIB // 2)


def test_people_and_programs_are_told_the_same():
    plan = plan_memory(*made(memory_limit=20 * GIB))
    first, second, third, fourth = memory_text(plan, 70 * GIB)
    assert "4.00 of pinned shared memory and 1.00 of device memory for clients on other GPUs" in third
    assert "in GiB: at most 0.06 for graphs" in fourth
    assert first.startswith("device memory in GiB: weights 13.9")
    assert "limit 20.00, free 70.00; at most 2306 graphs" in first
    assert "pinned" in second
    found = memory_json(plan, 70 * GIB)
    assert found["serving"] == plan.serving
    assert found["limit"] == 20 * GIB
    assert sum(found[k] for k in ("weights", "scratch", "buffers", "graphs", "context")) == found["serving"]


def test_the_limit_of_a_container_is_one_number_with_its_parts():
    """Pages of files count in a container, though they may be dropped, and the process once."""
    said = "host memory, as the limit of a container: "
    gpu, cpu = plan_memory(*made()), plan_memory(*made("cpu-avx512"))
    mapped = plan_memory(*made("cpu-avx512", cache=Path("somewhere")))
    assert memory_json(cpu, 0)["host"] == cpu.peak
    assert memory_json(mapped, 0)["host"] == mapped.peak + mapped.weights
    assert memory_json(gpu, 0)["host"] == gpu.pinned + gpu.staging
    assert host_text([mapped]).startswith(f"{said}{(mapped.weights + mapped.peak) / GIB:.2f} GiB (weights 13.")
    assert host_text([gpu]) == f"{said}0.64 GiB and the process (pinned 0.06, layers being read 0.58)"
    both = host_text([gpu, cpu])
    assert f"{(gpu.pinned + gpu.staging + cpu.peak - cpu.context) / GIB:.2f} GiB and the process (pinned" in both
    assert "layers being read 1.16, weights 13." in both
    twice = cpu.weights + cpu.scratch + cpu.loading
    assert f" {(2 * twice + cpu.context) / GIB:.2f} GiB (" in host_text([cpu, cpu])


@pytest.mark.parametrize("captured", [0, 10 << 20, 10 * GIB])
def test_what_is_held_makes_room_by_what_it_takes_now(monkeypatch, captured):
    """Graphs that are not captured yet take nothing: the device says that their memory is free."""
    config, assignments = made()
    held, more = assignments[:2], assignments[2:3]
    now, asked = plan_memory(config, held), []
    monkeypatch.setattr(residence, "free_bytes", lambda device: 5 * GIB)
    monkeypatch.setattr(residence, "require_room", lambda plan, config, of, free, *rest: asked.append((of, free)))
    r = object.__new__(Residence)
    r._config, r._workshop = config, Workshop(None, torch.device("cpu"))
    r._engine, r.before = SimpleNamespace(graph_bytes=captured), None
    r.booted = {n: SimpleNamespace(assignment=a) for n, a in enumerate(held)}
    r._require_room(more)
    graphs = min(captured, now.graphs)
    assert asked == [([*held, *more], 5 * GIB + now.weights + now.scratch + now.buffers + graphs)]
    assert now.serving == now.weights + now.scratch + now.buffers + now.graphs + now.context, "or a part is forgotten"


def test_explain_shows_the_plan_of_a_device_that_is_not_here(capsys):
    assert main(["explain", "--synthetic", QWEN, "--device", "h100", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["memory"]
    assert found["weights"] == plan_memory(*made()).weights
    assert found["free"] == 0, "not known"
    assert main(["explain", "--synthetic", "tiny:int4_g128", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert "host memory in GiB: " in out
    assert "host memory, as the limit of a container: " in out


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("20GiB", 20 * GIB),
        ("20G", 20 * GIB),
        ("20Gi", 20 * GIB),
        ("512Mi", 512 << 20),
        ("3Ki", 3072),
        ("2Ti", 2 << 40),
        ("1.5g", 3 * GIB // 2),
        ("20GB", 20 * 10**9),
        ("7", 7),
    ],
)
def test_sizes_have_units(text, size, monkeypatch):
    import argparse

    args = argparse.Namespace(synthetic=QWEN, memory_limit=text)
    assert resolve(args, {}).memory_limit == size
    with pytest.raises(ConfigError, match="want a size as 20GiB"):
        resolve(argparse.Namespace(synthetic=QWEN, memory_limit=f"{text}Q"), {})


def test_a_server_that_does_not_fit_stops_before_it_listens_or_loads(monkeypatch, tmp_path):
    with open(tmp_path / "out", "w") as f:
        console = Console(file=f)
        monkeypatch.setattr("expertd_server.host.host.free_bytes", lambda device: 1 << 20)
        monkeypatch.setattr("expertd_server.residence.residence.boot_layers", lambda *a, **k: pytest.fail("it loaded"))
        config = ServeConfig(synthetic="qwen3-30b-a3b:int4_g128", device="cpu", layers=module_ranges("0-3"))
        with pytest.raises(BootError, match=r"0\.00 GiB are free"):
            Host(config, console).start()
    assert "listening" not in (tmp_path / "out").read_text()


# ---------------------------------------------------------------- what this process may use


def tree(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


STAT = "anon 5\ninactive_file 100\nactive_file 7\n"


def test_memory_of_a_machine_without_limits_is_what_the_kernel_calls_available(tmp_path):
    proc = tree(tmp_path / "proc", {"meminfo": "MemTotal: 99 kB\nMemAvailable:  4 kB\n", "self/cgroup": "0::/\n"})
    cgroup = tree(tmp_path / "cgroup", {"memory.max": "max\n", "memory.current": "5\n", "memory.stat": STAT})
    assert available_bytes(proc, cgroup) == 4096
    assert cgroup_limit_bytes(proc, cgroup) == 0


@pytest.mark.parametrize("where", ["", "a/b", "gone"])
def test_the_tightest_control_group_counts_and_pages_that_can_be_dropped_do_not(tmp_path, where):
    proc = tree(tmp_path / "proc", {"meminfo": "MemAvailable:  4000 kB\n", "self/cgroup": f"0::/{where}\n"})
    cgroup = tree(tmp_path / "cgroup", {"memory.max": "3000000", "memory.current": "1000000", "memory.stat": STAT})
    if where == "a/b":
        tree(cgroup / "a/b", {"memory.max": "900", "memory.current": "500", "memory.stat": STAT})
        tree(cgroup / "a", {"memory.max": "700", "memory.current": "600", "memory.stat": "inactive_file 0\n"})
        assert available_bytes(proc, cgroup) == 100
        assert cgroup_limit_bytes(proc, cgroup) == 700
        return
    assert available_bytes(proc, cgroup) == 3000000 - 1000000 + 100
    assert cgroup_limit_bytes(proc, cgroup) == 3000000


def test_the_first_version_of_control_groups(tmp_path):
    lines = "7:cpu,cpuacct:/x\n5:memory:/docker/abc\n0::/\n"
    proc = tree(tmp_path / "proc", {"meminfo": "MemAvailable:  4000 kB\n", "self/cgroup": lines})
    files = {"memory.limit_in_bytes": "5000", "memory.usage_in_bytes": "4000",
             "memory.stat": "inactive_file 9\ntotal_inactive_file 50\n"}  # fmt: skip
    cgroup = tree(tmp_path / "cgroup" / "memory", files).parent
    assert available_bytes(proc, cgroup) == 1050
    tree(cgroup / "memory", {"memory.limit_in_bytes": str((1 << 63) - 4096)})
    assert available_bytes(proc, cgroup) == 4096000


def test_nothing_is_known_where_nothing_can_be_read(tmp_path):
    assert available_bytes(tmp_path, tmp_path) == 0


def test_what_is_free_for_a_cpu_is_what_this_process_may_use(monkeypatch):
    assert module.free_bytes(torch.device("cpu")) > 0
    monkeypatch.setattr("expertd_kernels.native.memory.available_bytes", lambda: 4321)
    assert module.free_bytes(torch.device("cpu")) == 4321


def test_packed_tensors_get_memory_of_their_own(monkeypatch):
    """What a GPU's allocator keeps is given back first; then one block is asked for, as large as all of them, and what
    they were in before is free."""
    kept = {
        "codes": torch.arange(1000, dtype=torch.int32).view(10, 100),
        "scales": torch.linspace(0, 1, 77).to(torch.float8_e4m3fn),
        "none": torch.empty(0, 3),
        "biases": torch.linspace(-1, 1, 9, dtype=torch.bfloat16),
    }
    wanted = {name: t.clone() for name, t in kept.items()}
    elsewhere = kept["elsewhere"] = torch.ones(3, device="meta")
    done, empty = [], torch.empty
    monkeypatch.setattr(module, "give_back", lambda device: done.append("given back"))
    monkeypatch.setattr(torch, "empty", lambda n, *, dtype, device: done.append(n) or empty(n, dtype=dtype))
    before = [weakref.ref(t) for name, t in kept.items() if name != "elsewhere"]
    settle(kept, torch.device("cpu"))
    assert done == ["given back", 4096 + 512 + 512]
    assert not any(ref() is not None for ref in before)
    assert kept.pop("elsewhere") is elsewhere
    assert len({t.untyped_storage().data_ptr() for t in kept.values()}) == 1
    for name, t in kept.items():
        assert (t.dtype, t.shape, t.is_contiguous()) == (wanted[name].dtype, wanted[name].shape, True)
        assert t.data_ptr() % 64 == 0
        assert torch.equal(t.view(torch.uint8), wanted[name].view(torch.uint8))


def test_what_is_given_back_counts_the_workspaces_of_cublas(monkeypatch):
    """They are the allocator's until they are dropped: 32 MiB for each stream that computed a reference."""
    done = []
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: done.append("workspaces"), raising=False)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: done.append("cache"))
    give_back(torch.device("cpu"))
    assert done == []
    give_back(torch.device("cuda"))
    assert done == ["workspaces", "cache"]
    monkeypatch.delattr(torch._C, "_cuda_clearCublasWorkspaces")
    give_back(torch.device("cuda"))
    assert done == ["workspaces", "cache", "cache"]
