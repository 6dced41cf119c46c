// The next token of a request from a row of logits, as `engine/sampling.py` defines it, to the bit.
//
// A token's weight is a whole number, so its sums are the same in any order, and a cut may be found
// in any way that is quick. Of what is kept, the token with the largest weight / exponential number
// is drawn. Weights and exponential numbers are the same few operations of fp64 in both, none of
// them fused.
//
// Knows logits; no tree and no model. Letters: V vocabulary.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "eyas.h"
#include "simd.h"

// The best token's weight is 2^44: the sum over 2^19 tokens fits an int64.
constexpr int kWeightBits = 44;
constexpr int64_t kBestWeight = int64_t(1) << kWeightBits;
constexpr double kLog2E = 1.4426950408889634, kLn2 = 0.6931471805599453, kLeastPower = -64;
constexpr int kPowerTerms = 12;  // of the series of 2^f, |f| <= 1/2: its rest is below 2^-47
constexpr int kLogTerms =
    8;  // of the series of log2(m), sqrt(1/2) <= m < sqrt(2): its rest is below 2^-44 of it
constexpr int64_t kSqrtHalf = 0x3FE6A09E667F3BCD,
                  kOne = 0x3FF0000000000000;  // the bits of these numbers
constexpr uint64_t kStep = 0x9E3779B97F4A7C15,
                   kFactors[] = {0xBF58476D1CE4E5B9, 0x94D049BB133111EB};  // splitmix64's
constexpr int kStripVectors =
    16;  // of 16 logits, whose maxima by lane say what the best k are at least
constexpr int kMostPlaces = 64;      // of a walk: a tree's columns
constexpr int64_t kWeightSlack = 4;  // units, above what rounding can turn around
constexpr int kFewLeft = 64;  // candidates: sorting them costs less than closing in once more

constexpr auto kPowerSeries = [] {
  std::array<double, kPowerTerms> c{1};
  for (int i = 1; i < kPowerTerms; ++i) c[i] = c[i - 1] * kLn2 / i;
  return c;
}();
constexpr auto kLogSeries = [] {
  std::array<double, kLogTerms> c{};
  for (int i = 0; i < kLogTerms; ++i) c[i] = 2 * kLog2E / (2 * i + 1);
  return c;
}();

// c[0] + c[1] x + ..., from the last term on.
template <size_t N>
INLINE Doubles polynomial(const std::array<double, N>& c, Doubles x) {
  Doubles p = splat(c[N - 1]);
  for (int i = static_cast<int>(N) - 2; i >= 0; --i) p = p * x + splat(c[i]);
  return p;
}

// round(2^44 * 2^((logit - best) * scale)) of 8 logits; 0 far below. `scale` is log2(e) /
// temperature.
INLINE Longs weights_of(Doubles logits, Doubles best, Doubles scale) {
  const Doubles least = splat(kLeastPower), raw = (logits - best) * scale;
  const Doubles y = select(raw > least, raw, least);
  const Longs whole = to_longs(y);
  const Doubles f = y - to_doubles(whole);
  const Doubles p = polynomial(kPowerSeries, f);
  return to_longs(p * as<double>((whole + splat<int64_t>(1023 + kWeightBits)) << 52));
}

// Of one number, or of 8.
template <class Z>
INLINE Z splitmix(Z z, Z first, Z second) {
  z = (z ^ (z >> 30)) * first;
  z = (z ^ (z >> 27)) * second;
  return z ^ (z >> 31);
}
inline uint64_t splitmix(uint64_t z) { return splitmix(z, kFactors[0], kFactors[1]); }

// What the random numbers of the answer's token `index` come from, one for each id of the
// vocabulary.
inline uint64_t draw_key(int64_t seed, int64_t index) {
  return splitmix(splitmix(static_cast<uint64_t>(seed)) +
                  (static_cast<uint64_t>(index) + 1) * kStep);
}

// The uniform numbers of 8 ids: odd multiples of 2^-53 below 1.
INLINE Doubles uniforms_of(uint64_t key, Longs ids) {
  const auto z = splitmix(splat(key + kStep) + as<uint64_t>(ids) * splat(kStep), splat(kFactors[0]),
                          splat(kFactors[1]));
  return as<double>((z >> 12) | splat<uint64_t>(kOne)) - splat(1 - 0x1p-53);
}

