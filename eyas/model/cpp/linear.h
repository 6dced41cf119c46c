// Matrix products of few rows: weights packed once, streamed once a forward.
//
//   panel    [pair of inputs][block][column][2]: all weights of inputs 2p, 2p + 1, then those of
//            2p + 2, ...
//
// bf16 weights are squeezed to 12 bits where that loses nothing, since reading them is the cost.
// The upper byte of a bf16 (sign and seven bits of exponent) takes few values in one matrix: it is
// stored as an index of four bits into the most frequent fifteen and 0; the few weights with
// another one are put in after unpacking. The first tile of rows unpacks while it multiplies and
// leaves that to the other tiles. The bits are those of plain bf16.
//
//   chunk    8 pairs of inputs: [lower bytes of four lines of 32 weights] ...
//            [64 bytes with their 128 indices] ...
//
// Every output is one sum over the inputs in ascending order: a row's bits depend on the row alone.
#pragma once

#include "amx.h"
#include "panels.h"

// half: of half precision, multiplied as floats.
enum class Packed : int { fp32 = 0, bf16 = 1, squeezed = 2, half = 3 };

// Of a pair of inputs and 16 columns.
constexpr size_t line_bytes(Packed kind) { return kind == Packed::fp32 ? 128 : 64; }

constexpr int kChunkPairs = 128;    // 32 KB of a panel: further tiles of rows find it in a cache
constexpr int kSqueezedPairs = 8;   // of a chunk
constexpr int kUnpackedChunks = 8;  // left to the other tiles: 16 KB
constexpr int kCodes = 16, kSampleStep = 7, kRareShare = 256;

constexpr int kBurstPairs = 8;  // between two bursts of prefetches
constexpr int kNearRows = 4;    // up to these, plain weights go into the first cache

// What is fetched meanwhile.
struct Ahead {
  Address from = 0;
  size_t lines = 0;
  bool is_far = false;  // into the second cache
};

class Linear final : public Product {
 public:
  // parts: [rows, K] matrices stacked, of one kind; gated: two parts whose blocks alternate.
  // bias: of all rows, or null.
  Linear(const std::vector<Source>& parts, int K, Packed kind, bool gated, const float* bias,
         int threads)
      : Product(K, gated, false), pairs((K + 1) / 2), kind(kind) {
    const std::vector<int> column_rows = columns(parts, bias);
    std::vector<const uint8_t*> lines;
    for (const Source& part : parts)
      for (int row = 0; row < part.rows; ++row)
        lines.push_back(static_cast<const uint8_t*>(part.data) +
                        static_cast<size_t>(row) * K * element());
    if (kind == Packed::squeezed && !choose_upper(lines)) this->kind = Packed::bf16;
    by_amx = !by_input() && K % (2 * kAmxPairs) == 0 && has_amx();
    place(threads);
    data_ = Arena::take(num_bytes_);
    std::vector<std::vector<std::vector<Rare>>> rare(panels.size());
    Pool::shared().run(threads, [&](int t) {
      for (size_t p = t; p < panels.size(); p += threads)
        rare[p] = pack(panels[p], column_rows, lines);
    });
    rare_starts_.push_back(0);
    for (const auto& chunks : rare)
      for (const auto& chunk : chunks) {
        rare_.insert(rare_.end(), chunk.begin(), chunk.end());
        rare_starts_.push_back(static_cast<uint32_t>(rare_.size()));
      }
  }

  int chunk_pairs() const { return kind == Packed::squeezed ? kSqueezedPairs : kChunkPairs; }

  size_t chunk_bytes(int pairs_of_chunk, int width) const {
    const size_t lines = static_cast<size_t>(pairs_of_chunk) * width;
    return kind == Packed::squeezed ? (lines + 3) / 4 * 192 : lines * line_bytes(kind);
  }

  const uint8_t* chunk(const Panel& panel, int index) const {
    return data_.get() + panel.offset + index * chunk_bytes(chunk_pairs(), panel.width);
  }

  bool has_rare(const Panel& panel, int index) const {
    const size_t at = panel.first_chunk + index;
    return rare_starts_[at] != rare_starts_[at + 1];
  }

