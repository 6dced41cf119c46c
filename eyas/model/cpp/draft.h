// A draft head: its entries, its proposals, and the growth of trees (EAGLE-2, arXiv 2406.16858).
#pragma once

#include <numeric>

#include "draw.h"
#include "model.h"
#include "round.h"

namespace {  // of one translation unit: decoder.cpp

constexpr int kRefined = 128;  // logits of a row that a coarse head's are computed anew of
constexpr int kMaxTopk = 16, kTopChunk = 128;
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

template <class A>
class Draft final : public Model<A> {
  using Base = Model<A>;
  using Base::check, Base::norm_row, Base::plan, Base::put_product, Base::sync;
  using Base::H_, Base::Hk_, Base::V_, Base::h_, Base::h_stride_, Base::x_, Base::x_stride_;
  using Base::shape_, Base::outer_, Base::layers_, Base::eps_, Base::threads_;
  using typename Base::T;

 public:
  explicit Draft(const DecoderParts& parts)
      : Base(parts), target_ids_(parts.target_ids), logits_stride_(round_up(V_, kLanes)) {}

  int extend(const StatesCall& call) override {
    return draft(call, [&](int t, int T_) {
      const int M = call.rows.M;
      const T* features = static_cast<const T*>(call.inputs);
      size_t stride = 3 * H_;
      if (outer_.features_norm != nullptr || outer_.feature_norms[0] != nullptr) {
        for (int m = M * t / T_; m < M * (t + 1) / T_; ++m)
          norm_features(features + size_t(m) * 3 * H_, m, t);
        sync();
        features = features_.get(), stride = feature_stride();
      }
      put_product(t, T_, *outer_.fc, layers_[0].in, features, stride, M, other_h_.get(), h_stride_);
      if (t == 0)
        for (int m = 0; m < M; ++m) sources_[m] = other_h_.get() + m * h_stride_;
      sync();
    });
  }

  int step(const StatesCall& call) override {
    return draft(call, [&](int t, int) {
      const float* h = static_cast<const float*>(call.inputs);
      for (int m = 0; t == 0 && m < call.rows.M; ++m) sources_[m] = h + size_t(m) * H_;
      sync();
    });
  }

  int proposals(const ProposalsCall& call) override {
    const int n = call.R, team = Pool::shared().advised(threads_);
    if (n == 0) return kDone;
    reserve(n, team);
    Pool::shared().run(team, [&](int t) {
      for (int r = n * t / team; r < n * (t + 1) / team; ++r) {
        std::memcpy(state(r), call.h + size_t(r) * H_, H_ * sizeof(float));
        head_input(r);
      }
      sync();
      best_tokens(t, team, n, Guess{call.draws, 1, call.place}, call.k, call.ids, call.log_probs);
    });
    return kDone;
  }

  // The entries up to the roots', from the features of the columns before, and the trees that grow
  // from there.
  int grow(const Growth& given) override {
    Growth growth = given;
    const Lines lines = lines_of(growth);
    if (!entry_rows_.line_up(lines, growth.starts, growth.entered)) return -kBadSlot;
    const RowsView rows = entry_rows_.rows.view(lines, 1);
    const size_t width = 3 * H_, B = lines.B;
    gathered_.resize(rows.M * width), outputs_.resize(size_t(rows.M) * H_), roots_h_.resize(B * H_);
    for (int m = 0; m < rows.M; ++m)
      std::memcpy(gathered_.data() + m * width,
                  static_cast<const T*>(growth.features) + entry_rows_.features[m] * width,
                  width * sizeof(T));
    if (const int status = extend({rows, growth.kv, gathered_.data(), outputs_.data()});
        status != kDone)
      return -status;
    for (size_t b = 0; b < B; ++b)
      std::memcpy(roots_h_.data() + b * H_, outputs_.data() + (entry_rows_.ends[b] - 1) * H_,
                  H_ * sizeof(float));
    first_ids_.resize(B * growth.k), first_log_probs_.resize(B * growth.k);
    proposals({roots_h_.data(), growth.draws, 0, lines.B, growth.k, first_ids_.data(),
               first_log_probs_.data()});
    for (int64_t& id : first_ids_) id = target_id(id);
    growth.h = roots_h_.data(), growth.first_ids = first_ids_.data(),
    growth.first_log_probs = first_log_probs_.data();
    return propose(growth);
  }

