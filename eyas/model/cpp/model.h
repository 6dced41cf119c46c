// The layers of a decoder on the CPU, as `eyas/model/architecture.py` describes it: what targets
// and drafts share. target.h has a target's forward and walks, draft.h a draft head's extend, step
// and growth of a tree.
//
// The whole of a forward is one run of the pool's threads with about five barriers a layer. The
// residual stream is fp32; activations are rounded to A (bf16 or fp32) where a product or the cache
// takes them. Keys and values are the caller's; of what is between them and the weights each class
// has its own buffers.
//
// Letters: M rows, R rows with logits, B requests, H hidden, X input width of q, k, v (2 H for a
// draft), I intermediate, D head dimension, E experts, V vocabulary (of the head's outputs), k
// candidates of a node, t of T threads.
#pragma once

#include <cmath>
#include <memory>

#include "amx_attention.h"
#include "attention.h"
#include "decoder.h"
#include "experts.h"
#include "linear.h"
#include "quantised.h"

namespace {  // of one translation unit: decoder.cpp

// Calls use with what a model's MLPs are made of.
template <class Use>
INLINE void with_activation(int64_t activation, Use&& use) {
  switch (activation) {
    case 1:
      return use(GeluTanh());
    case 2:
      return use(ClampedSilu());
    default:
      return use(Silu());
  }
}

// What rows of embeddings are stored as; above these, ggml's formats.
constexpr int64_t kEmbedFp32 = 0, kEmbedHalf = 1, kEmbedBf16 = 30;  // ggml's numbers
constexpr int kOwnNorms = 8;    // rows that every thread norms by itself
constexpr int kMaxKernel = 16;  // taps of a convolution

template <class A>
class Model : public Decoder {
 protected:
  using T = typename A::T;

  explicit Model(const DecoderParts& parts)
      : Decoder(parts.shape.threads),
        shape_(parts.shape),
        factors_(parts.factors),
        eps_(factors_.eps),
        layers_(parts.layers, parts.layers + shape_.layers),
        outer_(parts.outer),
        experts_(shape_.num_experts, shape_.experts_per_token, shape_.renormalises != 0,
                 shape_.routes_input != 0) {
    H_ = shape_.hidden, I_ = shape_.inner, D_ = shape_.D, V_ = shape_.vocab;
    Hq_ = shape_.Hq, Hk_ = shape_.Hk, E_inner_ = shape_.expert_inner;
    X_ = shape_.is_draft ? 2 * H_ : H_;
    h_stride_ = round_up(H_, kLanes);
    // A line more than a multiple of 2 KB: rows of one tile must not fall into the same sets of the
    // L1 cache.
    x_stride_ = round_up(std::max(X_, Hq_ * D_), 32) + 32;
    act_stride_ = round_up(I_, 32) + 32, expert_stride_ = round_up(E_inner_, 32) + 32;
    in_stride_ =
        round_up(std::max((Hq_ + 2 * Hk_) * D_, shape_.conv_kernel > 0 ? 3 * H_ : 0), kLanes);
    query_stride_ = round_up(D_, 32);
    for (const Layer& layer : layers_) {
      if (std::none_of(visible_.begin(), visible_.end(),
                       [&](const Visible& one) { return is_of(one, layer); }))
        visible_.emplace_back(layer.window, layer.chunk);
      adds_later_ |= layer.out_norm != nullptr || layer.experts != nullptr;
    }
    by_amx_ = A::is_bf16 && has_amx();
#ifdef __AMX_BF16__
    if (by_amx_) tile_queries_ = kAmxQueries;
#endif
  }

  // Buffers

