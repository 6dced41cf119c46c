// A decoder on the CPU, as `eyas/model/architecture.py` describes it: what targets and drafts
// share. target.h has a target's forward, draft.h a draft head's extend, step and growth of a tree;
// layer.h what a layer computes.
//
// The whole of a forward is one run of the pool's threads with about five barriers a layer. The
// residual stream is fp32; activations are rounded to A (bf16 or fp32) where a product or the cache
// takes them.
//
// Letters: M rows, R rows with logits, B requests, H hidden, X input width of q, k, v (2 H for a
// draft), I intermediate, D head dimension, E experts, V vocabulary (of the head's outputs), k
// candidates of a node, t of T threads.
#pragma once

#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>
#include <string>

#include "amx_attention.h"
#include "attention.h"
#include "draw.h"
#include "experts.h"
#include "linear.h"
#include "quantised.h"
#include "round.h"

namespace {  // of one translation unit: decoder.cpp

enum Status : int {
  kDone = 0,
  kBadToken = 1,
  kBadPosition = 2,
  kBadSlot = 3,
  kBadRow = 4,
  kBadLogits = 5,
  kNoMemory = 6
};

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
constexpr int kRefined = 128;  // logits of a row that a coarse head's are computed anew of
constexpr int kMaxTopk = 16, kTopChunk = 128, kOwnNorms = 8, kMaxKernel = 16;
constexpr float kCutOff = -40;  // added to logits that min_p cuts

// The best of a stretch of logits, best first (ties: smaller index), and its sum of exponentials
// relative to its maximum.
struct Top {
  float most, sum, logits[kMaxTopk];
  int ids[kMaxTopk];

  void clear() {
    for (int i = 0; i < kMaxTopk; ++i) logits[i] = -INFINITY, ids[i] = -1;
  }
  void insert(int k, float logit, int id) {
    if (!(logit > logits[k - 1])) return;
    int at = k - 1;
    for (; at > 0 && logits[at - 1] < logit; --at)
      logits[at] = logits[at - 1], ids[at] = ids[at - 1];
    logits[at] = logit, ids[at] = id;
  }
};

// What a draft knows of the draws that it guesses: each request draws with `draws`, or draws[b] is
// null, and the rows of a request stand together. The token is the answer's num_drawn + place.
struct Guess {
  const DrawState* const* draws;
  int rows_each;
  int64_t place;

  const DrawState* of(int row) const { return draws[row / rows_each]; }
};

class Decoder {
 public:
  virtual ~Decoder() = default;
  // logits[r]: where those of row r go, V of them, or null; null for none of any row
  virtual int forward(const RowsView& rows, void* kv, const Tapped& tapped,
                      const int64_t* logits_of, int64_t R, float* const* logits, int64_t* best,
                      void* last_hidden) = 0;
  virtual int64_t vocabulary() const = 0;
  virtual int verify(const Lines& lines, const Chosen& chosen, void* kv, const Tapped& tapped,
                     const Draws& draws, int64_t places, int64_t* emitted, int64_t* counts) = 0;
  virtual int extend(const RowsView& rows, void* kv, const void* aux, float* h) = 0;
  virtual int step(const RowsView& rows, void* kv, const float* h_in, float* h) = 0;
  virtual int proposals(const float* h, const Guess& guess, int64_t R, int64_t k, int64_t* ids,
                        float* log_probs) = 0;
  virtual int propose(const Growth& growth) = 0;  // levels drafted, or -status
  virtual int grow(const Lines& lines, const int64_t* starts, const int64_t* tokens,
                   const void* features, Growth& growth) = 0;

  // Cosines and sines of each rope, [length, rotary_dims / 2]; what a query is multiplied by at
  // each position, or null.
  void set_positions(const float* const* tables, int64_t ropes, const float* query_scales,
                     int64_t length) {
    tables_.assign(tables, tables + 2 * ropes);
    query_scales_ = query_scales, positions_ = length;
  }
  void set_threads(int threads) {
    threads_ = std::max(1, std::min(threads, Pool::kMaxThreads - 1));
  }
  int threads() const { return threads_; }