  // A squeezed chunk as lines of bf16.
  void unpack(const Panel& panel, int index, int pairs_of_chunk, bf16* to) const {
    const int fours = (pairs_of_chunk * panel.width + 3) / 4;
    const uint8_t *low = chunk(panel, index), *codes = low + fours * 128;
    const Bits table = upper_table();
    for (int i = 0; i < fours; ++i) {
      Bits lines[4];
      unpack_four(low + i * 128, codes + i * 64, table, lines);
      for (int l = 0; l < 4; ++l) store_bits(to + i * 128 + l * 32, lines[l]);
    }
    const size_t at = panel.first_chunk + index;
    for (uint32_t i = rare_starts_[at]; i < rare_starts_[at + 1]; ++i)
      to[rare_[i].place] = rare_[i].weight;
  }

  INLINE Bits upper_table() const { return load_table(upper_); }

  static INLINE void unpack_four(const uint8_t* low, const uint8_t* codes, Bits table,
                                 Bits* lines) {
    const Bits code = load_bits(codes);
    const Bits upper[2] = {look_up_low(table, code), look_up_low(table, words_right(code, 4))};
    for (int i = 0; i < 2; ++i) {
      const Bits lower = load_bits(low + i * 64);
      lines[2 * i] = zip_low<uint8_t>(lower, upper[i]);
      lines[2 * i + 1] = zip_high<uint8_t>(lower, upper[i]);
    }
  }

  int pairs;
  Packed kind;
  bool by_amx;  // rows of bf16 are multiplied by tiles

 private:
  struct Rare {
    uint16_t place;  // in the unpacked chunk
    bf16 weight;
  };

  // A line of 16 columns for each input; else pairs of bf16.
  bool by_input() const { return kind == Packed::fp32 || kind == Packed::half; }
  size_t element() const { return kind == Packed::fp32 ? 4 : 2; }

  // The table of upper bytes, from a sample; false when too many have another.
  bool choose_upper(const std::vector<const uint8_t*>& lines) {
    std::vector<size_t> counts(256);
    size_t all = 0, covered = 0;
    for (const uint8_t* line : lines)
      for (int k = static_cast<int>(all % kSampleStep); k < K; k += kSampleStep, ++all)
        ++counts[line[2 * k + 1]];
    covered = counts[0];
    upper_[0] = 0, counts[0] = 0;
    for (int code = 1; code < kCodes; ++code) {
      const auto most = std::max_element(counts.begin() + 1, counts.end());
      upper_[code] = static_cast<uint8_t>(most - counts.begin());
      covered += *most;
      *most = 0;
    }
    return (all - covered) * kRareShare <= all;
  }

  void place(int threads) {
    int chunks = 0;
    for (Panel panel : shares(threads)) {
      const int full = pairs / chunk_pairs(), left = pairs % chunk_pairs();
      panel.offset = num_bytes_, panel.first_chunk = chunks;
      panels.push_back(panel);
      num_bytes_ += full * chunk_bytes(chunk_pairs(), panel.width) +
                    (left > 0 ? chunk_bytes(left, panel.width) : 0);
      chunks += full + (left > 0);
    }
  }

  template <class T>
  void pack_as(T* to, const Panel& panel, int begin, int end, const std::vector<int>& column_rows,
               const std::vector<const uint8_t*>& lines) const {
    const int first = panel.first * kLanes, columns = panel.width * kLanes;
    for (int p = begin; p < end; ++p)
      for (int c = 0; c < columns; ++c) {
        const int row = column_rows[first + c];
        for (int i = 0; i < 2; ++i) {
          const int k = 2 * p + i;
          const T value = row < 0 || k >= K ? T(0) : reinterpret_cast<const T*>(lines[row])[k];
          const size_t block = static_cast<size_t>(p - begin) * panel.width + c / kLanes;
          // bf16: the pair side by side, for one instruction
          to[block * 32 + (by_input() ? i * kLanes + c % kLanes : c % kLanes * 2 + i)] = value;
        }
      }
  }

