# mypy: ignore-errors
# (Gluon device code: its types are checked by Triton's compiler, not by mypy.)
"""Device code of the persistent kernels with tokens on wgmma's M side (`wide`, `w8a8`): which tile is next, and the
ring of stages.  `C` is a Tile or a Tile8."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier


@gluon.jit
def _find(ie, cnt, nb, cum, t, G: gl.constexpr, ahead: gl.constexpr, C: gl.constexpr):
    """tile number -> (expert, its first route in the list, its routes, its blocks, block, column tile)"""
    CT: gl.constexpr = C.column_tiles
    before = (cum * CT <= t).to(gl.int32)
    e = gl.sum(before, 0)
    mine = ie == e
    start = gl.sum(cnt * before, 0)
    n = gl.sum(gl.where(mine, cnt, 0), 0)
    blocks = gl.sum(gl.where(mine, nb, 0), 0)
    r = t - gl.sum(nb * before, 0) * CT
    first = r // (G * CT) * G
    r -= first * CT
    size = gl.minimum(blocks - first, G)
    if ahead:
        size = gl.maximum(size, 1)
    return e, start, n, blocks, first + r % size, r // size


@gluon.jit
def find_tile(ie, cnt, nb, cum, t, G: gl.constexpr, ahead: gl.constexpr, C: gl.constexpr):
    """tile number -> (expert, first route of the block in the list, routes from there to the expert's end, column
    tile).  Up to G blocks of an expert share a column tile before the next one: their weights are read once.
    ahead: asked before it is known whether there is a tile at all"""
    e, start, n, _blocks, b, col = _find(ie, cnt, nb, cum, t, G, ahead, C)
    return e, start + b * C.BM, n - b * C.BM, col


@gluon.jit
def find_even_tile(ie, cnt, nb, cum, t, G: gl.constexpr, C: gl.constexpr):
    """As find_tile, but an expert's routes are dealt out to its blocks evenly, 64 at a time, so that blocks which share
    weights run at one pace; the third result is the routes of the block, 0 where there is no such tile"""
    e, start, n, blocks, b, col = _find(ie, cnt, nb, cum, t, G, True, C)
    blocks = gl.maximum(blocks, 1)
    parts = (n + 63) // 64
    begin = b * parts // blocks * 64
    return e, start + begin, gl.minimum((b + 1) * parts // blocks * 64, n) - begin, col


@gluon.jit
def next_slot(slot, ph, C: gl.constexpr):
    slot = gl.where(slot == C.ST - 1, 0, slot + 1)
    return slot, gl.where(slot == 0, ph ^ 1, ph)


@gluon.jit
def skip_tile(full, empty, slot, ph, C: gl.constexpr):
    """the stages of a tile of which no token is ours"""
    for _i in range(C.iterations):
        mbarrier.wait(full.index(slot), ph)
        mbarrier.arrive(empty.index(slot), count=1)
        slot, ph = next_slot(slot, ph, C)
    return slot, ph