  void reserve(int M, int team) {
    if (M <= rows_ && team <= team_) return;
    const size_t rows = std::max(M, rows_);
    team = std::max(team, team_);
    rows_ = team_ = 0;  // until all buffers are there
    h_.reserve(rows * h_stride_);
    x_.reserve(rows * x_stride_);
    own_x_.reserve(team * kOwnNorms * x_stride_);
    in_.reserve(rows * in_stride_);
    if (adds_later_) later_.reserve(rows * h_stride_);
    queries_.reserve(rows * Hq_ * query_stride_);
    mixed_.reserve(rows * x_stride_);
    const size_t mlp_rows = rows * std::max<size_t>(1, shape_.experts_per_token);
    act_.reserve(std::max(rows * act_stride_, mlp_rows * expert_stride_));
    if (shape_.num_experts > 0) experts_.reserve(rows, x_stride_, h_stride_);
    if (has_quantised()) {
      blocks_.reserve(mlp_rows * row_blocks() +
                      kAmxRows);  // a tile may read rows that are not used
      own_blocks_.reserve(team * kOwnNorms * row_blocks() + kAmxRows);
    }
    sums_.reserve(size_t(team) * rows * kPanelColumns);
#ifdef __AMX_BF16__
    packed_ = std::make_unique<PackedPrefix[]>(team);
#endif
    rows_ = static_cast<int>(rows), team_ = team;
  }

  bool plan(const RowsView& rows) {
    const int group = Hq_ / Hk_, a_tile = std::max(1, tile_queries_ / group);
    int longest = 0;
    for (Visible& visible : visible_) {
      if (!visible.plan(rows, a_tile, by_amx_ ? a_tile : kMaxApart)) return false;
      longest = std::max(longest, visible.longest);
    }
    scores_stride_ = round_up(longest + 64, 1024) + 16;
    scores_.reserve(size_t(team_) * tile_queries_ * scores_stride_);
    return true;
  }

  int check(const RowsView& rows) const {
    for (int m = 0; m < rows.M; ++m) {
      if (rows.token[m] < 0 || rows.token[m] >= shape_.embed_rows) return kBadToken;
      if (rows.position[m] < 0 || rows.position[m] >= positions_) return kBadPosition;
    }
    return kDone;
  }

  // Of the widest product's row.
  size_t row_blocks() const {
    return std::max({X_, Hq_ * D_, I_, E_inner_, shape_.is_draft ? 3 * H_ : 0}) / kBlockInputs;
  }

  bool has_quantised() const {
    const auto is = [](const Product* one) { return one != nullptr && one->is_quantised; };
    const auto any = [&](const Layer& one) {
      return is(one.in) || is(one.out) || is(one.gate_up) || is(one.down) || is(one.router) ||
             (one.experts != nullptr &&
              std::any_of(one.experts, one.experts + 2 * shape_.num_experts, is));
    };
    return is(outer_.fc) || is(outer_.head) || std::any_of(layers_.begin(), layers_.end(), any);
  }

  static bool is_of(const Visible& one, const Layer& layer) {
    return one.window == layer.window && one.chunk == layer.chunk;
  }
  const Visible& seen_by(const Layer& layer) const {
    return *std::find_if(visible_.begin(), visible_.end(),
                         [&](const Visible& one) { return is_of(one, layer); });
  }

  float* sums(int t) const { return sums_.get() + size_t(t) * rows_ * kPanelColumns; }
  static void sync() { Pool::shared().barrier(); }

  // Rows

  void embed(int64_t token, float* to) const {
    const Vec size = splat(factors_.embed);
    const int64_t kind = shape_.embed_kind;
    if (kind != kEmbedFp32 && kind != kEmbedHalf && kind != kEmbedBf16) {
      const Format format = static_cast<Format>(kind);
      dequantise_row(format,
                     static_cast<const uint8_t*>(outer_.embed) + token * row_bytes(format, H_), H_,
                     to);
      for (int c = 0; c < H_; c += kLanes) store(to + c, size * load(to + c));
      return;
    }
    for (int c = 0; c < H_; c += kLanes) {
      const Lanes lanes = first_lanes(H_ - c);
      const size_t at = size_t(token) * H_ + c;
      const auto* halves = static_cast<const bf16*>(outer_.embed) + at;
      const Vec v = kind == kEmbedBf16 ? Bf16::load(halves, lanes)
                    : kind == kEmbedHalf
                        ? from_half_precision(load_halves(halves, lanes))
                        : Fp32::load(static_cast<const float*>(outer_.embed) + at, lanes);
      store(to + c, size * v);
    }
  }