// Their exponential numbers: -log2(u), above 1 - u.
INLINE Doubles exponentials_of(Doubles u) {
  const Longs bits = as<int64_t>(u), whole = (bits - splat(kSqrtHalf)) >> 52;
  const Doubles one = splat(1.0), m = as<double>(bits - (whole << 52));
  const Doubles s = (m - one) / (m + one), square = s * s;
  return Doubles{} - (to_doubles(whole) + s * polynomial(kLogSeries, square));
}

// A token and its rank: by the logit, of equal ones the smaller id first.
struct Candidate {
  float logit;
  int id;

  bool operator<(const Candidate& other) const {
    return logit != other.logit ? logit > other.logit : id < other.id;
  }
};

constexpr Candidate kEverything{-INFINITY, INT32_MAX};

// Draws the tokens of one request along its walk. Its buffers serve one walk after the other.
class TokenSampler {
 public:
  static constexpr int64_t kNoToken = -1;

  void begin(const DrawState& state, int V) {
    state_ = &state, V_ = V, place_ = 0;
    seen_.assign(state.seen, state.seen + state.num_seen),
        counts_.assign(state.counts, state.counts + state.num_seen);
  }

  // The token after the nodes so far; kNoToken where the best logit is no number.
  int64_t next(const float* raw) {
    const int64_t index = state_->num_drawn + place_;
    const float* logits = adjusted(raw, index);
    const int64_t token =
        state_->temperature == 0 ? argmax(logits) : sampled(logits, draw_key(state_->seed, index));
    if (token == kNoToken) return token;
    if (state_->scored_ints != nullptr && place_ < kMostPlaces && !score(raw, token))
      return kNoToken;
    ++place_;
    if (has_penalties()) count(token);
    return token;
  }

  // The token that the numbers of `key` draw from what the cuts keep.
  int64_t sampled(const float* logits, uint64_t key) {
    const float best = best_of(logits);
    if (!std::isfinite(best)) return kNoToken;
    best_ = best, scale_ = kLog2E / state_->temperature;
    least_ = std::max<int64_t>(
        1, static_cast<int64_t>(std::ceil(state_->min_p * static_cast<double>(kBestWeight))));
    last_ = state_->top_k > 0 && state_->top_k < V_ ? best_candidates(logits, state_->top_k)
                                                    : kEverything;
    if (state_->top_p < 1) {
      weigh(logits);
      last_ = last_of_nucleus(logits);
    }
    return winner(logits, key);
  }

  // What the token's log-probability is made of, at temperature 1 and of the logits as they are.
  bool score(const float* raw, int64_t token) {
    const int64_t n = state_->num_top;
    int64_t* ints = state_->scored_ints + place_ * (1 + n);
    float* logits = state_->scored_logits + place_ * (2 + n);
    const float best = best_of(raw);
    if (!std::isfinite(best)) return false;
    best_ = best, scale_ = kLog2E, least_ = 1, last_ = kEverything;
    ints[0] = sum(raw), logits[0] = best, logits[1] = raw[token];
    if (n == 0) return true;
    best_candidates(raw, n);
    std::sort(ranked_.begin(), ranked_.begin() + std::min<int64_t>(n, V_));
    for (int64_t i = 0; i < std::min<int64_t>(n, V_); ++i)
      ints[1 + i] = ranked_[i].id, logits[2 + i] = ranked_[i].logit;
    return true;
  }

 private:
  bool has_penalties() const {
    return state_->repetition != 1 || state_->frequency != 0 || state_->presence != 0;
  }

  const float* adjusted(const float* raw, int64_t index) {
    const bool masks = index < state_->min_tokens && state_->num_ends > 0;
    if (!has_penalties() && state_->num_biased == 0 && !masks) return raw;
    adjusted_.assign(raw, raw + V_);
    for (size_t i = 0; has_penalties() && i < seen_.size(); ++i) {
      double logit = adjusted_[seen_[i]];
      if (state_->repetition != 1)
        logit = logit > 0 ? logit / state_->repetition : logit * state_->repetition;
      logit -= state_->frequency * static_cast<double>(counts_[i]) +
               state_->presence * (counts_[i] > 0 ? 1.0 : 0.0);
      adjusted_[seen_[i]] = static_cast<float>(logit);
    }
    for (int64_t i = 0; i < state_->num_biased; ++i)
      adjusted_[state_->biased[i]] += static_cast<float>(state_->biases[i]);
    for (int64_t i = 0; masks && i < state_->num_ends; ++i) adjusted_[state_->ends[i]] = -INFINITY;
    return adjusted_.data();
  }