  // Writes a panel's chunks; gives the rare weights of each.
  std::vector<std::vector<Rare>> pack(const Panel& panel, const std::vector<int>& column_rows,
                                      const std::vector<const uint8_t*>& lines) const {
    std::vector<std::vector<Rare>> rare;
    for (int first = 0, index = 0; first < pairs; first += chunk_pairs(), ++index) {
      uint8_t* to = data_.get() + (chunk(panel, index) - data_.get());
      const int end = std::min(pairs, first + chunk_pairs());
      rare.emplace_back();
      if (kind == Packed::fp32)
        pack_as(reinterpret_cast<float*>(to), panel, first, end, column_rows, lines);
      else if (kind != Packed::squeezed)
        pack_as(reinterpret_cast<bf16*>(to), panel, first, end, column_rows, lines);
      else {
        std::vector<bf16> plain((static_cast<size_t>(end - first) * panel.width + 3) / 4 * 128);
        pack_as(plain.data(), panel, first, end, column_rows, lines);
        squeeze(plain, to, rare.back());
      }
    }
    return rare;
  }

  void squeeze(const std::vector<bf16>& plain, uint8_t* to, std::vector<Rare>& rare) const {
    const size_t fours = plain.size() / 128;
    std::memset(to + fours * 128, 0, fours * 64);
    for (size_t place = 0; place < plain.size(); ++place) {
      const size_t half = place / 64, word = place % 32, second = place / 32 % 2;
      const size_t byte =
          word / 8 * 16 + second * 8 + word % 8;  // where the unpack instructions take it from
      const uint8_t* found =
          std::find(upper_, upper_ + kCodes, static_cast<uint8_t>(plain[place] >> 8));
      if (found == upper_ + kCodes) rare.push_back({static_cast<uint16_t>(place), plain[place]});
      const unsigned code = found == upper_ + kCodes ? 0 : static_cast<unsigned>(found - upper_);
      to[half * 64 + byte] = static_cast<uint8_t>(plain[place]);
      to[fours * 128 + half / 2 * 64 + byte] |= static_cast<uint8_t>(code << half % 2 * 4);
    }
  }

  alignas(16) uint8_t upper_[kCodes] = {};
  std::vector<Rare> rare_;
  std::vector<uint32_t> rare_starts_;
};

// sum + the products of inputs x[0], x[1] with a line of pairs of bf16.
template <class A>
INLINE Vec add_pair(Vec sum, const typename A::T* x, Bits line) {
  if constexpr (A::is_bf16) {
    return dot_pairs(sum, splat_four(x), line);
  } else {
    sum = fma(splat(x[0]), even_of_pairs(line), sum);
    return fma(splat(x[1]), odd_of_pairs(line), sum);
  }
}

// Some chunks of a squeezed panel.
struct Squeezed {
  const Linear& linear;
  const Panel& panel;
  const Stream& stream;
  int first, count;
  int tiles;  // each fetches its part of what is ahead
  bool is_far;
};