  // A row's norm, of H numbers; null is none.
  template <class Out>
  void norm_row(const float* from, const float* weight, Out* to) const {
    normalise(from, weight, H_, eps_, [&](int c, Lanes lanes, Vec v) {
      if constexpr (std::is_same_v<Out, float>)
        store(to + c, lanes, v);
      else
        A::store(to + c, lanes, v);
    });
  }

  // The norm of M rows of h (of those that `which` names) for a product: few rows every thread does
  // by itself, more they share.
  const T* normed(int t, int T_, int M, const float* weight, const int64_t* which) {
    const bool own = M <= kOwnNorms;
    T* x = own ? own_x_.get() + t * kOwnNorms * x_stride_ : x_.get();
    for (int m = own ? 0 : M * t / T_; m < (own ? M : M * (t + 1) / T_); ++m) {
      norm_row(h_.get() + (which == nullptr ? m : which[m]) * h_stride_, weight, x + m * x_stride_);
    }
    if (!own) sync();
    return x;
  }

  // Thread t's part of x [M, K] times the weights; put and next as of `multiply`. Of few rows every
  // thread quantises all by itself; of more, they are kept from row `first` on.
  template <class Put>
  void product(const Product& weights, const Product* next, const T* x, size_t stride, int M, int t,
               int T_, Put&& put, size_t first = 0) {
    if (!weights.is_quantised)
      return multiply<A>(static_cast<const Linear&>(weights), next, x, stride, M, t, T_, sums(t),
                         put);
    const bool own = M <= kOwnNorms;
    const RowBlocks rows{own ? own_blocks_.get() + t * kOwnNorms * row_blocks()
                             : blocks_.get() + first * row_blocks(),
                         weights.K / kBlockInputs, M};
    for (int m = own ? 0 : M * t / T_; m < (own ? M : M * (t + 1) / T_); ++m)
      quantise_row<A>(x + m * stride, rows, m);
    if (!own) sync();
    multiply_quantised(static_cast<const QuantisedProduct&>(weights), next, rows, t, T_, sums(t),
                       put);
  }

  // A product whose outputs are kept as they are, [M, stride].
  void put_product(int t, int T_, const Product& weights, const Product* next, const T* x,
                   size_t x_stride, int M, float* to, size_t stride, size_t first = 0) {
    product(
        weights, next, x, x_stride, M, t, T_,
        [&](const Panel& panel, const float* out) {
          for (int m = 0; m < M; ++m)
            for (int w = 0; w < panel.width; ++w)
              store(to + m * stride + (panel.first + w) * kLanes,
                    load(out + m * kPanelColumns + w * kLanes));
        },
        first);
  }

  // Gate and up of an MLP, joined by its activation, to [M, stride].
  void put_gated(int t, int T_, const Product& weights, const Product* next, const T* x, int M,
                 T* to, size_t stride, size_t first = 0) {
    with_activation(shape_.activation, [&](auto activation) {
      product(
          weights, next, x, x_stride_, M, t, T_,
          [&](const Panel& panel, const float* out) {
            for (int m = 0; m < M; ++m)
              for (int w = 0; w < panel.width; w += 2) {
                const float* at = out + m * kPanelColumns + w * kLanes;
                A::store(to + m * stride + (panel.first + w) / 2 * kLanes,
                         activation.of(load(at), load(at + kLanes)));
              }
          },
          first);
    });
  }

