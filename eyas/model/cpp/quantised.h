// Products of quantised weights (formats.h) with rows that are quantised on the way: integers inside a block of 32 inputs,
// floats between blocks. Knows no layer.
//
// A row is quantised as ggml's Q8_0 and Q8_1 are: 32 int8 with a scale of half precision, the largest number's 127th part. The
// sum of a block's products is an exact integer, in whatever order; to a row's output its blocks are added in ascending order:
//
//   sum = fma(scale of weights * scale of row, integer, sum), then sum = fma(min of weights, sum of row, sum)
//
// whatever the number of rows, panels or threads: a row's bits depend on nothing but the row. With or without the instruction
// for four products of bytes (VNNI) they are the same.
#pragma once

#include "formats.h"
#include "panels.h"

constexpr int kMaxGroupRows = 12;  // 12 sums, 12 integers and a line with its scales fill the 32 registers

// A block of a row. sum: scale times the sum of q; offset: -128 times the sum of q, offsets: of either half.
struct alignas(64) RowBlock {
  int8_t q[kBlockInputs];
  float scale, sum;
  int32_t offset, offsets[2];
};

// M rows of `blocks` blocks. Rows that are multiplied together lie together: [groups of up to 12 rows][block][row].
struct RowBlocks {
  RowBlock* data;
  int blocks, M;

  int group_rows(int first) const { return std::min(kMaxGroupRows, M - first); }
  RowBlock* group(int first) const { return data + static_cast<size_t>(first) * blocks; }
};

// The nearest number of half precision.
INLINE float rounded_to_half(float x) { return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtps_ph(_mm_set_ss(x), _MM_FROUND_TO_NEAREST_INT))); }

INLINE void quantise(Vec first, Vec second, RowBlock& to) {
  const float most = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(first), _mm512_abs_ps(second)));
  const float scale = most / 127.0f;
  const Vec inverse = _mm512_set1_ps(most > 0 ? 127.0f / most : 0.0f);
  const Bits q[2] = {_mm512_cvtps_epi32(_mm512_mul_ps(first, inverse)), _mm512_cvtps_epi32(_mm512_mul_ps(second, inverse))};
  for (int half = 0; half < 2; ++half) {
    const __m128i bytes = _mm512_cvtsepi32_epi8(q[half]);
    _mm_store_si128(reinterpret_cast<__m128i*>(to.q) + half, bytes);
    to.offsets[half] = -128 * _mm512_reduce_add_epi32(_mm512_cvtepi8_epi32(bytes));
  }
  to.offset = to.offsets[0] + to.offsets[1];
  to.scale = rounded_to_half(scale);
  to.sum = rounded_to_half(scale * static_cast<float>(to.offset / -128));
}

// Row m of rows, K inputs of it, a multiple of 32.
template <class A>
void quantise_row(const typename A::T* x, const RowBlocks& rows, int m) {
  const int first = m / kMaxGroupRows * kMaxGroupRows, count = rows.group_rows(first);
  RowBlock* to = rows.group(first) + (m - first);
  for (int b = 0; b < rows.blocks; ++b, x += kBlockInputs, to += count)
    quantise(A::load(x, 0xffff), A::load(x + kLanes, 0xffff), *to);
}

// Calls use(Q()) with the format's struct.
template <class Use>
INLINE auto with_format(Format format, Use&& use) {
  switch (format) {
    case Format::q4_0: return use(Q4_0());
    case Format::q4_1: return use(Q4_1());
    case Format::q4_k: return use(Q4_K());
    case Format::q6_k: return use(Q6_K());
    default: return use(Q8_0());
  }
}

inline size_t row_bytes(Format format, int K) {
  return with_format(format, [&](auto q) { return K / (q.kBlocks * kBlockInputs) * q.kSourceBytes; });
}

// K numbers of a row as it lies in a file.
inline void dequantise_row(Format format, const uint8_t* row, int K, float* to) {
  with_format(format, [&](auto q) {
    for (int k = 0; k < K; k += q.kBlocks * kBlockInputs, row += q.kSourceBytes) q.dequantise(row, to + k);
  });
}

