// Attention of rows over a paged cache. Knows the cache's layout and which columns a row sees, no
// weights.
//
//   a row's keys, in order    columns first_column .. prefix_len - 1, then the tree columns of its
//                             bits, ascending; with a window, those of positions from position -
//                             window + 1 on; in chunks, those from the last multiple of a chunk on
//
// Every sum runs over this logical list in the same order and in the same groups, however many rows
// are worked on together: a tree's node gets the very bits of plain decoding.
#pragma once

#include <algorithm>
#include <vector>

#include "eyas.h"
#include "simd.h"

constexpr int kTileQueries = 4;
constexpr int kTreeColumns = 64;
constexpr int kMaxApart = 4;  // rows of one tile: their prefixes end so near the first one's
constexpr int kMaxRest = kTreeColumns + 2 * kMaxApart + 2;

// Up to kTileQueries rows of one request, neighbours in M, whose prefixes nearly agree.
struct RowTile {
  int first, count;
};

// Which slots each row sees, worked out once a forward.
class Visible {
 public:
  // window: positions that a row sees; chunk: it sees those of its own; 0 for all.
  Visible(int64_t window, int64_t chunk) : window(window), chunk(chunk) {}

  // False when a row names a slot or page that is not there.
  bool plan(const RowsView& rows, int rows_a_tile, int apart) {
    rows_ = rows;
    tiles.clear();
    const int M = rows.M;
    prefix_of_.resize(M);
    tail_count_.resize(M);
    tail_.resize(static_cast<size_t>(M) * kTreeColumns);
    starts_.clear();
    begins_.clear();
    slots_.clear();
    longest = 0;
    for (int m = 0; m < M; ++m)  // all before any: a prefix is listed for the rows that follow too
      if (!is_within(m)) return false;
    for (int m = 0; m < M; ++m) {
      if (!add_prefix(m) || !add_tail(m)) return false;
      if (prefix_count(m) + tail_count_[m] == 0) return false;
      longest = std::max(longest, prefix_count(m) + tail_count_[m]);
      const bool joins =
          !tiles.empty() && tiles.back().count < rows_a_tile &&
          rows.request[m] == rows.request[m - 1] &&
          std::abs(rows.prefix_len[m] - rows.prefix_len[tiles.back().first]) <= apart &&
          begin(m) == begin(tiles.back().first);
      if (joins)
        ++tiles.back().count;
      else
        tiles.push_back({m, 1});
    }
    return true;
  }

  int prefix_count(int m) const { return static_cast<int>(rows_.prefix_len[m] - begin(m)); }
  const int* prefix(int m) const {
    return slots_.data() + starts_[prefix_of_[m]] + (begin(m) - begins_[prefix_of_[m]]);
  }
  // Whether no tile before it has read this tile's keys.
  bool begins_prefix(int tile) const {
    return tile == 0 || prefix_of_[tiles[tile].first] != prefix_of_[tiles[tile - 1].first];
  }
  const int* tail(int m) const { return tail_.data() + static_cast<size_t>(m) * kTreeColumns; }
  int tail_count(int m) const { return tail_count_[m]; }

  // A row's list as one: how long it is, and the slot of its column j.
  int count(int m) const { return prefix_count(m) + tail_count_[m]; }
  int column(int m, int j) const {
    const int of_prefix = prefix_count(m);
    return j < of_prefix ? prefix(m)[j] : tail(m)[j - of_prefix];
  }

  // How far the lists of two rows of a tile agree, in whole steps; where one is the beginning of
  // the other, to the longer one's end.
  int agree(int m, int other, int step) const {
    const int shorter = std::min(count(m), count(other)), longer = std::max(count(m), count(other));
    for (int j = std::min(prefix_count(m), prefix_count(other)); j < shorter; ++j)
      if (column(m, j) != column(other, j)) return j / step * step;
    return round_up(longer, step);
  }

  int64_t window, chunk;
  std::vector<RowTile> tiles;
  int longest = 0;