  // Adds a product's outputs to h_, or their norm where it has a weight. tap(m, column, lanes,
  // values) sees what h_ becomes.
  template <class Tap>
  void add_product(int t, int T_, const Product& weights, const Product* next, const float* norm,
                   const T* x, size_t stride, int M, Tap&& tap) {
    if (norm != nullptr) {
      put_product(t, T_, weights, next, x, stride, M, later_.get(), h_stride_);
      sync();
      for (int m = M * t / T_; m < M * (t + 1) / T_; ++m)
        add_normed(m, later_.get() + m * h_stride_, norm, tap);
      return;
    }
    product(weights, next, x, stride, M, t, T_, [&](const Panel& panel, const float* out) {
      for (int m = 0; m < M; ++m)
        for (int w = 0; w < panel.width; ++w) {
          const int c = (panel.first + w) * kLanes;
          const float* at = out + m * kPanelColumns + w * kLanes;
          tap(m, c, first_lanes(H_ - c), add_to_h(m, c, load(at)));
        }
    });
  }

  template <class Tap>
  void add_normed(int m, const float* x, const float* norm, Tap&& tap) {
    normalise(x, norm, H_, eps_,
              [&](int c, Lanes lanes, Vec v) { tap(m, c, lanes, add_to_h(m, c, v)); });
  }

  INLINE Vec add_to_h(int m, int c, Vec v) {
    float* to = h_.get() + m * h_stride_ + c;
    const Vec sum = fma(v, splat(factors_.residual), load(to));
    store(to, sum);
    return sum;
  }

  // One layer of the M rows, after their input x: adds to h_. next: the product after it; tap as of
  // add_product.
  template <class Tap>
  void layer(int t, int T_, const Layer& layer, const Product* next, const RowsView& rows,
             const T* x, T* cache, Tap&& tap) {
    const int M = rows.M;
    project(t, T_, layer, layer.out, x, M);
    if (layer.taps != nullptr)
      convolve(t, T_, layer, rows, cache);
    else
      attention(t, T_, layer, rows, cache);
    sync();
    add_product(t, T_, *layer.out, layer.gate_up == nullptr ? layer.router : layer.gate_up,
                layer.out_norm, mixed_.get(), x_stride_, M, [](int, int, Lanes, Vec) {});
    sync();
    x = normed(t, T_, M, layer.post_norm, nullptr);
    if (layer.experts != nullptr) return mixture(t, T_, layer, next, x, M, tap);
    put_gated(t, T_, *layer.gate_up, layer.down, x, M, act_.get(), act_stride_);
    sync();
    add_product(t, T_, *layer.down, next, layer.mlp_out_norm, act_.get(), act_stride_, M, tap);
  }

  // What attention or a convolution takes of the M rows, to in_.
  void project(int t, int T_, const Layer& layer, const Product* next, const T* x, int M) {
    put_product(t, T_, *layer.in, next, x, x_stride_, M, in_.get(), in_stride_);
    sync();
  }

  // A short convolution: C * (taps over the B * x of the row's path, its own last). The cache keeps
  // these; before a sequence there are zeros. A thread has its channels of all rows.
  void convolve(int t, int T_, const Layer& layer, const RowsView& rows, T* cache) {
    const Visible& visible = seen_by(layer);
    const T* path[kMaxKernel];
    const int vectors = (H_ + kLanes - 1) / kLanes, kernel = shape_.conv_kernel,
              first = vectors * t / T_ * kLanes,
              end = std::min(H_, vectors * (t + 1) / T_ * kLanes);
    const auto kept = [&](int64_t slot) { return cache + slot * shape_.slot_width; };
    for (int m = 0; m < rows.M; ++m)
      for (int c = first; c < end; c += kLanes) {
        const Lanes lanes = first_lanes(H_ - c);
        const float* from = in_.get() + m * in_stride_ + c;
        A::store(kept(rows.slot[m]) + c, lanes, load(from, lanes) * load(from + 2 * H_, lanes));
      }
    for (int m = 0; m < rows.M; ++m) {
      const int count = visible.count(m), steps = std::min(kernel, count);
      for (int i = 1; i <= steps; ++i) path[i - 1] = kept(visible.column(m, count - i));
      for (int c = first; c < end; c += kLanes) {
        const Lanes lanes = first_lanes(H_ - c);
        Vec sum = layer.taps_bias == nullptr ? Vec{} : load(layer.taps_bias + c, lanes);
        for (int i = steps; i > 0; --i)
          sum = fma(A::load(path[i - 1] + c, lanes),
                    load(layer.taps + (kernel - i) * H_ + c, lanes), sum);
        const Vec gate = load(in_.get() + m * in_stride_ + H_ + c, lanes);
        A::store(mixed_.get() + m * x_stride_ + c, lanes, gate * sum);
      }
    }
  }

