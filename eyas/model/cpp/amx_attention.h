// Attention in bf16 by AMX's tiles: 16 queries of one key head at a time, over the same logical
// list of columns as `attention.h`.
//
//   scores    queries [16][32 channels] times keys [16 pairs of channels][16 keys], every 32
//             channels
//   values    weights [16][32 columns] times values [16 pairs of columns][16 channels], every 32
//             columns of the list
//
// Both are sums in the order of the list, 32 columns at a time from its beginning, so a row's bits
// depend on nothing but its list. Rows work together as far as their lists agree: the shorter one's
// weights end in zeros. What is behind is each row's own.
#pragma once

#include "amx.h"
#include "attention.h"

#ifdef __AMX_BF16__

constexpr int kAmxQueries = 16, kAmxKeys = 16, kAmxColumns = 32,
              kAmxTile = 512;     // a tile: numbers of bf16
constexpr int kAmxChannels = 64;  // whose sums are in tiles at a time
constexpr int kMaxOwn =
    kAmxColumns + kAmxQueries + kTreeColumns;  // columns that a row has for itself
constexpr int kOwnStride = (kMaxOwn + kAmxColumns - 1) / kAmxColumns * kAmxColumns;

// 16 keys as tiles [channels / 32][16 pairs][key][2]; of fewer than 16, the last one again.
inline void pack_keys(const bf16* keys, size_t stride, const int* slots, int n, int D, bf16* to) {
  alignas(64) bf16 padded[kAmxKeys * kMaxHeadDim];
  const bf16* key[kAmxKeys];
  for (int i = 0; i < kAmxKeys; ++i) key[i] = keys + slots[std::min(i, n - 1)] * stride;
  if (const int width = round_up(D, 32); width != D)
    for (int i = 0; i < kAmxKeys; ++i) {
      std::memset(padded + i * width, 0, width * sizeof(bf16));
      key[i] = static_cast<const bf16*>(std::memcpy(padded + i * width, key[i], D * sizeof(bf16)));
    }
  for (int d = 0; d < D; d += 32, to += kAmxTile)
#pragma GCC unroll 4
    for (int q = 0; q < 4; ++q) {
      Bits four[4];
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        const int at = d + 8 * q;
        four[i] = of_quarters(key[i] + at, key[i + 4] + at, key[i + 8] + at, key[i + 12] + at);
      }
      const Bits a = zip_low<int32_t>(four[0], four[1]), b = zip_high<int32_t>(four[0], four[1]);
      const Bits c = zip_low<int32_t>(four[2], four[3]), e = zip_high<int32_t>(four[2], four[3]);
      bf16* line = to + q * 4 * 32;
      store_bits(line, zip_low<int64_t>(a, c));
      store_bits(line + 32, zip_high<int64_t>(a, c));
      store_bits(line + 64, zip_low<int64_t>(b, e));
      store_bits(line + 96, zip_high<int64_t>(b, e));
    }
}

// 32 values as tiles [channels / 16][16 pairs of columns][channel][2], the channels of 32 as the
// unpack instructions leave them.
inline void pack_values(const bf16* values, size_t stride, const int* slots, int n, int D,
                        bf16* to) {
  for (int pair = 0; pair < kAmxColumns / 2; ++pair, to += 32) {
    const bf16 *one = values + slots[std::min(2 * pair, n - 1)] * stride,
               *two = values + slots[std::min(2 * pair + 1, n - 1)] * stride;
    for (int d = 0; d < D; d += 32) {
      const Lanes lanes = first_lanes(D - d);
      const Bits a = load_words(one + d, lanes), b = load_words(two + d, lanes);
      store_bits(to + d / 16 * kAmxTile, zip_low<uint16_t>(a, b));
      store_bits(to + (d / 16 + 1) * kAmxTile, zip_high<uint16_t>(a, b));
    }
  }
}

// Adds to sums [16][sums_stride], of `channels` channels, up to 64, the weights
// [16][weights_stride] of `steps` times 32 columns, with values(step): the tiles of a step from the
// first of these channels on.
template <class Values>
INLINE void mix_tiles(const bf16* weights, size_t weights_stride, int steps, int channels,
                      float* sums, size_t sums_stride, bool fresh, Values&& values) {
  const size_t bytes = weights_stride * sizeof(bf16), to = sums_stride * sizeof(float);
  const bool wide = channels > 32;
  before_tiles();
  if (fresh) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  } else {
    _tile_loadd(0, sums, to);
    _tile_loadd(1, sums + 16, to);
    if (wide) {
      _tile_loadd(2, sums + 32, to);
      _tile_loadd(3, sums + 48, to);
    }
  }
  for (int s = 0; s < steps; ++s) {
    const bf16* tiles = values(s);
    before_tiles();
    _tile_loadd(4, weights + s * kAmxColumns, bytes);
    _tile_loadd(6, tiles, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, tiles + kAmxTile, 64);
    _tile_dpbf16ps(1, 4, 7);
    if (wide) {
      _tile_loadd(6, tiles + 2 * kAmxTile, 64);
      _tile_dpbf16ps(2, 4, 6);
      _tile_loadd(7, tiles + 3 * kAmxTile, 64);
      _tile_dpbf16ps(3, 4, 7);
    }
  }
  _tile_stored(0, sums, to);
  _tile_stored(1, sums + 16, to);
  if (wide) {
    _tile_stored(2, sums + 32, to);
    _tile_stored(3, sums + 48, to);
  }
}

