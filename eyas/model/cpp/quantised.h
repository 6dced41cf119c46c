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
// either half, and sums.
struct alignas(64) RowBlock {
  int8_t q[kBlockInputs];
  float scale, sum, sums[2];
  int32_t offset, offsets[2];
};

constexpr bool kOpens = kOpenedFrom > 0;
constexpr int kBytesOfRow = 150;  // of weights, read while a row is multiplied by a block
constexpr int kStretch = 8;       // blocks of a row that lie together: one unit, or 8

// M rows of `blocks` blocks, in the order in which they are read: [stretch][group][block][row].
// Few rows are groups that take the weights apart each for itself; many are small groups that share
// what is taken apart once, and tiles (AMX) have their own number.
struct RowBlocks {
  RowBlock* data;
  int blocks, M;

  bool are_many() const { return !has_amx() && kOpens && M >= kOpenedFrom; }
  int rows_of_group() const {
    return has_amx() ? kAmxRows : are_many() ? kOpenedRows : kMaxGroupRows;
  }
  int group_rows(int first) const { return std::min(rows_of_group(), M - first); }
  int stretch_blocks(int block) const { return std::min(kStretch, blocks - block); }
  // From a stretch's first block on, the blocks of the group that begins with row `first`.
  RowBlock* stretch(int block, int first) const {
    return data + static_cast<size_t>(block) * M + first * stretch_blocks(block);
  }
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
  for (int half = 0; half < 2; ++half)
    to.sums[half] = to.scale * static_cast<float>(to.offsets[half] / -128);
}

// Row m of rows, K inputs of it, a multiple of 32.
template <class A>
void quantise_row(const typename A::T* x, const RowBlocks& rows, int m) {
  const int first = m / rows.rows_of_group() * rows.rows_of_group(), count = rows.group_rows(first);
  for (int stretch = 0; stretch < rows.blocks; stretch += kStretch) {
    RowBlock* to = rows.stretch(stretch, first) + (m - first);
    for (int b = 0; b < rows.stretch_blocks(stretch); ++b, x += kBlockInputs, to += count)
      quantise(A::load(x), A::load(x + kLanes), *to);
  }
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
    case Format::q2_k:
      return use(Q2_K());
    case Format::q3_k:
      return use(Q3_K());
    case Format::q4_k:
      return use(Q4_K());
    case Format::q5_k:
      return use(Q5_K());
    case Format::q6_k:
      return use(Q6_K());
    case Format::iq4_nl:
      return use(IQ4_NL());
    case Format::iq4_xs:
      return use(IQ4_XS());
    case Format::mxfp4:
      return use(MXFP4());
    case Format::two_bits:
      return use(TwoBits());
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

// What a block's integers begin with.
template <class Q>
INLINE Bits start_of(const RowBlock& x, int half) {
  if constexpr (Q::kOffset < 0) return Bits{};
  return splat(Q::kHalves == 1 ? x.offset : x.offsets[half]) >> std::max(0, Q::kOffset);
}

template <class Q>
INLINE Vec add_scaled(Vec sum, Scales scales, Bits integers, const RowBlock& x, int half) {
  sum = fma(scales.scale * splat(x.scale), to_floats(integers), sum);
  if constexpr (Q::kHasMin)
    sum = fma(scales.min, splat(Q::kHalves == 1 ? x.sum : x.sums[half]), sum);
  return sum;
}

// The sums of R rows on W blocks of columns while blocks of inputs go by: in registers where these
// are enough, else in memory.
template <int R, int W>
class RowSums {
 public:
  explicit RowSums(float* at) : at_(at) {}

  INLINE void begin(bool is_first) {
    each([&](int r, int w) __attribute__((always_inline)) {
      if constexpr (kInRegisters)
        in_[r][w] = is_first ? Vec{} : load(place(r, w));
      else if (is_first)
        store(place(r, w), Vec{});
    });
  }
  INLINE void end() {
    if constexpr (kInRegisters)
      each([&](int r, int w) __attribute__((always_inline)) { store(place(r, w), in_[r][w]); });
  }
  template <class Q>
  INLINE void add(int r, int w, Scales scales, Bits integers, const RowBlock& x, int half) {
    if constexpr (kInRegisters)
      in_[r][w] = add_scaled<Q>(in_[r][w], scales, integers, x, half);
    else
      store(place(r, w), add_scaled<Q>(load(place(r, w)), scales, integers, x, half));
  }

 private:
  static constexpr bool kInRegisters = R * W <= kSumsInRegisters;

  template <class Do>
  static INLINE void each(Do&& what) {
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int w = 0; w < W; ++w) what(r, w);
  }
  INLINE float* place(int r, int w) { return at_ + r * kPanelColumns + w * kLanes; }

  float* at_;
  Vec in_[R][W];
};

