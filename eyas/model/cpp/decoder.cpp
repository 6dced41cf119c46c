// A Llama-family decoder on the CPU: a target's forward, and a draft head's extend, step and growth
// of a tree.
//
// Knows the layer and EAGLE-3's head; what a row sees, `attention.h` knows, how weights are
// streamed, `linear.h`. The whole of a forward is one run of the pool's threads with about five
// barriers a layer. The residual stream is fp32; activations are rounded to A (bf16 or fp32) where
// a product or the cache takes them.
//
// Letters: M rows, R rows with logits, B requests, H hidden, X input width of q, k, v (2 H for a
// draft), I intermediate, D head dimension, V vocabulary (of the head's outputs), k candidates of a
// node, t of T threads.
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

namespace {

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

  // last_hidden: [M, H] after the final norm, or null.
  int forward(const RowsView& rows, void* kv, const Tapped& tapped, const int64_t* logits_of,
              int64_t R, float* const* logits, int64_t* best, void* last_hidden) override {
    const int M = rows.M, n = static_cast<int>(R);
    for (int64_t r = 0; logits_of != nullptr && r < R; ++r)
      if (logits_of[r] < 0 || logits_of[r] >= M) return kBadRow;
    if (M == 0) return kDone;
    if (const int status = check(rows); status != kDone) return status;
    const int team = Pool::shared().advised(threads_);
    reserve(std::max(M, n), team);
    if (!plan(rows)) return kBadSlot;
    Pool::shared().run(team, [&](int t) {
      const int T_ = team;
      for (int m = M * t / T_; m < M * (t + 1) / T_; ++m) embed(rows.token[m], h_ + m * h_stride_);
      sync();
      for (size_t l = 0; l < layers_.size(); ++l) {
        const T* x = normed(t, T_, M, layers_[l].input_norm, nullptr);
        const Product* next = l + 1 < layers_.size() ? layers_[l + 1].qkv : outer_.head;
        layer(t, T_, layers_[l], next, rows, x,
              static_cast<T*>(kv) + l * rows.num_slots * 2 * Hk_ * D_,
              [&](int m, int c, __mmask16 lanes, Vec v) {
                if (tapped.taps == nullptr) return;
                const size_t to = tapped.by_slot ? rows.slot[m] : m;
                for (int i = 0; i < 3; ++i)
                  if (tapped.taps[i] == static_cast<int64_t>(l))
                    A::store(static_cast<T*>(tapped.aux) + (to * 3 + i) * H_ + c, lanes, v);
              });
        sync();
      }
      for (int m = M * t / T_; last_hidden != nullptr && m < M * (t + 1) / T_; ++m) {
        T* to = static_cast<T*>(last_hidden) + static_cast<size_t>(m) * H_;
        normalise(h_ + m * h_stride_, outer_.final_norm, H_, eps_,
                  [&](int c, __mmask16 lanes, Vec v) { A::store(to + c, lanes, v); });
      }
      if (n == 0) return;
      const T* x = normed(t, T_, n, outer_.final_norm, logits_of);
      clear_best(t, n);
      product(*outer_.head, layers_[0].qkv, x, x_stride_, n, t, T_,
              [&](const Panel& panel, const float* out) {
                for (int r = 0; r < n; ++r)
                  for (int w = 0; w < panel.width; ++w) {
                    const int c = (panel.first + w) * kLanes;
                    const __mmask16 lanes = first_lanes(V_ - c);
                    const Vec v = _mm512_loadu_ps(out + r * kPanelColumns + w * kLanes);
                    if (logits != nullptr && logits[r] != nullptr)
                      put_away(logits[r] + c, lanes, v);
                    raise_best(t, r, c, lanes, v);
                  }
              });
      _mm_sfence();  // what is put away is there for the other threads
      sync();
      for (int r = n * t / T_; r < n * (t + 1) / T_; ++r) best[r] = best_of(T_, r);
    });
    return kDone;
  }

  // One forward over the chosen trees; the target's own tokens along each, and its columns put in
  // order. Of a request that its caller walks, the logits of its nodes and no token.
  int verify(const Lines& lines, const Chosen& chosen, void* kv, const Tapped& tapped,
             const Draws& draws, int64_t places, int64_t* emitted, int64_t* counts) override {
    if (!forest_.plant(lines, chosen)) return kBadSlot;
    const RowsView rows = forest_.rows.view(lines, 0);
    best_.resize(rows.M);
    if (const int status = place_logits(lines.B, draws, rows.M); status != kDone) return status;
    if (const int status =
            forward(rows, kv, tapped, nullptr, rows.M, logits_of_.data(), best_.data(), nullptr);
        status != kDone)
      return status;
    const bool samples = std::any_of(draws.of, draws.of + lines.B,
                                     [](const DrawState* one) { return one != nullptr; });
    const int team = samples && lines.B > 1 ? Pool::shared().advised(threads_) : 1;
    paths_.resize(lines.B), drawn_.resize(lines.B),
        samplers_.resize(std::max<size_t>(team, samplers_.size()));
    std::atomic<bool> good{true};
    Pool::shared().run(team, [&](int t) {
      for (int64_t b = t; b < lines.B; b += team)
        if (!walk(b, draws.of[b], samplers_[t])) good = false;
    });
    if (!good) return kBadLogits;
    for (int64_t b = 0; b < lines.B; ++b) {
      const std::vector<int>& path = paths_[b];
      counts[b] = std::min(places, static_cast<int64_t>(path.size()));
      for (int64_t place = 0; place < counts[b]; ++place) {
        emitted[b * places + place] = drawn_[b][place];
        // A path's nodes ascend, so no slot is written before it is read.
        move(rows, rows.slot[path[place]], rows.slot[path[0] + place], static_cast<T*>(kv), tapped);
      }
    }
    return kDone;
  }