 private:
  bool is_within(int m) const {
    return rows_.slot[m] >= 0 && rows_.slot[m] < rows_.num_slots && rows_.request[m] >= 0 &&
           rows_.request[m] < rows_.B && rows_.position[m] >= 0 &&
           rows_.prefix_len[m] >= rows_.first_column &&
           rows_.prefix_len[m] <= rows_.P * rows_.page_size;
  }
  int64_t slot_of(int64_t request, int64_t column) const {
    if (column < 0 || column / rows_.page_size >= rows_.P) return -1;
    const int64_t slot =
        rows_.page_table[request * rows_.P + column / rows_.page_size] * rows_.page_size +
        column % rows_.page_size;
    return slot >= 0 && slot < rows_.num_slots ? slot : -1;
  }

  // The first column of its prefix that a row sees: the entry in column c has the position c -
  // first_column.
  int64_t begin(int m) const {
    return std::min(first_position(rows_.position[m]) + rows_.first_column, rows_.prefix_len[m]);
  }
  int64_t first_position(int64_t position) const {
    if (chunk > 0) return position / chunk * chunk;
    return window > 0 ? std::max<int64_t>(position - window + 1, 0) : 0;
  }

  // Rows of one request stand together, so its slots are listed once, from the first to the last
  // column that one of them sees.
  bool add_prefix(int m) {
    const int64_t request = rows_.request[m];
    if (m > 0 && rows_.request[m - 1] == request) {
      prefix_of_[m] = prefix_of_[m - 1];
      return true;
    }
    int64_t first = begin(m), end = 0;
    for (int i = m; i < rows_.M && rows_.request[i] == request; ++i)
      first = std::min(first, begin(i)), end = std::max(end, rows_.prefix_len[i]);
    prefix_of_[m] = static_cast<int>(starts_.size());
    starts_.push_back(slots_.size());
    begins_.push_back(first);
    for (int64_t column = first; column < end;) {
      const int64_t slot = slot_of(request, column);
      const int64_t count = std::min(rows_.page_size - column % rows_.page_size, end - column);
      if (slot < 0) return false;
      for (int64_t i = 0; i < count; ++i) slots_.push_back(static_cast<int>(slot + i));
      column += count;
    }
    return true;
  }

  // Of its ancestors, which stand one position apart, and itself, those that a row sees.
  bool add_tail(int m) {
    int count = 0;
    uint64_t bits = static_cast<uint64_t>(rows_.seen[m]);
    const int64_t seen = rows_.position[m] - first_position(rows_.position[m]) + 1;
    for (int64_t unseen = __builtin_popcountll(bits) - seen; unseen > 0; --unseen) bits &= bits - 1;
    for (; bits != 0; bits &= bits - 1) {
      const int64_t slot = slot_of(rows_.request[m], rows_.prefix_len[m] + __builtin_ctzll(bits));
      if (slot < 0) return false;
      tail_[static_cast<size_t>(m) * kTreeColumns + count++] = static_cast<int>(slot);
    }
    tail_count_[m] = count;
    return true;
  }

  RowsView rows_{};
  std::vector<int> prefix_of_, tail_count_, tail_, slots_;
  std::vector<size_t> starts_;
  std::vector<int64_t> begins_;
};

// How scores become weights. softcap: cuts them softly, 0 for not. sinks: a logit of each query
// head that takes weight and has no value, or null.
struct Scoring {
  float scale, softcap;
  const float* sinks;
};

// One layer's cache, in each slot keys [Hk, D] and values [Hk, D], and its queries [M, Hq, padded
// D].
template <class A>
struct AttentionView {
  using T = typename A::T;
  const T* cache;
  const T* queries;
  T* mixed;  // [M, mixed_stride]
  size_t query_stride, mixed_stride, slot_stride;
  int Hq, Hk, D;
  Scoring scoring;
};

// Elements that one instruction of a score takes: pairs of bf16, or floats.
template <class A>
constexpr int kScoreLanes = A::is_bf16 ? 32 : 16;

constexpr int kKeysAhead = 32;

// Keys that are read after those worked on, and their values: fetched into the second cache
// meanwhile.
template <class T>
struct Later {
  const T* keys;
  const int* slots;
  int count, fetched = 0;

