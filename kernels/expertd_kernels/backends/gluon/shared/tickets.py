# mypy: ignore-errors
# (Gluon device code: its types are checked by Triton's compiler, not by mypy.)
"""Device code of the persistent kernels: which tile is next (`ws` asks pieces.find_ordered), who hears of it, the ring.
`C` is a Tile or a Tile8.

Tiles are drawn by tickets: a CTA asks for its next one when it is nearly ready for it, so blocks that share a column
tile begin together wherever the CTAs stand, and its weights come from memory once.  (In a fixed order the CTAs drift
apart by more than the L2 holds: decision 59.)  The producer asks, and tells the consumers beside the tile's first
stage."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

EARLY = gl.constexpr(3)
"""Stages before a tile's last one at which the next is drawn: the answer takes about as long as they do."""


@gluon.jit
def _find(ie, cnt, nb, cum, t, G: gl.constexpr, C: gl.constexpr):
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
    size = gl.maximum(gl.minimum(blocks - first, G), 1)
    return e, start, n, blocks, first + r % size, r // size


@gluon.jit
def find_tile(ie, cnt, nb, cum, t, G: gl.constexpr, C: gl.constexpr):
    """tile number -> (expert, first route of the block in the list, routes from there to the expert's end, column
    tile); no routes where there is no such tile.  Up to G blocks of an expert share a column tile before the next
    one."""
    e, start, n, _blocks, b, col = _find(ie, cnt, nb, cum, t, G, C)
    return e, start + b * C.BM, n - b * C.BM, col


@gluon.jit
def find_even_tile(ie, cnt, nb, cum, t, G: gl.constexpr, C: gl.constexpr):
    """As find_tile, but an expert's routes are dealt out to its blocks evenly, 64 at a time, so that blocks which share
    weights run at one pace; the third result is the routes of the block, 0 where there is no such tile"""
    e, start, n, blocks, b, col = _find(ie, cnt, nb, cum, t, G, C)
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


@gluon.jit
def tell(tile, slot, e, base, n, col, W: gl.constexpr):
    """which tile begins with the stage in this slot; the arrival at its barrier comes after"""
    L: gl.constexpr = gl.BlockedLayout([1], [32], [W], [0])
    tile.index(4 * slot).store(gl.full([1], e, gl.int32, L))
    tile.index(4 * slot + 1).store(gl.full([1], base, gl.int32, L))
    tile.index(4 * slot + 2).store(gl.full([1], n, gl.int32, L))
    tile.index(4 * slot + 3).store(gl.full([1], col, gl.int32, L))


@gluon.jit
def told(tile, full, slot, ph, W: gl.constexpr = 4):
    """(expert, first route of the block in the list, its routes, column tile) once the tile's first stage is there;
    no routes: there is no tile left"""
    L: gl.constexpr = gl.BlockedLayout([1], [32], [W], [0])
    mbarrier.wait(full.index(slot), ph)
    e = gl.max(tile.index(4 * slot).load(L), 0)
    base = gl.max(tile.index(4 * slot + 1).load(L), 0)
    n = gl.max(tile.index(4 * slot + 2).load(L), 0)
    col = gl.max(tile.index(4 * slot + 3).load(L), 0)
    return e, base, n, col