  int extend(const RowsView& rows, void* kv, const void* aux, float* h) override {
    return draft(rows, kv, h, [&](int t, int T_) {
      const int M = rows.M;
      const T* features = static_cast<const T*>(aux);
      size_t stride = 3 * H_;
      if (outer_.features_norm != nullptr || outer_.feature_norms[0] != nullptr) {
        for (int m = M * t / T_; m < M * (t + 1) / T_; ++m)
          norm_features(features + static_cast<size_t>(m) * 3 * H_, m, t);
        sync();
        features = features_.get(), stride = feature_stride();
      }
      product(*outer_.fc, layers_[0].qkv, features, stride, M, t, T_,
              [&](const Panel& panel, const float* out) {
                for (int m = 0; m < M; ++m)
                  for (int w = 0; w < panel.width; ++w)
                    _mm512_storeu_ps(other_h_ + m * h_stride_ + (panel.first + w) * kLanes,
                                     _mm512_loadu_ps(out + m * kPanelColumns + w * kLanes));
              });
      if (t == 0)
        for (int m = 0; m < M; ++m) sources_[m] = other_h_ + m * h_stride_;
      sync();
    });
  }

  int step(const RowsView& rows, void* kv, const float* h_in, float* h) override {
    return draft(rows, kv, h, [&](int t, int) {
      if (t == 0)
        for (int m = 0; m < rows.M; ++m) sources_[m] = h_in + static_cast<size_t>(m) * H_;
      sync();
    });
  }

  int proposals(const float* h, const Guess& guess, int64_t R, int64_t k, int64_t* ids,
                float* log_probs) override {
    const int n = static_cast<int>(R), team = Pool::shared().advised(threads_);
    if (n == 0) return kDone;
    reserve(n, team);
    Pool::shared().run(team, [&](int t) {
      for (int r = n * t / team; r < n * (t + 1) / team; ++r) {
        std::memcpy(h_ + r * h_stride_, h + static_cast<size_t>(r) * H_, H_ * sizeof(float));
        draft_normed(r, shape_.norm_output);
      }
      sync();
      best_tokens(t, team, n, guess, static_cast<int>(k), ids, log_probs);
    });
    return kDone;
  }

  int propose(const Growth& growth) override;

  // The entries up to the roots', from the features of the columns before, and the trees that grow
  // from there.
  int grow(const Lines& lines, const int64_t* starts, const int64_t* tokens, const void* features,
           Growth& growth) override {
    if (!behind_.line_up(lines, starts, tokens)) return -kBadSlot;
    const RowsView rows = behind_.rows.view(lines, 1);
    const size_t width = 3 * H_, B = lines.B;
    gathered_.resize(rows.M * width), outputs_.resize(static_cast<size_t>(rows.M) * H_),
        roots_h_.resize(B * H_);
    for (int m = 0; m < rows.M; ++m)
      std::memcpy(gathered_.data() + m * width,
                  static_cast<const T*>(features) + behind_.features[m] * width, width * sizeof(T));
    if (const int status = extend(rows, growth.kv, gathered_.data(), outputs_.data());
        status != kDone)
      return -status;
    for (size_t b = 0; b < B; ++b)
      std::memcpy(roots_h_.data() + b * H_, outputs_.data() + (behind_.ends[b] - 1) * H_,
                  H_ * sizeof(float));
    first_ids_.resize(B * growth.k), first_log_probs_.resize(B * growth.k);
    proposals(roots_h_.data(), Guess{growth.draws, 1, 0}, lines.B, growth.k, first_ids_.data(),
              first_log_probs_.data());
    for (int64_t& id : first_ids_) id = target_id(id);
    growth.h = roots_h_.data(), growth.first_ids = first_ids_.data(),
    growth.first_log_probs = first_log_probs_.data();
    return propose(growth);
  }

 private:
  // Stores a line past the caches, which the weights need: of a tree's rows few are ever read.
  static INLINE void put_away(float* to, __mmask16 lanes, Vec v) {
    if (lanes == 0xffff && reinterpret_cast<uintptr_t>(to) % 64 == 0) {
      _mm512_stream_ps(to, v);
    } else {
      _mm512_mask_storeu_ps(to, lanes, v);
    }
  }

  // Says where the logits go of the rows that may be drawn from.
  int place_logits(int64_t B, const Draws& draws, int M) {
    const size_t stride = round_up(V_, kLanes);
    size_t own = 0, given = 0;
    logits_of_.assign(M, nullptr);
    for (int64_t b = 0; b < B; ++b)
      if (draws.of[b] != nullptr && !draws.of[b]->by_caller)
        own += forest_.end(b) - forest_.first(b);
    float* to = own == 0 ? nullptr : drawn_logits_.reserve(own * stride);
    for (int64_t b = 0; b < B; ++b) {
      if (draws.of[b] == nullptr) continue;
      for (int m = forest_.first(b); m < forest_.end(b); ++m) {
        if (draws.of[b]->by_caller) {
          if (given == static_cast<size_t>(draws.room)) return kBadRow;
          logits_of_[m] = draws.logits + given++ * V_;
        } else {
          logits_of_[m] = to, to += stride;
        }
      }
    }
    return kDone;
  }