  // Its part of when `done` of `all` are worked on: values lie to_values behind their keys.
  INLINE void fetch(int done, int all, size_t stride, size_t to_values, int D) {
    for (const int end = static_cast<int>(int64_t(count) * done / all); fetched < end; ++fetched)
      for (int d = 0; d < D; d += 64 / sizeof(T)) {
        const T* key = keys + slots[fetched] * stride + d;
        __builtin_prefetch(key, 0, 2);
        __builtin_prefetch(key + to_values, 0, 2);
      }
  }
};

// scores[r][j] = q[r] . key of slots[j], for j < n; writes up to 15 places behind. Values lie
// to_values behind their keys.
template <class A, int R>
void scores_of(const typename A::T* const* q, const typename A::T* keys, size_t stride,
               size_t to_values, const int* slots, int n, int D, float* const* scores,
               Later<typename A::T> later) {
  using T = typename A::T;
  constexpr int at_once = R == 1 ? 16 : R == 2 ? 8 : 4, lanes = kScoreLanes<A>;
  const int steps = (D + lanes - 1) / lanes;
  const Lanes last = first_lanes(D - (steps - 1) * lanes);
  for (int j = 0; j < n; j += at_once) {
    const T* key[at_once];
    for (int i = 0; i < at_once; ++i) {
      key[i] = keys + slots[std::min(j + i, n - 1)] * stride;
      // Keys of a head lie apart, so the hardware does not foresee them.
      const T* soon = keys + slots[std::min(j + i + kKeysAhead, n - 1)] * stride;
      for (int d = 0; d < D; d += 64 / sizeof(T)) __builtin_prefetch(soon + d, 0, 3);
    }
    later.fetch(std::min(j + at_once, n), n, stride, to_values, D);
    Vec sum[16];
    for (int i = 0; i < 16; ++i) sum[i] = Vec{};
    for (int d = 0; d < steps; ++d) {
      const Lanes mask = d == steps - 1 ? last : first_lanes(lanes);
#pragma GCC unroll 16
      for (int i = 0; i < at_once; ++i) {
        if constexpr (A::is_bf16) {
          const Bits k = load_words(key[i] + d * lanes, mask);
#pragma GCC unroll 4
          for (int r = 0; r < R; ++r)
            sum[r * at_once + i] = dot_pairs(sum[r * at_once + i], load_bits(q[r] + d * lanes), k);
        } else {
          const Vec k = load(key[i] + d * lanes, mask);
#pragma GCC unroll 4
          for (int r = 0; r < R; ++r)
            sum[r * at_once + i] = fma(load(q[r] + d * lanes), k, sum[r * at_once + i]);
        }
      }
    }
    const Vec done = sums_of(sum);
    if constexpr (R == 1) {
      store(scores[0] + j, done);
    } else if constexpr (R == 2) {
      store_quarter<0>(scores[0] + j, done), store_quarter<1>(scores[0] + j + 4, done);
      store_quarter<2>(scores[1] + j, done), store_quarter<3>(scores[1] + j + 4, done);
    } else {
      store_quarter<0>(scores[0] + j, done), store_quarter<1>(scores[1] + j, done);
      store_quarter<2>(scores[2] + j, done);
      if constexpr (R == 4) store_quarter<3>(scores[3] + j, done);
    }
  }
}

// Scores [n] of a query head to weights, in place; returns 1 / their sum. In bf16 weights are
// rounded and packed to the front, an odd number of them followed by a zero.
template <class A>
float weigh(float* scores, int n, const Scoring& scoring, int head) {
  Vec most = splat(-INFINITY);
  Vec factor = splat(scoring.scale);
  if (scoring.softcap > 0) {
    for (int j = 0; j < n; j += kLanes) {
      const Vec scaled = load(scores + j) * factor;
      store(scores + j, capped(scaled, splat(scoring.softcap)));
    }
    factor = splat(1.0f);
  }
  for (int j = 0; j < n; j += kLanes) {
    most = max(most, load(scores + j, first_lanes(n - j), splat(-INFINITY)));
  }
  Vec top = splat(max_of(most)) * factor;
  const Vec sink = splat(scoring.sinks == nullptr ? -INFINITY : scoring.sinks[head]);
  if (scoring.sinks != nullptr) top = max(top, sink);
  Vec total = Vec{};
  bf16* packed = reinterpret_cast<bf16*>(scores);
  for (int j = 0; j < n; j += kLanes) {
    const Lanes lanes = first_lanes(n - j);
    Vec weight = exp_of(load(scores + j, lanes) * factor - top);
    weight = first_of(lanes, weight);
    if constexpr (A::is_bf16) {
      const Halves rounded = narrow(weight);
      weight = widen(rounded);
      store(packed + j, rounded);
    } else {
      store(scores + j, weight);
    }
    total = total + weight;
  }
  if (scoring.sinks != nullptr) total = total + first_of(first_lanes(1), exp_of(sink - top));
  return 1.0f / sum_of(total);
}

