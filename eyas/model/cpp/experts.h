// Which experts of a mixture take which rows. Knows the router's logits, no weights.
//
// An expert's output is multiplied by its share; or, where inputs are routed, its input.
//
// The rows of a forward go to experts grouped: an expert's rows stand together, so its weights are
// read once. What a row is given, and in what order it is summed, depends on the row alone.
#pragma once

#include <cmath>
#include <vector>

#include "simd.h"

// Rows [start, start + count) of the grouped ones.
struct ExpertRows {
  int expert, start, count;
};

// Letters: M rows, E experts, k of them for a row.
template <class T>
class Experts {
 public:
  Experts(int64_t E, int64_t k, bool renormalises, bool routes_input)
      : E_(static_cast<int>(E)),
        k_(static_cast<int>(k)),
        stride_(round_up(E_, kLanes)),
        renormalises_(renormalises),
        routes_input_(routes_input) {}

  void reserve(size_t M, size_t x_stride, size_t h_stride) {
    logits.reserve(M * stride_);
    ids_.resize(M * k_), places_.resize(M * k_), rows_.resize(M * k_), shares_.resize(M * k_);
    of_inputs_.resize(M * k_);
    counts_.resize(E_ + 1), groups_.resize(E_);
    x.reserve(M * k_ * x_stride);
    outputs.reserve(M * k_ * h_stride);
  }

  // The k best of row m's logits (ties: smaller id), ascending, and their shares: of the softmax,
  // or where inputs are routed, the sigmoid of each.
  void choose(int m) {
    float *p = logits.get() + static_cast<size_t>(m) * stride_, *shares = shares_.data() + m * k_;
    int* ids = ids_.data() + m * k_;
    for (int i = 0; i < k_; ++i) {
      int best = -1;
      for (int e = 0; e < E_; ++e)
        if (std::find(ids, ids + i, e) == ids + i && (best < 0 || p[e] > p[best])) best = e;
      ids[i] = best;
    }
    std::sort(ids, ids + k_);
    if (routes_input_) {
      for (int i = 0; i < k_; ++i)
        shares[i] = max_of(splat(1.0f) / (splat(1.0f) + exp_of(splat(-p[ids[i]]))));
      return;
    }
    Vec most = splat(-INFINITY), sum = Vec{};
    for (int e = 0; e < E_; e += kLanes)
      most = max(most, first_of(first_lanes(E_ - e), load(p + e), most));
    const Vec top = splat(max_of(most));
    for (int e = 0; e < E_; e += kLanes) {
      const Vec part = exp_of(load(p + e) - top);
      store(p + e, part);
      sum = sum + first_of(first_lanes(E_ - e), part);
    }
    float total = renormalises_ ? 0 : sum_of(sum);
    for (int i = 0; renormalises_ && i < k_; ++i) total += p[ids[i]];
    for (int i = 0; i < k_; ++i) shares[i] = p[ids[i]] / total;
  }

  // Groups the M rows by expert; needs every row's choice.
  void group(int M) {
    int* starts = counts_.data();
    std::fill(starts, starts + E_ + 1, 0);
    for (int i = 0; i < M * k_; ++i) ++starts[ids_[i] + 1];
    num_groups_ = 0;
    for (int e = 0; e < E_; ++e) {
      if (starts[e + 1] > 0) groups_[num_groups_++] = {e, starts[e], starts[e + 1]};
      starts[e + 1] += starts[e];
    }
    for (int i = 0; i < M * k_; ++i) {
      const int place = starts[ids_[i]]++;
      places_[i] = place, rows_[place] = i / k_;
      of_inputs_[place] = routes_input_ ? std::exchange(shares_[i], 1.0f) : 1.0f;
    }
  }

  // After `group`.
  int num_groups() const { return num_groups_; }
  const ExpertRows& operator[](int group) const { return groups_[group]; }
  int row(int place) const { return rows_[place]; }
  float of_input(int place) const { return of_inputs_[place]; }  // what it is multiplied by

  // 16 channels of row m's sum over its experts, in their order, of outputs [M * k, stride], and
  // of what is there already.
  INLINE Vec sum(int m, int c, size_t stride, Vec all) const {
    for (int i = m * k_; i < (m + 1) * k_; ++i)
      all = fma(splat(shares_[i]), load(outputs.get() + places_[i] * stride + c), all);
    return all;
  }

  int stride() const { return stride_; }

  Buffer<float> logits, outputs;  // [M, stride], [M * k, h_stride]
  Buffer<T> x;                    // [M * k, x_stride]

 private:
  int E_, k_, stride_, num_groups_ = 0;
  bool renormalises_, routes_input_;
  std::vector<int> ids_, places_, rows_, counts_;
  std::vector<float> shares_, of_inputs_;
  std::vector<ExpertRows> groups_;
};
