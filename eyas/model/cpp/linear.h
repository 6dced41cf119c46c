// Matrix products of few rows: weights packed once, streamed once a forward. Knows no layer.
//
//   block    16 output columns                      panel   up to 4 neighbouring blocks, one sequential stream:
//            [pair of inputs][block][column][2]             all weights of inputs 2p, 2p + 1, then those of 2p + 2, ...
//
// Every output is one sum over the inputs in ascending order, whatever the number of rows, panels or threads: a row's bits
// depend on nothing but the row.
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "pool.h"
#include "simd.h"

enum class Packed : int { fp32 = 0, bf16 = 1 };

struct Panel {
  int first, width;  // blocks
  size_t offset;     // bytes
};

constexpr int kPanelBlocks = 4, kPanelColumns = kPanelBlocks * kLanes;
constexpr int kMaxTileRows = 6;      // 6 rows x 4 blocks of sums, and 4 of weights, fill the 32 registers
constexpr int kChunkPairs = 128;     // 32 KB of a panel: its second and further tiles of rows find it in a cache

// Memory for weights in huge pages, handed out in order: products packed one after the other lie behind each other.
class Arena {
 public:
  using Piece = std::shared_ptr<uint8_t>;

  static Piece take(size_t bytes) {
    static std::mutex mutex;
    static std::shared_ptr<Chunk> open;
    static size_t used = 0;
    const std::lock_guard<std::mutex> guard(mutex);
    bytes = (bytes + 63) / 64 * 64;
    if (open == nullptr || used + bytes > open->size) {
      open = std::make_shared<Chunk>(std::max(kChunk, (bytes + kHugePage - 1) / kHugePage * kHugePage));
      used = 0;
    }
    uint8_t* at = open->data + used;
    used += bytes;
    return Piece(open, at);
  }

 private:
  static constexpr size_t kHugePage = size_t(2) << 20, kChunk = size_t(64) << 20;

  struct Chunk {
    explicit Chunk(size_t bytes) : size(bytes), data(static_cast<uint8_t*>(std::aligned_alloc(kHugePage, bytes))) {
      if (data == nullptr) throw std::bad_alloc();
      madvise(data, bytes, MADV_HUGEPAGE);
    }
    ~Chunk() { std::free(data); }
    const size_t size;
    uint8_t* const data;
  };
};

constexpr int kBurstPairs = 8;  // between two bursts of prefetches

struct Source {
  const void* data;
  int rows;
};

// What is to be fetched while something else is worked on.
struct Ahead {
  const uint8_t* from = nullptr;
  size_t lines = 0;
};

class Linear {
 public:
  // parts: [rows, K] matrices stacked, in fp32 or bf16; gated: two parts whose blocks alternate. bias: of all rows, or null.
  Linear(const std::vector<Source>& parts, int K, Packed kind, bool gated, const float* bias, int threads)
      : K(K), pairs((K + 1) / 2), kind(kind), gated(gated) {
    const std::vector<int> column_rows = columns(parts);
    blocks = static_cast<int>(column_rows.size()) / kLanes;
    split(threads);
    has_bias = bias != nullptr;
    float* biases = bias_.reserve(column_rows.size());
    for (size_t c = 0; has_bias && c < column_rows.size(); ++c) biases[c] = column_rows[c] < 0 ? 0.0f : bias[column_rows[c]];
    data_ = Arena::take(bytes());
    std::vector<const uint8_t*> lines;
    for (const Source& part : parts)
      for (int row = 0; row < part.rows; ++row)
        lines.push_back(static_cast<const uint8_t*>(part.data) + static_cast<size_t>(row) * K * element());
    Pool::shared().run(threads, [&](int t) {
      for (size_t p = t; p < panels.size(); p += threads) pack(panels[p], column_rows, lines);
    });
  }

  // The panels of thread t of T: [share(t, T), share(t + 1, T)).
  int share(int t, int T) const {
    const int first = static_cast<int>(static_cast<int64_t>(blocks) * t / T);
    return static_cast<int>(
        std::lower_bound(panels.begin(), panels.end(), first, [](const Panel& p, int b) { return p.first < b; }) - panels.begin());
  }

  // The chunk of thread t that follows on panel p from pair `first` on; of the product after this one when this one ends.
  Ahead after(int p, int first, int t, int T, const Linear* next) const {
    if (first >= pairs) ++p, first = 0;
    if (p >= share(t + 1, T)) {
      if (next == nullptr || next->share(t, T) == next->share(t + 1, T)) return {};
      return next->after(next->share(t, T), 0, t, T, nullptr);
    }
    const size_t step = panels[p].width * unit();
    return {weights(panels[p]) + first * step, std::min(kChunkPairs, pairs - first) * step / 64};
  }