  void count(int64_t token) {
    const auto at = std::find(seen_.begin(), seen_.end(), token);
    if (at == seen_.end()) {
      seen_.push_back(token), counts_.push_back(1);
    } else {
      ++counts_[at - seen_.begin()];
    }
  }

  // The maximum; NaN where there is one.
  float best_of(const float* logits) const {
    Vec most = splat(-INFINITY);
    Mask odd{};
    for (int c = 0; c < V_; c += kLanes) {
      const Vec v = load(logits + c, first_lanes(V_ - c), splat(-INFINITY));
      odd = odd | (v != v);
      most = max(most, v);
    }
    return bits_of(odd) != 0 ? NAN : max_of(most);
  }

  // As NumPy's: of equal ones the first, and a NaN before all.
  int64_t argmax(const float* logits) const {
    const float best = best_of(logits);
    return std::find_if(logits, logits + V_,
                        [&](float logit) { return logit == best || std::isnan(logit); }) -
           logits;
  }

  // Calls take(first id, kept lanes, weights) for the vocabulary's eights from `first` to `end` of
  // which one is kept or more.
  template <class Take>
  INLINE void each_eight(const float* logits, int first, int end, Take&& take) const {
    const Doubles best = splat(best_), scale = splat(scale_), bound = splat<double>(last_.logit);
    const Longs least = splat(least_), place = count_up<int64_t>();
    for (int c = first; c < end; c += 8) {
      const Doubles v = load_as_doubles(logits + c, std::min(8, end - c));
      // of equal logits the first ids, and none behind the end
      const Longs last = splat<int64_t>(last_.id) - splat<int64_t>(c);
      Longs kept =
          ((v > bound) | ((v == bound) & (place <= last))) & (place < splat<int64_t>(end - c));
      if (bits_of(kept) == 0) continue;
      const Longs weights = weights_of(v, best, scale);
      kept = kept & (weights >= least);
      if (bits_of(kept) != 0) take(c, kept, weights);
    }
  }

  int64_t sum(const float* logits) const {
    Longs total{};
    each_eight(logits, 0, V_, [&](int, Longs kept, Longs w) { total = total + (w & kept); });
    return sum_of(total);
  }

  // The largest weight / exponential number of what is kept, of equal ones the first. Few have to
  // know theirs: it is below weight / (1 - u).
  int64_t winner(const float* logits, uint64_t key) const {
    int64_t token = kNoToken;
    double most = 0;
    each_eight(logits, 0, V_, [&](int c, Longs kept, Longs w) {
      const Doubles u = uniforms_of(key, splat<int64_t>(c) + count_up<int64_t>()),
                    weights = to_doubles(w);
      unsigned rest = bits_of(kept & ((splat(1.0) - u) * splat(most) < weights));
      if (rest == 0) return;
      double ratios[8];
      store(ratios, weights / exponentials_of(u));
      for (; rest != 0; rest &= rest - 1) {
        const int i = __builtin_ctz(rest);
        if (ratios[i] > most) most = ratios[i], token = c + i;
      }
    });
    return token;
  }

  // The weights of what is kept, 0 of the others, in eights.
  void weigh(const float* logits) {
    weights_.assign(round_up(V_, 8), 0);
    each_eight(logits, 0, V_,
               [&](int c, Longs kept, Longs w) { store(weights_.data() + c, w & kept); });
  }

  struct Held {
    int64_t weight, count;
  };

  // Of the tokens of `bound` or more.
  Held held_from(int64_t bound) const {
    Longs sum{}, count{};
    for (size_t i = 0; i < weights_.size(); i += 8) {
      const Longs w = load(weights_.data() + i), kept = w >= splat(bound);
      sum = sum + (w & kept), count = count - kept;
    }
    return {sum_of(sum), sum_of(count)};
  }

