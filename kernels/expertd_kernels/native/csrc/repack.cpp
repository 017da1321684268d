// Checkpoint layouts of packed integers -> canonical codes, see abi.h. Fields only change places, nothing is computed with
// them. The work goes in tiles of 16 x 16 words, so that whole cache lines are read and written.
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <memory>

#include "abi.h"
#include "processor.h"

namespace {

#define INLINED __attribute__((always_inline))
#define INLINE inline INLINED

constexpr int64_t PAGE = 4096, LINE = 64;  // bytes
constexpr int TILE = LINE / sizeof(uint32_t);
typedef uint32_t Tile[TILE][TILE];
typedef uint8_t v16 __attribute__((vector_size(16)));
typedef uint16_t pairs __attribute__((vector_size(16)));
typedef uint32_t v4 __attribute__((vector_size(16)));
typedef uint32_t v8 __attribute__((vector_size(32)));

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

template <class V>
INLINE V load(const void* p) {
  V v;
  memcpy(&v, p, sizeof v);
  return v;
}

template <class V>
INLINE void store(void* p, V v) {
  memcpy(p, &v, sizeof v);
}

// Elements of x, then of y, by their places: pick<0, 4, 1, 5>(x, y) is x0 y0 x1 y1 of two vectors of four.
template <int... at, class V>
INLINE V pick(V x, V y) {
#if defined(__clang__) || __GNUC__ >= 12
  return __builtin_shufflevector(x, y, at...);
#else
  return __builtin_shuffle(x, y, V{at...});
#endif
}

INLINE void transpose4(v4& a, v4& b, v4& c, v4& d) {
  const v4 ab = pick<0, 4, 1, 5>(a, b), ab2 = pick<2, 6, 3, 7>(a, b);
  const v4 cd = pick<0, 4, 1, 5>(c, d), cd2 = pick<2, 6, 3, 7>(c, d);
  a = pick<0, 1, 4, 5>(ab, cd);
  b = pick<2, 3, 6, 7>(ab, cd);
  c = pick<0, 1, 4, 5>(ab2, cd2);
  d = pick<2, 3, 6, 7>(ab2, cd2);
}

INLINE void transpose16(const Tile& tile, uint32_t* out, int64_t stride) {
  for (int c = 0; c < TILE; c += 4)  // outer: few lines of `out` at a time, they often fall into one set of the cache
    for (int r = 0; r < TILE; r += 4) {
      v4 x0 = load<v4>(&tile[r][c]), x1 = load<v4>(&tile[r + 1][c]);
      v4 x2 = load<v4>(&tile[r + 2][c]), x3 = load<v4>(&tile[r + 3][c]);
      transpose4(x0, x1, x2, x3);
      store(out + c * stride + r, x0);
      store(out + (c + 1) * stride + r, x1);
      store(out + (c + 2) * stride + r, x2);
      store(out + (c + 3) * stride + r, x3);
    }
}

// Writes the first height rows and width columns of a tile, transposed: column c to out + c * stride.
INLINE void put(const Tile& tile, int64_t height, int64_t width, uint32_t* out, int64_t stride) {
  if (height == TILE && width == TILE) return transpose16(tile, out, stride);
  for (int64_t c = 0; c < width; c++)
    for (int64_t r = 0; r < height; r++) out[c * stride + r] = tile[r][c];
}

// Transposes a [rows, cols] matrix of words that fill(r, c0, width, row) makes (words c0 .. c0 + width of row r): column c to
// out + c * stride.
template <class Fill>
INLINE void write_transposed(int64_t rows, int64_t cols, uint32_t* out, int64_t stride, const Fill& fill) {
  Tile tile;
  for (int64_t c0 = 0; c0 < cols; c0 += TILE)
    for (int64_t r0 = 0; r0 < rows; r0 += TILE) {
      const int64_t height = least(TILE, rows - r0), width = least(TILE, cols - c0);
      if (height == TILE && width == TILE)  // apart, so that the compiler knows the sizes
        for (int64_t r = 0; r < TILE; r++) fill(r0 + r, c0, TILE, tile[r]);
      else
        for (int64_t r = 0; r < height; r++) fill(r0 + r, c0, width, tile[r]);
      put(tile, height, width, out + c0 * stride + r0, stride);
    }
}

struct Flipped {
  const uint32_t* in;
  int64_t cols;
  uint32_t flip;