  const uint8_t* weights(const Panel& panel) const { return data_.get() + panel.offset; }
  const float* bias() const { return bias_.get(); }
  size_t unit() const { return kind == Packed::bf16 ? 64 : 128; }  // bytes of a block's pair of inputs
  size_t bytes() const { return static_cast<size_t>(blocks) * pairs * unit(); }

  int K, pairs, blocks = 0;
  Packed kind;
  bool gated, has_bias = false;
  int N = 0;  // columns with outputs
  std::vector<Panel> panels;

 private:
  size_t element() const { return kind == Packed::bf16 ? 2 : 4; }

  // The source row of each packed column, -1 for padding.
  std::vector<int> columns(const std::vector<Source>& parts) {
    std::vector<int> rows;
    for (const Source& part : parts) N += part.rows;
    if (!gated) {
      for (int c = 0; c < round_up(N, kLanes); ++c) rows.push_back(c < N ? c : -1);
      return rows;
    }
    const int half = parts[0].rows;
    for (int first = 0; first < half; first += kLanes)
      for (int part = 0; part < 2; ++part)
        for (int c = first; c < first + kLanes; ++c) rows.push_back(c < half ? part * half + c : -1);
    return rows;
  }

  // Even shares of blocks for the threads, each in panels as wide as possible.
  void split(int threads) {
    const int grain = gated ? 2 : 1, grains = blocks / grain;
    size_t offset = 0;
    for (int t = 0; t < threads; ++t) {
      int first = static_cast<int>(static_cast<int64_t>(grains) * t / threads) * grain;
      const int end = static_cast<int>(static_cast<int64_t>(grains) * (t + 1) / threads) * grain;
      while (first < end) {
        const int width = std::min(kPanelBlocks, end - first);
        panels.push_back({first, width, offset});
        offset += static_cast<size_t>(width) * pairs * unit();
        first += width;
      }
    }
  }

  template <class T>
  void pack_as(T* to, const Panel& panel, const std::vector<int>& column_rows, const std::vector<const uint8_t*>& lines) {
    const int first = panel.first * kLanes, columns = panel.width * kLanes;
    for (int p = 0; p < pairs; ++p)
      for (int c = 0; c < columns; ++c) {
        const int row = column_rows[first + c];
        for (int i = 0; i < 2; ++i) {
          const int k = 2 * p + i;
          const T value = row < 0 || k >= K ? T(0) : reinterpret_cast<const T*>(lines[row])[k];
          const size_t block = static_cast<size_t>(p) * panel.width + c / kLanes;
          // bf16: the pair side by side, for one instruction; fp32: one line of 16 columns for each input.
          to[block * 32 + (sizeof(T) == 2 ? c % kLanes * 2 + i : i * kLanes + c % kLanes)] = value;
        }
      }
  }

  void pack(const Panel& panel, const std::vector<int>& column_rows, const std::vector<const uint8_t*>& lines) {
    uint8_t* to = data_.get() + panel.offset;
    if (kind == Packed::bf16)
      pack_as(reinterpret_cast<bf16*>(to), panel, column_rows, lines);
    else
      pack_as(reinterpret_cast<float*>(to), panel, column_rows, lines);
  }

  Arena::Piece data_;
  Buffer<float> bias_;
};

