// Products of quantised weights (formats.h) with rows that are quantised on the way: integers
// inside a block of 32 inputs, floats between blocks.
//
// A row is quantised as ggml's Q8_0 and Q8_1 are: 32 int8 with a scale of half precision, the
// largest number's 127th part. The sum of a block's products is an exact integer, in whatever
// order; to a row's output its blocks are added in ascending order:
//
//   sum = fma(scale of weights * scale of row, integer, sum), then sum = fma(min of weights, sum of
//   row, sum)
//
// whatever the number of rows, panels or threads: a row's bits depend on nothing but the row. With
// or without the instruction for four products of bytes (VNNI) they are the same.
#pragma once

#include "amx.h"
#include "formats.h"
#include "panels.h"

// A block of a row. sum: scale times the sum of q; offset: -128 times the sum of q, offsets: of
// either half.
struct alignas(64) RowBlock {
  int8_t q[kBlockInputs];
  float scale, sum;
  int32_t offset, offsets[2];
};

// Rows that are multiplied together: by tiles as many as one has.
inline int rows_of_group() { return has_amx() ? kAmxRows : kMaxGroupRows; }

// M rows of `blocks` blocks. Rows that are multiplied together lie together: [groups][block][row].
struct RowBlocks {
  RowBlock* data;
  int blocks, M;

  int group_rows(int first) const { return std::min(rows_of_group(), M - first); }
  RowBlock* group(int first) const { return data + static_cast<size_t>(first) * blocks; }
};

// The nearest number of half precision.
INLINE float rounded_to_half(float x) { return from_half_precision(to_half_precision(x)); }

INLINE void quantise(Vec first, Vec second, RowBlock& to) {
  const float most = max_of(max(abs(first), abs(second)));
  const float scale = most / 127.0f;
  const Vec inverse = splat(most > 0 ? 127.0f / most : 0.0f), greatest = splat(127.0f);
  const Bits q[2] = {to_ints(min(first * inverse, greatest)),  // 127 where it is no number
                     to_ints(min(second * inverse, greatest))};
  for (int half = 0; half < 2; ++half) {
    store_bytes(to.q + half * kLanes, q[half]);
    to.offsets[half] = -128 * sum_of(q[half]);
  }
  to.offset = to.offsets[0] + to.offsets[1];
  to.scale = rounded_to_half(scale);
  to.sum = rounded_to_half(scale * static_cast<float>(to.offset / -128));
}

// Row m of rows, K inputs of it, a multiple of 32.
template <class A>
void quantise_row(const typename A::T* x, const RowBlocks& rows, int m) {
  const int first = m / rows_of_group() * rows_of_group(), count = rows.group_rows(first);
  RowBlock* to = rows.group(first) + (m - first);
  for (int b = 0; b < rows.blocks; ++b, x += kBlockInputs, to += count)
    quantise(A::load(x), A::load(x + kLanes), *to);
}

// Calls use(Q()) with the format's struct.
template <class Use>
INLINE auto with_format(Format format, Use&& use) {
  switch (format) {
    case Format::q4_0:
      return use(Q4_0());
    case Format::q4_1:
      return use(Q4_1());
    case Format::q5_0:
      return use(Q5_0());
    case Format::q5_1:
      return use(Q5_1());
    case Format::q4_k:
      return use(Q4_K());
    case Format::q5_k:
      return use(Q5_K());
    case Format::q6_k:
      return use(Q6_K());
    case Format::mxfp4:
      return use(MXFP4());
    default:
      return use(Q8_0());
  }
}

inline size_t row_bytes(Format format, int K) {
  return with_format(format,
                     [&](auto q) { return K / (q.kBlocks * kBlockInputs) * q.kSourceBytes; });
}

// K numbers of a row as it lies in a file.
inline void dequantise_row(Format format, const uint8_t* row, int K, float* to) {
  with_format(format, [&](auto q) {
    for (int k = 0; k < K; k += q.kBlocks * kBlockInputs, row += q.kSourceBytes)
      q.dequantise(row, to + k);
  });
}

class QuantisedProduct final : public Product {
 public:
  // parts: [rows, K] matrices stacked, each in its format as in a file. Where two formats meet,
  // rows so far are a multiple of 16; gated: two parts of one format whose blocks alternate. bias:
  // of all rows, or null.
  QuantisedProduct(const std::vector<Source>& parts, const std::vector<Format>& formats, int K,
                   bool gated, const float* bias, int threads)
      : Product(K, gated, true) {
    const std::vector<int> column_rows = columns(parts, bias);
    std::vector<const uint8_t*> lines;
    std::vector<Format> line_formats;
    for (size_t i = 0; i < parts.size(); ++i)
      for (int row = 0; row < parts[i].rows; ++row) {
        lines.push_back(static_cast<const uint8_t*>(parts[i].data) +
                        row * row_bytes(formats[i], K));
        line_formats.push_back(formats[i]);
      }
    place(threads, column_rows, line_formats);
    data_ = Arena::take(num_bytes_);
    Pool::shared().run(threads, [&](int t) {
      for (size_t p = t; p < panels.size(); p += threads) pack(panels[p], column_rows, lines);
    });
  }