  INLINE void operator()(int64_t r, int64_t c0, int64_t width, uint32_t* row) const {
    for (int64_t c = 0; c < width; c++) row[c] = in[r * cols + c0 + c] ^ flip;
  }
};

// The four bytes of each of 16 words -> four rows of 16 bytes.
INLINE void split_bytes(const uint32_t* in, v16 (&rows)[4]) {
  v16 even[2], odd[2];
  for (int i = 0; i < 2; i++) {
    const v16 x = load<v16>(in + 8 * i), y = load<v16>(in + 8 * i + 4);
    even[i] = pick<0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30>(x, y);
    odd[i] = pick<1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31>(x, y);
  }
  rows[0] = pick<0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30>(even[0], even[1]);
  rows[1] = pick<0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30>(odd[0], odd[1]);
  rows[2] = pick<1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31>(even[0], even[1]);
  rows[3] = pick<1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31>(odd[0], odd[1]);
}

// The inverse, each word XORed with `flip`.
INLINE void join_bytes(const v16 (&rows)[4], uint32_t flip, uint32_t* out) {
  pairs low[2], high[2];  // bytes 0 and 1, bytes 2 and 3 of eight words
  low[0] = pairs(pick<0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23>(rows[0], rows[1]));
  low[1] = pairs(pick<8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31>(rows[0], rows[1]));
  high[0] = pairs(pick<0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23>(rows[2], rows[3]));
  high[1] = pairs(pick<8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31>(rows[2], rows[3]));
  for (int i = 0; i < 2; i++) {
    store(out + 8 * i, v4(pick<0, 8, 1, 9, 2, 10, 3, 11>(low[i], high[i])) ^ flip);
    store(out + 8 * i + 4, v4(pick<4, 12, 5, 13, 6, 14, 7, 15>(low[i], high[i])) ^ flip);
  }
}

// The fields of 16 words -> 32 / bits rows of 16 bytes, a field in each.
template <int bits>
INLINE void split_fields(const uint32_t* in, uint8_t* out) {
  v16 rows[4];
  split_bytes(in, rows);
  for (int i = 0; i < 4; i++) {
    if (bits == 8) {
      store(out + 16 * i, rows[i]);
    } else {
      store(out + 32 * i, rows[i] & 15);
      store(out + 32 * i + 16, rows[i] >> 4);
    }
  }
}

// Words of a strip of 16 columns, made of the rows columns[r * 32 / bits + i] of its fields [k, 16].
template <int bits>
struct Gathered {
  const uint8_t* fields;
  const int32_t* columns;
  uint32_t flip;

  INLINE v16 field(int64_t i) const { return load<v16>(fields + int64_t(columns[i]) * TILE); }