class QuantisedProduct final : public Product {
 public:
  // parts: [rows, K] matrices stacked, each in its format as in a file. Where two formats meet, rows so far are a multiple of
  // 16; gated: two parts of one format whose blocks alternate. bias: of all rows, or null.
  QuantisedProduct(const std::vector<Source>& parts, const std::vector<Format>& formats, int K, bool gated, const float* bias, int threads)
      : Product(K, gated, true) {
    const std::vector<int> column_rows = columns(parts, bias);
    std::vector<const uint8_t*> lines;
    std::vector<Format> line_formats;
    for (size_t i = 0; i < parts.size(); ++i)
      for (int row = 0; row < parts[i].rows; ++row) {
        lines.push_back(static_cast<const uint8_t*>(parts[i].data) + row * row_bytes(formats[i], K));
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
  void place(int threads, const std::vector<int>& column_rows, const std::vector<Format>& line_formats) {
    const auto of_block = [&](int block) { return line_formats[column_rows[block * kLanes]]; };
    for (Panel left : shares(threads))
      while (left.width > 0) {
        Panel panel = left;
        const Format found = of_block(panel.first);
        for (panel.width = 1; panel.width < left.width && of_block(panel.first + panel.width) == found;) ++panel.width;
        panel.offset = num_bytes_, panel.first_chunk = static_cast<int>(panels.size());
        panels.push_back(panel);
        formats_.push_back(found);
        num_bytes_ += panel.width * block_bytes(found);
        left.first += panel.width, left.width -= panel.width;
      }
  }

  void pack(const Panel& panel, const std::vector<int>& column_rows, const std::vector<const uint8_t*>& lines) const {
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
void quantised_tile(const uint8_t* weights, const RowBlock* x, int blocks, float* sums, const Stream* stream) {
  constexpr int chains = R == 1 ? 4 : R < 4 ? 2 : 1;  // integers of a row that do not wait for each other
  Vec sum[R];
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) sum[r] = _mm512_setzero_ps();
  for (int unit = 0; unit < blocks; unit += Q::kBlocks, weights += Q::kBytes) {
    if (const uint8_t* ahead = stream == nullptr ? nullptr : stream->ahead(weights); ahead != nullptr)
      for (size_t at = 0; at < Q::kBytes; at += 64) _mm_prefetch(ahead + at, _MM_HINT_T1);
    for (int b = 0; b < Q::kBlocks; ++b, x += R) {
      Bits all[R][Q::kHalves][chains];
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r)
        for (int h = 0; h < Q::kHalves; ++h) {
          const Bits offset = _mm512_set1_epi32(Q::kHalves == 1 ? x[r].offset : x[r].offsets[h]);
          all[r][h][0] = Q::kOffset < 0 ? _mm512_setzero_si512() : _mm512_srai_epi32(offset, std::max(0, Q::kOffset));
          for (int i = 1; i < chains; ++i) all[r][h][i] = _mm512_setzero_si512();
        }
      Q::lines(weights, b, [&](int i, Bits line) __attribute__((always_inline)) {
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r) {
          int four;
          std::memcpy(&four, x[r].q + i * kLineInputs, 4);
          Bits& to = all[r][i * Q::kHalves / kBlockLines][i % chains];
          to = dot_bytes(to, line, _mm512_set1_epi32(four));
        }
      });
#pragma GCC unroll 2
      for (int h = 0; h < Q::kHalves; ++h) {
        const Scales scales = Q::scales(weights, b, h);
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r) {
          for (int i = 1; i < chains; ++i) all[r][h][0] = _mm512_add_epi32(all[r][h][0], all[r][h][i]);
          sum[r] = _mm512_fmadd_ps(_mm512_mul_ps(scales.scale, _mm512_set1_ps(x[r].scale)), _mm512_cvtepi32_ps(all[r][h][0]), sum[r]);
          if constexpr (Q::kHasMin) sum[r] = _mm512_fmadd_ps(scales.min, _mm512_set1_ps(x[r].sum), sum[r]);
        }
      }
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) _mm512_storeu_ps(sums + r * kPanelColumns, sum[r]);
}

using QuantisedTile = void (*)(const uint8_t*, const RowBlock*, int, float*, const Stream*);

template <class Q>
QuantisedTile quantised_tile_of(int rows) {
  static constexpr QuantisedTile tiles[kMaxGroupRows] = {
      quantised_tile<Q, 1>, quantised_tile<Q, 2>, quantised_tile<Q, 3>, quantised_tile<Q, 4>,  quantised_tile<Q, 5>,  quantised_tile<Q, 6>,
      quantised_tile<Q, 7>, quantised_tile<Q, 8>, quantised_tile<Q, 9>, quantised_tile<Q, 10>, quantised_tile<Q, 11>, quantised_tile<Q, 12>};
  return tiles[rows - 1];
}

// Thread t's part of the rows times the weights; put and next as of `multiply`.
template <class Put>
void multiply_quantised(const QuantisedProduct& product, const Product* next, const RowBlocks& rows, int t, int T, float* sums, Put&& put) {
  const Stream stream(product, next, t, T);
  for (int p = product.share(t, T); p < product.share(t + 1, T); ++p) {
    const Panel& panel = product.panels[p];
    const Format format = product.format(panel);
    const uint8_t* weights = product.weights(panel);
    for (int w = 0; w < panel.width; ++w, weights += product.block_bytes(format))
      for (int first = 0; first < rows.M; first += kMaxGroupRows) {
        const QuantisedTile tile = with_format(format, [&](auto q) { return quantised_tile_of<decltype(q)>(rows.group_rows(first)); });
        tile(weights, rows.group(first), rows.blocks, sums + first * kPanelColumns + w * kLanes, first == 0 ? &stream : nullptr);
      }
    product.add_bias(panel, rows.M, sums);
    put(panel, sums);
  }
}