// scores [16][scores_stride], 16 keys of them, of queries [16][width] and a tile of keys.
INLINE void score_tile(const bf16* queries, int width, const bf16* keys, float* scores,
                       size_t scores_stride) {
  before_tiles();
  _tile_zero(0);
  for (int d = 0; d < width; d += 32) {
    _tile_loadd(4, queries + d, width * sizeof(bf16));
    _tile_loadd(6, keys + d / 32 * kAmxTile, 64);
    _tile_dpbf16ps(0, 4, 6);
  }
  _tile_stored(0, scores, scores_stride * sizeof(float));
}

// What a thread has packed of the prefix that its last tile saw, for its next one.
struct PackedPrefix {
  Buffer<bf16> keys, values;
  const int* slots = nullptr;
  int head = -1, key_tiles = 0, value_steps = 0;
};

// As `attend`, for tiles of up to 16 queries. kept: this layer's; may_keep: another tile of the
// same prefix and key head follows or was before.
inline void attend_by_amx(const AttentionView<Bf16>& at, const Visible& visible,
                          const RowTile& tile, int g, int head, int heads, float* scratch,
                          size_t scratch_stride, PackedPrefix& kept, bool may_keep,
                          Later<bf16> later) {
  const size_t to_values = static_cast<size_t>(at.Hk) * at.D, stride = at.slot_stride;
  const bf16 *keys = at.cache + g * at.D, *values = keys + to_values;
  const int width = round_up(at.D, 32), R = tile.count * heads;
  alignas(64) bf16 queries[2 * kAmxQueries * kMaxHeadDim];
  alignas(64) float sums[kAmxQueries][kMaxHeadDim];
  alignas(64) bf16 tiles[kMaxHeadDim / 16 * kAmxTile];
  int longest = 0;
  for (int i = 0; i < tile.count; ++i) {
    const int m = tile.first + i;
    if (visible.count(m) > visible.count(tile.first + longest)) longest = i;
    for (int h = 0; h < heads; ++h)
      std::memcpy(queries + (i * heads + h) * width,
                  at.queries + (static_cast<size_t>(m) * at.Hq + head + h) * at.query_stride,
                  width * sizeof(bf16));
  }
  // As far as the lists agree: to the end, or to where a step of 32 columns is the last one in
  // common.
  const int most = tile.first + longest, all = visible.count(most),
            of_prefix = visible.prefix_count(most);
  const int* prefix = visible.prefix(most);
  int common = round_up(all, kAmxColumns);
  for (int i = 0; i < tile.count; ++i)
    common = std::min(common, visible.agree(tile.first + i, most, kAmxColumns));
  const int shared = std::min(common, all);
  int behind[kAmxColumns + kMaxOwn];  // the shared list from its last whole step of the prefix on
  const int whole = std::min(of_prefix, shared) / kAmxColumns * kAmxColumns;
  for (int j = whole; j < shared; ++j) behind[j - whole] = visible.column(most, j);
  const auto slots = [&](int j) { return j < whole ? prefix + j : behind + (j - whole); };
  if (kept.slots != prefix || kept.head != g)
    kept.slots = prefix, kept.head = g, kept.key_tiles = kept.value_steps = 0;
  if (may_keep)
    kept.keys.grow((static_cast<size_t>(whole) / kAmxKeys + 1) * width / 32 * kAmxTile,
                   static_cast<size_t>(kept.key_tiles) * width / 32 * kAmxTile);
  if (may_keep)
    kept.values.grow((static_cast<size_t>(whole) / kAmxColumns + 1) * width / 16 * kAmxTile,
                     static_cast<size_t>(kept.value_steps) * width / 16 * kAmxTile);

  for (int j = 0; j < shared; j += kAmxKeys) {
    const bool keeps = may_keep && j + kAmxKeys <= whole;
    bf16* to =
        keeps ? kept.keys.get() + static_cast<size_t>(j) / kAmxKeys * width / 32 * kAmxTile : tiles;
    if (!keeps || j / kAmxKeys >= kept.key_tiles) {
      if (j + kKeysAhead < whole)
        for (int i = 0; i < kAmxKeys; ++i)
          for (int d = 0; d < at.D; d += 32)
            __builtin_prefetch(keys + prefix[std::min(j + kKeysAhead + i, whole - 1)] * stride + d,
                               0, 3);
      pack_keys(keys, stride, slots(j), std::min(kAmxKeys, shared - j), at.D, to);
      if (keeps) kept.key_tiles = j / kAmxKeys + 1;
    }
    later.fetch(std::min(j + kAmxKeys, shared), shared, stride, to_values, at.D);
    score_tile(queries, width, to, scratch + j, scratch_stride);
  }
  int own_slots[kAmxQueries][kMaxOwn];
  for (int i = 0; i < tile.count; ++i) {
    const int m = tile.first + i, own = visible.count(m) - common;
    alignas(64) float scores[kAmxQueries][kAmxKeys];
    for (int j = 0; j < own; ++j) own_slots[i][j] = visible.column(m, common + j);
    for (int j = 0; j < own; j += kAmxKeys) {
      pack_keys(keys, stride, own_slots[i] + j, std::min(kAmxKeys, own - j), at.D, tiles);
      score_tile(queries + i * heads * width, width, tiles, scores[0], kAmxKeys);
      for (int h = 0; h < heads; ++h)
        store(scratch + (i * heads + h) * scratch_stride + common + j, load(scores[h]));
    }
  }

  float inverse[kAmxQueries];
  for (int r = 0; r < R; ++r) {
    float* scores = scratch + r * scratch_stride;
    const int count = visible.count(tile.first + r / heads),
              end = std::max(common, round_up(count, kAmxColumns));
    inverse[r] = weigh<Bf16>(scores, count, at.scoring, head + r % heads);
    bf16* weights = reinterpret_cast<bf16*>(scores);
    for (int j = round_up(count, kLanes); j < end; j += kLanes) store(weights + j, narrow(Vec{}));
  }

  const bf16* weights = reinterpret_cast<const bf16*>(scratch);
  for (int d = 0; d < at.D; d += kAmxChannels) {
    mix_tiles(
        weights, 2 * scratch_stride, common / kAmxColumns, at.D - d, &sums[0][d], kMaxHeadDim, true,
        [&](int s) {
          const int j = s * kAmxColumns;
          const bool keeps = may_keep && j < whole;
          bf16* to =
              keeps ? kept.values.get() + static_cast<size_t>(s) * width / 16 * kAmxTile : tiles;
          if (!keeps || s >= kept.value_steps) {
            if (j + kAmxColumns < whole)
              for (int i = 0; i < kAmxColumns; ++i)
                for (int c = 0; c < at.D; c += 32)
                  __builtin_prefetch(values + prefix[j + kAmxColumns + i] * stride + c, 0, 3);
            pack_values(values, stride, slots(j), std::min(kAmxColumns, shared - j), at.D, to);
            if (keeps) kept.value_steps = s + 1;
          }
          return to + d / 16 * kAmxTile;
        });
    for (int i = 0; i < tile.count; ++i) {
      const int own = visible.count(tile.first + i) - common;
      if (own <= 0) continue;
      // Of the tile of sums only this row's are used; its weights are copied, as those behind them
      // are not there.
      alignas(64) float mine[kAmxQueries][kAmxChannels];
      alignas(64) bf16 own_weights[kAmxQueries][kOwnStride];
      const int steps = round_up(own, kAmxColumns) / kAmxColumns;
      for (int h = 0; h < heads; ++h) {
        const int r = i * heads + h;
        std::memcpy(own_weights[h],
                    reinterpret_cast<const bf16*>(scratch + r * scratch_stride) + common,
                    steps * kAmxColumns * sizeof(bf16));
        std::memcpy(mine[h], &sums[r][d], sizeof(mine[h]));
      }
      mix_tiles(own_weights[0], kOwnStride, steps, at.D - d, mine[0], kAmxChannels, false,
                [&](int s) {
                  pack_values(values, stride, own_slots[i] + s * kAmxColumns,
                              std::min(kAmxColumns, own - s * kAmxColumns), at.D, tiles);
                  return tiles + d / 16 * kAmxTile;
                });
      for (int h = 0; h < heads; ++h)
        std::memcpy(&sums[i * heads + h][d], mine[h], sizeof(mine[h]));
    }
  }
  for (int i = 0; i < tile.count; ++i)
    for (int h = 0; h < heads; ++h) {
      const int r = i * heads + h;
      for (int d = 0; d < at.D; d += 32) in_order(sums[r] + d);
      bf16* out = at.mixed + (tile.first + i) * at.mixed_stride + (head + h) * at.D;
      for (int d = 0; d < at.D; d += kLanes)
        Bf16::store(out + d, first_lanes(at.D - d), load(sums[r] + d) * splat(inverse[r]));
    }
}

#endif
