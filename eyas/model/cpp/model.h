// A Llama-family decoder on the CPU: what targets and drafts share. target.h has a target's
// forward, draft.h a draft head's extend, step and growth of a tree.
//
// The whole of a forward is one run of the pool's threads with about five barriers a layer. The
// residual stream is fp32; activations are rounded to A (bf16 or fp32) where a product or the cache
// takes them.
//
// Letters: M rows, R rows with logits, B requests, H hidden, X input width of q, k, v (2 H for a
// draft), I intermediate, D head dimension, V vocabulary (of the head's outputs), k candidates of a
// node, t of T threads.
#pragma once

#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>
#include <string>

#include "amx_attention.h"
#include "attention.h"
#include "draw.h"
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

struct Shape {
  int64_t layers, hidden, inner, Hq, Hk, D, vocab, embed_rows, embed_kind, is_draft;
  int64_t norm_before_residual, norm_output, threads, window;
};

// Norm weights; null where the model has none. Of a layer: input, post, q, k; of a draft also
// hidden.
struct Layer {
  const Product *qkv, *out, *gate_up, *down;
  const float *input_norm, *post_norm, *q_norm, *k_norm;
};

struct Outer {
  const float *final_norm, *hidden_norm, *features_norm, *feature_norms[3];
  const Product *head, *fc;
  const void* embed;
};

// What rows of embeddings are stored as; above these, ggml's formats.
constexpr int64_t kEmbedBf16 = 1;
constexpr int kMaxTopk = 16, kTopChunk = 512, kOwnNorms = 8;
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

struct Growth {
  int64_t B, num_draft_steps, k, width, P, page_size,
      num_slots;  // k candidates of a row, `width` rows of a request a step
  const int64_t *lens, *first_ids;
  const float *h, *first_log_probs;
  const int32_t* page_table;
  const double* thresholds;
  void* kv;
  const DrawState* const* draws;  // of each request, null where the best logit is the token
  int64_t* tokens;                // [B, all candidates]
  int32_t* parents;
  float* scores;
};

// Where a target's features go: rows of aux by row, or by slot.
struct Tapped {
  const int64_t* taps;  // 3 layers, or null
  void* aux;
  bool by_slot;
};

// How the requests of a round draw: null where the best logit is the token. logits [room, V]: of
// those that draw by_caller.
struct Draws {
  const DrawState* const* of;
  float* logits;
  int64_t room;
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

  void set_rope(const float* cos, const float* sin, int64_t length) {
    cos_ = cos, sin_ = sin, positions_ = length;
  }
  void set_threads(int threads) {
    threads_ = std::max(1, std::min(threads, Pool::kMaxThreads - 1));
  }
  int threads() const { return threads_; }

 protected:
  const float *cos_ = nullptr, *sin_ = nullptr;  // [positions, D / 2]
  int64_t positions_ = 0;
  int threads_ = 1;
};