// Adds a block of R rows times W blocks of columns to their sums. lines(use) calls use(i, w, codes)
// with line i of block w, scales(half, w) has its scales.
template <class Q, int R, int W, class Lines, class ScalesOf>
INLINE void add_block(const RowBlock* x, Lines&& lines, ScalesOf&& scales, RowSums<R, W>& sums) {
  // integers of a row that do not wait for each other
  constexpr int per_half = kBlockLines / Q::kHalves, chains = R * W == 1  ? kChains
                                                              : R * W < 4 ? (kChains + 1) / 2
                                                                          : 1;
#pragma GCC unroll 2
  for (int h = 0; h < Q::kHalves; ++h) {
    Dots<Q::kBits, per_half / chains> dots[R][W][chains];
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int w = 0; w < W; ++w)
#pragma GCC unroll 4
        for (int i = 0; i < chains; ++i)
          dots[r][w][i].begin(i == 0 ? start_of<Q>(x[r], h) : Bits{});
    int taken[W] = {};
    lines([&](int i, int w, Bits line) __attribute__((always_inline)) {
      if (i / per_half != h) return;
      const int step = taken[w]++;
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r)
        dots[r][w][step % chains].add(step / chains, line, splat_four(x[r].q + i * kLineInputs));
    });
#pragma GCC unroll 4
    for (int w = 0; w < W; ++w) {
      const Scales of_half = scales(h, w);
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r) {
        Bits integers = dots[r][w][0].end(start_of<Q>(x[r], h));
        for (int i = 1; i < chains; ++i) integers = integers + dots[r][w][i].end(Bits{});
        sums.template add<Q>(r, w, of_half, integers, x[r], h);
      }
    }
  }
}

// Fetches what is `lead` ahead, a little at each block: a core waits that asks for more than some
// twenty lines. Where R rows take longer than reading, into the second cache: it takes more.
template <class Q, int R>
INLINE void fetch_block(const Stream& stream, const uint8_t* unit, int block,
                        size_t lead = kQuantisedLead) {
  constexpr int lines = (Q::kBytes + 63) / 64;
  constexpr bool is_far = R * kBytesOfRow >= static_cast<int>(Q::kBytes) / Q::kBlocks;
  const int first = lines * block / Q::kBlocks, past = lines * (block + 1) / Q::kBlocks;
  const size_t bytes = static_cast<size_t>(past - first) * 64;
  stream.fetch_ahead(unit + first * 64, bytes, lead, is_far);
}

// Sums of R rows, a group from row `first` on, on one block of 16 columns. The first group
// fetches what is ahead.
template <class Q, int R>
void quantised_tile(const uint8_t* weights, const RowBlocks& rows, int first, float* to,
                    const Stream* stream) {
  RowSums<R, 1> sums(to);
  sums.begin(true);
  for (int stretch = 0; stretch < rows.blocks; stretch += kStretch) {
    const RowBlock* x = rows.stretch(stretch, first);
    const int count = rows.stretch_blocks(stretch);
    for (int b = 0; b < count; ++b, x += R) {
      const int of_unit = b % Q::kBlocks;
      if (stream != nullptr) fetch_block<Q, R>(*stream, weights, of_unit);
      add_block<Q>(
          x,
          [&](auto&& use) __attribute__((always_inline)) {
            Q::lines(weights, of_unit,
                     [&](int i, Bits line) __attribute__((always_inline)) { use(i, 0, line); });
          },
          [&](int h, int) __attribute__((always_inline)) { return Q::scales(weights, of_unit, h); },
          sums);
      if (of_unit == Q::kBlocks - 1) weights += Q::kBytes;
    }
  }
  sums.end();
}