  bool walk(int64_t b, const DrawState* state, TokenSampler& sampler) {
    if (state == nullptr)
      return forest_.walk(b, paths_[b], drawn_[b], [&](int m) { return best_[m]; });
    if (state->by_caller) {
      paths_[b].clear();
      return true;
    }
    sampler.begin(*state, V_);
    return forest_.walk(b, paths_[b], drawn_[b],
                        [&](int m) { return sampler.next(logits_of_[m]); });
  }

  // A column's keys, values and features from one slot to another.
  void move(const RowsView& rows, int64_t from, int64_t to, T* kv, const Tapped& tapped) const {
    if (from == to) return;
    const size_t width = static_cast<size_t>(2) * Hk_ * D_, features = static_cast<size_t>(3) * H_;
    for (size_t l = 0; l < layers_.size(); ++l, kv += rows.num_slots * width)
      std::memcpy(kv + to * width, kv + from * width, width * sizeof(T));
    if (tapped.taps == nullptr) return;
    T* aux = static_cast<T*>(tapped.aux);
    std::memcpy(aux + to * features, aux + from * features, features * sizeof(T));
  }

  // Buffers

  void reserve(int M, int team) {
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

  bool plan(const RowsView& rows) {
    const int group = Hq_ / Hk_, a_tile = std::max(1, tile_queries_ / group);
    if (!visible_.plan(rows, a_tile, by_amx_ ? a_tile : kMaxApart, shape_.window)) return false;
    scores_stride_ = round_up(visible_.longest + 64, 1024) + 16;
    scores_.reserve(static_cast<size_t>(team_) * tile_queries_ * scores_stride_);
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
    return std::max({X_, Hq_ * D_, I_, shape_.is_draft ? 3 * H_ : 0}) / kBlockInputs;
  }

  bool has_quantised() const {
    const auto any = [](const Layer& one) {
      return one.qkv->is_quantised || one.out->is_quantised || one.gate_up->is_quantised ||
             one.down->is_quantised;
    };
    if (shape_.is_draft && outer_.fc->is_quantised) return true;
    return outer_.head->is_quantised || std::any_of(layers_.begin(), layers_.end(), any);
  }

  size_t feature_stride() const { return round_up(3 * H_, 32) + 32; }
  size_t wide_stride() const { return round_up(3 * H_, kLanes); }
  int top_chunks() const { return (V_ + kTopChunk - 1) / kTopChunk; }
  float* sums(int t) const { return sums_.get() + static_cast<size_t>(t) * rows_ * kPanelColumns; }
  static void sync() { Pool::shared().barrier(); }

  // Rows

  void embed(int64_t token, float* to) const {
    if (shape_.embed_kind > kEmbedBf16) {
      const Format format = static_cast<Format>(shape_.embed_kind);
      dequantise_row(format,
                     static_cast<const uint8_t*>(outer_.embed) + token * row_bytes(format, H_), H_,
                     to);
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

  void attention(int t, int T_, const Layer& layer, const RowsView& rows, T* cache) {
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

  // Norm and rotation of one key head and its query heads; key and value go to the cache.
  void place(const Layer& layer, const RowsView& rows, T* cache, int m, int g) {
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

  void clear_best(int t, int n) const {
    for (int r = 0; r < n; ++r) {
      _mm512_storeu_ps(most(t, r), _mm512_set1_ps(-INFINITY));
      _mm512_storeu_si512(most_ids(t, r), _mm512_set1_epi32(INT32_MAX));
    }
  }

  INLINE void raise_best(int t, int r, int c, __mmask16 lanes, Vec v) const {
    const Bits ids =
        _mm512_add_epi32(_mm512_set1_epi32(c),
                         _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
    const __mmask16 more =
        _mm512_mask_cmp_ps_mask(lanes, v, _mm512_loadu_ps(most(t, r)), _CMP_GT_OQ);
    _mm512_mask_storeu_ps(most(t, r), more, v);
    _mm512_mask_storeu_epi32(most_ids(t, r), more, ids);
  }

  int64_t best_of(int T_, int r) const {
    float top = -INFINITY;
    int id = INT32_MAX;
    for (int t = 0; t < T_; ++t)
      for (int i = 0; i < kLanes; ++i) {
        const float v = most(t, r)[i];
        if (v > top || (v == top && most_ids(t, r)[i] < id)) top = v, id = most_ids(t, r)[i];
      }
    return id == INT32_MAX ? 0 : id;  // all NaN: any token, but one that there is
  }

  // The draft

  // prepare(t, T) leaves the rows' features or fed-back states in sources_, for all threads to see.
  template <class Prepare>
  int draft(const RowsView& rows, void* kv, float* h, Prepare&& prepare) {
    const int M = rows.M, team = Pool::shared().advised(threads_);
    if (M == 0) return kDone;
    if (const int status = check(rows); status != kDone) return status;
    reserve(M, team);
    if (!plan(rows)) return kBadSlot;
    Pool::shared().run(team, [&](int t) {
      prepare(t, team);
      draft_input(t, team, rows);
      if (h == nullptr) {  // a draft has one layer: of a row that nothing is drafted from, only key
                           // and value will be seen
        project(t, team, layers_[0], nullptr, x_, M);
        for (int i = t; i < M * Hk_; i += team)
          place(layers_[0], rows, static_cast<T*>(kv), i / Hk_, i % Hk_);
        return;
      }
      draft_layer(t, team, rows, static_cast<T*>(kv));
      for (int m = M * t / team; m < M * (t + 1) / team; ++m) {
        if (shape_.norm_output) norm_output(m);
        std::memcpy(h + static_cast<size_t>(m) * H_, h_ + m * h_stride_, H_ * sizeof(float));
      }
    });
    return kDone;
  }

  // Embeddings beside features or states, normed, to x_; the residual to h_.
  void draft_input(int t, int T_, const RowsView& rows) {
    const int M = rows.M;
    const Layer& only = layers_[0];
    for (int m = M * t / T_; m < M * (t + 1) / T_; ++m) {
      T* x = x_ + m * x_stride_;
      float *wide = wide_.get() + t * wide_stride(), *h = h_ + m * h_stride_;
      embed(rows.token[m], wide);
      normalise(wide, only.input_norm, H_, eps_,
                [&](int c, __mmask16 lanes, Vec v) { A::store(x + c, lanes, v); });
      const bool residual_normed = shape_.norm_before_residual;
      normalise(sources_[m], outer_.hidden_norm, H_, eps_, [&](int c, __mmask16 lanes, Vec v) {
        A::store(x + H_ + c, lanes, v);
        _mm512_storeu_ps(h + c,
                         residual_normed ? v : _mm512_maskz_loadu_ps(lanes, sources_[m] + c));
      });
    }
    sync();
  }

  void draft_layer(int t, int T_, const RowsView& rows, T* cache) {
    layer(t, T_, layers_[0], outer_.head, rows, x_, cache, [](int, int, __mmask16, Vec) {});
    sync();
  }

  void norm_output(int m) {
    float* h = h_ + m * h_stride_;
    normalise(h, outer_.final_norm, H_, eps_,
              [&](int c, __mmask16 lanes, Vec v) { _mm512_mask_storeu_ps(h + c, lanes, v); });
  }

  // The input of lm_head from row m of h_, to x_; h_ is the post-norm state already when
  // `is_normed`.
  void draft_normed(int m, bool is_normed) {
    float* h = h_ + m * h_stride_;
    T* x = x_ + m * x_stride_;
    if (!is_normed) {
      normalise(h, outer_.final_norm, H_, eps_,
                [&](int c, __mmask16 lanes, Vec v) { A::store(x + c, lanes, v); });
      return;
    }
    for (int c = 0; c < H_; c += kLanes)
      A::store(x + c, first_lanes(H_ - c), _mm512_loadu_ps(h + c));
  }

  void norm_features(const T* from, int m, int t) {
    float* wide = wide_.get() + t * wide_stride();
    T* to = features_.get() + m * feature_stride();
    for (int c = 0; c < 3 * H_; c += kLanes) {
      const __mmask16 lanes = first_lanes(3 * H_ - c);
      _mm512_mask_storeu_ps(wide + c, lanes, A::load(from + c, lanes));
    }
    for (int i = 0; i < 3 && outer_.feature_norms[i] != nullptr; ++i) {
      float* part = wide + i * H_;
      normalise(part, outer_.feature_norms[i], H_, eps_,
                [&](int c, __mmask16 lanes, Vec v) { _mm512_mask_storeu_ps(part + c, lanes, v); });
    }
    if (outer_.features_norm != nullptr)
      normalise(wide, outer_.features_norm, 3 * H_, eps_,
                [&](int c, __mmask16 lanes, Vec v) { _mm512_mask_storeu_ps(wide + c, lanes, v); });
    for (int c = 0; c < 3 * H_; c += kLanes)
      A::store(to + c, first_lanes(3 * H_ - c), _mm512_loadu_ps(wide + c));
  }

  // The k best tokens of n rows whose lm_head inputs are in x_. Ends with a barrier only between
  // its parts.
  void best_tokens(int t, int T_, int n, const Guess& guess, int k, int64_t* ids,
                   float* log_probs) {
    product(*outer_.head, layers_[0].qkv, x_, x_stride_, n, t, T_,
            [&](const Panel& panel, const float* out) {
              for (int r = 0; r < n; ++r)
                for (int w = 0; w < panel.width; ++w)
                  _mm512_storeu_ps(logits_.get() + r * logits_stride_ + (panel.first + w) * kLanes,
                                   _mm512_loadu_ps(out + r * kPanelColumns + w * kLanes));
            });
    sync();
    const int chunks = top_chunks();
    bool draws = false, cuts = false;
    for (int r = 0; r < n; r += guess.rows_each) {
      if (guess.of(r) == nullptr || guess.of(r)->temperature == 0) continue;
      draws = true, cuts |= guess.of(r)->min_p > 0;
    }
    if (cuts) {
      for (int r = n * t / T_; r < n * (t + 1) / T_; ++r)
        row_most_[r] = *std::max_element(logits_.get() + r * logits_stride_,
                                         logits_.get() + r * logits_stride_ + V_);
      sync();
    }
    for (int i = t; draws && i < n / guess.rows_each * chunks; i += T_)
      add_numbers(i / chunks * guess.rows_each, i % chunks, guess);
    if (draws) sync();
    for (int i = t; i < n * chunks; i += T_) survey(i / chunks, i % chunks, k);
    sync();
    for (int r = n * t / T_; r < n * (t + 1) / T_; ++r) {
      const Top* parts = tops_.get() + r * chunks;
      Top all;
      all.clear();
      float most = -INFINITY;
      for (int c = 0; c < chunks; ++c) most = std::max(most, parts[c].most);
      double total = 0;
      for (int c = 0; c < chunks; ++c) {
        total += parts[c].sum * std::exp(static_cast<double>(parts[c].most) - most);
        for (int i = 0; i < k && parts[c].ids[i] >= 0; ++i)
          all.insert(k, parts[c].logits[i], parts[c].ids[i]);
      }
      const double shift = most + std::log(total);
      for (int i = 0; i < k; ++i) {
        ids[r * k + i] = std::max(all.ids[i], 0);
        log_probs[r * k + i] = static_cast<float>(all.logits[i] - shift);
      }
    }
  }

  void survey(int r, int chunk, int k) {
    Top& top = tops_.get()[r * top_chunks() + chunk];
    top.clear();
    const float* logits = logits_.get() + r * logits_stride_;
    const int first = chunk * kTopChunk, end = std::min(V_, first + kTopChunk);
    Vec most = _mm512_set1_ps(-INFINITY);
    for (int c = first; c < end; c += kLanes) {
      const __mmask16 lanes = first_lanes(end - c);
      const Vec v = _mm512_loadu_ps(logits + c);
      most = _mm512_mask_max_ps(most, lanes, most, v);
      unsigned more =
          _mm512_mask_cmp_ps_mask(lanes, v, _mm512_set1_ps(top.logits[k - 1]), _CMP_GT_OQ);
      for (; more != 0; more &= more - 1)
        top.insert(k, logits[c + __builtin_ctz(more)], c + __builtin_ctz(more));
    }
    top.most = _mm512_reduce_max_ps(most);
    Vec sum = _mm512_setzero_ps();
    for (int c = first; c < end; c += kLanes)
      sum = _mm512_mask_add_ps(
          sum, first_lanes(end - c), sum,
          exp_of(_mm512_sub_ps(_mm512_loadu_ps(logits + c), _mm512_set1_ps(top.most))));
    top.sum = _mm512_reduce_add_ps(sum);
  }

  // Guesses of draws, of a request's rows from `first` on: each logit plus temperature * -log(its
  // token's exponential number), as the target's will have it (Gumbel-max). With min_p the best
  // logit of each row is in row_most_.
  void add_numbers(int first, int chunk, const Guess& guess) {
    const DrawState* state = guess.of(first);
    if (state == nullptr || state->temperature == 0) return;
    const uint64_t key = draw_key(state->seed, state->num_drawn + guess.place);
    const __m512d factor = _mm512_set1_pd(state->temperature * kLn2);
    const auto cut = static_cast<float>(state->temperature * std::log(state->min_p));
    const int end = std::min(V_, (chunk + 1) * kTopChunk);
    for (int c = chunk * kTopChunk; c < end; c += kLanes) {
      __m256 halves[2];
      for (int i = 0; i < 2; ++i) {
        const __m512d numbers = exponentials_of(uniforms_of(key, ids_from(c + 8 * i, end)));
        halves[i] = _mm512_cvtpd_ps(
            _mm512_mul_pd(exponentials_of(numbers), factor));  // -log2 of any number
      }
      const Vec gains = _mm512_insertf32x8(_mm512_castps256_ps512(halves[0]), halves[1], 1);
      for (int r = first; r < first + guess.rows_each; ++r) {
        float* logits = logits_.get() + r * logits_stride_ + c;
        Vec x = _mm512_loadu_ps(logits);
        if (state->min_p > 0)
          x = _mm512_mask_add_ps(
              x, _mm512_cmp_ps_mask(x, _mm512_set1_ps(row_most_[r] + cut), _CMP_LT_OQ), x,
              _mm512_set1_ps(kCutOff));
        _mm512_storeu_ps(logits, _mm512_add_ps(x, gains));
      }
    }
  }

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
  Forest forest_;
  Behind behind_;
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
void Model<A>::first_frontier(const Growth& growth, size_t all) {
  const int64_t k = growth.k, width = growth.width;
  for (int64_t b = 0; b < growth.B; ++b)
    for (int64_t j = 0; j < k; ++j) {
      const size_t at = b * all + j, row = b * width + j;
      growth.tokens[at] = growth.first_ids[b * k + j];
      growth.scores[at] = growth.first_log_probs[b * k + j];
      growth.parents[at] = -1;
      if (j >= width) continue;
      frontier_.token[row] = growth.tokens[at], frontier_.score[row] = growth.scores[at];
      frontier_.candidate[row] = j;
      frontier_.seen[row] = int64_t(1) << j;
      frontier_.h[row] = growth.h + static_cast<size_t>(b) * H_;
    }
}

// The width * k children of a level's frontier, from what the threads drew.
template <class A>
void Model<A>::add_candidates(const Growth& growth, int level, size_t all) {
  const int64_t k = growth.k, width = growth.width;
  for (int64_t row = 0; row < growth.B * width; ++row)
    for (int64_t i = 0; i < k; ++i) {
      const size_t at = row / width * all + k + (level * width + row % width) * k + i;
      growth.tokens[at] = target_id(drawn_ids_[row * k + i]);
      growth.scores[at] = frontier_.score[row] + drawn_log_probs_[row * k + i];
      growth.parents[at] = static_cast<int32_t>(frontier_.candidate[row]);
    }
}

// The best of the level's candidates (ties: smaller index), in the order of their indices.
template <class A>
void Model<A>::next_frontier(const Growth& growth, int level, size_t all) {
  const int64_t k = growth.k, width = growth.width, first = k + level * width * k;
  std::vector<int> order(width * k);
  for (int64_t b = 0; b < growth.B; ++b) {
    const float* scores = growth.scores + b * all + first;
    std::iota(order.begin(), order.end(), 0);
    std::partial_sort(order.begin(), order.begin() + width, order.end(), [&](int x, int y) {
      return scores[x] != scores[y] ? scores[x] > scores[y] : x < y;
    });
    std::sort(order.begin(), order.begin() + width);
    for (int64_t j = 0; j < width; ++j) {
      const int64_t row = b * width + j, parent = b * width + order[j] / k,
                    candidate = first + order[j];
      next_.token[row] = growth.tokens[b * all + candidate];
      next_.score[row] = scores[order[j]];
      next_.candidate[row] = candidate;
      next_.seen[row] = frontier_.seen[parent] | int64_t(uint64_t(1) << ((level + 1) * width + j));
      next_.h[row] = h_ + parent * h_stride_;
    }
  }
  std::swap(frontier_, next_);
}

// `engine/tree.py:goes_on`.
template <class A>
bool Model<A>::goes_on(const Growth& growth, int level) const {
  double sum = 0;
  for (int64_t b = 0; b < growth.B; ++b) {
    const float* scores = frontier_.score.data() + b * growth.width;
    const double best =
        std::exp(static_cast<double>(*std::max_element(scores, scores + growth.width)));
    sum += std::max(best - growth.thresholds[growth.num_draft_steps - 1], 0.0);
  }
  return sum >= growth.thresholds[level];
}

// Where the frontier's rows lie: columns n + 1 + level * width + j, behind a prefix of n + 1
// columns.
template <class A>
int Model<A>::place_frontier(const Growth& growth, int level, RowsView& rows) {
  const int64_t width = growth.width;
  for (int64_t row = 0; row < growth.B * width; ++row) {
    const int64_t b = row / width, column = growth.lens[b] + 1 + level * width + row % width;
    if (growth.lens[b] < 0 || column / growth.page_size >= growth.P) return kBadSlot;
    frontier_.request[row] = b;
    frontier_.position[row] = growth.lens[b] + level;
    frontier_.slot[row] =
        growth.page_table[b * growth.P + column / growth.page_size] * growth.page_size +
        column % growth.page_size;
    frontier_.prefix_len[row] = growth.lens[b] + 1;
    sources_[row] = frontier_.h[row];
  }
  rows = RowsView{frontier_.token.data(),
                  frontier_.request.data(),
                  frontier_.position.data(),
                  frontier_.slot.data(),
                  frontier_.prefix_len.data(),
                  frontier_.seen.data(),
                  growth.page_table,
                  growth.B,
                  growth.P,
                  1,
                  growth.page_size,
                  growth.num_slots,
                  static_cast<int>(growth.B * width)};
  if (const int status = check(rows); status != kDone) return status;
  return plan(rows) ? kDone : kBadSlot;
}

template <class A>
int Model<A>::propose(const Growth& growth) {
  const int k = static_cast<int>(growth.k), levels = static_cast<int>(growth.num_draft_steps) - 1,
            team = Pool::shared().advised(threads_);
  const int M = static_cast<int>(growth.B * growth.width);
  const size_t all = k + static_cast<size_t>(levels) * growth.width * k;
  if (M == 0) return 0;
  reserve(M, team);
  frontier_.resize(M), next_.resize(M);
  drawn_ids_.resize(static_cast<size_t>(M) * k),
      drawn_log_probs_.resize(static_cast<size_t>(M) * k);
  first_frontier(growth, all);
  int drafted = 0, status = kDone;
  bool more = false;
  RowsView rows{};
  const auto next_level = [&](int level) {
    if (level > 0) {
      add_candidates(growth, level - 1, all);
      drafted = level;
    }
    more = level < levels;
    if (more && level > 0) next_frontier(growth, level - 1, all);
    more = more && goes_on(growth, level);
    if (!more) return;
    status = place_frontier(growth, level, rows);
    more = status == kDone;
    std::swap(h_, other_h_);  // the frontier's states lie in the buffer of the level before
  };
  Pool::shared().run(team, [&](int t) {
    for (int level = 0;; ++level) {
      if (t == 0) try {
          next_level(level);
        } catch (const std::bad_alloc&) {  // the others wait at the barrier
          status = kNoMemory, more = false;
        }
      sync();
      if (!more) return;
      draft_input(t, team, rows);
      draft_layer(t, team, rows, static_cast<T*>(growth.kv));
      for (int m = M * t / team; m < M * (t + 1) / team; ++m) {
        if (shape_.norm_output) norm_output(m);
        draft_normed(m, shape_.norm_output);
      }
      sync();
      best_tokens(t, team, M, Guess{growth.draws, growth.width, level + 1}, k, drawn_ids_.data(),
                  drawn_log_probs_.data());
      sync();
    }
  });
  return status == kDone ? drafted : -status;
}

template <class A>
Decoder* make(const Shape& shape, float eps, const std::vector<Layer>& layers, const Outer& outer,
              const int64_t* target_ids) {
  auto* model = new Model<A>(shape, eps, layers, outer);
  model->target_ids = target_ids;
  return model;
}

RowsView view(const int64_t* ints, void* const* pointers) {
  const auto column = [&](int i) { return static_cast<const int64_t*>(pointers[i]); };
  return RowsView{column(0),
                  column(1),
                  column(2),
                  column(3),
                  column(4),
                  column(5),
                  static_cast<const int32_t*>(pointers[6]),
                  ints[1],
                  ints[2],
                  ints[3],
                  ints[4],
                  ints[5],
                  static_cast<int>(ints[0])};
}

// Calls are serialised: decoders share the pool, and a decoder its buffers.
std::mutex& calls() {
  static std::mutex mutex;
  return mutex;
}

// What a call returns, or `failure`: no exception crosses into Python. They are of memory, or of a
// thread that cannot be started.
template <class Call>
int64_t guarded(Call&& call, int64_t failure = kNoMemory) {
  try {
    return call();
  } catch (const std::exception&) {
    return failure;
  }
}

template <class Call>
int64_t locked(Call&& call, int64_t failure = kNoMemory) {
  const std::lock_guard<std::mutex> guard(calls());
  return guarded(call, failure);
}

// The same of what makes an object: null.
template <class Made, class Make>
Made* made_or_null(Make&& make) {
  try {
    return make();
  } catch (const std::exception&) {
    return nullptr;
  }
}

}  // namespace

// What Python calls. `ints` of rows: M, B, P, first_column, page_size, num_slots; `pointers`:
// token, request, position, slot, prefix_len, seen, page_table, then the cache. A call returns a
// Status; eyas_propose and eyas_grow return levels or -Status. What makes an object returns null
// where memory lacks.
#pragma GCC visibility push(default)
extern "C" {

Product* eyas_linear(const void* const* parts, const int64_t* part_rows, int64_t count, int64_t K,
                     int64_t kind, int64_t gated, const float* bias, int64_t threads) {
  return made_or_null<Product>([&] {
    std::vector<Source> sources;
    for (int64_t i = 0; i < count; ++i)
      sources.push_back({parts[i], static_cast<int>(part_rows[i])});
    return new Linear(sources, static_cast<int>(K), static_cast<Packed>(kind), gated != 0, bias,
                      static_cast<int>(threads));
  });
}

// Parts as they lie in a GGUF file: see QuantisedProduct.
Product* eyas_quantised(const void* const* parts, const int64_t* part_rows, const int64_t* formats,
                        int64_t count, int64_t K, int64_t gated, const float* bias,
                        int64_t threads) {
  return made_or_null<Product>([&] {
    std::vector<Source> sources;
    std::vector<Format> found;
    for (int64_t i = 0; i < count; ++i) {
      sources.push_back({parts[i], static_cast<int>(part_rows[i])});
      found.push_back(static_cast<Format>(formats[i]));
    }
    return new QuantisedProduct(sources, found, static_cast<int>(K), gated != 0, bias,
                                static_cast<int>(threads));
  });
}

void eyas_free_linear(Product* product) { delete product; }
int64_t eyas_linear_bytes(const Product* product) { return static_cast<int64_t>(product->bytes()); }

// linears: per layer qkv, out, gate_up, down; then head, fc. norms: per layer input, post, q, k;
// then final, hidden, features, 3 of fc.
Decoder* eyas_new(int64_t is_bf16, const int64_t* shape_ints, float eps,
                  const Product* const* linears, const float* const* norms, const void* embed,
                  const int64_t* target_ids) {
  return made_or_null<Decoder>([&] {
    Shape shape;
    static_assert(sizeof(Shape) == 14 * sizeof(int64_t));
    std::memcpy(&shape, shape_ints, sizeof(Shape));
    std::vector<Layer> layers;
    for (int64_t l = 0; l < shape.layers; ++l, linears += 4, norms += 4)
      layers.push_back(
          {linears[0], linears[1], linears[2], linears[3], norms[0], norms[1], norms[2], norms[3]});
    const Outer outer{norms[0],   norms[1],   norms[2], {norms[3], norms[4], norms[5]},
                      linears[0], linears[1], embed};
    return is_bf16 ? make<Bf16>(shape, eps, layers, outer, target_ids)
                   : make<Fp32>(shape, eps, layers, outer, target_ids);
  });
}

void eyas_free(Decoder* decoder) { delete decoder; }

void eyas_set_rope(Decoder* decoder, const float* cos, const float* sin, int64_t length) {
  const std::lock_guard<std::mutex> guard(calls());
  decoder->set_rope(cos, sin, length);
}

int64_t eyas_forward(Decoder* decoder, const int64_t* ints, void* const* pointers,
                     const int64_t* taps, void* aux, int64_t by_slot, const int64_t* logits_of,
                     int64_t R, float* logits, int64_t* best, void* last_hidden) {
  return locked([&]() -> int64_t {
    std::vector<float*> rows(R, nullptr);
    for (int64_t r = 0; logits != nullptr && r < R; ++r)
      rows[r] = logits + r * decoder->vocabulary();
    return decoder->forward(view(ints, pointers), pointers[7], Tapped{taps, aux, by_slot != 0},
                            logits_of, R, rows.data(), best, last_hidden);
  });
}

// ints: B, P, page_size, num_slots, C, places, room. pointers: lens, roots, line, tokens, parents,
// kept, page_table, cache, taps, features, how each request draws, then emitted [B, places], counts
// and the logits [room, V] of those that draw by the caller.
int64_t eyas_verify(Decoder* decoder, const int64_t* ints, void* const* p) {
  return locked([&]() -> int64_t {
    const Lines lines{ints[0],
                      ints[1],
                      ints[2],
                      ints[3],
                      static_cast<const int32_t*>(p[6]),
                      static_cast<const int64_t*>(p[0])};
    const Chosen chosen{static_cast<const int64_t*>(p[1]), static_cast<const int64_t*>(p[3]),
                        static_cast<const int32_t*>(p[2]), static_cast<const int32_t*>(p[4]),
                        static_cast<const uint8_t*>(p[5]), ints[4]};
    const Tapped tapped{static_cast<const int64_t*>(p[8]), p[9], true};
    const Draws draws{static_cast<const DrawState* const*>(p[10]), static_cast<float*>(p[13]),
                      ints[6]};
    return decoder->verify(lines, chosen, p[7], tapped, draws, ints[5],
                           static_cast<int64_t*>(p[11]), static_cast<int64_t*>(p[12]));
  });
}

// A walk along `rows` [count, V]: the token drawn from each, up to the first without one (-1).
int64_t eyas_draw(const DrawState* state, const float* rows, int64_t count, int64_t V,
                  int64_t* tokens) {
  return guarded([&]() -> int64_t {
    TokenSampler sampler;
    sampler.begin(*state, static_cast<int>(V));
    for (int64_t r = 0; r < count; ++r)
      if ((tokens[r] = sampler.next(rows + r * V)) < 0) break;
    return kDone;
  });
}

// What the log-probabilities of a token and of the best are made of: see DrawState. False where the
// best logit is no number.
int64_t eyas_score(const float* logits, int64_t V, int64_t token, int64_t num_top,
                   int64_t* scored_ints, float* scored_logits) {
  return guarded([&]() -> int64_t {
    DrawState state{};
    state.num_top = num_top, state.scored_ints = scored_ints, state.scored_logits = scored_logits;
    TokenSampler sampler;
    sampler.begin(state, static_cast<int>(V));
    return sampler.score(logits, token);
  });
}

int64_t eyas_extend(Decoder* decoder, const int64_t* ints, void* const* pointers, const void* aux,
                    float* h) {
  return locked(
      [&]() -> int64_t { return decoder->extend(view(ints, pointers), pointers[7], aux, h); });
}

int64_t eyas_step(Decoder* decoder, const int64_t* ints, void* const* pointers, const float* h_in,
                  float* h) {
  return locked(
      [&]() -> int64_t { return decoder->step(view(ints, pointers), pointers[7], h_in, h); });
}

// draws: how the request of each row draws, of which the next token is its num_drawn + place.
int64_t eyas_proposals(Decoder* decoder, const float* h, const DrawState* const* draws,
                       int64_t place, int64_t R, int64_t k, int64_t* ids, float* log_probs) {
  return locked([&]() -> int64_t {
    return decoder->proposals(h, Guess{draws, 1, place}, R, k, ids, log_probs);
  });
}

// ints: B, K, k, width, P, page_size, num_slots. pointers: lens, first_ids, h, first_log_probs,
// page_table, thresholds, cache, tokens, parents, scores, how each request draws.
int64_t eyas_propose(Decoder* decoder, const int64_t* ints, void* const* p) {
  return locked(
      [&]() -> int64_t {
        return decoder->propose(
            Growth{ints[0], ints[1], ints[2], ints[3], ints[4], ints[5], ints[6],
                   static_cast<const int64_t*>(p[0]), static_cast<const int64_t*>(p[1]),
                   static_cast<const float*>(p[2]), static_cast<const float*>(p[3]),
                   static_cast<const int32_t*>(p[4]), static_cast<const double*>(p[5]), p[6],
                   static_cast<const DrawState* const*>(p[10]), static_cast<int64_t*>(p[7]),
                   static_cast<int32_t*>(p[8]), static_cast<float*>(p[9])});
      },
      -kNoMemory);
}

// ints as of eyas_propose. pointers: lens, starts, tokens, features, page_table, thresholds, cache,
// then tokens, parents, scores, how each request draws.
int64_t eyas_grow(Decoder* decoder, const int64_t* ints, void* const* p) {
  return locked(
      [&]() -> int64_t {
        const auto* lens = static_cast<const int64_t*>(p[0]);
        const auto* page_table = static_cast<const int32_t*>(p[4]);
        Growth growth{ints[0],
                      ints[1],
                      ints[2],
                      ints[3],
                      ints[4],
                      ints[5],
                      ints[6],
                      lens,
                      nullptr,
                      nullptr,
                      nullptr,
                      page_table,
                      static_cast<const double*>(p[5]),
                      p[6],
                      static_cast<const DrawState* const*>(p[10]),
                      static_cast<int64_t*>(p[7]),
                      static_cast<int32_t*>(p[8]),
                      static_cast<float*>(p[9])};
        const Lines lines{ints[0], ints[4], ints[5], ints[6], page_table, lens};
        return decoder->grow(lines, static_cast<const int64_t*>(p[1]),
                             static_cast<const int64_t*>(p[2]), p[3], growth);
      },
      -kNoMemory);
}
}
#pragma GCC visibility pop
