"""What the compiler made of the CPU kernels: sums stay in registers in the loops that hold the products."""

import re
import subprocess

import pytest

import cpu_loops
from cpu_loops import Instruction, Loop, inner_loops, spills
from expertd_kernels.native import library as native
from expertd_kernels.native.csrc import build

LEVELS = ("level_avx2", "level_avx512", "level_avx512_bf16")
NEVER = re.compile(r"tile_row_i16<Avx512|tile_bytes<\w+, \d, \d, [123],|tile_bf16<\w+, \d+, \d, [1-8], \d>")
SELDOM = re.compile(r"tile_row_i16<Avx2|tile_bytes<|tile_i16<\w+, \d, \d, [12],")
"""Where registers are just too few, at most one move for four products: they hide it."""

pytestmark = [
    pytest.mark.skipif(bool(native.kernel_error()), reason=native.kernel_error() or "built"),
    pytest.mark.skipif(bool(cpu_loops.missing_tools()), reason=cpu_loops.missing_tools() or "there"),
]


def test_products_are_not_spilled_at_any_level():
    loops = [loop for loop in inner_loops(build.HERE / build.LIBRARY, LEVELS) if loop.dots]
    if not loops:
        pytest.skip(f"{build.LIBRARY} has no AVX code, or was stripped of its names")
    allowed = [(loop, loop.dots // 4 if SELDOM.match(loop.function) else 0) for loop in loops
               if NEVER.match(loop.function) or SELDOM.match(loop.function)]  # fmt: skip
    kinds = {(loop.source, loop.function.partition("<")[0]) for loop, _ in allowed}
    want = {(level, name) for level in LEVELS for name in ("tile_row_i16", "tile_i16")}
    want |= {("level_avx512_bf16", name) for name in ("tile_bytes", "tile_bf16")}
    assert kinds == want
    wrong = {f"{loop.source} {loop.function}": spills(loop) for loop, most in allowed if len(spills(loop)) > most}
    assert wrong == {}, "sums go to the stack in each step: indices that are no constants, or too many sums"


def test_levels_without_bf16_have_none_of_its_instructions():
    """`avx512_vnni` and `avx512_bytes_ahead` run without BF16, and share a source with levels that have it:
    its instructions may stand only in functions that those levels never call."""
    text = subprocess.run(
        ["objdump", "-d", "-C", "--no-show-raw-insn", str(build.HERE / build.LIBRARY)],
        capture_output=True, text=True, check=True, timeout=60,
    ).stdout  # fmt: skip
    function, found = "", set()
    for line in text.splitlines():
        if line.endswith(">:"):
            function = line
        elif re.search(r"\t(vdpbf16ps|vcvtne\w*bf16)", line):
            found.add(function)
    if not found:
        pytest.skip(f"{build.LIBRARY} has no AVX code, or was stripped of its names")
    assert {f for f in found if not re.search(r"tile_bf16<|::peak<", f)} == set()


BROKEN = """
#include <immintrin.h>
namespace expertd { namespace {
template <int N, bool KEPT> __attribute__((noinline)) void tile(const __m256i* x, __m256i* out, long n) {
  __m256i sum[N] = {};
  for (const __m256i* end = x + n; x < end; x++) {
    const __m256i v = _mm256_loadu_si256(x);
#pragma GCC unroll 8
    for (int i = 0; i < N; i++) {
      sum[i] = _mm256_add_epi32(sum[i], _mm256_madd_epi16(v, _mm256_set1_epi16(i + 1)));
      if (!KEPT) asm volatile("" : : "r"(sum) : "memory");
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < N; i++) _mm256_storeu_si256(out + i, sum[i]);
}
} }
extern "C" void both(const __m256i* x, __m256i* out, long n) {
  expertd::tile<4, true>(x, out, n);
  expertd::tile<4, false>(x, out, n);
}
"""


def test_sums_that_the_compiler_keeps_in_memory_are_seen(tmp_path):
    try:
        compiler = build.find_compiler()
    except build.BuildError as e:
        pytest.skip(str(e))
    source, made = tmp_path / "level_broken.cpp", tmp_path / "broken.so"
    source.write_text(BROKEN)
    flags = ["-O2", "-mavx2", "-fPIC", "-shared"]
    subprocess.run([*compiler, *flags, str(source), "-o", str(made)], check=True, timeout=60)
    found = {loop.function: loop for loop in inner_loops(made, ["level_broken"])}
    assert found.keys() == {"tile<4, true>", "tile<4, false>"}
    assert found["tile<4, true>"].products == 4
    assert spills(found["tile<4, true>"]) == []
    assert len(spills(found["tile<4, false>"])) >= 4
    assert inner_loops(made, ["level_avx2"]) == []


def test_what_moves_a_vector_to_the_stack_and_back():
    body = ["vmovdqa32 %zmm1,-0x38(%rsp)", "vpaddd 0x40(%rsp),%ymm2,%ymm2", "mov 0x8(%rsp),%rax"]
    body.append("vmovups (%rbp),%ymm1")
    instructions = tuple(Instruction(i, text) for i, text in enumerate(body))
    assert spills(Loop("s", "f", False, instructions)) == body[:2]
    assert spills(Loop("s", "f", True, instructions)) == [*body[:2], body[3]]