// out = x * weight / sqrt(mean(x^2) + eps) of n channels; the same bits wherever it is called from.
template <class Store>
INLINE void normalise(const float* x, const float* weight, int n, float eps, Store&& store) {
  Vec squares[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
  int i = 0;
  for (; i + 2 * kLanes <= n; i += 2 * kLanes) {
    const Vec a = _mm512_loadu_ps(x + i), b = _mm512_loadu_ps(x + i + kLanes);
    squares[0] = _mm512_fmadd_ps(a, a, squares[0]);
    squares[1] = _mm512_fmadd_ps(b, b, squares[1]);
  }
  for (; i < n; i += kLanes) {
    const Vec a = _mm512_maskz_loadu_ps(first_lanes(n - i), x + i);
    squares[0] = _mm512_fmadd_ps(a, a, squares[0]);
  }
  const float mean =
      _mm512_reduce_add_ps(_mm512_add_ps(squares[0], squares[1])) / static_cast<float>(n);
  const Vec factor = _mm512_set1_ps(1.0f / std::sqrt(mean + eps));
  for (i = 0; i < n; i += kLanes) {
    const __mmask16 lanes = first_lanes(n - i);
    const Vec scaled = _mm512_mul_ps(_mm512_maskz_loadu_ps(lanes, x + i), factor);
    store(i, lanes, _mm512_mul_ps(scaled, _mm512_maskz_loadu_ps(lanes, weight + i)));
  }
}

template <class A>
class Model final : public Decoder {
  using T = typename A::T;

 public:
  Model(const Shape& shape, float eps, std::vector<Layer> layers, const Outer& outer)
      : shape_(shape), eps_(eps), layers_(std::move(layers)), outer_(outer) {
    H_ = static_cast<int>(shape.hidden), I_ = static_cast<int>(shape.inner),
    D_ = static_cast<int>(shape.D);
    Hq_ = static_cast<int>(shape.Hq), Hk_ = static_cast<int>(shape.Hk),
    V_ = static_cast<int>(shape.vocab);
    X_ = shape.is_draft ? 2 * H_ : H_;
    h_stride_ = round_up(H_, kLanes);
    // A line more than a multiple of 2 KB: rows of one tile must not fall into the same sets of the
    // L1 cache.
    x_stride_ = round_up(std::max(X_, Hq_ * D_), 32) + 32;
    act_stride_ = round_up(I_, 32) + 32;
    qkv_stride_ = round_up((Hq_ + 2 * Hk_) * D_, kLanes);
    query_stride_ = round_up(D_, 32);
    logits_stride_ = round_up(V_, kLanes);
    set_threads(static_cast<int>(shape.threads));
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
  static INLINE void put_away(float* to, __mmask16 lanes, Vec v) {
    if (lanes == 0xffff && reinterpret_cast<uintptr_t>(to) % 64 == 0) {
      _mm512_stream_ps(to, v);
    } else {
      _mm512_mask_storeu_ps(to, lanes, v);
    }
  }

  int place_logits(int64_t B, const Draws& draws, int M);

  bool walk(int64_t b, const DrawState* state, TokenSampler& sampler);

  void move(const RowsView& rows, int64_t from, int64_t to, T* kv, const Tapped& tapped) const;

  // Buffers

  void reserve(int M, int team);

  bool plan(const RowsView& rows);

  int check(const RowsView& rows) const;

  // Of the widest product's row.
  size_t row_blocks() const {
    return std::max({X_, Hq_ * D_, I_, shape_.is_draft ? 3 * H_ : 0}) / kBlockInputs;
  }

  bool has_quantised() const;

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
                [&](int c, __mmask16 lanes, Vec v) { A::store(to + c, lanes, v); });
    }
    if (!own) sync();
    return x;
  }

  // Thread t's part of x [M, K] times the weights; put and next as of `multiply`. Of few rows every
  // thread quantises all by itself.
  template <class Put>
  void product(const Product& weights, const Product* next, const T* x, size_t stride, int M, int t,
               int T_, Put&& put) {
    if (!weights.is_quantised)
      return multiply<A>(static_cast<const Linear&>(weights), next, x, stride, M, t, T_, sums(t),
                         put);
    const bool own = M <= kOwnNorms;
    const RowBlocks rows{
        own ? own_blocks_.get() + static_cast<size_t>(t) * kOwnNorms * row_blocks() : blocks_.get(),
        weights.K / kBlockInputs, M};
    for (int m = own ? 0 : M * t / T_; m < (own ? M : M * (t + 1) / T_); ++m)
      quantise_row<A>(x + m * stride, rows, m);
    if (!own) sync();
    multiply_quantised(static_cast<const QuantisedProduct&>(weights), next, rows, t, T_, sums(t),
                       put);
  }

  // One layer of the M rows, after their input x: adds to h_. next: the product after it. tap(m,
  // column, lanes, values) sees what is put out.
  template <class Tap>
  void layer(int t, int T_, const Layer& layer, const Product* next, const RowsView& rows,
             const T* x, T* cache, Tap&& tap) {
    const int M = rows.M;
    project(t, T_, layer, layer.out, x, M);
    attention(t, T_, layer, rows, cache);
    sync();
    product(*layer.out, layer.gate_up, mixed_.get(), x_stride_, M, t, T_,
            [&](const Panel& panel, const float* out) {
              for (int m = 0; m < M; ++m)
                for (int w = 0; w < panel.width; ++w)
                  add_to_h(m, (panel.first + w) * kLanes, out + m * kPanelColumns + w * kLanes);
            });
    sync();
    x = normed(t, T_, M, layer.post_norm, nullptr);
    product(*layer.gate_up, layer.down, x, x_stride_, M, t, T_,
            [&](const Panel& panel, const float* out) {
              for (int m = 0; m < M; ++m)
                for (int w = 0; w < panel.width; w += 2) {
                  const float* at = out + m * kPanelColumns + w * kLanes;
                  A::store(act_.get() + m * act_stride_ + (panel.first + w) / 2 * kLanes,
                           silu_times(_mm512_loadu_ps(at), _mm512_loadu_ps(at + kLanes)));
                }
            });
    sync();
    product(*layer.down, next, act_.get(), act_stride_, M, t, T_,
            [&](const Panel& panel, const float* out) {
              for (int m = 0; m < M; ++m)
                for (int w = 0; w < panel.width; ++w) {
                  const int c = (panel.first + w) * kLanes;
                  tap(m, c, first_lanes(H_ - c),
                      add_to_h(m, c, out + m * kPanelColumns + w * kLanes));
                }
            });
  }

  // Queries, keys and values of the M rows, to qkv_.
  void project(int t, int T_, const Layer& layer, const Product* next, const T* x, int M) {
    product(*layer.qkv, next, x, x_stride_, M, t, T_, [&](const Panel& panel, const float* out) {
      for (int m = 0; m < M; ++m)
        for (int w = 0; w < panel.width; ++w)
          _mm512_storeu_ps(qkv_.get() + m * qkv_stride_ + (panel.first + w) * kLanes,
                           _mm512_loadu_ps(out + m * kPanelColumns + w * kLanes));
    });
    sync();
  }

  INLINE Vec add_to_h(int m, int c, const float* out) {
    float* to = h_ + m * h_stride_ + c;
    const Vec sum = _mm512_add_ps(_mm512_loadu_ps(to), _mm512_loadu_ps(out));
    _mm512_storeu_ps(to, sum);
    return sum;
  }

  void attention(int t, int T_, const Layer& layer, const RowsView& rows, T* cache);