using QuantisedTile = void (*)(const uint8_t*, const RowBlocks&, int, float*, const Stream*);

template <class Q>
QuantisedTile quantised_tile_of(int rows) {
  return of_rows_and_width<QuantisedTile, kMaxGroupRows, 1>(
      rows, 1, [](auto R, auto) { return quantised_tile<Q, R>; });
}

// A stretch of some of a panel's weights, taken apart.
struct Opened {
  alignas(64) uint8_t lines[kStretch][kBlockLines][kOpenedBlocks][64];
  Scales scales[kStretch][2][kOpenedBlocks];
};

// One block of 16 columns from a stretch's unit on. lead: to what is worked on next.
template <class Q>
void open(const Stream& stream, size_t lead, const uint8_t* weights, int count, int w, Opened& to) {
  for (int i = 0; i < count; ++i) {
    const uint8_t* unit = weights + i / Q::kBlocks * Q::kBytes;
    const int b = i % Q::kBlocks;
    fetch_block<Q, kOpenedFrom>(stream, unit, b, lead);
    Q::lines(unit, b, [&](int line, Bits codes) __attribute__((always_inline)) {
      store_bits(to.lines[i][line][w], codes);
    });
    for (int h = 0; h < Q::kHalves; ++h) to.scales[i][h][w] = Q::scales(unit, b, h);
  }
}

// A stretch's part of the sums of R rows on W blocks of columns.
template <class Q, int R, int W>
void opened_tile(const Opened& opened, int count, const RowBlock* x, float* to, bool is_first) {
  RowSums<R, W> sums(to);
  sums.begin(is_first);
  for (int i = 0; i < count; ++i, x += R)
    add_block<Q>(
        x,
        [&](auto&& use) __attribute__((always_inline)) {
#pragma GCC unroll 8
          for (int l = 0; l < kBlockLines; ++l)
#pragma GCC unroll 4
            for (int w = 0; w < W; ++w) use(l, w, load_bits(opened.lines[i][l][w]));
        },
        [&](int h, int w) __attribute__((always_inline)) { return opened.scales[i][h][w]; }, sums);
  sums.end();
}

using OpenedTile = void (*)(const Opened&, int, const RowBlock*, float*, bool);

template <class Q>
OpenedTile opened_tile_of(int rows, int width) {
  return of_rows_and_width<OpenedTile, kOpenedRows, kOpenedBlocks>(
      rows, width, [](auto R, auto W) { return opened_tile<Q, R, W>; });
}

// All rows on a panel, whose weights are taken apart once for all of them.
template <class Q>
void opened_panel(const uint8_t* weights, size_t apart, int width, const RowBlocks& rows,
                  float* sums, const Stream& stream) {
  Opened opened;
  const int group = rows.rows_of_group();
  for (int stretch = 0; stretch < rows.blocks; stretch += kStretch) {
    const int count = rows.stretch_blocks(stretch);
    const size_t bytes = static_cast<size_t>(count) / Q::kBlocks * Q::kBytes;
    const bool is_last = stretch + count == rows.blocks;
    const size_t lead = is_last ? apart * (width - 1) + bytes : bytes;
    for (int w = 0; w < width; w += kOpenedBlocks) {
      const int W = std::min(kOpenedBlocks, width - w);
      for (int v = 0; v < W; ++v)
        open<Q>(stream, lead, weights + (w + v) * apart, count, v, opened);
      for (int first = 0; first < rows.M; first += group)
        opened_tile_of<Q>(rows.group_rows(first), W)(opened, count, rows.stretch(stretch, first),
                                                     sums + first * kPanelColumns + w * kLanes,
                                                     stretch == 0);
    }
    weights += bytes;
  }
}

#if defined(__AMX_INT8__) && defined(__AMX_TILE__)

constexpr int kBlocksAtOnce = 4;
constexpr int kFewRowsByBytes = 7;  // up to these the instruction for four products is faster

