"""Two kernels of a caller on a GPU, as PTX that the driver compiles for whatever GPU it finds: they need no compiler
and no package.

    bring   three tensors into the session's memory, and 0 into a word of the host, in one launch
    take    one out of it, or, where the call was not answered well, NaN (every bit set) in its place: an answer that
            failed is never mistaken for one.  A read of the host's word takes a microsecond and does not overlap with
            another one, so one thread reads it while all copy, and the last block to end sees what it read

Addresses are multiples of 16.
"""

from __future__ import annotations

import ctypes as C

from expertd.shm.cuda import Cuda, CudaError

__all__ = ["Copies", "Launch", "ptx"]

_THREADS = 512
_MOST_BLOCKS = 528
_BLOCKS_BYTES = 256
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
_CLEAR = """
  setp.ne.u32 %p1, %r4, 0;
  @%p1 bra CLEARED;
  ld.param.u64 %a10, [word];
  mov.u32 %r11, 0;
  st.volatile.global.u32 [%a10], %r11;
CLEARED:
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
.visible .entry take(.param .u64 to, .param .u64 from, .param .u64 bytes, .param .u64 word, .param .u64 good,
                     .param .u64 blocks)
{{
  .shared .align 4 .u32 last;
  {index}
  ld.param.u64 %a3, [to];
  ld.param.u64 %a4, [from];
  ld.param.u64 %a5, [bytes];
  ld.param.u64 %a10, [word];
  ld.param.u64 %a11, [good];
  cvt.u32.u64 %r10, %a11;
  ld.param.u64 %a12, [blocks];
  setp.ne.u32 %p1, %r4, 0;
  @%p1 bra COPY;
  ld.volatile.global.u32 %r11, [%a10];
  setp.ne.u32 %p2, %r10, %r11;
  selp.b32 %r11, 1, 0, %p2;
  st.volatile.global.u32 [%a12+4], %r11;
COPY:
  and.b64 %a6, %a5, -16;
  mov.u64 %a7, %a0;
VECTORS:
  setp.ge.u64 %p0, %a7, %a6;
  @%p0 bra REST;
  add.u64 %a8, %a4, %a7;
  add.u64 %a9, %a3, %a7;
  ld.global.v4.u32 {{%r6, %r7, %r8, %r9}}, [%a8];
  st.global.v4.u32 [%a9], {{%r6, %r7, %r8, %r9}};
  add.u64 %a7, %a7, %a1;
  bra VECTORS;
REST:
  add.u64 %a7, %a6, %a2;
  setp.ge.u64 %p0, %a7, %a5;
  @%p0 bra COPIED;
  add.u64 %a8, %a4, %a7;
  add.u64 %a9, %a3, %a7;
  ld.global.u8 %r6, [%a8];
  st.global.u8 [%a9], %r6;
COPIED:
  membar.gl;
  bar.sync 0;
  setp.ne.u32 %p1, %r0, 0;
  @%p1 bra COUNTED;
  atom.global.add.u32 %r12, [%a12], 1;
  sub.u32 %r13, %r3, 1;
  setp.eq.u32 %p2, %r12, %r13;
  selp.b32 %r12, 1, 0, %p2;
  st.shared.u32 [last], %r12;
COUNTED:
  bar.sync 0;
  ld.shared.u32 %r12, [last];
  setp.eq.u32 %p2, %r12, 0;
  @%p2 bra END;
  membar.gl;
  mov.u32 %r13, 0;
  @!%p1 st.volatile.global.u32 [%a12], %r13;
  ld.volatile.global.u32 %r11, [%a12+4];
  setp.eq.u32 %p2, %r11, 0;
  @%p2 bra END;
  cvt.u64.u32 %a7, %r0;
  cvt.u64.u32 %a1, %r2;
  mov.u32 %r6, -1;
SPOIL:
  setp.ge.u64 %p0, %a7, %a5;
  @%p0 bra END;
  add.u64 %a9, %a3, %a7;
  st.global.u8 [%a9], %r6;
  add.u64 %a7, %a7, %a1;
  bra SPOIL;
END:
  ret;
}}
"""


def ptx() -> str:
    """Of both kernels."""
    parameters = ", ".join(_PARAMETERS.format(n=n) for n in range(3))
    segments = "".join(_SEGMENT.format(n=n) for n in range(3))
    bring = f".visible .entry bring({parameters}, .param .u64 word)\n{{{_INDEX}{_CLEAR}{segments}  ret;\n}}\n"
    return _HEAD + bring + _TAKE.format(index=_INDEX)


class Launch:
    """Arguments of a launch that is made again and again; of `nbytes` in its largest tensor."""

    def __init__(self, nbytes: int, *values: int) -> None:
        self.values = (C.c_uint64 * len(values))(*values)
        first = C.addressof(self.values)
        self.pointers = (C.c_void_p * len(values))(*(first + 8 * i for i in range(len(values))))
        self.blocks = C.c_uint(max(1, min(_MOST_BLOCKS, -(-nbytes // (_VECTOR * _THREADS)))))


class Copies:
    """For one GPU.  Its methods launch on a stream (the driver's handle) of the current context.

    blocks   address of memory in which the blocks of `take` count themselves: one launch at a time uses it"""

    def __init__(self, driver: Cuda) -> None:
        """With the GPU's context current.  Raises CudaError."""
        self._launch = driver.library.cuLaunchKernel
        self._module = C.c_void_p()
        self._driver = driver
        driver("cuModuleLoadData", C.byref(self._module), C.c_char_p(ptx().encode()))
        blocks = C.c_uint64()
        driver("cuMemAlloc_v2", C.byref(blocks), C.c_size_t(_BLOCKS_BYTES))
        driver("cuMemsetD8_v2", blocks, C.c_ubyte(0), C.c_size_t(_BLOCKS_BYTES))
        self.blocks = blocks.value
        self._bring, self._take = C.c_void_p(), C.c_void_p()
        driver("cuModuleGetFunction", C.byref(self._bring), self._module, C.c_char_p(b"bring"))
        driver("cuModuleGetFunction", C.byref(self._take), self._module, C.c_char_p(b"take"))

    def bring(self, stream: int, launch: Launch) -> None:
        """Three segments: launch.values are to, from and bytes of each, and the address of a word."""
        self._start(self._bring, stream, launch)

    def take(self, stream: int, launch: Launch) -> None:
        """launch.values: to, from, bytes, the address of a word, what it must be, and `blocks`."""
        self._start(self._take, stream, launch)

    def _start(self, kernel: C.c_void_p, stream: int, launch: Launch) -> None:
        code = self._launch(kernel, launch.blocks, 1, 1, _THREADS, 1, 1, 0, C.c_void_p(stream), launch.pointers, None)
        if code:
            raise CudaError(f"launching a copy: CUDA error {code}")

    def close(self) -> None:
        """With the GPU's context current, when nothing that was launched runs any more."""
        self._driver("cuModuleUnload", self._module)
        self._driver("cuMemFree_v2", C.c_uint64(self.blocks))
