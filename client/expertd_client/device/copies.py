"""Two kernels of a caller on a GPU, as PTX that the driver compiles for whatever GPU it finds: they need no compiler
and no package.

    call    three tensors into the session's memory (none, where the caller made them there); then, once everybody sees
            them, 0 into one word of the host and a number into another.  The block that is last then waits until the
            first of those words is not 0, and says whether it is the one that is good; where it is not, it makes a
            tensor NaN (every bit set).  A stream's own wait (cuStreamWaitValue32) looks once in 9 us
    take    a tensor out of the session's memory, or, where the word was not the good one, NaN in its place: an answer
            that failed is never mistaken for one.  It does not look at the host's word itself: a block's read of that
            takes a microsecond and no two overlap

Addresses are multiples of 16.
"""

from __future__ import annotations

import ctypes as C

from expertd.shm.cuda import Cuda, CudaError

__all__ = ["Copies", "Launch", "ptx"]

_THREADS = 512
_COUNT = C.c_uint(_THREADS)
_MOST_BLOCKS = 528
_WORDS_BYTES = 512
_VECTOR = 16
_HEAD = """
.version 6.4
.target sm_70
.address_size 64
"""
_INDEX = """
  .reg .pred %p<4>;
  .reg .b32 %r<16>;
  .reg .b64 %a<16>;
  mov.u32 %r0, %tid.x;
  mov.u32 %r1, %ctaid.x;
  mov.u32 %r2, %ntid.x;
  mov.u32 %r3, %nctaid.x;
  mad.lo.u32 %r4, %r1, %r2, %r0;
  mul.wide.u32 %a0, %r4, 16;
  mul.lo.u32 %r5, %r2, %r3;
  mul.wide.u32 %a1, %r5, 16;
  cvt.u64.u32 %a2, %r4;
"""
_CALL = """
  membar.sys;
  bar.sync 0;
  setp.ne.u32 %p1, %r0, 0;
  @%p1 bra TOLD;
  mov.u32 %r13, 0;
  st.shared.u32 [spoilt], %r13;
  ld.param.u64 %a12, [blocks];
  atom.global.add.u32 %r12, [%a12], 1;
  sub.u32 %r14, %r3, 1;
  setp.ne.u32 %p2, %r12, %r14;
  @%p2 bra TOLD;
  st.volatile.global.u32 [%a12], %r13;
  ld.param.u64 %a13, [answered];
  st.volatile.global.u32 [%a13], %r13;
  membar.sys;
  ld.param.u64 %a10, [called];
  ld.param.u64 %a11, [number];
  cvt.u32.u64 %r11, %a11;
  st.volatile.global.u32 [%a10], %r11;
  ld.param.u64 %a11, [good];
  cvt.u32.u64 %r11, %a11;
AGAIN:
  ld.volatile.global.u32 %r12, [%a13];
  setp.eq.u32 %p2, %r12, 0;
  @%p2 bra AGAIN;
  membar.sys;
  setp.ne.u32 %p2, %r12, %r11;
  selp.b32 %r13, 1, 0, %p2;
  ld.param.u64 %a12, [failed];
  st.global.u32 [%a12], %r13;
  st.shared.u32 [spoilt], %r13;
TOLD:
  bar.sync 0;
  ld.shared.u32 %r13, [spoilt];
  setp.eq.u32 %p2, %r13, 0;
  @%p2 bra OVER;
  ld.param.u64 %a3, [spoil];
  ld.param.u64 %a6, [spoil_bytes];
  mul.wide.u32 %a7, %r0, 4;
  mul.wide.u32 %a1, %r2, 4;
  mov.u32 %r6, -1;
SPOIL:
  setp.ge.u64 %p0, %a7, %a6;
  @%p0 bra OVER;
  add.u64 %a9, %a3, %a7;
  st.global.u32 [%a9], %r6;
  add.u64 %a7, %a7, %a1;
  bra SPOIL;
OVER:
"""
_SEGMENT = """
  ld.param.u64 %a3, [to{n}];
  ld.param.u64 %a4, [from{n}];
  ld.param.u64 %a5, [bytes{n}];
  and.b64 %a6, %a5, -16;
  mov.u64 %a7, %a0;
VECTORS{n}:
  setp.ge.u64 %p0, %a7, %a6;
  @%p0 bra REST{n};
  add.u64 %a8, %a4, %a7;
  add.u64 %a9, %a3, %a7;
  ld.global.v4.u32 {{%r6, %r7, %r8, %r9}}, [%a8];
  st.global.v4.u32 [%a9], {{%r6, %r7, %r8, %r9}};
  add.u64 %a7, %a7, %a1;
  bra VECTORS{n};
REST{n}:
  add.u64 %a7, %a6, %a2;
  setp.ge.u64 %p0, %a7, %a5;
  @%p0 bra END{n};
  add.u64 %a8, %a4, %a7;
  add.u64 %a9, %a3, %a7;
  ld.global.u8 %r6, [%a8];
  st.global.u8 [%a9], %r6;
END{n}:
"""
_PARAMETERS = ".param .u64 to{n}, .param .u64 from{n}, .param .u64 bytes{n}"
_TAKE = """
.visible .entry take(.param .u64 to, .param .u64 from, .param .u64 bytes, .param .u64 failed)
{{
  {index}
  ld.param.u64 %a3, [to];
  ld.param.u64 %a4, [from];
  ld.param.u64 %a5, [bytes];
  ld.param.u64 %a10, [failed];
  ld.global.u32 %r11, [%a10];
  and.b64 %a6, %a5, -16;
  mov.u64 %a7, %a0;
VECTORS:
  setp.ge.u64 %p0, %a7, %a6;
  @%p0 bra REST;
  add.u64 %a8, %a4, %a7;
  add.u64 %a9, %a3, %a7;
  ld.global.v4.u32 {{%r6, %r7, %r8, %r9}}, [%a8];
  setp.eq.u32 %p2, %r11, 0;
  selp.b32 %r6, %r6, -1, %p2;
  selp.b32 %r7, %r7, -1, %p2;
  selp.b32 %r8, %r8, -1, %p2;
  selp.b32 %r9, %r9, -1, %p2;
  st.global.v4.u32 [%a9], {{%r6, %r7, %r8, %r9}};
  add.u64 %a7, %a7, %a1;
  bra VECTORS;
REST:
  add.u64 %a7, %a6, %a2;
  setp.ge.u64 %p0, %a7, %a5;
  @%p0 bra END;
  add.u64 %a8, %a4, %a7;
  add.u64 %a9, %a3, %a7;
  ld.global.u8 %r6, [%a8];
  setp.eq.u32 %p2, %r11, 0;
  selp.b32 %r6, %r6, -1, %p2;
  st.global.u8 [%a9], %r6;
END:
  ret;
}}
"""