  Format format(const Panel& panel) const { return formats_[panel.first_chunk]; }
  const uint8_t* weights(const Panel& panel) const { return data_.get() + panel.offset; }
  size_t block_bytes(Format format) const {
    return with_format(format, [&](auto q) { return K / (q.kBlocks * kBlockInputs) * q.kBytes; });
  }

 private:
  // Panels are cut where formats meet. first_chunk: the panel's number.
  void place(int threads, const std::vector<int>& column_rows,
             const std::vector<Format>& line_formats) {
    const auto of_block = [&](int block) { return line_formats[column_rows[block * kLanes]]; };
    for (Panel left : shares(threads))
      while (left.width > 0) {
        Panel panel = left;
        const Format found = of_block(panel.first);
        for (panel.width = 1;
             panel.width < left.width && of_block(panel.first + panel.width) == found;)
          ++panel.width;
        panel.offset = num_bytes_, panel.first_chunk = static_cast<int>(panels.size());
        panels.push_back(panel);
        formats_.push_back(found);
        num_bytes_ += panel.width * block_bytes(found);
        left.first += panel.width, left.width -= panel.width;
      }
  }

  void pack(const Panel& panel, const std::vector<int>& column_rows,
            const std::vector<const uint8_t*>& lines) const {
    with_format(format(panel), [&](auto q) {
      uint8_t* to = data_.get() + panel.offset;
      const int units = K / (q.kBlocks * kBlockInputs);
      for (int w = 0; w < panel.width; ++w)
        for (int u = 0; u < units; ++u, to += q.kBytes) {
          std::memset(to, 0, q.kBytes);
          for (int c = 0; c < kLanes; ++c)
            if (const int row = column_rows[(panel.first + w) * kLanes + c]; row >= 0)
              q.pack_column(lines[row] + u * q.kSourceBytes, c, to);
        }
    });
  }

  std::vector<Format> formats_;  // of panels
};

// Sums of R rows, a group, on one block of 16 columns. What is ahead is fetched by the first group.
template <class Q, int R>
void quantised_tile(const uint8_t* weights, const RowBlock* x, int blocks, float* sums,
                    const Stream* stream) {
  constexpr int chains = R == 1  ? 4
                         : R < 4 ? 2
                                 : 1;  // integers of a row that do not wait for each other
  Vec sum[R];
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) sum[r] = Vec{};
  for (int unit = 0; unit < blocks; unit += Q::kBlocks, weights += Q::kBytes) {
    if (const Address ahead = stream == nullptr ? 0 : stream->ahead(weights); ahead != 0)
      prefetch(ahead, Q::kBytes);
    for (int b = 0; b < Q::kBlocks; ++b, x += R) {
      Bits all[R][Q::kHalves][chains];
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r)
        for (int h = 0; h < Q::kHalves; ++h) {
          const int offset = Q::kHalves == 1 ? x[r].offset : x[r].offsets[h];
          all[r][h][0] = Q::kOffset < 0 ? Bits{} : splat(offset) >> std::max(0, Q::kOffset);
          for (int i = 1; i < chains; ++i) all[r][h][i] = Bits{};
        }
      Q::lines(weights, b, [&](int i, Bits line) __attribute__((always_inline)) {
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r) {
          Bits& to = all[r][i * Q::kHalves / kBlockLines][i % chains];
          to = dot_bytes<Q::kBits>(to, line, splat_four(x[r].q + i * kLineInputs));
        }
      });
#pragma GCC unroll 2
      for (int h = 0; h < Q::kHalves; ++h) {
        const Scales scales = Q::scales(weights, b, h);
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r) {
          for (int i = 1; i < chains; ++i) all[r][h][0] = all[r][h][0] + all[r][h][i];
          sum[r] = fma(scales.scale * splat(x[r].scale), to_floats(all[r][h][0]), sum[r]);
          if constexpr (Q::kHasMin) sum[r] = fma(scales.min, splat(x[r].sum), sum[r]);
        }
      }
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) store(sums + r * kPanelColumns, sum[r]);
}

using QuantisedTile = void (*)(const uint8_t*, const RowBlock*, int, float*, const Stream*);

template <class Q>
QuantisedTile quantised_tile_of(int rows) {
  static constexpr auto tiles = []<int... R>(std::integer_sequence<int, R...>) {
    return std::array<QuantisedTile, kMaxGroupRows>{quantised_tile<Q, R + 1>...};
  }(std::make_integer_sequence<int, kMaxGroupRows>());
  return tiles[rows - 1];
}

#if defined(__AMX_INT8__) && defined(__AMX_TILE__)

constexpr int kBlocksAtOnce = 4;
constexpr int kFewRowsByBytes = 7;  // up to these the instruction for four products is faster