// Sums of R rows and W blocks over the inputs of squeezed chunks, as `tile` below. keep: the lines
// of bf16 are left in `kept`.
template <class A, int R, int W, bool keep>
void fused_tile(const Squeezed& chunks, const typename A::T* x, size_t stride, float* sums,
                bf16* kept) {
  constexpr int at_once = W == 4   ? 1
                          : W == 2 ? 2
                                   : 4,
                lines = at_once * W;  // pairs whose lines come in fours
  constexpr int words = kSqueezedPairs * W * 32;
  constexpr size_t bytes = static_cast<size_t>(kSqueezedPairs) * W * 48;
  const Linear& linear = chunks.linear;
  const Bits table = linear.upper_table();
  const bool fresh = chunks.first == 0;
  Vec sum[R][W];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
    for (int w = 0; w < W; ++w)
      sum[r][w] = fresh ? Vec{} : load(sums + r * kPanelColumns + w * kLanes);
  const uint8_t *weights = linear.chunk(chunks.panel, chunks.first), *fetching = weights;
  const size_t fetched = bytes / 64 / chunks.tiles * 64;
  for (int c = chunks.first; c < chunks.first + chunks.count;
       ++c, weights += bytes, x += 2 * kSqueezedPairs) {
    chunks.stream.fetch_ahead(fetching, fetched, chunks.is_far ? kFarLead : kLead, chunks.is_far);
    fetching += fetched;
    const int pairs = std::min(kSqueezedPairs, linear.pairs - c * kSqueezedPairs);
    if (pairs == kSqueezedPairs && !linear.has_rare(chunks.panel, c)) {
      const uint8_t *low = weights, *codes = weights + words;
      for (int p = 0; p < kSqueezedPairs; p += at_once, low += lines * 32, codes += lines * 16) {
        Bits line[lines];
#pragma GCC unroll 4
        for (int i = 0; i < lines; i += 4)
          Linear::unpack_four(low + i * 32, codes + i * 16, table, line + i);
#pragma GCC unroll 12
        for (int i = 0; i < lines; ++i) {
          if constexpr (keep) store_bits(kept + (p * W + i) * 32, line[i]);
#pragma GCC unroll 8
          for (int r = 0; r < R; ++r)
            sum[r][i % W] = add_pair<A>(sum[r][i % W], x + r * stride + (p + i / W) * 2, line[i]);
        }
      }
    } else {
      linear.unpack(chunks.panel, c, pairs, kept);
      for (int p = 0; p < pairs; ++p)
#pragma GCC unroll 8
        for (int w = 0; w < W; ++w) {
          const Bits line = load_bits(kept + (p * W + w) * 32);
#pragma GCC unroll 8
          for (int r = 0; r < R; ++r)
            sum[r][w] = add_pair<A>(sum[r][w], x + r * stride + 2 * p, line);
        }
    }
    if (keep) kept += words;
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
    for (int w = 0; w < W; ++w) store(sums + r * kPanelColumns + w * kLanes, sum[r][w]);
}

template <class A>
using FusedTile = void (*)(const Squeezed&, const typename A::T*, size_t, float*, bf16*);

template <class A, bool keep>
FusedTile<A> fused_tile_of(int rows, int width) {
  return of_rows_and_width<FusedTile<A>, kMaxTileRows, kPanelBlocks>(
      rows, width, [](auto R, auto W) { return fused_tile<A, R, W, keep>; });
}

// Sums of R rows and V of W blocks over `pairs` pairs of inputs, added to sums [R][kPanelColumns]
// or, when fresh, put there. Fetches what is ahead.
template <class A, Packed kind, int R, int V, int W>
INLINE void tile_part(const typename A::T* x, size_t stride, const uint8_t* weights, int pairs,
                      float* sums, bool fresh, Ahead ahead) {
  Vec sum[R][V];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v)
      sum[r][v] = fresh ? Vec{} : load(sums + r * kPanelColumns + v * kLanes);
  constexpr size_t unit = line_bytes(kind);
  const int bursts = (pairs + kBurstPairs - 1) / kBurstPairs;
  const size_t burst = (ahead.lines + bursts - 1) / bursts * 64;
  for (int first = 0; first < pairs; first += kBurstPairs) {
    prefetch(ahead.from, burst, ahead.is_far);
    ahead.from += burst;
    const int past = std::min(pairs, first + kBurstPairs);
    for (int p = first; p < past; ++p, weights += W * unit) {
      if constexpr (A::is_bf16 && kind == Packed::bf16) {
        Bits w[V];
        for (int i = 0; i < V; ++i) w[i] = load_bits(weights + i * 64);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          const Bits a = splat_four(x + r * stride + 2 * p);
          for (int i = 0; i < V; ++i) sum[r][i] = dot_pairs(sum[r][i], a, w[i]);
        }
      } else {
#pragma GCC unroll 2
        for (int odd = 0; odd < 2; ++odd) {
          Vec w[V];
          for (int i = 0; i < V; ++i) {
            if constexpr (kind == Packed::fp32) {
              w[i] = load(reinterpret_cast<const float*>(weights + i * 128) + odd * kLanes);
            } else if constexpr (kind == Packed::half) {
              w[i] = from_half_precision(load_halves(weights + i * 64 + odd * 32));
            } else {
              const Bits pair = load_bits(weights + i * 64);
              w[i] = odd ? odd_of_pairs(pair) : even_of_pairs(pair);
            }
          }
#pragma GCC unroll 8
          for (int r = 0; r < R; ++r) {
            const Vec a = splat(A::number(x[r * stride + 2 * p + odd]));
            for (int i = 0; i < V; ++i) sum[r][i] = fma(a, w[i], sum[r][i]);
          }
        }
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) store(sums + r * kPanelColumns + v * kLanes, sum[r][v]);
}

// As many blocks at a time as registers hold sums.
template <class A, Packed kind, int R, int W, int first = 0>
void tile(const typename A::T* x, size_t stride, const uint8_t* weights, int pairs, float* sums,
          bool fresh, Ahead ahead) {
  constexpr int V = std::min(W - first, std::max(1, kTileSums / R));
  tile_part<A, kind, R, V, W>(x, stride, weights + first * line_bytes(kind), pairs,
                              sums + first * kLanes, fresh, ahead);
  if constexpr (first + V < W)
    tile<A, kind, R, W, first + V>(x, stride, weights, pairs, sums, fresh, {});
}

template <class A>
using Tile = void (*)(const typename A::T*, size_t, const uint8_t*, int, float*, bool, Ahead);

template <class A, Packed kind>
Tile<A> tile_of(int rows, int width) {
  return of_rows_and_width<Tile<A>, kMaxTileRows, kPanelBlocks>(
      rows, width, [](auto R, auto W) { return tile<A, kind, R, W>; });
}

template <class A>
Tile<A> tile_of(Packed kind, int rows, int width) {
  return kind == Packed::fp32   ? tile_of<A, Packed::fp32>(rows, width)
         : kind == Packed::half ? tile_of<A, Packed::half>(rows, width)
                                : tile_of<A, Packed::bf16>(rows, width);
}

// The sums of all rows on one panel.
template <class A>
void multiply_panel(const Linear& linear, const Panel& panel, const Stream& stream,
                    const typename A::T* x, size_t stride, int M, float* sums) {
  const bool squeezed = linear.kind == Packed::squeezed;
  const int even = M / ((M + kMaxTileRows - 1) / kMaxTileRows),
            fused = squeezed ? std::min(even, kFusedRows) : 0, rest = M - fused,
            others = (rest + kMaxTileRows - 1) / kMaxTileRows, tiles = others + squeezed;
  const int all_chunks = (linear.pairs + linear.chunk_pairs() - 1) / linear.chunk_pairs();
  const bool is_far = squeezed ? tiles < 3 : even > kNearRows;
  const int at_once = !squeezed ? 1 : tiles > 1 ? kUnpackedChunks : all_chunks;
  alignas(64) bf16 kept[kUnpackedChunks * kSqueezedPairs * kPanelColumns * 2 + 128];
  for (int c = 0; c < all_chunks; c += at_once) {
    const int first = c * linear.chunk_pairs(),
              pairs = std::min(at_once * linear.chunk_pairs(), linear.pairs - first);
    const uint8_t* weights = linear.chunk(panel, c);
    const Address ahead = stream.ahead(weights, is_far ? kFarLead : kLead);
    const size_t all_lines = ahead == 0 ? 0 : linear.chunk_bytes(pairs, panel.width) / 64;
    if (squeezed) {
      const Squeezed chunks{linear, panel, stream, c, std::min(at_once, all_chunks - c),
                            tiles,  is_far};
      (tiles > 1 ? fused_tile_of<A, true> : fused_tile_of<A, false>)(fused, panel.width)(
          chunks, x + 2 * first, stride, sums, kept);
      weights = reinterpret_cast<const uint8_t*>(kept);
    }
    for (int i = squeezed ? 1 : 0; i < tiles; ++i) {
      const auto begin = [&](int i) {
        return fused + static_cast<int>(int64_t(rest) * (i - squeezed) / others);
      };
      const int row = begin(i), rows = begin(i + 1) - row;
      const size_t from = all_lines * i / tiles, lines = all_lines * (i + 1) / tiles - from;
      tile_of<A>(linear.kind, rows, panel.width)(x + row * stride + 2 * first, stride, weights,
                                                 pairs, sums + row * kPanelColumns, c == 0,
                                                 {ahead + from * 64, lines, is_far});
    }
  }
}

#ifdef __AMX_BF16__
constexpr int kChunksOfStep = kAmxPairs / kSqueezedPairs;
// Steps that the passes go through before the next ones: where reading takes the time, as many as
// the first cache holds read and unpacked; where products do, more, for fewer sums.
constexpr int kStepsOfFew = 2, kSteps = 4, kFewRows = 64;

// Steps of a panel's weights, unpacked by the first pass and left for the others.
class PanelFeed {
 public:
  PanelFeed(const Linear& linear, const Panel& panel, int first_step, int kept, Bursts ahead,
            bf16* unpacked)
      : linear_(linear),
        panel_(panel),
        first_(first_step),
        kept_(kept),
        line_(panel.width * 32),
        ahead_(ahead),
        unpacked_(unpacked) {}

  INLINE const uint8_t* step(int s) {
    ahead_.one();
    if (linear_.kind != Packed::squeezed)
      return linear_.chunk(panel_, 0) + static_cast<size_t>(first_ + s) * kAmxPairs * line_ * 2;
    bf16* to = unpacked_ + s % kept_ * kAmxPairs * line_;
    if (next_ == s) {
      for (int i = 0; i < kChunksOfStep; ++i) {
        ahead_.one();
        linear_.unpack(panel_, (first_ + s) * kChunksOfStep + i, kSqueezedPairs,
                       to + i * kSqueezedPairs * line_);
      }
      ++next_;
    }
    return reinterpret_cast<const uint8_t*>(to);
  }

 private:
  const Linear& linear_;
  const Panel& panel_;
  int first_, kept_, next_ = 0;  // steps
  size_t line_;
  Bursts ahead_;
  bf16* unpacked_;
};

// The sums of all rows on one panel, by tiles.
inline void multiply_panel_by_amx(AmxTiles& tiles, const Linear& linear, const Panel& panel,
                                  const Stream& stream, const bf16* x, size_t stride, int M,
                                  float* sums) {
  alignas(64) bf16 unpacked[kSteps * kAmxPairs * kPanelColumns * 2];
  const bool squeezed = linear.kind == Packed::squeezed;
  const int all = linear.pairs / kAmxPairs, passes = amx_passes(M, panel.width);
  const int kept = squeezed && M <= kFewRows ? kStepsOfFew : kSteps,
            at_once = passes == 1 ? all : kept;
  for (int first = 0; first < all; first += at_once) {
    const int steps = std::min(at_once, all - first);
    const uint8_t* weights =
        linear.chunk(panel, 0) + linear.chunk_bytes(first * kAmxPairs, panel.width);
    const Bursts ahead(stream, weights, linear.chunk_bytes(steps * kAmxPairs, panel.width),
                       steps * (passes + squeezed * kChunksOfStep));
    PanelFeed feed(linear, panel, first, kept, ahead, unpacked);
    multiply_by_amx(
        tiles,
        {x + 2 * first * kAmxPairs, sums, stride, kPanelColumns, steps, panel.width, first == 0}, M,
        feed);
  }
}
#endif

// Thread t's part of x [M, K] times the weights; put(panel, sums [M][kPanelColumns]) takes each
// panel's outputs, bias added. next: the product that this thread will read after this one.
template <class A, class Put>
void multiply(const Linear& linear, const Product* next, const typename A::T* x, size_t stride,
              int M, int t, int T, float* sums, Put&& put) {
  const Stream stream(linear, next, t, T);
  const auto each_panel = [&](auto&& sum) {
    for (int p = linear.share(t, T); p < linear.share(t + 1, T); ++p) {
      const Panel& panel = linear.panels[p];
      sum(panel);
      linear.add_bias(panel, M, sums);
      put(panel, sums);
    }
  };
#ifdef __AMX_BF16__
  if constexpr (A::is_bf16)
    if (linear.by_amx) {
      AmxTiles tiles;
      return each_panel([&](const Panel& panel) {
        multiply_panel_by_amx(tiles, linear, panel, stream, x, stride, M, sums);
      });
    }
#endif
  each_panel(
      [&](const Panel& panel) { multiply_panel<A>(linear, panel, stream, x, stride, M, sums); });
}