  // The worst of the smallest set of the best that holds top_p of what weigh() kept.
  //
  // Bounds close in on its weight: what weighs `high` or more does not hold enough, what weighs
  // `low` or more does. The rank goes by the logits, so a few units to both sides are ranked with
  // them: rounding may turn two weights around, but by no more than one.
  Candidate last_of_nucleus(const float* logits) {
    int64_t low = 1, high = kBestWeight + 1;
    Held of_low = held_from(low), of_high{0, 0};
    const int64_t total = of_low.weight;
    const int64_t need = std::min(
        total, static_cast<int64_t>(std::ceil(state_->top_p * static_cast<double>(total))));
    while (of_low.count - of_high.count > kFewLeft) {
      const int64_t middle =
          static_cast<int64_t>(std::sqrt(static_cast<double>(low) * static_cast<double>(high)));
      if (middle <= low || middle >= high) break;
      const Held held = held_from(middle);
      if (held.weight >= need) {
        low = middle, of_low = held;
      } else {
        high = middle, of_high = held;
      }
    }
    int64_t held = held_from(high + kWeightSlack).weight;
    ranked_.clear();
    for (int c = 0; c < V_; c += 8) {
      const Longs w = load(weights_.data() + c);
      unsigned kept = bits_of((w >= splat(std::max<int64_t>(1, low - kWeightSlack))) &
                              (w < splat(high + kWeightSlack)));
      for (; kept != 0; kept &= kept - 1)
        ranked_.push_back({logits[c + __builtin_ctz(kept)], c + __builtin_ctz(kept)});
    }
    const auto weight = [&](const Candidate& one) { return weights_[one.id]; };
    size_t first = 0, end = ranked_.size();
    while (end - first > kFewLeft) {  // many, where many are equal
      const size_t middle = (first + end) / 2;
      std::nth_element(ranked_.begin() + first, ranked_.begin() + middle, ranked_.begin() + end);
      int64_t better = 0;
      for (size_t i = first; i < middle; ++i) better += weight(ranked_[i]);
      if (held + better >= need) {
        end = middle;
      } else {
        held += better, first = middle;
      }
    }
    std::sort(ranked_.begin() + first, ranked_.begin() + end);
    for (; first + 1 < end && held + weight(ranked_[first]) < need; ++first)
      held += weight(ranked_[first]);
    return ranked_[first];
  }

  // Leaves the `count` best and maybe others in ranked_, the best of them first up to the worst,
  // and returns that one.
  Candidate best_candidates(const float* logits, int64_t count) {
    count = std::min<int64_t>(count, V_);
    float bound = -INFINITY;
    maxima_.clear();
    for (int first = 0; first < V_; first += kStripVectors * kLanes) {
      Vec most = splat(-INFINITY);
      for (int c = first; c < std::min(V_, first + kStripVectors * kLanes); c += kLanes)
        most = max(most, load(logits + c, first_lanes(V_ - c), splat(-INFINITY)));
      maxima_.resize(maxima_.size() + kLanes);
      store(maxima_.data() + maxima_.size() - kLanes, most);
    }
    if (count <= static_cast<int64_t>(maxima_.size())) {
      std::nth_element(maxima_.begin(), maxima_.begin() + (count - 1), maxima_.end(),
                       std::greater<float>());
      bound = maxima_[count - 1];
    }
    ranked_.clear();
    for (int c = 0; c < V_; c += kLanes) {
      const Lanes lanes = first_lanes(V_ - c);
      unsigned kept = bits_of(mask_of(lanes) & (load(logits + c, lanes) >= splat(bound)));
      for (; kept != 0; kept &= kept - 1)
        ranked_.push_back({logits[c + __builtin_ctz(kept)], c + __builtin_ctz(kept)});
    }
    std::nth_element(ranked_.begin(), ranked_.begin() + (count - 1), ranked_.end());
    return ranked_[count - 1];
  }

  const DrawState* state_ = nullptr;
  int V_ = 0;
  int64_t place_ = 0;
  double best_ = 0, scale_ = 0;
  int64_t least_ = 1;             // what is kept weighs so much or more,
  Candidate last_ = kEverything;  // and ranks no worse than this
  std::vector<int64_t> seen_, counts_, weights_;
  std::vector<float> adjusted_, maxima_;
  std::vector<Candidate> ranked_;
};