// As quantised_tile, by AMX's tiles of bytes: 16 rows by the 32 inputs of a block, times these by
// 16 columns. A block's sum is an exact integer, so the bits are the same. R: the group's rows and
// some that are not used.
template <class Q, int R>
void quantised_by_amx(AmxTiles& tiles, const uint8_t* weights, const RowBlock* x, int rows,
                      int blocks, float* sums, const Stream* stream) {
  alignas(64) uint8_t lines[kBlocksAtOnce][Q::kHalves][kBlockLines][64];
  alignas(64) int32_t integers[kBlocksAtOnce][Q::kHalves][R][kLanes];
  if constexpr (Q::kHalves > 1)
    std::memset(lines, 0, sizeof(lines));  // of each half the lines of the other stay 0
  tiles.shape(rows, 0, kBlockInputs);
  Vec sum[R];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) sum[r] = Vec{};
  for (int first = 0; first < blocks; first += kBlocksAtOnce) {
    const int count = std::min(kBlocksAtOnce, blocks - first);
    const auto unit = [&](int i) {
      return weights + static_cast<size_t>((first + i) / Q::kBlocks) * Q::kBytes;
    };
    for (int i = 0; i < count; ++i) {
      const int b = (first + i) % Q::kBlocks;
      if (const Address ahead = stream == nullptr || b != 0 ? 0 : stream->ahead(unit(i));
          ahead != 0)
        prefetch(ahead, Q::kBytes);
      Q::lines(unit(i), b, [&](int line, Bits codes) __attribute__((always_inline)) {
        store_bits(lines[i][line * Q::kHalves / kBlockLines][line], codes);
      });
    }
    before_tiles();
#define EYAS_HALF(I, H, TILE)         \
  _tile_zero(I);                      \
  _tile_loadd(TILE, lines[I][H], 64); \
  _tile_dpbsud(I, 4, TILE);           \
  _tile_stored(I, integers[I][H], 64);
#define EYAS_BLOCK(I)                                                            \
  if (I < count) {                                                               \
    _tile_loadd(4, x + static_cast<size_t>(first + I) * rows, sizeof(RowBlock)); \
    EYAS_HALF(I, 0, 5)                                                           \
    if constexpr (Q::kHalves > 1) {                                              \
      EYAS_HALF(I, Q::kHalves - 1, 6)                                            \
    }                                                                            \
  }
    EYAS_BLOCK(0)
    EYAS_BLOCK(1)
    EYAS_BLOCK(2)
    EYAS_BLOCK(3)
#undef EYAS_BLOCK
#undef EYAS_HALF
    for (int i = 0; i < count; ++i) {
      const RowBlock* row = x + static_cast<size_t>(first + i) * rows;
#pragma GCC unroll 2
      for (int h = 0; h < Q::kHalves; ++h) {
        const Scales scales = Q::scales(unit(i), (first + i) % Q::kBlocks, h);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
          Bits integer = load(integers[i][h][r]);
          if constexpr (Q::kOffset >= 0)
            integer = integer +
                      splat((Q::kHalves == 1 ? row[r].offset : row[r].offsets[h]) >> Q::kOffset);
          sum[r] = fma(scales.scale * splat(row[r].scale), to_floats(integer), sum[r]);
          if constexpr (Q::kHasMin) sum[r] = fma(scales.min, splat(row[r].sum), sum[r]);
        }
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
    if (r < rows) store(sums + r * kPanelColumns, sum[r]);
}

using QuantisedByAmx = void (*)(AmxTiles&, const uint8_t*, const RowBlock*, int, int, float*,
                                const Stream*);

template <class Q>
QuantisedByAmx quantised_by_amx_of(int rows) {
  static constexpr QuantisedByAmx tiles[] = {quantised_by_amx<Q, 4>, quantised_by_amx<Q, 8>,
                                             quantised_by_amx<Q, 12>, quantised_by_amx<Q, 16>};
  return tiles[(rows - 1) / 4];
}

#endif

// Thread t's part of the rows times the weights; put and next as of `multiply`.
template <class Put>
void multiply_quantised(const QuantisedProduct& product, const Product* next, const RowBlocks& rows,
                        int t, int T, float* sums, Put&& put) {
  const Stream stream(product, next, t, T);
#ifdef __AMX_INT8__
  AmxTiles tiles;
#endif
  for (int p = product.share(t, T); p < product.share(t + 1, T); ++p) {
    const Panel& panel = product.panels[p];
    const Format format = product.format(panel);
    const uint8_t* weights = product.weights(panel);
    for (int w = 0; w < panel.width; ++w, weights += product.block_bytes(format))
      for (int first = 0; first < rows.M; first += rows_of_group()) {
        const int R = rows.group_rows(first);
        float* to = sums + first * kPanelColumns + w * kLanes;
        const Stream* ahead = first == 0 ? &stream : nullptr;
        with_format(format, [&](auto q) {
          using Q = decltype(q);
#ifdef __AMX_INT8__
          if (R > kFewRowsByBytes && has_amx())
            return quantised_by_amx_of<Q>(R)(tiles, weights, rows.group(first), R, rows.blocks, to,
                                             ahead);
#endif
          quantised_tile_of<Q>(R)(weights, rows.group(first), rows.blocks, to, ahead);
        });
      }
    product.add_bias(panel, rows.M, sums);
    put(panel, sums);
  }
}
