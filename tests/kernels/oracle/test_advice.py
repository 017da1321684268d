"""What a user is told to install: a pure function of a decision."""

import copy
import pickle
from dataclasses import replace

import pytest

from expertd_kernels import NAMED_DEVICES, Package, Problem, Scheme, decide
from expertd_kernels.oracle.advice import Advice, advice
from expertd_kernels.oracle.decision import Refusal, RefusalKind, Remedy
from expertd_kernels.oracle.probe import assumed_packages
from expertd_kernels.oracle.table import BACKENDS

ALL = dict(assumed_packages(BACKENDS))
TRITON = next(b.needs["triton"] for b in BACKENDS if b.name == "gluon_sm90")


def ask(device="sm90", scheme="int4_g128", *, packages=ALL, without=(), pin=None, **more):
    s = Scheme.parse(scheme)
    kept = {name: p for name, p in packages.items() if name not in without}
    return decide(Problem(NAMED_DEVICES[device], s, s, 128, 2048, 768, 8, packages=kept, **more), pin=pin)


def test_a_fast_row_that_lacks_a_package_comes_with_the_pip_requirement():
    found = advice(ask(without=["triton"]))
    assert str(found) == f"faster backend gluon_sm90 needs triton {TRITON}: pip install 'triton{TRITON}'"
    old = advice(ask(packages={**ALL, "triton": Package("2.1.0")}))
    assert old == found == Advice("gluon_sm90", True, "", f"triton {TRITON}", f"pip install 'triton{TRITON}'")


def test_nothing_is_advised_where_the_first_row_serves():
    assert advice(ask()) is None
    assert advice(ask(without=["sglang"])) is None, "marlin stands behind what serves"
    assert advice(ask("gfx942", without=["amd-aiter"])) is None


def test_a_row_that_cannot_be_had_is_not_advised():
    """On SM80 no version of Triton makes the Hopper row run; and bias is not added by one that pip could bring."""
    assert advice(ask("sm80", without=["humming-kernels"])) is None, "triton serves before it"
    found = advice(ask("sm80", without=["triton"]))
    assert found.backend == "triton", "not gluon_sm90, whose device is another"
    rows = {v.backend: v for v in ask("sm80", without=["triton"]).verdicts}
    assert {r.kind for r in rows["gluon_sm90"].refusals} == {RefusalKind.ROW, RefusalKind.INSTALL}
    assert {r.kind for r in rows["cpu"].refusals} == {RefusalKind.DEVICE}
    assert rows["cpu"].elsewhere
    assert not rows["gluon_sm90"].elsewhere


def test_a_row_that_was_not_seen_on_hardware_is_not_called_faster():
    text = str(advice(ask("xpu-xe2", without=["vllm-xpu-kernels"])))
    assert text.startswith(
        "preferred backend xpu (not run on hardware, compared with a reference on a CPU) needs vllm-xpu-kernels >="
    )


@pytest.mark.parametrize(("device", "kind"), [("gfx942", "rocm"), ("xpu-xe2", "xpu")])
def test_triton_for_other_makers_comes_with_torch(device, kind):
    """The one on the package index is for NVIDIA."""
    row = next(v for v in ask(device, without=["triton"]).verdicts if v.backend == "triton")
    assert row.refusals[0].remedy.command == f"install torch's build for {kind}, which brings it (docs/install.md)"


def test_a_package_that_does_not_import_is_to_be_installed_again():
    broken = {**ALL, "triton": Package(ALL["triton"].version, "ImportError: libtriton.so")}
    found = advice(ask(packages=broken))
    assert found.needs == f"a triton {TRITON} that imports"
    assert found.command == f"pip install --force-reinstall --no-deps 'triton{TRITON}'"


@pytest.mark.parametrize("remedy", ["", "pip install ziglang && python -m expertd_kernels.native.csrc.build"])
def test_the_cpu_row_names_the_command_that_makes_its_library(remedy):
    kernel = Package("1", "cpu kernel: libexpertd_cpu.so is not built", remedy)
    d = ask("cpu-avx512", packages={**ALL, "expertd-cpu-kernel": kernel})
    assert d.chosen.name == "cpu_torch"
    assert next(v.refusals for v in d.verdicts if v.backend == "cpu") == (kernel.error,)
    want = remedy or "python -m expertd_kernels.native.csrc.build"
    assert str(advice(d)) == f"faster backend cpu needs its compiled library: {want}"
    assert advice(ask("cpu-avx512", packages={})).command == "python -m expertd_kernels.native.csrc.build"


def test_a_pin_is_the_users_choice_and_its_own_lack_is_told():
    assert advice(ask(without=["sglang"], pin="humming")) is None
    refused = advice(ask(without=["triton", "humming-kernels"], pin="humming"))
    assert (refused.backend, refused.earlier) == ("humming", False)
    assert refused.needs.startswith("humming-kernels >=")
    assert refused.needs.endswith(" and triton >=3.6")
    assert str(refused).startswith("backend humming needs ")
    assert str(refused).endswith(" && pip install 'triton>=3.6'")
    assert advice(ask(without=["amd-aiter"], pin="aiter")) is None, "no package makes it run on this device"


def test_what_was_found_out_while_loading_is_no_matter_of_the_install():
    d = ask(without=["triton"])
    late = tuple(
        replace(v, refusals=(*v.refusals, Refusal("when packing: no"))) if v.backend == "gluon_sm90" else v
        for v in d.verdicts
    )
    assert advice(replace(d, verdicts=late)).backend == "triton"


def test_a_refusal_is_a_text_that_keeps_what_it_knows():
    r = Refusal("no", RefusalKind.INSTALL, Remedy("x >=1", "pip install 'x>=1'"))
    assert (r, f"{r}", "; ".join([r, r])) == ("no", "no", "no; no")
    for same in (copy.copy(r), copy.deepcopy(r), pickle.loads(pickle.dumps(r))):
        assert (same, same.kind, same.remedy) == (r, r.kind, r.remedy)
    assert (Refusal("no").kind, Refusal("no").remedy) == (RefusalKind.ROW, None)
    for kind, remedy in ((RefusalKind.INSTALL, None), (RefusalKind.ROW, r.remedy)):
        with pytest.raises(ValueError, match="want one for an install alone"):
            Refusal("no", kind, remedy)
