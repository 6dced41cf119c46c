// A draft head: its entries, its proposals, and the growth of trees (EAGLE-2, arXiv 2406.16858).
#pragma once

#include "layer.h"

namespace {  // of one translation unit: decoder.cpp

template <class A>
int Model<A>::extend(const RowsView& rows, void* kv, const void* aux, float* h) {
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
    put_product(t, T_, *outer_.fc, layers_[0].in, features, stride, M, other_h_, h_stride_);
    if (t == 0)
      for (int m = 0; m < M; ++m) sources_[m] = other_h_ + m * h_stride_;
    sync();
  });
}

template <class A>
int Model<A>::step(const RowsView& rows, void* kv, const float* h_in, float* h) {
  return draft(rows, kv, h, [&](int t, int) {
    if (t == 0)
      for (int m = 0; m < rows.M; ++m) sources_[m] = h_in + static_cast<size_t>(m) * H_;
    sync();
  });
}

template <class A>
int Model<A>::proposals(const float* h, const Guess& guess, int64_t R, int64_t k, int64_t* ids,
                        float* log_probs) {
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

// The entries up to the roots', from the features of the columns before, and the trees that grow
// from there.
template <class A>
int Model<A>::grow(const Lines& lines, const int64_t* starts, const int64_t* tokens,
                   const void* features, Growth& growth) {
  if (!entry_rows_.line_up(lines, starts, tokens)) return -kBadSlot;
  const RowsView rows = entry_rows_.rows.view(lines, 1);
  const size_t width = 3 * H_, B = lines.B;
  gathered_.resize(rows.M * width), outputs_.resize(static_cast<size_t>(rows.M) * H_),
      roots_h_.resize(B * H_);
  for (int m = 0; m < rows.M; ++m)
    std::memcpy(gathered_.data() + m * width,
                static_cast<const T*>(features) + entry_rows_.features[m] * width,
                width * sizeof(T));
  if (const int status = extend(rows, growth.kv, gathered_.data(), outputs_.data());
      status != kDone)
    return -status;
  for (size_t b = 0; b < B; ++b)
    std::memcpy(roots_h_.data() + b * H_, outputs_.data() + (entry_rows_.ends[b] - 1) * H_,
                H_ * sizeof(float));
  first_ids_.resize(B * growth.k), first_log_probs_.resize(B * growth.k);
  proposals(roots_h_.data(), Guess{growth.draws, 1, 0}, lines.B, growth.k, first_ids_.data(),
            first_log_probs_.data());
  for (int64_t& id : first_ids_) id = target_id(id);
  growth.h = roots_h_.data(), growth.first_ids = first_ids_.data(),
  growth.first_log_probs = first_log_probs_.data();
  return propose(growth);
}

// prepare(t, T) leaves the rows' features or fed-back states in sources_, for all threads to see.
template <class A>
template <class Prepare>
int Model<A>::draft(const RowsView& rows, void* kv, float* h, Prepare&& prepare) {
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
template <class A>
void Model<A>::draft_input(int t, int T_, const RowsView& rows) {
  const int M = rows.M;
  const Layer& only = layers_[0];
  for (int m = M * t / T_; m < M * (t + 1) / T_; ++m) {
    T* x = x_ + m * x_stride_;
    float *wide = wide_.get() + t * wide_stride(), *h = h_ + m * h_stride_;
    embed(rows.token[m], wide);
    normalise(wide, only.input_norm, H_, eps_,
              [&](int c, Lanes lanes, Vec v) { A::store(x + c, lanes, v); });
    const bool residual_normed = shape_.norm_before_residual;
    normalise(sources_[m], outer_.hidden_norm, H_, eps_, [&](int c, Lanes lanes, Vec v) {
      A::store(x + H_ + c, lanes, v);
      store(h + c, residual_normed ? v : load(sources_[m] + c, lanes));
    });
  }
  sync();
}

template <class A>
void Model<A>::norm_output(int m) {
  float* h = h_ + m * h_stride_;
  normalise(h, outer_.final_norm, H_, eps_,
            [&](int c, Lanes lanes, Vec v) { store(h + c, lanes, v); });
}

// The input of lm_head from row m of h_, to x_; h_ is the post-norm state already when
// `is_normed`.
template <class A>
void Model<A>::draft_normed(int m, bool is_normed) {
  float* h = h_ + m * h_stride_;
  T* x = x_ + m * x_stride_;
  if (!is_normed) {
    normalise(h, outer_.final_norm, H_, eps_,
              [&](int c, Lanes lanes, Vec v) { A::store(x + c, lanes, v); });
    return;
  }
  for (int c = 0; c < H_; c += kLanes) A::store(x + c, first_lanes(H_ - c), load(h + c));
}

template <class A>
void Model<A>::norm_features(const T* from, int m, int t) {
  float* wide = wide_.get() + t * wide_stride();
  T* to = features_.get() + m * feature_stride();
  for (int c = 0; c < 3 * H_; c += kLanes) {
    const Lanes lanes = first_lanes(3 * H_ - c);
    store(wide + c, lanes, A::load(from + c, lanes));
  }
  for (int i = 0; i < 3 && outer_.feature_norms[i] != nullptr; ++i) {
    float* part = wide + i * H_;
    normalise(part, outer_.feature_norms[i], H_, eps_,
              [&](int c, Lanes lanes, Vec v) { store(part + c, lanes, v); });
  }
  if (outer_.features_norm != nullptr)
    normalise(wide, outer_.features_norm, 3 * H_, eps_,
              [&](int c, Lanes lanes, Vec v) { store(wide + c, lanes, v); });
  for (int c = 0; c < 3 * H_; c += kLanes)
    A::store(to + c, first_lanes(3 * H_ - c), load(wide + c));
}

// The k best tokens of n rows whose lm_head inputs are in x_. Ends with a barrier only between
// its parts.
template <class A>
void Model<A>::best_tokens(int t, int T_, int n, const Guess& guess, int k, int64_t* ids,
                           float* log_probs) {
  put_product(t, T_, *outer_.head, layers_[0].in, x_, x_stride_, n, logits_.get(), logits_stride_);
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

// The logits of n rows are those of a coarse head: the best of each row are computed anew.
template <class A>
void Model<A>::refine(int t, int T_, int n) {
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
          logits_.get()[r * logits_stride_ + id] = exact_logit(x_ + r * x_stride_, id);
        }
  }
  sync();
}

template <class A>
float Model<A>::exact_logit(const T* x, int id) const {
  const T* weights = static_cast<const T*>(outer_.head_rows) + static_cast<size_t>(id) * H_;
  Vec sum{};
  for (int c = 0; c < H_; c += kLanes) {
    const Lanes lanes = first_lanes(H_ - c);
    sum = fma(A::load(x + c, lanes), A::load(weights + c, lanes), sum);
  }
  return sum_of(sum);
}

template <class A>
void Model<A>::survey(int r, int chunk, int k) {
  best_of_chunk(r, chunk, k);
  Top& top = tops_.get()[r * top_chunks() + chunk];
  const float* logits = logits_.get() + r * logits_stride_;
  const int first = chunk * kTopChunk, end = std::min(V_, first + kTopChunk);
  Vec sum = Vec{};
  for (int c = first; c < end; c += kLanes)
    sum = sum + first_of(first_lanes(end - c), exp_of(load(logits + c) - splat(top.most)));
  top.sum = sum_of(sum);
}

template <class A>
void Model<A>::best_of_chunk(int r, int chunk, int k) {
  Top& top = tops_.get()[r * top_chunks() + chunk];
  top.clear();
  const float* logits = logits_.get() + r * logits_stride_;
  const int first = chunk * kTopChunk, end = std::min(V_, first + kTopChunk);
  Vec most = splat(-INFINITY);
  for (int c = first; c < end; c += kLanes) {
    const Lanes lanes = first_lanes(end - c);
    const Vec v = load(logits + c);
    most = max(most, first_of(lanes, v, splat(-INFINITY)));
    unsigned more = bits_of(mask_of(lanes) & (v > splat(top.logits[k - 1])));
    for (; more != 0; more &= more - 1)
      top.insert(k, logits[c + __builtin_ctz(more)], c + __builtin_ctz(more));
  }
  top.most = max_of(most);
}

// Guesses of draws, of a request's rows from `first` on: each logit plus temperature * -log(its
// token's exponential number), as the target's will have it (Gumbel-max). With min_p the best
// logit of each row is in row_most_.
template <class A>
void Model<A>::add_numbers(int first, int chunk, const Guess& guess) {
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
      float* logits = logits_.get() + r * logits_stride_ + c;
      Vec x = load(logits);
      if (state->min_p > 0) x = select(x < splat(row_most_[r] + cut), x + splat(kCutOff), x);
      store(logits, x + load(gains));
    }
  }
}

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
      const Guess guess{growth.draws, static_cast<int>(growth.width), level + 1};
      best_tokens(t, team, M, guess, k, drawn_ids_.data(), drawn_log_probs_.data());
      sync();
    }
  });
  return status == kDone ? drafted : -status;
}

}  // namespace