  // As the MLP of `layer`, of a mixture: each expert's rows together, and a row's sum over its
  // experts, added to what the MLP of all rows gives where there is one.
  template <class Tap>
  void mixture(int t, int T_, const Layer& layer, const Product* next, const T* x, int M,
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
    const int all = M * shape_.experts_per_token, groups = experts_.num_groups();
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
      put_gated(t, T_, *layer.experts[2 * expert], after, experts_.x.get() + start * x_stride_,
                count, act_.get() + start * expert_stride_, expert_stride_, start);
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

  AttentionView<A> view(const Layer& layer, const T* cache) const {
    return {cache,        queries_.get(),
            mixed_.get(), query_stride_,
            x_stride_,    size_t(shape_.slot_width),
            Hq_,          Hk_,
            D_,           {factors_.score, factors_.softcap, layer.sinks}};
  }

  // The norm of a head, its rotation at a row's position, and its size: times `factor`. inverse: of
  // the norm.
  INLINE void turn(const float* x, const float* norm, float inverse, const Layer& layer,
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
  void place(const Layer& layer, const RowsView& rows, T* cache, int m, int g) {
    const int group = Hq_ / Hk_;
    const int64_t position = rows.position[m];
    const float *queries = in_.get() + m * in_stride_, *keys = queries + Hq_ * D_,
                *value = keys + (Hk_ + g) * D_;
    T* to = cache + rows.slot[m] * shape_.slot_width + g * D_;
    // A head's norm is of its own numbers, or of all heads' together.
    const bool is_wide = shape_.wide_head_norms != 0;
    const auto place_heads = [&](const float* heads, int count, int first, int end,
                                 const float* norm, float factor, T* to, size_t stride) {
      float inverse = is_wide ? inverse_size(heads, count * D_, eps_) : 0;
      for (int head = first; head < end; ++head, to += stride) {
        const float* x = heads + head * D_;
        if (norm != nullptr && !is_wide) inverse = inverse_size(x, D_, eps_);
        turn(x, is_wide ? norm + head * D_ : norm, inverse, layer, position, factor, to);
      }
    };
    place_heads(queries, Hq_, g * group, (g + 1) * group, layer.q_norm,
                layer.scales == 0 || query_scales_ == nullptr ? 1.0f : query_scales_[position],
                queries_.get() + (m * Hq_ + g * group) * query_stride_, query_stride_);
    place_heads(keys, Hk_, g, g + 1, layer.k_norm, 1.0f, to, 0);
    for (int d = 0; d < D_; d += kLanes)
      A::store(to + size_t(Hk_) * D_ + d, first_lanes(D_ - d),
               load(value + d, first_lanes(D_ - d)));
  }

  void attention(int t, int T_, const Layer& layer, const RowsView& rows, T* cache) {
#ifdef __AMX_BF16__
    if constexpr (A::is_bf16)
      if (by_amx_) return attention_by_amx(t, T_, layer, rows, cache);
#endif
    const Visible& visible = seen_by(layer);
    const int M = rows.M, group = Hq_ / Hk_, tiles = visible.tiles.size();
    for (int i = t; i < M * Hk_; i += T_) place(layer, rows, cache, i / Hk_, i % Hk_);
    // One row: the thread that wrote a head's key is the one that reads it.
    if (M > 1) sync();
    const AttentionView<A> at = view(layer, cache);
    float* scratch = scores_.get() + size_t(t) * kTileQueries * scores_stride_;
    for (int i = t; i < tiles * Hk_; i += T_) {
      const int next = (i + T_) / Hk_;
      Later<T> later{cache + (i + T_) % Hk_ * D_, nullptr, 0};
      if (next < tiles && visible.begins_prefix(next)) {
        const int m = visible.tiles[next].first;
        later.slots = visible.prefix(m), later.count = visible.prefix_count(m);
      }
      for (int head = 0; head < group; head += kTileQueries)
        attend(at, visible, visible.tiles[i / Hk_], i % Hk_, i % Hk_ * group + head,
               std::min(kTileQueries, group - head), scratch, scores_stride_,
               head == 0 ? later : Later<T>{});
    }
  }

#ifdef __AMX_BF16__
  // The same by tiles. Tiles of one prefix stand together for each key head, so that a thread packs
  // its keys and values once.
  void attention_by_amx(int t, int T_, const Layer& layer, const RowsView& rows, T* cache) {
    const Visible& visible = seen_by(layer);
    const int M = rows.M, group = Hq_ / Hk_, tiles = visible.tiles.size(), all = tiles * Hk_;
    // One row: the thread that wrote a head's key is the one that reads it.
    for (int i = M * Hk_ * t / T_; i < M * Hk_ * (t + 1) / T_; ++i)
      place(layer, rows, cache, i / Hk_, i % Hk_);
    if (M > 1) sync();
    const AttentionView<Bf16> at = view(layer, cache);
    float* scratch = scores_.get() + size_t(t) * tile_queries_ * scores_stride_;
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
              later = {cache + (same ? g + 1 : 0) * D_, visible.prefix(m), visible.prefix_count(m)};
            }
          }
          for (int head = 0; head < group; head += kAmxQueries)
            attend_by_amx(at, visible, visible.tiles[i], g, g * group + head,
                          std::min(kAmxQueries, group - head), scratch, scores_stride_, kept,
                          end - first > 1 || D_ > kAmxChannels || group > kAmxQueries,
                          head == 0 ? later : Later<bf16>{});
        }
      first = end;
    }
  }
