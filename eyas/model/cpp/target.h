// A target's forward, and verification of trees: the walks through them and the best logit of a
// row.
#pragma once

#include "layer.h"

namespace {  // of one translation unit: decoder.cpp

// last_hidden: [M, H] after the final norm, or null.
template <class A>
int Model<A>::forward(const RowsView& rows, void* kv, const Tapped& tapped,
                      const int64_t* logits_of, int64_t R, float* const* logits, int64_t* best,
                      void* last_hidden) {
  const int M = rows.M, n = static_cast<int>(R);
  for (int64_t r = 0; logits_of != nullptr && r < R; ++r)
    if (logits_of[r] < 0 || logits_of[r] >= M) return kBadRow;
  if (M == 0) return kDone;
  if (const int status = check(rows); status != kDone) return status;
  const int team = Pool::shared().advised(threads_);
  reserve(std::max(M, n), team);
  if (!plan(rows)) return kBadSlot;
  const bool finishes = factors_.logit != 1 || factors_.logit_softcap > 0;
  Pool::shared().run(team, [&](int t) {
    const int T_ = team;
    for (int m = M * t / T_; m < M * (t + 1) / T_; ++m) embed(rows.token[m], h_ + m * h_stride_);
    sync();
    for (size_t l = 0; l < layers_.size(); ++l) {
      const T* x = normed(t, T_, M, layers_[l].input_norm, nullptr);
      const Product* next = l + 1 < layers_.size() ? layers_[l + 1].in : outer_.head;
      layer(t, T_, layers_[l], next, rows, x,
            static_cast<T*>(kv) + l * rows.num_slots * shape_.slot_width,
            [&](int m, int c, Lanes lanes, Vec v) {
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
                [&](int c, Lanes lanes, Vec v) { A::store(to + c, lanes, v); });
    }
    if (n == 0) return;
    const T* x = normed(t, T_, n, outer_.final_norm, logits_of);
    clear_best(t, n);
    product(*outer_.head, layers_[0].in, x, x_stride_, n, t, T_,
            [&](const Panel& panel, float* out) {
              if (finishes) finish_logits(out, n, panel.width);
              for (int r = 0; r < n; ++r)
                for (int w = 0; w < panel.width; ++w) {
                  const int c = (panel.first + w) * kLanes;
                  const Lanes lanes = first_lanes(V_ - c);
                  const Vec v = load(out + r * kPanelColumns + w * kLanes);
                  if (logits != nullptr && logits[r] != nullptr) put_away(logits[r] + c, lanes, v);
                  raise_best(t, r, c, lanes, v);
                }
            });
    end_streams();  // what is put away is there for the other threads
    sync();
    for (int r = n * t / T_; r < n * (t + 1) / T_; ++r) best[r] = best_of(T_, r);
  });
  return kDone;
}

// Factors the outputs of lm_head on a panel, and cuts them softly.
template <class A>
void Model<A>::finish_logits(float* out, int n, int width) const {
  const Vec size = splat(factors_.logit), cap = splat(factors_.logit_softcap);
  for (int r = 0; r < n; ++r)
    for (int w = 0; w < width; ++w) {
      float* at = out + r * kPanelColumns + w * kLanes;
      const Vec v = size * load(at);
      store(at, factors_.logit_softcap > 0 ? capped(v, cap) : v);
    }
}

// One forward over the chosen trees; the target's own tokens along each, and its columns put in
// order. Of a request that its caller walks, the logits of its nodes and no token.
template <class A>
int Model<A>::verify(const Lines& lines, const Chosen& chosen, void* kv, const Tapped& tapped,
                     const Draws& draws, int64_t places, int64_t* emitted, int64_t* counts) {
  if (!tree_rows_.line_up(lines, chosen)) return kBadSlot;
  const RowsView rows = tree_rows_.rows.view(lines, 0);
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

// Says where the logits go of the rows that may be drawn from.
template <class A>
int Model<A>::place_logits(int64_t B, const Draws& draws, int M) {
  const size_t stride = round_up(V_, kLanes);
  size_t own = 0, given = 0;
  logits_of_.assign(M, nullptr);
  for (int64_t b = 0; b < B; ++b)
    if (draws.of[b] != nullptr && !draws.of[b]->by_caller)
      own += tree_rows_.end(b) - tree_rows_.first(b);
  float* to = own == 0 ? nullptr : drawn_logits_.reserve(own * stride);
  for (int64_t b = 0; b < B; ++b) {
    if (draws.of[b] == nullptr) continue;
    for (int m = tree_rows_.first(b); m < tree_rows_.end(b); ++m) {
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

template <class A>
bool Model<A>::walk(int64_t b, const DrawState* state, TokenSampler& sampler) {
  if (state == nullptr)
    return tree_rows_.walk(b, paths_[b], drawn_[b], [&](int m) { return best_[m]; });
  if (state->by_caller) {
    paths_[b].clear();
    return true;
  }
  sampler.begin(*state, V_);
  return tree_rows_.walk(b, paths_[b], drawn_[b],
                         [&](int m) { return sampler.next(logits_of_[m]); });
}

// A column's keys, values and features from one slot to another.
template <class A>
void Model<A>::move(const RowsView& rows, int64_t from, int64_t to, T* kv,
                    const Tapped& tapped) const {
  if (from == to) return;
  const size_t width = shape_.slot_width, features = static_cast<size_t>(3) * H_;
  for (size_t l = 0; l < layers_.size(); ++l, kv += rows.num_slots * width)
    std::memcpy(kv + to * width, kv + from * width, width * sizeof(T));
  if (tapped.taps == nullptr) return;
  T* aux = static_cast<T*>(tapped.aux);
  std::memcpy(aux + to * features, aux + from * features, features * sizeof(T));
}

template <class A>
void Model<A>::clear_best(int t, int n) const {
  for (int r = 0; r < n; ++r) {
    store(most(t, r), splat(-INFINITY));
    store(most_ids(t, r), splat(INT32_MAX));
  }
}

template <class A>
int64_t Model<A>::best_of(int T_, int r) const {
  float top = -INFINITY;
  int id = INT32_MAX;
  for (int t = 0; t < T_; ++t)
    for (int i = 0; i < kLanes; ++i) {
      const float v = most(t, r)[i];
      if (v > top || (v == top && most_ids(t, r)[i] < id)) top = v, id = most_ids(t, r)[i];
    }
  return id == INT32_MAX ? 0 : id;  // all NaN: any token, but one that there is
}

}  // namespace