#ifdef __AMX_BF16__
  // The same by tiles. Tiles of one prefix stand together for each key head, so that a thread packs
  // its keys and values once.
  void attention_by_amx(int t, int T_, const Layer& layer, const RowsView& rows, T* cache) {
    const int M = rows.M, group = Hq_ / Hk_, tiles = static_cast<int>(visible_.tiles.size()),
              all = tiles * Hk_;
    // One row: the thread that wrote a head's key is the one that reads it.
    for (int i = M * Hk_ * t / T_; i < M * Hk_ * (t + 1) / T_; ++i)
      place(layer, rows, cache, i / Hk_, i % Hk_);
    if (M > 1) sync();
    const AttentionView<Bf16> view{cache,
                                   queries_.get(),
                                   mixed_.get(),
                                   static_cast<size_t>(query_stride_),
                                   static_cast<size_t>(x_stride_),
                                   Hq_,
                                   Hk_,
                                   D_,
                                   1.0f / std::sqrt(static_cast<float>(D_))};
    float* scratch = scores_.get() + static_cast<size_t>(t) * tile_queries_ * scores_stride_;
    PackedPrefix& kept = packed_[t];
    kept.slots = nullptr;
    AmxTiles shapes;
    shapes.shape(kAmxRows, kAmxRows);
    for (int first = 0, unit = 0; first < tiles;) {
      int end = first + 1;
      while (end < tiles && !visible_.begins_prefix(end)) ++end;
      for (int g = 0; g < Hk_; ++g)
        for (int i = first; i < end; ++i, ++unit) {
          if (unit < all * t / T_ || unit >= all * (t + 1) / T_) continue;
          Later<bf16> later{cache, nullptr, 0};
          if (i + 1 == end) {
            const bool same = g + 1 < Hk_;
            if (same || end < tiles) {
              const int m = visible_.tiles[same ? first : end].first;
              later = {cache + (same ? g + 1 : 0) * D_, visible_.prefix(rows, m),
                       visible_.prefix_count(rows, m)};
            }
          }
          for (int head = 0; head < group; head += kAmxQueries)
            attend_by_amx(view, rows, visible_, visible_.tiles[i], g, g * group + head,
                          std::min(kAmxQueries, group - head), scratch, scores_stride_, kept,
                          end - first > 1 || D_ > kAmxChannels || group > kAmxQueries,
                          head == 0 ? later : Later<bf16>{});
        }
      first = end;
    }
  }