  INLINE void operator()(int64_t r, int64_t, int64_t, uint32_t* row) const {
    v16 bytes[4];
    for (int i = 0; i < 4; i++)
      bytes[i] = bits == 8 ? field(4 * r + i) : field(8 * r + 2 * i) | v16(v4(field(8 * r + 2 * i + 1)) << 4);
    join_bytes(bytes, flip, row);
  }
};

template <int bits>
INLINE void gather(const uint32_t* in, int64_t rows, int64_t cols, const int32_t* columns, uint32_t flip, uint8_t* fields,
                   uint32_t* out) {
  for (int64_t c0 = 0; c0 < cols; c0 += TILE) {
    const int64_t width = least(TILE, cols - c0);
    for (int64_t r = 0; r < rows; r++) {
      uint32_t line[TILE] = {};
      const uint32_t* from = in + r * cols + c0;
      if (width < TILE) from = static_cast<uint32_t*>(memcpy(line, from, size_t(width) * sizeof(uint32_t)));
      split_fields<bits>(from, fields + r * (32 / bits) * TILE);
    }
    write_transposed(rows, width, out + c0 * rows, rows, Gathered<bits>{fields, columns, flip});
  }
}

// A step of transposing the 8 x 8 nibbles of eight words: swaps the off-diagonal blocks of `half` rows and nibbles.
template <int half, uint32_t mask>
INLINE void swap_blocks(v8& low, v8& high) {
  const v8 l = low, h = high;
  low = (l & mask) | ((h & mask) << (4 * half));
  high = ((l >> (4 * half)) & mask) | (h & ~mask);
}

INLINE void transpose_nibbles(v8 (&w)[8]) {
  for (int i = 0; i < 4; i++) swap_blocks<4, 0x0000FFFFu>(w[i], w[i + 4]);
  for (int i = 0; i < 8; i++)
    if (!(i & 2)) swap_blocks<2, 0x00FF00FFu>(w[i], w[i + 2]);
  for (int i = 0; i < 8; i += 2) swap_blocks<1, 0x0F0F0F0Fu>(w[i], w[i + 1]);
}

// Tile i of `tiles` holds, at [r][c], the eight rows of word row r0 + r at column 8 (c0 + c) + i.
INLINE void turn_columns(const uint32_t* in, int64_t cols, int64_t r0, int64_t height, int64_t c0, int64_t width, Tile (&tiles)[8]) {
  for (int64_t r = 0; r < height; r++) {
    const uint32_t* rows = in + (r0 + r) * 8 * cols + c0;
    for (int half = 0; half < TILE; half += 8) {
      v8 w[8] = {};
      const int64_t count = least(8, width - half);
      for (int i = 0; i < 8 && count > 0; i++) {
        if (count == 8)
          w[i] = load<v8>(rows + i * cols + half);
        else
          memcpy(&w[i], rows + i * cols + half, size_t(count) * sizeof(uint32_t));
      }
      transpose_nibbles(w);
      for (int i = 0; i < 8; i++) store(&tiles[i][r][half], w[i]);
    }
  }
}

// A buffer of the calling thread, kept: it stays in the cache, and none of its pages is fresh. Begins with a page. NULL: no memory.
INLINE uint32_t* scratch(int64_t words) {
  static thread_local std::unique_ptr<void, decltype(&free)> buffer{nullptr, free};
  static thread_local int64_t size = 0;
  const int64_t pages = words * int64_t(sizeof(uint32_t)) / PAGE + 2;  // one for rounding up, one for read_words
  if (size < pages) {
    buffer.reset(aligned_alloc(PAGE, size_t(pages * PAGE)));
    size = buffer ? pages : 0;
  }
  return static_cast<uint32_t*>(buffer.get());
}

// Reads into a scratch buffer with a page to spare; where the words begin, a cache line's start. NULL: the file failed.
// They lie half a page further into their page than in the file: a copy to a place at most 32 bytes further takes four times as
// long, because the processor takes each load for one of the bytes that it has just stored (it compares 12 bits of the address).
uint32_t* read_words(int fd, int64_t offset, int64_t words, uint32_t* buffer) {
  char* const begin = reinterpret_cast<char*>(buffer) + (offset + PAGE / 2) % PAGE / LINE * LINE;
  char* at = begin;
  for (int64_t left = words * int64_t(sizeof(uint32_t)); left > 0;) {
    const ssize_t got = pread(fd, at, size_t(left), off_t(offset));
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return nullptr;
    at += got;
    offset += got;
    left -= got;
  }
  return reinterpret_cast<uint32_t*>(begin);
}

// Rows to take at a time of a matrix of so many columns: what stays in the second-level cache (256 KiB and more today).
INLINE int64_t piece_rows(int64_t rows, int64_t cols, int64_t multiple) {
  const int64_t fit = (192 << 10) / int64_t(sizeof(uint32_t)) / cols / multiple * multiple;
  return least(rows, fit < multiple ? multiple : fit);
}

INLINE void turn_rows(const uint32_t* in, int64_t rows, int64_t cols, uint32_t flip, uint32_t* out, int64_t stride) {
  write_transposed(rows, cols, out, stride, Flipped{in, cols, flip});
}

INLINE void turn_gathered(const uint32_t* in, int64_t words, int64_t n, int32_t bits, const int32_t* columns, uint32_t flip, uint8_t* fields,
                          uint32_t* out) {
  if (bits == 4)
    gather<4>(in, words, n, columns, flip, fields, out);
  else
    gather<8>(in, words, n, columns, flip, fields, out);
}

INLINE void turn_all_columns(const uint32_t* in, int64_t words, int64_t cols, const uint8_t* order, uint32_t* out, int64_t stride) {
  Tile tiles[8];
  for (int64_t c0 = 0; c0 < cols; c0 += TILE)
    for (int64_t r0 = 0; r0 < words; r0 += TILE) {
      const int64_t height = least(TILE, words - r0), width = least(TILE, cols - c0);
      turn_columns(in, cols, r0, height, c0, width, tiles);
      for (int i = 0; i < 8; i++) put(tiles[i], height, width, out + (c0 * 8 + order[i]) * stride + r0, 8 * stride);
    }
}

// What `work` inlines is compiled twice, and the wider code is taken where the machine has it.
template <class Work>
void narrow(const Work& work) { work(); }
#if defined(__x86_64__)
template <class Work>
__attribute__((target("avx2"))) void wide(const Work& work) { work(); }
template <class Work>
void run(const Work& work) { expertd::processor().avx2 ? wide(work) : narrow(work); }
#else
template <class Work>
void run(const Work& work) { narrow(work); }
#endif

}  // namespace

