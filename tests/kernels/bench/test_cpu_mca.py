"""Which loop of the library is whose, and what llvm-mca says of it."""

import pytest

import cpu_mca
from cpu_loops import Instruction, Loop, inner_loops, missing_tools
from cpu_mca import LEVELS, Kernel, find_mca, kernels, loop_of, loops_of, markdown, predicted
from expertd_kernels.native import library as native
from expertd_kernels.native.csrc import build

SOURCE = "level_avx512_bf16"


def loop(function, *texts, source=SOURCE):
    return Loop(source, function, False, tuple(Instruction(i, t) for i, t in enumerate(texts)))


def test_a_kernels_loop_is_the_one_of_two_blocks_with_most_products():
    dot = "vpdpbusd %zmm1,%zmm2,%zmm3"
    one, two = (
        loop("tile_bytes<Avx512, 0, 1, 4, -1>", *[dot] * 12),
        loop("tile_bytes<Avx512, 0, 2, 4, -1>", *[dot] * 24),
    )
    ends = loop("tile_bytes<Avx512, 0, 2, 4, -1>", "vfmadd213ps %zmm1,%zmm2,%zmm3")
    kernel = Kernel("avx512_bytes", "int4_g128", 4)
    assert loop_of(kernel, [one, ends, two]) == (two, 2.0)
    assert loop_of(kernel, [one, ends]) == (one, 1.0)
    assert loop_of(kernel, [ends]) is None
    assert loop_of(Kernel("avx512_bf16", "int4_g128", 4), [one, two]) is None


@pytest.mark.parametrize(
    ("kernel", "function", "dot", "vectors"),
    [
        (Kernel("avx2", "int4_g128", 1), "tile_row_i16<Avx2, 0, 2, 3>", "vpmaddwd", 2),
        (Kernel("avx2", "int8_g128", 4), "tile_i16<Avx2, 1, 1, 4, -1>", "vpmaddwd", 1),
        (Kernel("avx512", "mxfp4", 1), "tile_i16<Avx512, 3, 2, 1, 4>", "vpmaddwd", 4),
        (Kernel("avx512_bytes", "mxfp4", 1), "tile_bytes<Avx512, 3, 2, 1, 4>", "vpdpbusd", 4),
        (Kernel("avx512_bf16", "e4m3_block128", 4), "tile_bf16<Avx512, 2, 2, 4>", "vdpbf16ps", 2),
        (Kernel("avx2", "e4m3_block128", 1), "tile_f32<Avx2, 2, 2, 1>", "vfmadd231ps", 2),
    ],
    ids=str,
)
def test_products_say_how_many_vectors_of_codes_a_loop_takes(kernel, function, dot, vectors):
    found = loop(function, *[f"{dot} %zmm1,%zmm2,%zmm3"] * 16, source=LEVELS[kernel.level][0])
    assert loop_of(kernel, [found]) == (found, vectors)


def test_the_table_has_a_line_for_each_kernel_that_was_found():
    found = loop("tile_bytes<Avx512, 0, 2, 1, -1>", *["vpdpbusd %zmm1,%zmm2,%zmm3"] * 6, "jne 10 <x+0x10>")
    kernel = Kernel("avx512_bytes", "int4_g128", 1)
    text = markdown(loops_of([found]), {(kernel, "znver4"): 7.5}, {kernel: 3.21})
    assert text.splitlines()[2:] == ["| `avx512_bytes` | int4_g128 | 1 | 3.5 |  | 7.5 |  |  |  | 3.2 |"]


def test_what_to_install_is_said_where_there_is_no_llvm_mca(monkeypatch, capsys):
    monkeypatch.setattr(cpu_mca.shutil, "which", lambda name: None)
    assert cpu_mca.main([]) == 1
    assert "apt-get install llvm-19" in capsys.readouterr().err


@pytest.mark.skipif(bool(native.kernel_error()), reason=native.kernel_error() or "built")
@pytest.mark.skipif(bool(missing_tools()), reason=missing_tools() or "there")
def test_every_kernel_of_the_built_library_has_a_loop():
    loops = inner_loops(build.HERE / build.LIBRARY, sorted({source for source, *_ in LEVELS.values()}))
    if not loops:
        pytest.skip(f"{build.LIBRARY} has no AVX code, or was stripped of its names")
    assert list(loops_of(loops)) == kernels()


def test_llvm_mca_predicts_a_loop_and_knows_who_has_its_instructions():
    try:
        mca = find_mca()
    except FileNotFoundError as e:
        pytest.skip(str(e))
    adds = loop("f", "vpaddd %ymm1,%ymm0,%ymm0", "vpaddd %ymm1,%ymm0,%ymm0", "jne 10 <x+0x10>")
    assert predicted(mca, adds, "znver3") == pytest.approx(2, rel=0.1)
    assert predicted(mca, loop("f", "vpdpbusd %zmm1,%zmm2,%zmm3", "jne 10 <x>"), "znver3") is None
    assert predicted(mca, adds, "no_core") is None