#endif

  void place(const Layer& layer, const RowsView& rows, T* cache, int m, int g);

  INLINE void turn(float* x, const float* norm, int64_t position, T* to) const {
    if (norm != nullptr)
      normalise(x, norm, D_, eps_,
                [&](int c, __mmask16 lanes, Vec v) { _mm512_mask_storeu_ps(x + c, lanes, v); });
    const int half = D_ / 2;
    const float *cos = cos_ + position * half, *sin = sin_ + position * half;
    for (int d = 0; d < half; d += kLanes) {
      const __mmask16 lanes = first_lanes(half - d);
      const Vec a = _mm512_maskz_loadu_ps(lanes, x + d),
                b = _mm512_maskz_loadu_ps(lanes, x + half + d);
      const Vec c = _mm512_maskz_loadu_ps(lanes, cos + d),
                s = _mm512_maskz_loadu_ps(lanes, sin + d);
      A::store(to + d, lanes, _mm512_fnmadd_ps(b, s, _mm512_mul_ps(a, c)));
      A::store(to + half + d, lanes, _mm512_fmadd_ps(a, s, _mm512_mul_ps(b, c)));
    }
  }

  // The best logit of each row, lane by lane

  float* most(int t, int r) const {
    return most_.get() + (static_cast<size_t>(t) * rows_ + r) * kLanes;
  }
  int* most_ids(int t, int r) const {
    return most_ids_.get() + (static_cast<size_t>(t) * rows_ + r) * kLanes;
  }

  void clear_best(int t, int n) const;

  INLINE void raise_best(int t, int r, int c, __mmask16 lanes, Vec v) const {
    const Bits ids =
        _mm512_add_epi32(_mm512_set1_epi32(c),
                         _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
    const __mmask16 more =
        _mm512_mask_cmp_ps_mask(lanes, v, _mm512_loadu_ps(most(t, r)), _CMP_GT_OQ);
    _mm512_mask_storeu_ps(most(t, r), more, v);
    _mm512_mask_storeu_epi32(most_ids(t, r), more, ids);
  }

  int64_t best_of(int T_, int r) const;

  // The draft

  template <class Prepare>
  int draft(const RowsView& rows, void* kv, float* h, Prepare&& prepare);

  void draft_input(int t, int T_, const RowsView& rows);

  void draft_layer(int t, int T_, const RowsView& rows, T* cache) {
    layer(t, T_, layers_[0], outer_.head, rows, x_, cache, [](int, int, __mmask16, Vec) {});
    sync();
  }

  void norm_output(int m);

  void draft_normed(int m, bool is_normed);

  void norm_features(const T* from, int m, int t);

  void best_tokens(int t, int T_, int n, const Guess& guess, int k, int64_t* ids, float* log_probs);

  void survey(int r, int chunk, int k);

  void add_numbers(int first, int chunk, const Guess& guess);

  // The target's ids of 8 of the draft's tokens, those from `end` on any.
  Bits ids_from(int c, int end) const {
    if (target_ids != nullptr)
      return _mm512_maskz_loadu_epi64(
          static_cast<__mmask8>(first_lanes(std::max(0, std::min(8, end - c)))), target_ids + c);
    return _mm512_add_epi64(_mm512_set1_epi64(c), _mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7));
  }

  const Shape shape_;
  const float eps_;
  const std::vector<Layer> layers_;
  const Outer outer_;
  int H_, X_, I_, Hq_, Hk_, D_, V_;
  int h_stride_, x_stride_, act_stride_, qkv_stride_, query_stride_, logits_stride_;
  size_t scores_stride_ = 0;
  bool by_amx_ = false;
  int tile_queries_ = kTileQueries;
#ifdef __AMX_BF16__
  std::unique_ptr<PackedPrefix[]> packed_;  // of each thread
#endif
  int rows_ = 0, team_ = 0;
  float *h_ = nullptr, *other_h_ = nullptr;
  T* x_ = nullptr;
  Buffer<float> h_buffer_, other_h_buffer_, qkv_, sums_, scores_, most_, wide_, logits_;
  Buffer<T> x_buffer_, own_x_, queries_, mixed_, act_, features_;
  Buffer<RowBlock> blocks_, own_blocks_;
  Buffer<int> most_ids_;
  Buffer<Top> tops_;
  std::vector<const float*> sources_;
  Visible visible_;
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
  qkv_.reserve(rows * qkv_stride_);
  queries_.reserve(rows * Hq_ * query_stride_);
  mixed_.reserve(rows * x_stride_);
  act_.reserve(rows * act_stride_);
  if (has_quantised()) {
    blocks_.reserve(rows * row_blocks() + kAmxRows);  // a tile may read rows that are not used
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
    sources_.resize(rows);
  }
  rows_ = static_cast<int>(rows), team_ = team;
}