// Sums of R rows and W blocks over `pairs` pairs of inputs, added to sums [R][kPanelColumns] or, when fresh, put there. What is
// ahead is fetched on the way.
template <class A, Packed kind, int R, int W>
void tile(const typename A::T* x, size_t stride, const uint8_t* weights, int pairs, float* sums, bool fresh, Ahead ahead) {
  Vec sum[R][W];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
    for (int w = 0; w < W; ++w) sum[r][w] = fresh ? _mm512_setzero_ps() : _mm512_loadu_ps(sums + r * kPanelColumns + w * kLanes);
  constexpr size_t unit = kind == Packed::bf16 ? 64 : 128;
  const int bursts = (pairs + kBurstPairs - 1) / kBurstPairs;
  const size_t burst = (ahead.lines + bursts - 1) / bursts * 64;
  for (int first = 0; first < pairs; first += kBurstPairs) {
    for (const uint8_t* end = ahead.from + burst; ahead.from < end; ahead.from += 64) _mm_prefetch(ahead.from, _MM_HINT_T1);
    const int past = std::min(pairs, first + kBurstPairs);
    for (int p = first; p < past; ++p, weights += W * unit) {
      if constexpr (A::is_bf16) {
        Bits w[W];
        for (int i = 0; i < W; ++i) w[i] = _mm512_loadu_si512(weights + i * 64);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          int pair;
          std::memcpy(&pair, x + r * stride + 2 * p, 4);
          const Bits a = _mm512_set1_epi32(pair);
          for (int i = 0; i < W; ++i) sum[r][i] = dot_pairs(sum[r][i], a, w[i]);
        }
      } else {
#pragma GCC unroll 2
        for (int odd = 0; odd < 2; ++odd) {
          Vec w[W];
          for (int i = 0; i < W; ++i) {
            if constexpr (kind == Packed::fp32) {
              w[i] = _mm512_loadu_ps(reinterpret_cast<const float*>(weights + i * 128) + odd * kLanes);
            } else {
              const Bits pair = _mm512_loadu_si512(weights + i * 64);
              w[i] = odd ? odd_of_pairs(pair) : even_of_pairs(pair);
            }
          }
#pragma GCC unroll 8
          for (int r = 0; r < R; ++r) {
            const Vec a = _mm512_set1_ps(x[r * stride + 2 * p + odd]);
            for (int i = 0; i < W; ++i) sum[r][i] = _mm512_fmadd_ps(a, w[i], sum[r][i]);
          }
        }
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
    for (int w = 0; w < W; ++w) _mm512_storeu_ps(sums + r * kPanelColumns + w * kLanes, sum[r][w]);
}

template <class A>
using Tile = void (*)(const typename A::T*, size_t, const uint8_t*, int, float*, bool, Ahead);

template <class A, Packed kind>
Tile<A> tile_of(int rows, int width) {
#define EYAS_ROW(R) {tile<A, kind, R, 1>, tile<A, kind, R, 2>, tile<A, kind, R, 3>, tile<A, kind, R, 4>}
  static constexpr Tile<A> tiles[kMaxTileRows][kPanelBlocks] = {EYAS_ROW(1), EYAS_ROW(2), EYAS_ROW(3),
                                                                EYAS_ROW(4), EYAS_ROW(5), EYAS_ROW(6)};
#undef EYAS_ROW
  return tiles[rows - 1][width - 1];
}

template <class A>
Tile<A> tile_of(Packed kind, int rows, int width) {
  if constexpr (A::is_bf16)
    return tile_of<A, Packed::bf16>(rows, width);
  else
    return kind == Packed::bf16 ? tile_of<A, Packed::bf16>(rows, width) : tile_of<A, Packed::fp32>(rows, width);
}

// Thread t's part of x [M, K] times the weights; put(panel, sums [M][kPanelColumns]) takes each panel's outputs, bias added.
// next: the product that this thread will read after this one.
template <class A, class Put>
void multiply(const Linear& linear, const Linear* next, const typename A::T* x, size_t stride, int M, int t, int T, float* sums,
              Put&& put) {
  const int end = linear.share(t + 1, T), tiles = (M + kMaxTileRows - 1) / kMaxTileRows;
  for (int p = linear.share(t, T); p < end; ++p) {
    const Panel& panel = linear.panels[p];
    const size_t step = panel.width * linear.unit();
    for (int first = 0; first < linear.pairs; first += kChunkPairs) {
      const uint8_t* weights = linear.weights(panel) + first * step;
      const int pairs = std::min(kChunkPairs, linear.pairs - first);
      const Ahead ahead = linear.after(p, first + pairs, t, T, next);
      for (int i = 0; i < tiles; ++i) {
        const int row = M * i / tiles, rows = M * (i + 1) / tiles - row;
        const size_t from = ahead.lines * i / tiles, lines = ahead.lines * (i + 1) / tiles - from;
        tile_of<A>(linear.kind, rows, panel.width)(x + row * stride + 2 * first, stride, weights, pairs,
                                                   sums + row * kPanelColumns, first == 0, {ahead.from + from * 64, lines});
      }
    }
    if (linear.has_bias)
      for (int m = 0; m < M; ++m)
        for (int w = 0; w < panel.width; ++w) {
          float* at = sums + m * kPanelColumns + w * kLanes;
          _mm512_storeu_ps(at, _mm512_add_ps(_mm512_loadu_ps(at), _mm512_loadu_ps(linear.bias() + (panel.first + w) * kLanes)));
        }
    put(panel, sums);
  }
}