  int propose(const Growth& growth) override {
    const int k = growth.k, levels = growth.num_draft_steps - 1,
              team = Pool::shared().advised(threads_);
    const int M = growth.B * growth.width;
    const size_t all = k + size_t(levels) * growth.width * k;
    if (M == 0) return 0;
    reserve(M, team);
    frontier_.resize(M), next_.resize(M);
    drawn_ids_.resize(size_t(M) * k), drawn_log_probs_.resize(size_t(M) * k);
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
      h_.swap(other_h_);  // the frontier's states lie in the buffer of the level before
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
          head_input(m);
        }
        sync();
        const Guess guess{growth.draws, static_cast<int>(growth.width), level + 1};
        best_tokens(t, team, M, guess, k, drawn_ids_.data(), drawn_log_probs_.data());
        sync();
      }
    });
    return status == kDone ? drafted : -status;
  }

 private:
  // A tree's growth: the frontier of level l, place j of request b is row b * width + j.
  struct Frontier {
    std::vector<int64_t> token, seen, candidate;
    std::vector<float> score;
    std::vector<const float*> h;

    void resize(size_t n) {
      token.resize(n), seen.resize(n), candidate.resize(n), score.resize(n), h.resize(n);
    }
  };

  static Lines lines_of(const Growth& growth) {
    return {growth.B, growth.P, growth.page_size, growth.num_slots, growth.page_table, growth.lens};
  }

  void reserve(int M, int team) {
    Base::reserve(M, team);
    const size_t rows = Base::rows_, threads = Base::team_;
    other_h_.reserve(rows * h_stride_);
    features_.reserve(rows * feature_stride());
    wide_.reserve(threads * wide_stride());
    logits_.reserve(rows * logits_stride_);
    tops_.reserve(rows * top_chunks());
    row_most_.resize(rows), sources_.resize(rows);
    found_.resize(threads);
    for (std::vector<float>& one : found_) one.reserve(top_chunks() * kMaxTopk);
  }

  size_t feature_stride() const { return round_up(3 * H_, 32) + 32; }
  size_t wide_stride() const { return round_up(3 * H_, kLanes); }
  int top_chunks() const { return (V_ + kTopChunk - 1) / kTopChunk; }
  float* state(int m) const { return h_.get() + m * h_stride_; }
  T* input(int m) const { return x_.get() + m * x_stride_; }
  float* logits(int r) const { return logits_.get() + r * logits_stride_; }
  int64_t target_id(int64_t id) const { return target_ids_ == nullptr ? id : target_ids_[id]; }

  // prepare(t, T) leaves the rows' features or fed-back states in sources_, for all threads to see.
  template <class Prepare>
  int draft(const StatesCall& call, Prepare&& prepare) {
    const RowsView& rows = call.rows;
    T* cache = static_cast<T*>(call.cache);
    const int M = rows.M, team = Pool::shared().advised(threads_);
    if (M == 0) return kDone;
    if (const int status = check(rows); status != kDone) return status;
    reserve(M, team);
    if (!plan(rows)) return kBadSlot;
    Pool::shared().run(team, [&](int t) {
      prepare(t, team);
      draft_input(t, team, rows);
      if (call.h == nullptr) {
        // a draft has one layer: of a row that nothing is drafted from, only key and value will be
        // seen
        this->project(t, team, layers_[0], nullptr, x_.get(), M);
        for (int i = t; i < M * Hk_; i += team)
          this->place(layers_[0], rows, cache, i / Hk_, i % Hk_);
        return;
      }
      draft_layer(t, team, rows, cache);
      for (int m = M * t / team; m < M * (t + 1) / team; ++m) {
        if (shape_.norm_output) norm_output(m);
        std::memcpy(call.h + size_t(m) * H_, state(m), H_ * sizeof(float));
      }
    });
    return kDone;
  }

  // Embeddings beside features or states, normed, to x_; the residual to h_.
  void draft_input(int t, int T_, const RowsView& rows) {
    const int M = rows.M;
    const Layer& only = layers_[0];
    for (int m = M * t / T_; m < M * (t + 1) / T_; ++m) {
      T* x = input(m);
      float *wide = wide_.get() + t * wide_stride(), *h = state(m);
      this->embed(rows.token[m], wide);
      norm_row(wide, only.input_norm, x);
      const bool residual_normed = shape_.norm_before_residual;
      normalise(sources_[m], outer_.hidden_norm, H_, eps_, [&](int c, Lanes lanes, Vec v) {
        A::store(x + H_ + c, lanes, v);
        store(h + c, residual_normed ? v : load(sources_[m] + c, lanes));
      });
    }
    sync();
  }

  void draft_layer(int t, int T_, const RowsView& rows, T* cache) {
    this->layer(t, T_, layers_[0], outer_.head, rows, x_.get(), cache, [](int, int, Lanes, Vec) {});
    sync();
  }

  void norm_output(int m) { norm_row(state(m), outer_.final_norm, state(m)); }

  // lm_head's input from row m of h_, which is the post-norm state already with norm_output.
  void head_input(int m) {
    norm_row(state(m), shape_.norm_output ? nullptr : outer_.final_norm, input(m));
  }

  void norm_features(const T* from, int m, int t) {
    float* wide = wide_.get() + t * wide_stride();
    T* to = features_.get() + m * feature_stride();
    for (int c = 0; c < 3 * H_; c += kLanes) {
      const Lanes lanes = first_lanes(3 * H_ - c);
      store(wide + c, lanes, A::load(from + c, lanes));
    }
    for (int i = 0; i < 3 && outer_.feature_norms[i] != nullptr; ++i)
      norm_row(wide + i * H_, outer_.feature_norms[i], wide + i * H_);
    if (outer_.features_norm != nullptr)
      normalise(wide, outer_.features_norm, 3 * H_, eps_,
                [&](int c, Lanes lanes, Vec v) { store(wide + c, lanes, v); });
    for (int c = 0; c < 3 * H_; c += kLanes)
      A::store(to + c, first_lanes(3 * H_ - c), load(wide + c));
  }

  // The k best tokens of n rows whose lm_head inputs are in x_. Ends with a barrier only between
  // its parts.
  void best_tokens(int t, int T_, int n, const Guess& guess, int k, int64_t* ids,
                   float* log_probs) {
    put_product(t, T_, *outer_.head, layers_[0].in, x_.get(), x_stride_, n, logits_.get(),
                logits_stride_);
    sync();
    if (outer_.head_rows != nullptr) refine(t, T_, n);
    const int chunks = top_chunks();
    bool draws = false, cuts = false;
    for (int r = 0; r < n; r += guess.rows_each) {
      if (guess.of(r) == nullptr || guess.of(r)->temperature == 0) continue;
      draws = true, cuts |= guess.of(r)->min_p > 0;
    }
    if (cuts) {
      for (int r = n * t / T_; r < n * (t + 1) / T_; ++r)
        row_most_[r] = *std::max_element(logits(r), logits(r) + V_);
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

  // The logits of n rows are those of a coarse head: the best of each row are computed anew.
  void refine(int t, int T_, int n) {
    const int chunks = top_chunks();
    for (int i = t; i < n * chunks; i += T_) best_of_chunk(i / chunks, i % chunks, kMaxTopk);
    sync();
    std::vector<float>& found = found_[t];
    for (int r = 0; r < n; ++r) {
      const Top* parts = tops_.get() + r * chunks;
      found.clear();
      for (int c = 0; c < chunks; ++c)
        found.insert(found.end(), parts[c].logits, parts[c].logits + kMaxTopk);
      const auto last = found.begin() + std::min<int>(kRefined, static_cast<int>(found.size())) - 1;
      std::nth_element(found.begin(), last, found.end(), std::greater<>());
      int number = 0;
      for (int c = 0; c < chunks; ++c)
        for (int i = 0; i < kMaxTopk && parts[c].ids[i] >= 0 && parts[c].logits[i] >= *last; ++i)
          if (number++ % T_ == t) {
            const int id = parts[c].ids[i];
            logits(r)[id] = exact_logit(input(r), id);
          }
    }
    sync();
  }

  float exact_logit(const T* x, int id) const {
    const T* weights = static_cast<const T*>(outer_.head_rows) + size_t(id) * H_;
    Vec sum{};
    for (int c = 0; c < H_; c += kLanes) {
      const Lanes lanes = first_lanes(H_ - c);
      sum = fma(A::load(x + c, lanes), A::load(weights + c, lanes), sum);
    }
    return sum_of(sum);
  }

  void survey(int r, int chunk, int k) {
    best_of_chunk(r, chunk, k);
    Top& top = tops_.get()[r * top_chunks() + chunk];
    const float* own = logits(r);
    const int first = chunk * kTopChunk, end = std::min(V_, first + kTopChunk);
    Vec sum = Vec{};
    for (int c = first; c < end; c += kLanes)
      sum = sum + first_of(first_lanes(end - c), exp_of(load(own + c) - splat(top.most)));
    top.sum = sum_of(sum);
  }

  void best_of_chunk(int r, int chunk, int k) {
    Top& top = tops_.get()[r * top_chunks() + chunk];
    top.clear();
    const float* own = logits(r);
    const int first = chunk * kTopChunk, end = std::min(V_, first + kTopChunk);
    Vec most = splat(-INFINITY);
    for (int c = first; c < end; c += kLanes) {
      const Lanes lanes = first_lanes(end - c);
      const Vec v = load(own + c);
      most = max(most, first_of(lanes, v, splat(-INFINITY)));
      unsigned more = bits_of(mask_of(lanes) & (v > splat(top.logits[k - 1])));
      for (; more != 0; more &= more - 1)
        top.insert(k, own[c + __builtin_ctz(more)], c + __builtin_ctz(more));
    }
    top.most = max_of(most);
  }

  // The target's ids of 8 of the draft's tokens, those from `end` on any.
  Longs ids_from(int c, int end) const {
    if (target_ids_ == nullptr) return splat<int64_t>(c) + count_up<int64_t>();
    if (end - c >= 8) return load(target_ids_ + c);
    int64_t ids[8] = {};
    if (c < end) std::copy(target_ids_ + c, target_ids_ + end, ids);
    return load(ids);
  }

  // Guesses of draws, of a request's rows from `first` on: each logit plus temperature * -log(its
  // token's exponential number), as the target's will have it (Gumbel-max). With min_p the best
  // logit of each row is in row_most_.
  void add_numbers(int first, int chunk, const Guess& guess) {
    const DrawState* state = guess.of(first);
    if (state == nullptr || state->temperature == 0) return;
    const uint64_t key = draw_key(state->seed, state->num_drawn + guess.place);
    const Doubles factor = splat(state->temperature * kLn2);
    const auto cut = static_cast<float>(state->temperature * std::log(state->min_p));
    const int end = std::min(V_, (chunk + 1) * kTopChunk);
    for (int c = chunk * kTopChunk; c < end; c += kLanes) {
      float gains[kLanes];
      for (int i = 0; i < kLanes; i += 8) {
        const Doubles numbers = exponentials_of(uniforms_of(key, ids_from(c + i, end)));
        store_as_floats(gains + i, exponentials_of(numbers) * factor);  // -log2 of any number
      }
      for (int r = first; r < first + guess.rows_each; ++r) {
        float* at = logits(r) + c;
        Vec x = load(at);
        if (state->min_p > 0) x = select(x < splat(row_most_[r] + cut), x + splat(kCutOff), x);
        store(at, x + load(gains));
      }
    }
  }

  void first_frontier(const Growth& growth, size_t all) {
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
        frontier_.h[row] = growth.h + size_t(b) * H_;
      }
  }

  // The width * k children of a level's frontier, from what the threads drew.
  void add_candidates(const Growth& growth, int level, size_t all) {
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
  void next_frontier(const Growth& growth, int level, size_t all) {
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
        next_.seen[row] =
            frontier_.seen[parent] | int64_t(uint64_t(1) << ((level + 1) * width + j));
        next_.h[row] = state(parent);
      }
    }
    std::swap(frontier_, next_);
  }

  // `engine/tree.py:goes_on`.
  bool goes_on(const Growth& growth, int level) const {
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
  int place_frontier(const Growth& growth, int level, RowsView& rows) {
    const int64_t width = growth.width;
    const Lines lines = lines_of(growth);
    frontier_rows_.clear();
    for (int64_t row = 0; row < growth.B * width; ++row) {
      const int64_t b = row / width, n = lines.lens[b],
                    column = n + 1 + level * width + row % width;
      if (n < 0 || !lines.has(column)) return kBadSlot;
      frontier_rows_.add(frontier_.token[row], b, n + level, lines.slot(b, column), n + 1,
                         static_cast<uint64_t>(frontier_.seen[row]));
      sources_[row] = frontier_.h[row];
    }
    rows = frontier_rows_.view(lines, 1);
    if (const int status = check(rows); status != kDone) return status;
    return plan(rows) ? kDone : kBadSlot;
  }

  const int64_t* const target_ids_;  // of each draft token, or null for the same
  const int logits_stride_;
  std::vector<const float*> sources_;      // of each row: its features or state, before the norm
  Buffer<float> other_h_;                  // features through fc; the states of the level before
  Buffer<T> features_;                     // normed
  Buffer<float> wide_;                     // of each thread: a row's embedding or features
  Buffer<float> logits_;                   // [R, logits_stride]
  Buffer<Top> tops_;                       // of each row and chunk
  std::vector<float> row_most_;            // the best logit of each row
  std::vector<std::vector<float>> found_;  // of each thread: a row's best logits

  // Of `grow`: the entries and their outputs, the roots among them and their proposals.
  EntryRows entry_rows_;
  std::vector<T> gathered_;
  std::vector<float> outputs_, roots_h_, first_log_probs_;
  std::vector<int64_t> first_ids_;

  // Of `propose`: this level's frontier and the next one's, and what is drawn from it.
  Frontier frontier_, next_;
  RowList frontier_rows_;
  std::vector<int64_t> drawn_ids_;
  std::vector<float> drawn_log_probs_;
};

}  // namespace
