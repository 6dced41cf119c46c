// Products of bf16 by AMX's tiles, a tile at a time: 16 rows by 32 inputs, times 32 inputs by 16
// columns. Knows the lines of a panel, no weights and no layer.
//
//   registers, two tiles of rows    0, 1 and 2, 3 sums of either by two blocks; 4, 5 rows;
//                                   6, 7 weights
//   one tile of rows                0 .. 3 sums by up to four blocks; 4 rows; 5, 6, 7 weights
//
// A step of 32 inputs adds, to every sum, what the processor makes of 16 pairs (TDPBF16PS: a sum
// over their first inputs, one over their second, then both; Intel's Software Developer's Manual,
// volume 2). So a row's bits depend on nothing but the row, but they are not those of AVX-512's
// instruction: one matrix is multiplied by the one or by the other, whatever the number of rows.
#pragma once

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>

#include "simd.h"

constexpr int kAmxRows = 16, kAmxPairs = 16;  // of a tile; pairs of inputs

#if defined(__AMX_BF16__) && defined(__AMX_TILE__)

// Whether the kernel lets this process have tiles: it is asked once.
inline bool has_amx() {
  constexpr long kRequest = 0x1023,
                 kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA of asm/prctl.h
  static const bool allowed = syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
  return allowed;
}

// What the tiles of a thread are, until it is done with a product.
class AmxTiles {
 public:
  AmxTiles() = default;
  AmxTiles(const AmxTiles&) = delete;
  AmxTiles& operator=(const AmxTiles&) = delete;
  ~AmxTiles() { _tile_release(); }

  // Of `first` rows and, where there is a second tile of them, `second`; a row has so many bytes.
  INLINE void shape(int first, int second, int row_bytes = 64) {
    if (first == first_ && second == second_) return;
    first_ = first, second_ = second;
    alignas(64) Shape shape = {};
    for (int i = 0; i < 8; ++i) {
      const int first_of_weights = second > 0 ? 6 : 5;
      const bool of_weights = i >= first_of_weights,
                 of_second = second > 0 && (i == 2 || i == 3 || i == 5);
      shape.rows[i] = static_cast<uint8_t>(of_weights ? row_bytes / 4 : of_second ? second : first);
      shape.bytes[i] = static_cast<uint16_t>(i >= 4 && !of_weights ? row_bytes : 64);
    }
    _tile_loadconfig(&shape);
  }

 private:
  struct Shape {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
  };
  static_assert(sizeof(Shape) == 64);

  int first_ = 0, second_ = 0;
};

// The compiler's intrinsics do not say that tiles are loaded from memory: what was written there
// before must be.
INLINE void before_tiles() { asm volatile("" ::: "memory"); }

// Some inputs of rows: x [rows][stride], sums [rows][sums_stride] are continued unless they are
// fresh. width: blocks side by side in a line of pairs of the weights.
struct AmxWork {
  const bf16* x;
  float* sums;
  size_t stride, sums_stride;
  int steps, width;
  bool fresh;
};

// Feed::step(s) is called in order and gives the lines of step s.