#endif

  const Shape shape_;
  const Factors factors_;
  const float eps_;
  const std::vector<Layer> layers_;
  const Outer outer_;
  int H_, X_, I_, E_inner_, Hq_, Hk_, D_, V_;
  size_t h_stride_, x_stride_, act_stride_, expert_stride_, in_stride_, query_stride_;
  bool by_amx_ = false, adds_later_ = false;
  int tile_queries_ = kTileQueries;

  // How many rows and threads the buffers have room for.
  int rows_ = 0, team_ = 0;
  Buffer<float> h_;                       // [M, h_stride]: the residual stream
  Buffer<T> x_, own_x_;                   // a product's input: of all rows, of few for each thread
  Buffer<RowBlock> blocks_, own_blocks_;  // the same, quantised
  Buffer<float> sums_;                    // of each thread: a panel's outputs
  Buffer<float> in_;                      // queries, keys and values, or what a convolution takes
  Buffer<T> queries_, mixed_;  // turned queries, and what attention or a convolution gives
  Buffer<float> scores_;       // of each thread, [tile_queries, scores_stride]
  size_t scores_stride_ = 0;
#ifdef __AMX_BF16__
  std::unique_ptr<PackedPrefix[]> packed_;  // of each thread
#endif
  std::vector<Visible> visible_;  // of each window and chunk
  Buffer<T> act_;                 // an MLP's inner state
  Buffer<float> later_;           // what is normed or summed before it is added to h
  Experts<T> experts_;
};

}  // namespace
