// A target's forward, and verification of trees: the walks through them and the best logit of a
// row.
#pragma once

#include "draw.h"
#include "model.h"
#include "round.h"

namespace {  // of one translation unit: decoder.cpp

template <class A>
class Target final : public Model<A> {
  using Base = Model<A>;
  using Base::check, Base::embed, Base::layer, Base::normed, Base::plan, Base::product, Base::sync;
  using Base::factors_, Base::shape_, Base::outer_, Base::layers_, Base::threads_;
  using Base::H_, Base::V_, Base::h_, Base::x_stride_, Base::h_stride_, Base::rows_;
  using typename Base::T;

 public:
  explicit Target(const DecoderParts& parts) : Base(parts) {}

  int forward(const ForwardCall& call) override {
    std::vector<float*> logits(call.R, nullptr);
    for (int64_t r = 0; call.logits != nullptr && r < call.R; ++r) logits[r] = call.logits + r * V_;
    return forward(call, logits.data());
  }

  // One forward over the chosen trees; the target's own tokens along each, and its columns put in
  // order. Of a request that its caller walks, the logits of its nodes and no token.
  int verify(const VerifyCall& call) override {
    const Lines& lines = call.lines;
    const Draws& draws = call.draws;
    const int64_t places = call.places;
    int64_t* counts = call.counts;
    if (!tree_rows_.line_up(lines, call.chosen)) return kBadSlot;
    const RowsView rows = tree_rows_.rows.view(lines, 0);
    best_.resize(rows.M);
    if (const int status = place_logits(lines.B, draws, rows.M); status != kDone) return status;
    const ForwardCall forwarded{rows,   call.cache, call.tapped,  nullptr,
                                rows.M, nullptr,    best_.data(), nullptr};
    if (const int status = forward(forwarded, logits_of_.data()); status != kDone) return status;
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
        call.emitted[b * places + place] = drawn_[b][place];
        // A path's nodes ascend, so no slot is written before it is read.
        move(rows, rows.slot[path[place]], rows.slot[path[0] + place], static_cast<T*>(call.cache),
             call.tapped);
      }
    }
    return kDone;
  }

 private:
  void reserve(int M, int team) {
    Base::reserve(M, team);
    bests_.reserve(size_t(Base::team_) * rows_);
  }

  // logits[r]: where those of the call's row r go, V of them, or null.
  int forward(const ForwardCall& call, float* const* logits) {
    const RowsView& rows = call.rows;
    const Tapped& tapped = call.tapped;
    const int64_t* logits_of = call.logits_of;
    const int M = rows.M, n = call.R;
    for (int r = 0; logits_of != nullptr && r < n; ++r)
      if (logits_of[r] < 0 || logits_of[r] >= M) return kBadRow;
    if (M == 0) return kDone;
    if (const int status = check(rows); status != kDone) return status;
    const int team = Pool::shared().advised(threads_);
    reserve(std::max(M, n), team);
    if (!plan(rows)) return kBadSlot;
    const bool finishes = factors_.logit != 1 || factors_.logit_softcap > 0;
    Pool::shared().run(team, [&](int t) {
      const int T_ = team;
      for (int m = M * t / T_; m < M * (t + 1) / T_; ++m)
        embed(rows.token[m], h_.get() + m * h_stride_);
      sync();
      for (size_t l = 0; l < layers_.size(); ++l) {
        const T* x = normed(t, T_, M, layers_[l].input_norm, nullptr);
        const Product* next = l + 1 < layers_.size() ? layers_[l + 1].in : outer_.head;
        layer(t, T_, layers_[l], next, rows, x,
              static_cast<T*>(call.cache) + l * rows.num_slots * shape_.slot_width,
              [&](int m, int c, Lanes lanes, Vec v) {
                if (tapped.taps == nullptr) return;
                const size_t to = tapped.by_slot ? rows.slot[m] : m;
                for (int i = 0; i < 3; ++i)
                  if (tapped.taps[i] == static_cast<int64_t>(l))
                    A::store(static_cast<T*>(tapped.aux) + (to * 3 + i) * H_ + c, lanes, v);
              });
        sync();
      }
      for (int m = M * t / T_; call.last_hidden != nullptr && m < M * (t + 1) / T_; ++m) {
        T* to = static_cast<T*>(call.last_hidden) + size_t(m) * H_;
        this->norm_row(h_.get() + m * h_stride_, outer_.final_norm, to);
      }
      if (n == 0) return;
      const T* x = normed(t, T_, n, outer_.final_norm, logits_of);
      for (int r = 0; r < n; ++r)
        store(best(t, r).most, splat(-INFINITY)), store(best(t, r).ids, splat(INT32_MAX));
      product(*outer_.head, layers_[0].in, x, x_stride_, n, t, T_,
              [&](const Panel& panel, float* out) {
                if (finishes) finish_logits(out, n, panel.width);
                for (int r = 0; r < n; ++r)
                  for (int w = 0; w < panel.width; ++w) {
                    const int c = (panel.first + w) * kLanes;
                    const Lanes lanes = first_lanes(V_ - c);
                    const Vec v = load(out + r * kPanelColumns + w * kLanes);
                    if (logits[r] != nullptr) put_away(logits[r] + c, lanes, v);
                    raise_best(best(t, r), c, lanes, v);
                  }
              });
      end_streams();  // what is put away is there for the other threads
      sync();
      for (int r = n * t / T_; r < n * (t + 1) / T_; ++r) call.best[r] = best_of(T_, r);
    });
    return kDone;
  }

  // Stores a line past the caches, which the weights need: of a tree's rows few are ever read.
  static INLINE void put_away(float* to, Lanes lanes, Vec v) {
    if (is_all(lanes) && reinterpret_cast<uintptr_t>(to) % 64 == 0) {
      stream(to, v);
    } else {
      store(to, lanes, v);
    }
  }

  // Factors the outputs of lm_head on a panel, and cuts them softly.
  void finish_logits(float* out, int n, int width) const {
    const Vec size = splat(factors_.logit), cap = splat(factors_.logit_softcap);
    for (int r = 0; r < n; ++r)
      for (int w = 0; w < width; ++w) {
        float* at = out + r * kPanelColumns + w * kLanes;
        const Vec v = size * load(at);
        store(at, factors_.logit_softcap > 0 ? capped(v, cap) : v);
      }
  }

  // Says where the logits go of the rows that may be drawn from.
  int place_logits(int64_t B, const Draws& draws, int M) {
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
          if (given == size_t(draws.room)) return kBadRow;
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
  void move(const RowsView& rows, int64_t from, int64_t to, T* kv, const Tapped& tapped) const {
    if (from == to) return;
    const size_t width = shape_.slot_width, features = size_t(3) * H_;
    for (size_t l = 0; l < layers_.size(); ++l, kv += rows.num_slots * width)
      std::memcpy(kv + to * width, kv + from * width, width * sizeof(T));
    if (tapped.taps == nullptr) return;
    T* aux = static_cast<T*>(tapped.aux);
    std::memcpy(aux + to * features, aux + from * features, features * sizeof(T));
  }

  // The best logit of each row, lane by lane

  struct Best {
    alignas(64) float most[kLanes];
    int ids[kLanes];
  };
  Best& best(int t, int r) const { return bests_.get()[size_t(t) * rows_ + r]; }

  INLINE void raise_best(Best& best, int c, Lanes lanes, Vec v) const {
    const Vec old = load(best.most);
    const Mask more = mask_of(lanes) & (v > old);
    store(best.most, select(more, v, old));
    store(best.ids, select(more, splat(c) + count_up<int>(), load(best.ids)));
  }

  int64_t best_of(int T_, int r) const {
    float top = -INFINITY;
    int id = INT32_MAX;
    for (int t = 0; t < T_; ++t)
      for (int i = 0; i < kLanes; ++i) {
        const float v = best(t, r).most[i];
        if (v > top || (v == top && best(t, r).ids[i] < id)) top = v, id = best(t, r).ids[i];
      }
    return id == INT32_MAX ? 0 : id;  // all NaN: any token, but one that there is
  }

  Buffer<Best> bests_;  // of each thread and row

  // Of a verify.
  TreeRows tree_rows_;
  std::vector<int64_t> best_;                // of each row
  std::vector<float*> logits_of_;            // of each row: where its logits are, or null
  Buffer<float> drawn_logits_;               // of rows that may be drawn from, [., V padded]
  std::vector<std::vector<int>> paths_;      // of each request: the rows that its walk takes,
  std::vector<std::vector<int64_t>> drawn_;  // and the tokens after them
  std::vector<TokenSampler> samplers_;       // of each thread
};

}  // namespace