// One tile of rows by W blocks.
template <int W, class Feed>
INLINE void one_of_rows(const AmxWork& work, Feed& feed) {
  const size_t x_bytes = work.stride * 2, line = work.width * 64, sums_bytes = work.sums_stride * 4;
  const bf16* x = work.x;
  float* sums = work.sums;
  before_tiles();
#define EYAS_BLOCKS(DO)  \
  DO(0)                  \
  if constexpr (W > 1) { \
    DO(1)                \
  }                      \
  if constexpr (W > 2) { \
    DO(2)                \
  }                      \
  if constexpr (W > 3) { \
    DO(3)                \
  }
#define EYAS_BEGIN(I) \
  if (work.fresh)     \
    _tile_zero(I);    \
  else                \
    _tile_loadd(I, sums + I * kLanes, sums_bytes);
  EYAS_BLOCKS(EYAS_BEGIN)
  for (int s = 0; s < work.steps; ++s, x += 2 * kAmxPairs) {
    const uint8_t* weights = feed.step(s);
    before_tiles();
    _tile_loadd(4, x, x_bytes);
    _tile_loadd(5, weights, line);
    _tile_dpbf16ps(0, 4, 5);
    if constexpr (W > 1) {
      _tile_loadd(6, weights + 64, line);
      _tile_dpbf16ps(1, 4, 6);
    }
    if constexpr (W > 2) {
      _tile_loadd(7, weights + 128, line);
      _tile_dpbf16ps(2, 4, 7);
    }
    if constexpr (W > 3) {
      _tile_loadd(5, weights + 192, line);
      _tile_dpbf16ps(3, 4, 5);
    }
  }
#define EYAS_END(I) _tile_stored(I, sums + I * kLanes, sums_bytes);
  EYAS_BLOCKS(EYAS_END)
#undef EYAS_BLOCKS
#undef EYAS_BEGIN
#undef EYAS_END
}

// Two tiles of rows, the second behind the 16 of the first, by W blocks, one or two, from `block`
// on.
template <int W, class Feed>
INLINE void two_of_rows(const AmxWork& work, int block, Feed& feed) {
  const size_t x_bytes = work.stride * 2, line = work.width * 64, sums_bytes = work.sums_stride * 4;
  const bf16 *x = work.x, *second = x + kAmxRows * work.stride;
  float *to = work.sums + block * kLanes, *to_second = to + kAmxRows * work.sums_stride;
  before_tiles();
  if (work.fresh) {
    _tile_zero(0);
    _tile_zero(2);
    if constexpr (W > 1) {
      _tile_zero(1);
      _tile_zero(3);
    }
  } else {
    _tile_loadd(0, to, sums_bytes);
    _tile_loadd(2, to_second, sums_bytes);
    if constexpr (W > 1) {
      _tile_loadd(1, to + kLanes, sums_bytes);
      _tile_loadd(3, to_second + kLanes, sums_bytes);
    }
  }
  for (int s = 0; s < work.steps; ++s, x += 2 * kAmxPairs, second += 2 * kAmxPairs) {
    const uint8_t* weights = feed.step(s) + block * 64;
    before_tiles();
    _tile_loadd(4, x, x_bytes);
    _tile_loadd(6, weights, line);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(5, second, x_bytes);
    _tile_dpbf16ps(2, 5, 6);
    if constexpr (W > 1) {
      _tile_loadd(7, weights + 64, line);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, to, sums_bytes);
  _tile_stored(2, to_second, sums_bytes);
  if constexpr (W > 1) {
    _tile_stored(1, to + kLanes, sums_bytes);
    _tile_stored(3, to_second + kLanes, sums_bytes);
  }
}

// Times that multiply_by_amx goes through the steps.
inline int amx_passes(int M, int width) {
  return (M / 32 + (M % 32 > 16)) * ((width + 1) / 2) + (M % 32 > 0 && M % 32 <= 16);
}

// M rows by all blocks of the work.
template <class Feed>
inline void multiply_by_amx(AmxTiles& tiles, AmxWork work, int M, Feed& feed) {
  for (int left = M; left > 0; left -= 2 * kAmxRows) {
    if (left > kAmxRows) {
      tiles.shape(kAmxRows, std::min(kAmxRows, left - kAmxRows));
      int block = 0;
      for (; block + 1 < work.width; block += 2) two_of_rows<2>(work, block, feed);
      if (block < work.width) two_of_rows<1>(work, block, feed);
      work.x += 2 * kAmxRows * work.stride, work.sums += 2 * kAmxRows * work.sums_stride;
      continue;
    }
    tiles.shape(left, 0);
    with_up_to_four(work.width, [&](auto W) { one_of_rows<W>(work, feed); });
  }
}

#else
inline bool has_amx() { return false; }
#endif