// As quantised_tile, by AMX's tiles of bytes: 16 rows by the 32 inputs of a block, times these by
// 16 columns. A block's sum is an exact integer, so the bits are the same. R: the group's rows and
// some that are not used.
template <class Q, int R>
void quantised_by_amx(AmxTiles& tiles, const uint8_t* weights, const RowBlocks& all, int first_row,
                      float* sums, const Stream* stream) {
  alignas(64) uint8_t lines[kBlocksAtOnce][Q::kHalves][kBlockLines][64];
  alignas(64) int32_t integers[kBlocksAtOnce][Q::kHalves][R][kLanes];
  if constexpr (Q::kHalves > 1)
    std::memset(lines, 0, sizeof(lines));  // of each half the lines of the other stay 0
  const int rows = all.group_rows(first_row), blocks = all.blocks;
  tiles.shape(rows, 0, kBlockInputs);
  Vec sum[R];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) sum[r] = Vec{};
  for (int first = 0; first < blocks; first += kBlocksAtOnce) {
    const int count = std::min(kBlocksAtOnce, blocks - first),
              stretch = first / kStretch * kStretch;
    const RowBlock* x =
        all.stretch(stretch, first_row) + static_cast<size_t>(first - stretch) * rows;
    const auto unit = [&](int i) {
      return weights + static_cast<size_t>((first + i) / Q::kBlocks) * Q::kBytes;
    };
    for (int i = 0; i < count; ++i) {
      const int b = (first + i) % Q::kBlocks;
      if (stream != nullptr && b == 0) stream->fetch_ahead(unit(i), Q::kBytes, kQuantisedLead);
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
#define EYAS_BLOCK(I)                                                    \
  if (I < count) {                                                       \
    _tile_loadd(4, x + static_cast<size_t>(I) * rows, sizeof(RowBlock)); \
    EYAS_HALF(I, 0, 5)                                                   \
    if constexpr (Q::kHalves > 1) {                                      \
      EYAS_HALF(I, Q::kHalves - 1, 6)                                    \
    }                                                                    \
  }
    EYAS_BLOCK(0)
    EYAS_BLOCK(1)
    EYAS_BLOCK(2)
    EYAS_BLOCK(3)
#undef EYAS_BLOCK
#undef EYAS_HALF
    for (int i = 0; i < count; ++i) {
      const RowBlock* row = x + static_cast<size_t>(i) * rows;
#pragma GCC unroll 2
      for (int h = 0; h < Q::kHalves; ++h) {
        const Scales scales = Q::scales(unit(i), (first + i) % Q::kBlocks, h);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
          Bits integer = load(integers[i][h][r]);
          if constexpr (Q::kOffset >= 0)
            integer = integer +
                      splat((Q::kHalves == 1 ? row[r].offset : row[r].offsets[h]) >> Q::kOffset);
          sum[r] = add_scaled<Q>(sum[r], scales, integer, row[r], h);
        }
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
    if (r < rows) store(sums + r * kPanelColumns, sum[r]);
}

using QuantisedByAmx = void (*)(AmxTiles&, const uint8_t*, const RowBlocks&, int, float*,
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
    with_format(format, [&](auto q) {
      using Q = decltype(q);
      const size_t apart = product.block_bytes(format);
      if constexpr (kOpens)
        if (rows.are_many())
          return opened_panel<Q>(weights, apart, panel.width, rows, sums, stream);
      for (int w = 0; w < panel.width; ++w, weights += apart)
        for (int first = 0; first < rows.M; first += rows.rows_of_group()) {
          const int R = rows.group_rows(first);
          float* to = sums + first * kPanelColumns + w * kLanes;
          const Stream* ahead = first == 0 ? &stream : nullptr;
#ifdef __AMX_INT8__
          if (R > kFewRowsByBytes && has_amx()) {
            quantised_by_amx_of<Q>(R)(tiles, weights, rows, first, to, ahead);
            continue;
          }
#endif
          quantised_tile_of<Q>(R)(weights, rows, first, to, ahead);
        }
    });
    product.add_bias(panel, rows.M, sums);
    put(panel, sums);
  }
}
