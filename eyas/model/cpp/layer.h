// What a layer computes between its norms: attention or a short convolution, a mixture of experts.
#pragma once

#include "model.h"

namespace {  // of one translation unit: decoder.cpp

// The norm of a head, its rotation at a row's position, and its size: times `factor`. inverse: of
// the norm.
template <class A>
INLINE void Model<A>::turn(const float* x, const float* norm, float inverse, const Layer& layer,
                           int64_t position, float factor, T* to) const {
  alignas(64) float space[kMaxHeadDim];
  if (norm != nullptr) {
    scale(x, norm, inverse, D_, [&](int c, Lanes, Vec v) { store(space + c, v); });
    x = space;
  }
  const int turned = layer.rope < 0 ? 0 : static_cast<int>(shape_.rotary_dims), half = turned / 2;
  const Vec size = splat(factor);
  if (turned > 0) {
    const float *cos = tables_[2 * layer.rope] + position * half,
                *sin = tables_[2 * layer.rope + 1] + position * half;
    for (int d = 0; d < half; d += kLanes) {
      const Lanes lanes = first_lanes(half - d);
      const Vec a = load(x + d, lanes), b = load(x + half + d, lanes);
      const Vec c = load(cos + d, lanes), s = load(sin + d, lanes);
      A::store(to + d, lanes, size * fnma(b, s, a * c));
      A::store(to + half + d, lanes, size * fma(a, s, b * c));
    }
  }
  for (int d = turned; d < D_; d += kLanes) {
    const Lanes lanes = first_lanes(D_ - d);
    A::store(to + d, lanes, size * load(x + d, lanes));
  }
}

// Norm and rotation of one key head and its query heads; key and value go to the cache.
template <class A>
void Model<A>::place(const Layer& layer, const RowsView& rows, T* cache, int m, int g) {
  const int group = Hq_ / Hk_;
  const int64_t position = rows.position[m];
  const float *queries = in_.get() + m * in_stride_, *keys = queries + Hq_ * D_,
              *value = keys + (Hk_ + g) * D_;
  T* to = cache + static_cast<size_t>(rows.slot[m]) * shape_.slot_width + g * D_;
  // A head's norm is of its own numbers, or of all heads' together.
  const bool is_wide = shape_.wide_head_norms != 0;
  const auto place_heads = [&](const float* heads, int count, int first, int end, const float* norm,
                               float factor, T* to, size_t stride) {
    float inverse = is_wide ? inverse_size(heads, count * D_, eps_) : 0;
    for (int head = first; head < end; ++head, to += stride) {
      const float* x = heads + head * D_;
      if (norm != nullptr && !is_wide) inverse = inverse_size(x, D_, eps_);
      turn(x, is_wide ? norm + head * D_ : norm, inverse, layer, position, factor, to);
    }
  };
  place_heads(queries, Hq_, g * group, (g + 1) * group, layer.q_norm,
              layer.scales == 0 || query_scales_ == nullptr ? 1.0f : query_scales_[position],
              queries_.get() + (static_cast<size_t>(m) * Hq_ + g * group) * query_stride_,
              query_stride_);
  place_heads(keys, Hk_, g, g + 1, layer.k_norm, 1.0f, to, 0);
  for (int d = 0; d < D_; d += kLanes)
    A::store(to + static_cast<size_t>(Hk_) * D_ + d, first_lanes(D_ - d),
             load(value + d, first_lanes(D_ - d)));
}

#ifdef __AMX_BF16__
// The same by tiles. Tiles of one prefix stand together for each key head, so that a thread packs
// its keys and values once.
template <class A>
void Model<A>::attention_by_amx(int t, int T_, const Layer& layer, const RowsView& rows, T* cache) {
  const Visible& visible = seen_by(layer);
  const int M = rows.M, group = Hq_ / Hk_, tiles = static_cast<int>(visible.tiles.size()),
            all = tiles * Hk_;
  // One row: the thread that wrote a head's key is the one that reads it.
  for (int i = M * Hk_ * t / T_; i < M * Hk_ * (t + 1) / T_; ++i)
    place(layer, rows, cache, i / Hk_, i % Hk_);
  if (M > 1) sync();
  const AttentionView<Bf16> at = view(layer, cache);
  float* scratch = scores_.get() + static_cast<size_t>(t) * tile_queries_ * scores_stride_;
  PackedPrefix& kept = packed_[t];
  kept.slots = nullptr;
  AmxTiles shapes;
  shapes.shape(kAmxRows, kAmxRows);
  for (int first = 0, unit = 0; first < tiles;) {
    int end = first + 1;
    while (end < tiles && !visible.begins_prefix(end)) ++end;
    for (int g = 0; g < Hk_; ++g)
      for (int i = first; i < end; ++i, ++unit) {
        if (unit < all * t / T_ || unit >= all * (t + 1) / T_) continue;
        Later<bf16> later{cache, nullptr, 0};
        if (i + 1 == end) {
          const bool same = g + 1 < Hk_;
          if (same || end < tiles) {
            const int m = visible.tiles[same ? first : end].first;
            later = {cache + (same ? g + 1 : 0) * D_, visible.prefix(rows, m),
                     visible.prefix_count(rows, m)};
          }
        }
        for (int head = 0; head < group; head += kAmxQueries)
          attend_by_amx(at, rows, visible, visible.tiles[i], g, g * group + head,
                        std::min(kAmxQueries, group - head), scratch, scores_stride_, kept,
                        end - first > 1 || D_ > kAmxChannels || group > kAmxQueries,
                        head == 0 ? later : Later<bf16>{});
      }
    first = end;
  }
}
#endif

template <class A>
void Model<A>::attention(int t, int T_, const Layer& layer, const RowsView& rows, T* cache) {
#ifdef __AMX_BF16__
  if constexpr (A::is_bf16)
    if (by_amx_) return attention_by_amx(t, T_, layer, rows, cache);
#endif
  const Visible& visible = seen_by(layer);
  const int M = rows.M, group = Hq_ / Hk_, tiles = static_cast<int>(visible.tiles.size());
  for (int i = t; i < M * Hk_; i += T_) place(layer, rows, cache, i / Hk_, i % Hk_);
  // One row: the thread that wrote a head's key is the one that reads it.
  if (M > 1) sync();
  const AttentionView<A> at = view(layer, cache);
  float* scratch = scores_.get() + static_cast<size_t>(t) * kTileQueries * scores_stride_;
  for (int i = t; i < tiles * Hk_; i += T_) {
    const int next = (i + T_) / Hk_;
    Later<T> later{cache + (i + T_) % Hk_ * D_, nullptr, 0};
    if (next < tiles && visible.begins_prefix(next)) {
      const int m = visible.tiles[next].first;
      later.slots = visible.prefix(rows, m), later.count = visible.prefix_count(rows, m);
    }
    for (int head = 0; head < group; head += kTileQueries)
      attend(at, rows, visible, visible.tiles[i / Hk_], i % Hk_, i % Hk_ * group + head,
             std::min(kTileQueries, group - head), scratch, scores_stride_,
             head == 0 ? later : Later<T>{});
  }
}

// A short convolution: C * (taps over the B * x of the row's path, its own last). The cache keeps B
// * x; before a sequence there are zeros. A thread has its channels of all rows.
template <class A>
void Model<A>::convolve(int t, int T_, const Layer& layer, const RowsView& rows, T* cache) {
  const Visible& visible = seen_by(layer);
  const T* path[kMaxKernel];
  const int vectors = (H_ + kLanes - 1) / kLanes, kernel = static_cast<int>(shape_.conv_kernel),
            first = vectors * t / T_ * kLanes, end = std::min(H_, vectors * (t + 1) / T_ * kLanes);
  const auto kept = [&](int64_t slot) { return cache + slot * shape_.slot_width; };
  for (int m = 0; m < rows.M; ++m)
    for (int c = first; c < end; c += kLanes) {
      const Lanes lanes = first_lanes(H_ - c);
      const float* from = in_.get() + m * in_stride_ + c;
      A::store(kept(rows.slot[m]) + c, lanes, load(from, lanes) * load(from + 2 * H_, lanes));
    }
  for (int m = 0; m < rows.M; ++m) {
    const int count = visible.count(rows, m), steps = std::min(kernel, count);
    for (int i = 1; i <= steps; ++i) path[i - 1] = kept(visible.column(rows, m, count - i));
    for (int c = first; c < end; c += kLanes) {
      const Lanes lanes = first_lanes(H_ - c);
      Vec sum = layer.taps_bias == nullptr ? Vec{} : load(layer.taps_bias + c, lanes);
      for (int i = steps; i > 0; --i)
        sum = fma(A::load(path[i - 1] + c, lanes), load(layer.taps + (kernel - i) * H_ + c, lanes),
                  sum);
      const Vec gate = load(in_.get() + m * in_stride_ + H_ + c, lanes);
      A::store(mixed_.get() + m * x_stride_ + c, lanes, gate * sum);
    }
  }
}

// As the MLP of `layer`, of a mixture: each expert's rows together, and a row's sum over its
// experts, added to what the MLP of all rows gives where there is one.
template <class A>
template <class Tap>
void Model<A>::mixture(int t, int T_, const Layer& layer, const Product* next, const T* x, int M,
                       Tap&& tap) {
  const bool is_shared = layer.gate_up != nullptr;
  if (is_shared) {
    put_gated(t, T_, *layer.gate_up, layer.down, x, M, act_.get(), act_stride_);
    sync();
    put_product(t, T_, *layer.down, layer.router, act_.get(), act_stride_, M, later_.get(),
                h_stride_);
    sync();  // the next product's rows are quantised where these lie
  }
  put_product(t, T_, *layer.router, nullptr, x, x_stride_, M, experts_.logits.get(),
              experts_.stride());
  sync();
  for (int m = M * t / T_; m < M * (t + 1) / T_; ++m) experts_.choose(m);
  sync();
  if (t == 0) experts_.group(M);
  sync();
  const int all = M * static_cast<int>(shape_.experts_per_token), groups = experts_.num_groups();
  for (int i = all * t / T_; i < all * (t + 1) / T_; ++i) {
    const T* from = x + experts_.row(i) * x_stride_;
    for (int c = 0; c < H_; c += kLanes) {
      const Lanes lanes = first_lanes(H_ - c);
      A::store(experts_.x.get() + i * x_stride_ + c, lanes,
               splat(experts_.of_input(i)) * A::load(from + c, lanes));
    }
  }
  sync();
  for (int i = 0; i < groups; ++i) {
    const auto [expert, start, count] = experts_[i];
    const Product* after =
        layer.experts[i + 1 < groups ? 2 * experts_[i + 1].expert : 2 * experts_[0].expert + 1];
    put_gated(t, T_, *layer.experts[2 * expert], after, experts_.x.get() + start * x_stride_, count,
              act_.get() + start * expert_stride_, expert_stride_, start);
  }
  sync();
  for (int i = 0; i < groups; ++i) {
    const auto [expert, start, count] = experts_[i];
    const Product* after = i + 1 < groups ? layer.experts[2 * experts_[i + 1].expert + 1] : next;
    put_product(t, T_, *layer.experts[2 * expert + 1], after, act_.get() + start * expert_stride_,
                expert_stride_, count, experts_.outputs.get() + start * h_stride_, h_stride_,
                start);
  }
  sync();
  for (int m = M * t / T_; m < M * (t + 1) / T_; ++m) {
    float* sum = later_.get() + m * h_stride_;
    for (int c = 0; c < H_; c += kLanes)
      store(sum + c, experts_.sum(m, c, h_stride_, is_shared ? load(sum + c) : Vec{}));
    add_normed(m, sum, layer.mlp_out_norm, tap);
  }
}

}  // namespace