def ptx() -> str:
    """Of both kernels."""
    tensors = ", ".join(_PARAMETERS.format(n=n) for n in range(3))
    segments = "".join(_SEGMENT.format(n=n) for n in range(3))
    words = ("answered", "called", "number", "blocks", "good", "failed", "spoil", "spoil_bytes")
    parameters = ", ".join((tensors, *(f".param .u64 {word}" for word in words)))
    body = f"  .shared .align 4 .b32 spoilt;\n{_INDEX}{segments}{_CALL}  ret;\n"
    return f"{_HEAD}.visible .entry call({parameters})\n{{{body}}}\n" + _TAKE.format(index=_INDEX)


class Launch:
    """Arguments of a launch that is made again and again.  nbytes: of its largest tensor; 0 = one block."""

    def __init__(self, nbytes: int, *values: int) -> None:
        self.values = (C.c_uint64 * len(values))(*values)
        first = C.addressof(self.values)
        self.pointers = (C.c_void_p * len(values))(*(first + 8 * i for i in range(len(values))))
        self.blocks = C.c_uint(max(1, min(_MOST_BLOCKS, -(-nbytes // (_VECTOR * _THREADS)))))


class Copies:
    """For one GPU.  Its methods launch on a stream (the driver's handle) of the current context, one after another.

    blocks   address of a word in which the blocks of `call` count themselves
    failed   address of the word in which `call` tells `take`"""

    def __init__(self, driver: Cuda) -> None:
        """With the GPU's context current.  Raises CudaError."""
        self._launch, self._driver = driver.library.cuLaunchKernel, driver
        self._module, memory = C.c_void_p(), C.c_uint64()
        driver("cuModuleLoadData", C.byref(self._module), C.c_char_p(ptx().encode()))
        driver("cuMemAlloc_v2", C.byref(memory), C.c_size_t(_WORDS_BYTES))
        driver("cuMemsetD8_v2", memory, C.c_ubyte(0), C.c_size_t(_WORDS_BYTES))
        self.blocks, self.failed = memory.value, memory.value + _WORDS_BYTES // 2
        self._call, self._take = (self._function(name) for name in (b"call", b"take"))

    def call(self, stream: int, launch: Launch) -> None:
        """launch.values: to, from and bytes of three segments, the addresses of the word that is answered and of the
        one that calls, the number to call with, `blocks`, what the answer must be, `failed`, and what becomes NaN where
        it is not: its address and bytes, a multiple of 4."""
        self._start(self._call, stream, launch)

    def take(self, stream: int, launch: Launch) -> None:
        """launch.values: to, from, bytes, and `failed`."""
        self._start(self._take, stream, launch)

    def close(self) -> None:
        """With the GPU's context current, when nothing that was launched runs any more."""
        self._driver("cuModuleUnload", self._module)
        self._driver("cuMemFree_v2", C.c_uint64(self.blocks))

    def _function(self, name: bytes) -> C.c_void_p:
        found = C.c_void_p()
        self._driver("cuModuleGetFunction", C.byref(found), self._module, C.c_char_p(name))
        return found

    def _start(self, kernel: C.c_void_p, stream: int, launch: Launch) -> None:
        size = (launch.blocks, 1, 1, _COUNT, 1, 1)
        code = self._launch(kernel, *size, 0, C.c_void_p(stream), launch.pointers, None)
        if code:
            raise CudaError(f"launching a copy: CUDA error {code}")