template <class A>
bool Model<A>::plan(const RowsView& rows) {
  const int group = Hq_ / Hk_, a_tile = std::max(1, tile_queries_ / group);
  if (!visible_.plan(rows, a_tile, by_amx_ ? a_tile : kMaxApart, shape_.window)) return false;
  scores_stride_ = round_up(visible_.longest + 64, 1024) + 16;
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
  const auto any = [](const Layer& one) {
    return one.qkv->is_quantised || one.out->is_quantised || one.gate_up->is_quantised ||
           one.down->is_quantised;
  };
  if (shape_.is_draft && outer_.fc->is_quantised) return true;
  return outer_.head->is_quantised || std::any_of(layers_.begin(), layers_.end(), any);
}

template <class A>
void Model<A>::embed(int64_t token, float* to) const {
  if (shape_.embed_kind > kEmbedBf16) {
    const Format format = static_cast<Format>(shape_.embed_kind);
    dequantise_row(
        format, static_cast<const uint8_t*>(outer_.embed) + token * row_bytes(format, H_), H_, to);
    return;
  }
  for (int c = 0; c < H_; c += kLanes) {
    const __mmask16 lanes = first_lanes(H_ - c);
    const size_t at = static_cast<size_t>(token) * H_ + c;
    const Vec v = shape_.embed_kind == kEmbedBf16
                      ? Bf16::load(static_cast<const bf16*>(outer_.embed) + at, lanes)
                      : Fp32::load(static_cast<const float*>(outer_.embed) + at, lanes);
    _mm512_storeu_ps(to + c, v);
  }
}

template <class A>
void Model<A>::attention(int t, int T_, const Layer& layer, const RowsView& rows, T* cache) {
  const int M = rows.M, group = Hq_ / Hk_, tiles = static_cast<int>(visible_.tiles.size());
#ifdef __AMX_BF16__
  if constexpr (A::is_bf16)
    if (by_amx_) return attention_by_amx(t, T_, layer, rows, cache);
#endif
  for (int i = t; i < M * Hk_; i += T_) place(layer, rows, cache, i / Hk_, i % Hk_);
  // One row: the thread that wrote a head's key is the one that reads it.
  if (M > 1) sync();
  const AttentionView<A> view{cache,
                              queries_.get(),
                              mixed_.get(),
                              static_cast<size_t>(query_stride_),
                              static_cast<size_t>(x_stride_),
                              Hq_,
                              Hk_,
                              D_,
                              1.0f / std::sqrt(static_cast<float>(D_))};
  float* scratch = scores_.get() + static_cast<size_t>(t) * kTileQueries * scores_stride_;
  for (int i = t; i < tiles * Hk_; i += T_) {
    const int next = (i + T_) / Hk_;
    Later<T> later{cache + (i + T_) % Hk_ * D_, nullptr, 0};
    if (next < tiles && visible_.begins_prefix(next)) {
      const int m = visible_.tiles[next].first;
      later.slots = visible_.prefix(rows, m), later.count = visible_.prefix_count(rows, m);
    }
    for (int head = 0; head < group; head += kTileQueries)
      attend(view, rows, visible_, visible_.tiles[i / Hk_], i % Hk_, i % Hk_ * group + head,
             std::min(kTileQueries, group - head), scratch, scores_stride_,
             head == 0 ? later : Later<T>{});
  }
}

// Norm and rotation of one key head and its query heads; key and value go to the cache.
template <class A>
void Model<A>::place(const Layer& layer, const RowsView& rows, T* cache, int m, int g) {
  const int group = Hq_ / Hk_;
  float* from = qkv_.get() + m * qkv_stride_;
  T* to = cache + (static_cast<size_t>(rows.slot[m]) * 2 * Hk_ + g) * D_;
  for (int head = g * group; head < (g + 1) * group; ++head)
    turn(from + head * D_, layer.q_norm, rows.position[m],
         queries_.get() + (static_cast<size_t>(m) * Hq_ + head) * query_stride_);
  turn(from + (Hq_ + g) * D_, layer.k_norm, rows.position[m], to);
  const float* value = from + (Hq_ + Hk_ + g) * D_;
  for (int d = 0; d < D_; d += kLanes)
    A::store(to + static_cast<size_t>(Hk_) * D_ + d, first_lanes(D_ - d),
             _mm512_maskz_loadu_ps(first_lanes(D_ - d), value + d));
}

}  // namespace