// Values of 16 channels of n slots, times their weights, added to sums [R][stride]: V vectors of
// channels from `values` on.
template <int R, int V>
void mix_floats(const float* const* weights, const float* values, size_t stride, const int* slots,
                int n, Lanes last, float* const* sums) {
  Vec sum[R][V];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) sum[r][v] = load(sums[r] + v * kLanes);
  for (int j = 0; j < n; ++j) {
    const float* value = values + slots[j] * stride;
    Vec x[V];
    for (int v = 0; v < V; ++v)
      x[v] = load(value + v * kLanes, v == V - 1 ? last : first_lanes(kLanes));
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < V; ++v) sum[r][v] = fma(splat(weights[r][j]), x[v], sum[r][v]);
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) store(sums[r] + v * kLanes, sum[r][v]);
}

// The same in bf16 for V vectors of 32 channels: slots two by two (an odd last one with the weight
// 0 that follows its own). The sums of 32 channels stand as the unpack instructions leave them;
// `in_order` puts them right.
template <int R, int V>
void mix_pairs(const bf16* const* weights, const bf16* values, size_t stride, const int* slots,
               int n, Lanes last, float* const* sums) {
  Vec sum[R][2 * V];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < 2 * V; ++v) sum[r][v] = load(sums[r] + v * kLanes);
  for (int j = 0; j < n; j += 2) {
    const bf16 *one = values + slots[j] * stride,
               *two = values + slots[std::min(j + 1, n - 1)] * stride;
    Bits x[2 * V];
    for (int v = 0; v < V; ++v) {
      const Lanes lanes = v == V - 1 ? last : first_lanes(2 * kLanes);
      const Bits a = load_words(one + v * 32, lanes), b = load_words(two + v * 32, lanes);
      x[2 * v] = zip_low<uint16_t>(a, b);
      x[2 * v + 1] = zip_high<uint16_t>(a, b);
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const Bits pair = splat_four(weights[r] + j);
      for (int v = 0; v < 2 * V; ++v) sum[r][v] = dot_pairs(sum[r][v], pair, x[v]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < 2 * V; ++v) store(sums[r] + v * kLanes, sum[r][v]);
}

INLINE void in_order(float* sums) {
  Vec low = load(sums), high = load(sums + kLanes);
  zip_quarters(low, high);
  store(sums, low), store(sums + kLanes, high);
}

constexpr int kMaxHeadDim = 256;

// Add weights [R][n] times the values of slots [n] to sums [R][kMaxHeadDim].
template <class A, int R>
void mix(const typename A::T* const* weights, const typename A::T* values, size_t stride,
         const int* slots, int n, int D, float* const* sums) {
  float* at[R];
  for (int d = 0; d < D; d += 64) {
    for (int r = 0; r < R; ++r) at[r] = sums[r] + d;
    const int left = std::min(64, D - d);
    if constexpr (A::is_bf16) {
      const int over = left - (left > 32 ? 32 : 0);
      const Lanes last = first_lanes(over);
      (left > 32 ? mix_pairs<R, 2> : mix_pairs<R, 1>)(weights, values + d, stride, slots, n, last,
                                                      at);
    } else {
      const int vectors = (left + 15) / 16;
      const Lanes last = first_lanes(left - (vectors - 1) * 16);
      with_up_to_four(vectors, [&](auto V) {
        mix_floats<R, V>(weights, values + d, stride, slots, n, last, at);
      });
    }
  }
}

// The queries of heads [head, head + heads) of the rows of a tile; all of these heads share key
// head g. scratch: kTileQueries rows of `scratch_stride` floats, at least visible.longest + 32
// each.
template <class A>
void attend(const AttentionView<A>& at, const Visible& visible, const RowTile& tile, int g,
            int head, int heads, float* scratch, size_t scratch_stride,
            const Later<typename A::T>& later) {
  using T = typename A::T;
  const size_t to_values = static_cast<size_t>(at.Hk) * at.D, stride = at.slot_stride;
  const T *keys = at.cache + g * at.D, *values = keys + to_values;
  const int R = tile.count * heads;
  const T* q[kTileQueries];
  float *scores[kTileQueries], *sums[kTileQueries], inverse[kTileQueries];
  const T* weights[kTileQueries];
  alignas(64) float sums_space[kTileQueries][kMaxHeadDim];
  int shortest = 1 << 30, longest = 0;
  for (int i = 0; i < tile.count; ++i) {
    const int m = tile.first + i, count = visible.prefix_count(m);
    shortest = std::min(shortest, count);
    longest = std::max(longest, count);
    for (int h = 0; h < heads; ++h) {
      const int r = i * heads + h;
      q[r] = at.queries + m * at.Hq * at.query_stride + (head + h) * at.query_stride;
      scores[r] = scratch + r * scratch_stride;
      sums[r] = sums_space[r];
      for (int d = 0; d < at.D; d += kLanes) store(sums[r] + d, Vec{});
      for (int d = round_up(at.D, kLanes); d < round_up(at.D, 2 * kLanes); d += kLanes)
        store(sums[r] + d, Vec{});
    }
  }
  const int* prefix = visible.prefix(tile.first);
  with_up_to_four(R, [&](auto n) {
    scores_of<A, n>(q, keys, stride, to_values, prefix, longest, at.D, scores, later);
  });
  for (int i = 0; i < tile.count; ++i) {
    const int m = tile.first + i, count = visible.prefix_count(m), tail = visible.tail_count(m);
    float* behind[kTileQueries];
    for (int h = 0; h < heads; ++h) behind[h] = scores[i * heads + h] + count;
    if (tail > 0)
      with_up_to_four(heads, [&](auto n) {
        scores_of<A, n>(q + i * heads, keys, stride, to_values, visible.tail(m), tail, at.D, behind,
                        {});
      });
    for (int h = 0; h < heads; ++h) {
      const int r = i * heads + h;
      inverse[r] = weigh<A>(scores[r], count + tail, at.scoring, head + h);
      weights[r] = reinterpret_cast<const T*>(scores[r]);
    }
  }
  // Together as far as all rows see the same; in bf16 slots go in pairs, so that far must be even.
  const int common = A::is_bf16 ? shortest & ~1 : shortest;
  with_up_to_four(R,
                  [&](auto n) { mix<A, n>(weights, values, stride, prefix, common, at.D, sums); });
  for (int i = 0; i < tile.count; ++i) {
    const int m = tile.first + i, count = visible.prefix_count(m);
    int rest[kMaxRest], n_rest = 0;
    for (int j = common; j < count; ++j) rest[n_rest++] = prefix[j];
    for (int j = 0; j < visible.tail_count(m); ++j) rest[n_rest++] = visible.tail(m)[j];
    const T* further[kTileQueries];
    for (int h = 0; h < heads; ++h) further[h] = weights[i * heads + h] + common;
    if (n_rest > 0)
      with_up_to_four(heads, [&](auto n) {
        mix<A, n>(further, values, stride, rest, n_rest, at.D, sums + i * heads);
      });
    for (int h = 0; h < heads; ++h) {
      const int r = i * heads + h;
      if constexpr (A::is_bf16)
        for (int d = 0; d < at.D; d += 32) in_order(sums[r] + d);
      T* out = at.mixed + m * at.mixed_stride + (head + h) * at.D;
      for (int d = 0; d < at.D; d += kLanes)
        A::store(out + d, first_lanes(at.D - d), load(sums[r] + d) * splat(inverse[r]));
    }
  }
}