extern "C" {

int32_t expertd_repack_rows(int32_t fd, int64_t offset, int64_t rows, int64_t cols, uint32_t flip, uint32_t* out) {
  if (!out || offset < 0 || rows < 0 || cols < 1) return EXPERTD_BAD_ARGUMENT;
  const int64_t step = piece_rows(rows, cols, TILE);
  uint32_t* buffer = scratch(step * cols);
  if (!buffer) return EXPERTD_NO_MEMORY;
  for (int64_t r = 0; r < rows; r += step) {
    const int64_t count = least(step, rows - r);
    const uint32_t* in = read_words(fd, offset + r * cols * 4, count * cols, buffer);
    if (!in) return EXPERTD_READ_FAILED;
    run([&]() INLINED { turn_rows(in, count, cols, flip, out + r, rows); });
  }
  return EXPERTD_OK;
}

int32_t expertd_repack_gather(int32_t fd, int64_t offset, int64_t k, int64_t n, int32_t bits, const int32_t* columns, uint32_t flip,
                              uint32_t* out) {
  if (!out || !columns || offset < 0 || (bits != 4 && bits != 8) || k < 0 || n < 1 || k % (32 / bits)) return EXPERTD_BAD_ARGUMENT;
  for (int64_t j = 0; j < k; j++)
    if (columns[j] < 0 || columns[j] >= k) return EXPERTD_BAD_ARGUMENT;
  const int64_t words = k / (32 / bits);
  const int64_t fields = (k * TILE + PAGE - 1) / PAGE * PAGE;  // bytes for 16 columns of fields, a byte each; whole pages
  uint32_t* buffer = scratch(words * n + fields / int64_t(sizeof(uint32_t)));
  if (!buffer) return EXPERTD_NO_MEMORY;
  const uint32_t* in = read_words(fd, offset, words * n, buffer + fields / int64_t(sizeof(uint32_t)));
  if (!in) return EXPERTD_READ_FAILED;
  run([&]() INLINED { turn_gathered(in, words, n, bits, columns, flip, reinterpret_cast<uint8_t*>(buffer), out); });
  return EXPERTD_OK;
}

int32_t expertd_repack_columns(int32_t fd, int64_t offset, int64_t k, int64_t cols, const uint8_t* order, uint32_t* out) {
  if (!out || !order || offset < 0 || k < 0 || cols < 1 || k % 8) return EXPERTD_BAD_ARGUMENT;
  for (int i = 0; i < 8; i++)
    if (order[i] > 7) return EXPERTD_BAD_ARGUMENT;
  const int64_t step = piece_rows(k, cols, 8 * TILE);
  uint32_t* buffer = scratch(step * cols);
  if (!buffer) return EXPERTD_NO_MEMORY;
  for (int64_t r = 0; r < k; r += step) {
    const int64_t count = least(step, k - r);
    const uint32_t* in = read_words(fd, offset + r * cols * 4, count * cols, buffer);
    if (!in) return EXPERTD_READ_FAILED;
    run([&]() INLINED { turn_all_columns(in, count / 8, cols, order, out + r / 8, k / 8); });
  }
  return EXPERTD_OK;
}

}  // extern "C"