 protected:
  std::vector<const float*> tables_;
  const float* query_scales_ = nullptr;
  int64_t positions_ = 0;
  int threads_ = 1;
};

template <class A>
class Model final : public Decoder {
  using T = typename A::T;

 public:
  Model(const Shape& shape, const Factors& factors, std::vector<Layer> layers, const Outer& outer)
      : shape_(shape),
        factors_(factors),
        eps_(factors.eps),
        layers_(std::move(layers)),
        outer_(outer),
        experts_(shape.num_experts, shape.experts_per_token, shape.renormalises != 0,
                 shape.routes_input != 0) {
    H_ = static_cast<int>(shape.hidden), I_ = static_cast<int>(shape.inner),
    D_ = static_cast<int>(shape.D);
    Hq_ = static_cast<int>(shape.Hq), Hk_ = static_cast<int>(shape.Hk),
    V_ = static_cast<int>(shape.vocab);
    X_ = shape.is_draft ? 2 * H_ : H_, E_inner_ = static_cast<int>(shape.expert_inner);
    h_stride_ = round_up(H_, kLanes);
    // A line more than a multiple of 2 KB: rows of one tile must not fall into the same sets of the
    // L1 cache.
    x_stride_ = round_up(std::max(X_, Hq_ * D_), 32) + 32;
    act_stride_ = round_up(I_, 32) + 32, expert_stride_ = round_up(E_inner_, 32) + 32;
    in_stride_ =
        round_up(std::max((Hq_ + 2 * Hk_) * D_, shape.conv_kernel > 0 ? 3 * H_ : 0), kLanes);
    query_stride_ = round_up(D_, 32);
    logits_stride_ = round_up(V_, kLanes);
    set_threads(static_cast<int>(shape.threads));
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

  int64_t vocabulary() const override { return V_; }

  int forward(const RowsView& rows, void* kv, const Tapped& tapped, const int64_t* logits_of,
              int64_t R, float* const* logits, int64_t* best, void* last_hidden) override;

  int verify(const Lines& lines, const Chosen& chosen, void* kv, const Tapped& tapped,
             const Draws& draws, int64_t places, int64_t* emitted, int64_t* counts) override;

  int extend(const RowsView& rows, void* kv, const void* aux, float* h) override;

  int step(const RowsView& rows, void* kv, const float* h_in, float* h) override;

  int proposals(const float* h, const Guess& guess, int64_t R, int64_t k, int64_t* ids,
                float* log_probs) override;

  int propose(const Growth& growth) override;

  int grow(const Lines& lines, const int64_t* starts, const int64_t* tokens, const void* features,
           Growth& growth) override;

 private:
  // Stores a line past the caches, which the weights need: of a tree's rows few are ever read.
  static INLINE void put_away(float* to, Lanes lanes, Vec v) {
    if (is_all(lanes) && reinterpret_cast<uintptr_t>(to) % 64 == 0) {
      stream(to, v);
    } else {
      store(to, lanes, v);
    }
  }

  void finish_logits(float* out, int n, int width) const;

  int place_logits(int64_t B, const Draws& draws, int M);

  bool walk(int64_t b, const DrawState* state, TokenSampler& sampler);

  void move(const RowsView& rows, int64_t from, int64_t to, T* kv, const Tapped& tapped) const;

  // Buffers

  void reserve(int M, int team);

  bool plan(const RowsView& rows);

  int check(const RowsView& rows) const;

  // Of the widest product's row.
  size_t row_blocks() const {
    return std::max({X_, Hq_ * D_, I_, E_inner_, shape_.is_draft ? 3 * H_ : 0}) / kBlockInputs;
  }

  bool has_quantised() const;

  static bool is_of(const Visible& one, const Layer& layer) {
    return one.window == layer.window && one.chunk == layer.chunk;
  }
  const Visible& seen_by(const Layer& layer) const {
    return *std::find_if(visible_.begin(), visible_.end(),
                         [&](const Visible& one) { return is_of(one, layer); });
  }

  size_t feature_stride() const { return round_up(3 * H_, 32) + 32; }
  size_t wide_stride() const { return round_up(3 * H_, kLanes); }
  int top_chunks() const { return (V_ + kTopChunk - 1) / kTopChunk; }
  float* sums(int t) const { return sums_.get() + static_cast<size_t>(t) * rows_ * kPanelColumns; }
  static void sync() { Pool::shared().barrier(); }

  // Rows

  void embed(int64_t token, float* to) const;

  // The norm of M rows of h (of those that `which` names) for a product: few rows every thread does
  // by itself, more they share.
  const T* normed(int t, int T_, int M, const float* weight, const int64_t* which) {
    const bool own = M <= kOwnNorms;
    T* x = own ? own_x_.get() + static_cast<size_t>(t) * kOwnNorms * x_stride_ : x_;
    for (int m = own ? 0 : M * t / T_; m < (own ? M : M * (t + 1) / T_); ++m) {
      const float* from = h_ + (which == nullptr ? m : which[m]) * h_stride_;
      T* to = x + m * x_stride_;
      normalise(from, weight, H_, eps_,
                [&](int c, Lanes lanes, Vec v) { A::store(to + c, lanes, v); });
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
    const RowBlocks rows{own ? own_blocks_.get() + static_cast<size_t>(t) * kOwnNorms * row_blocks()
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
    float* to = h_ + m * h_stride_ + c;
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

  template <class Tap>
  void mixture(int t, int T_, const Layer& layer, const Product* next, const T* x, int M,
               Tap&& tap);

  void convolve(int t, int T_, const Layer& layer, const RowsView& rows, T* cache);

  AttentionView<A> view(const Layer& layer, const T* cache) const {
    return {cache,
            queries_.get(),
            mixed_.get(),
            static_cast<size_t>(query_stride_),
            static_cast<size_t>(x_stride_),
            static_cast<size_t>(shape_.slot_width),
            Hq_,
            Hk_,
            D_,
            {factors_.score, factors_.softcap, layer.sinks}};
  }

  void attention(int t, int T_, const Layer& layer, const RowsView& rows, T* cache);

#ifdef __AMX_BF16__
  void attention_by_amx(int t, int T_, const Layer& layer, const RowsView& rows, T* cache);
#endif

  void place(const Layer& layer, const RowsView& rows, T* cache, int m, int g);

  void turn(const float* x, const float* norm, float inverse, const Layer& layer, int64_t position,
            float factor, T* to) const;

  // The best logit of each row, lane by lane

  float* most(int t, int r) const {
    return most_.get() + (static_cast<size_t>(t) * rows_ + r) * kLanes;
  }
  int* most_ids(int t, int r) const {
    return most_ids_.get() + (static_cast<size_t>(t) * rows_ + r) * kLanes;
  }

  void clear_best(int t, int n) const;

  INLINE void raise_best(int t, int r, int c, Lanes lanes, Vec v) const {
    const Vec old = load(most(t, r));
    const Mask more = mask_of(lanes) & (v > old);
    store(most(t, r), select(more, v, old));
    store(most_ids(t, r), select(more, splat(c) + count_up<int>(), load(most_ids(t, r))));
  }

  int64_t best_of(int T_, int r) const;

  // The draft

  template <class Prepare>
  int draft(const RowsView& rows, void* kv, float* h, Prepare&& prepare);

  void draft_input(int t, int T_, const RowsView& rows);

  void draft_layer(int t, int T_, const RowsView& rows, T* cache) {
    layer(t, T_, layers_[0], outer_.head, rows, x_, cache, [](int, int, Lanes, Vec) {});
    sync();
  }

  void norm_output(int m);

  void draft_normed(int m, bool is_normed);

  void norm_features(const T* from, int m, int t);

  void best_tokens(int t, int T_, int n, const Guess& guess, int k, int64_t* ids, float* log_probs);

  void survey(int r, int chunk, int k);

  void best_of_chunk(int r, int chunk, int k);

  void refine(int t, int T_, int n);

  float exact_logit(const T* x, int id) const;

  void add_numbers(int first, int chunk, const Guess& guess);

  // The target's ids of 8 of the draft's tokens, those from `end` on any.
  Longs ids_from(int c, int end) const {
    if (target_ids == nullptr) return splat<int64_t>(c) + count_up<int64_t>();
    if (end - c >= 8) return load(target_ids + c);
    int64_t ids[8] = {};
    if (c < end) std::copy(target_ids + c, target_ids + end, ids);
    return load(ids);
  }

  const Shape shape_;
  const Factors factors_;
  const float eps_;
  const std::vector<Layer> layers_;
  const Outer outer_;
  int H_, X_, I_, E_inner_, Hq_, Hk_, D_, V_;
  int h_stride_, x_stride_, act_stride_, expert_stride_, in_stride_, query_stride_, logits_stride_;
  size_t scores_stride_ = 0;
  bool by_amx_ = false, adds_later_ = false;
  int tile_queries_ = kTileQueries;
#ifdef __AMX_BF16__
  std::unique_ptr<PackedPrefix[]> packed_;  // of each thread
#endif
  int rows_ = 0, team_ = 0;
  float *h_ = nullptr, *other_h_ = nullptr;
  T* x_ = nullptr;
  Buffer<float> h_buffer_, other_h_buffer_, in_, later_, sums_, scores_, most_, wide_, logits_;
  Buffer<T> x_buffer_, own_x_, queries_, mixed_, act_, features_;
  Buffer<RowBlock> blocks_, own_blocks_;
  Buffer<int> most_ids_;
  Buffer<Top> tops_;
  std::vector<const float*> sources_;
  std::vector<Visible> visible_;  // of each window and chunk
  Experts<T> experts_;
  TreeRows tree_rows_;
  EntryRows entry_rows_;
  std::vector<int64_t> best_, first_ids_;
  std::vector<std::vector<int>>
      paths_;  // of each request: the rows that its walk takes, and the tokens after them
  std::vector<std::vector<int64_t>> drawn_;
  std::vector<TokenSampler> samplers_;  // one a thread
  std::vector<float*> logits_of_;       // of each row of a verify: where its logits are, or null
  Buffer<float> drawn_logits_;
  std::vector<float> row_most_;
  std::vector<std::vector<float>> found_;  // of each thread: a row's best logits
  std::vector<T> gathered_;
  std::vector<float> outputs_, roots_h_, first_log_probs_;

 public:
  const int64_t* target_ids =
      nullptr;  // of a draft: the target's id of each draft token, or null for the same

 private:
  // A tree's growth: the frontier of level l, place j of request b is row b * width + j.
  struct Frontier {
    std::vector<int64_t> token, request, position, slot, prefix_len, seen, candidate;
    std::vector<float> score;
    std::vector<const float*> h;

    void resize(size_t n) {
      for (auto* v : {&token, &request, &position, &slot, &prefix_len, &seen, &candidate})
        v->resize(n);
      score.resize(n);
      h.resize(n);
    }
  };

  void first_frontier(const Growth& growth, size_t all);
  void add_candidates(const Growth& growth, int level, size_t all);
  void next_frontier(const Growth& growth, int level, size_t all);
  bool goes_on(const Growth& growth, int level) const;
  int place_frontier(const Growth& growth, int level, RowsView& rows);
  int64_t target_id(int64_t id) const { return target_ids == nullptr ? id : target_ids[id]; }

  Frontier frontier_, next_;
  std::vector<int64_t> drawn_ids_;
  std::vector<float> drawn_log_probs_;
};

template <class A>
void Model<A>::reserve(int M, int team) {
  if (M <= rows_ && team <= team_) return;
  const size_t rows = std::max(M, rows_);
  team = std::max(team, team_);
  rows_ = team_ = 0;  // until all buffers are there
  h_ = h_buffer_.reserve(rows * h_stride_);
  x_ = x_buffer_.reserve(rows * x_stride_);
  own_x_.reserve(static_cast<size_t>(team) * kOwnNorms * x_stride_);
  in_.reserve(rows * in_stride_);
  if (adds_later_) later_.reserve(rows * h_stride_);
  queries_.reserve(rows * Hq_ * query_stride_);
  mixed_.reserve(rows * x_stride_);
  const size_t mlp_rows = rows * std::max<size_t>(1, shape_.experts_per_token);
  act_.reserve(std::max(rows * act_stride_, mlp_rows * expert_stride_));
  if (shape_.num_experts > 0) experts_.reserve(rows, x_stride_, h_stride_);
  if (has_quantised()) {
    blocks_.reserve(mlp_rows * row_blocks() + kAmxRows);  // a tile may read rows that are not used
    own_blocks_.reserve(static_cast<size_t>(team) * kOwnNorms * row_blocks() + kAmxRows);
  }
  sums_.reserve(static_cast<size_t>(team) * rows * kPanelColumns);
#ifdef __AMX_BF16__
  packed_ = std::make_unique<PackedPrefix[]>(team);
#endif
  most_.reserve(static_cast<size_t>(team) * rows * kLanes);
  most_ids_.reserve(static_cast<size_t>(team) * rows * kLanes);
  if (shape_.is_draft) {
    other_h_ = other_h_buffer_.reserve(rows * h_stride_);
    features_.reserve(rows * feature_stride());
    wide_.reserve(team * wide_stride());
    logits_.reserve(rows * logits_stride_);
    tops_.reserve(rows * top_chunks());
    row_most_.resize(rows);
    found_.resize(team);
    for (std::vector<float>& one : found_) one.reserve(top_chunks() * kMaxTopk);
    sources_.resize(rows);
  }
  rows_ = static_cast<int>(rows), team_ = team;
}

template <class A>
bool Model<A>::plan(const RowsView& rows) {
  const int group = Hq_ / Hk_, a_tile = std::max(1, tile_queries_ / group);
  int longest = 0;
  for (Visible& visible : visible_) {
    if (!visible.plan(rows, a_tile, by_amx_ ? a_tile : kMaxApart)) return false;
    longest = std::max(longest, visible.longest);
  }
  scores_stride_ = round_up(longest + 64, 1024) + 16;
  scores_.reserve(static_cast<size_t>(team_) * tile_queries_ * scores_stride_);
  return true;
}

template <class A>
int Model<A>::check(const RowsView& rows) const {
  for (int m = 0; m < rows.M; ++m) {
    if (rows.token[m] < 0 || rows.token[m] >= shape_.embed_rows) return kBadToken;
    if (rows.position[m] < 0 || rows.position[m] >= positions_) return kBadPosition;
  }
  return kDone;
}

template <class A>
bool Model<A>::has_quantised() const {
  const auto is = [](const Product* one) { return one != nullptr && one->is_quantised; };
  const auto any = [&](const Layer& one) {
    return is(one.in) || is(one.out) || is(one.gate_up) || is(one.down) || is(one.router) ||
           (one.experts != nullptr &&
            std::any_of(one.experts, one.experts + 2 * shape_.num_experts, is));
  };
  if (shape_.is_draft && outer_.fc->is_quantised) return true;
  return outer_.head->is_quantised || std::any_of(layers_.begin(), layers_.end(), any);
}

template <class A>
void Model<A>::embed(int64_t token, float* to) const {
  const Vec size = splat(factors_.embed);
  const int64_t kind = shape_.embed_kind;
  if (kind != kEmbedFp32 && kind != kEmbedHalf && kind != kEmbedBf16) {
    const Format format = static_cast<Format>(kind);
    dequantise_row(
        format, static_cast<const uint8_t*>(outer_.embed) + token * row_bytes(format, H_), H_, to);
    for (int c = 0; c < H_; c += kLanes) store(to + c, size * load(to + c));
    return;
  }
  for (int c = 0; c < H_; c += kLanes) {
    const Lanes lanes = first_lanes(H_ - c);
    const size_t at = static_cast<size_t>(token) * H_ + c;
    const auto* halves = static_cast<const bf16*>(outer_.embed) + at;
    const Vec v = kind == kEmbedBf16 ? Bf16::load(halves, lanes)
                  : kind == kEmbedHalf
                      ? from_half_precision(load_halves(halves, lanes))
                      : Fp32::load(static_cast<const float*>(outer_.embed) + at, lanes);
    store(to + c, size * v);
  }
}

}  // namespace
