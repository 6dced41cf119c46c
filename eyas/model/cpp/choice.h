// How likely candidates are to be drawn, which of them to verify, and which came true: `engine/acceptance.py` and
// `engine/budget.py` for the few candidates of a round, where array operations take longer than the arithmetic.
//
// Knows probabilities and costs; no model. Letters: B requests, C candidates of each, D depths of the table, S bins.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <vector>

struct Candidates {
  int64_t B, C;
  const float* scores;     // [B, C] log-probability of the path
  const int32_t* parents;  // [B, C], -1 for the root
  const int32_t* depths;   // [C]
};

// The counts' table [2, D, S] of conditional probabilities: sampled or greedy, depth, bin of sqrt(-log p).
struct Calibration {
  const double* table;
  int64_t D, S;
  double bins_per_unit;
  const uint8_t* greedy;   // [B]
  const double* log_odds;  // [B]
};

inline void calibrate(const Candidates& tree, const Calibration& known, double* conditional, double* paths, int64_t* cells) {
  for (int64_t b = 0; b < tree.B; ++b) {
    const int64_t at = b * tree.C;
    const double factor = std::exp(known.log_odds[b]);
    for (int64_t c = 0; c < tree.C; ++c) {
      const int32_t above = tree.parents[at + c];
      const float step = (above < 0 ? 0.0f : tree.scores[at + above]) - tree.scores[at + c];
      const double bin = step > 0 ? std::sqrt(step) * known.bins_per_unit : 0;  // a NaN is no place in the table
      const int64_t depth = std::min<int64_t>(tree.depths[c], known.D) - 1;
      const int64_t cell = static_cast<int64_t>(std::min(bin, static_cast<double>(known.S - 1))) + (known.greedy[b] * known.D + depth) * known.S;
      const double given = known.table[cell], odds = factor * given;
      cells[at + c] = cell;
      conditional[at + c] = odds / (1.0 - given + odds);
      paths[at + c] = conditional[at + c] * (above < 0 ? 1.0 : paths[at + above]);
    }
  }
}

// The best prefix of all requests' best candidates: marks it, and says how many, the tokens expected and the ms.
struct Budget {
  const double* ms_of_nodes;  // [limit + 1]
  int64_t limit, max_nodes, num_tokens;
  double fixed_ms, rate;
};

inline int64_t choose(const Candidates& tree, const double* paths, const Budget& budget, uint8_t* kept, double* tokens, double* ms) {
  const int64_t width = std::min(tree.C, budget.max_nodes);
  std::vector<int64_t> pooled, own(tree.C);
  // At equal paths the lower index goes first: a parent's is below its child's.
  const auto better = [&](int64_t x, int64_t y) { return paths[x] != paths[y] ? paths[x] > paths[y] : x < y; };
  for (int64_t b = 0; b < tree.B; ++b) {
    std::iota(own.begin(), own.end(), b * tree.C);
    std::partial_sort(own.begin(), own.begin() + width, own.end(), better);
    pooled.insert(pooled.end(), own.begin(), own.begin() + width);
  }
  const int64_t most = std::min<int64_t>(pooled.size(), budget.limit);
  std::partial_sort(pooled.begin(), pooled.begin() + most, pooled.end(), better);
  double sum = static_cast<double>(budget.num_tokens), top = -INFINITY;
  int64_t best = 0;
  for (int64_t n = 0; n <= most; ++n) {
    if (n > 0) sum += paths[pooled[n - 1]];
    const double cost = budget.ms_of_nodes[n] + budget.fixed_ms, worth = sum - budget.rate * cost;
    if (worth > top) top = worth, best = n, *tokens = sum, *ms = cost;
  }
  std::fill(kept, kept + tree.B * tree.C, uint8_t{0});
  for (int64_t n = 0; n < best; ++n) kept[pooled[n]] = 1;
  return best;
}

// Down the drawn tokens of each request: candidates whose parent was drawn, those drawn themselves, and by how much more of
// them were drawn than expected. The children of a node stand together.
inline void judge(const Candidates& tree, const int64_t* tokens, const int64_t* emitted, const int64_t* counts, const double* conditional,
                  uint8_t* judged, uint8_t* drawn, double* surplus) {
  std::fill(judged, judged + tree.B * tree.C, uint8_t{0});
  std::fill(drawn, drawn + tree.B * tree.C, uint8_t{0});
  for (int64_t b = 0; b < tree.B; emitted += counts[b++]) {
    const int64_t at = b * tree.C;
    int64_t node = -1, c = 0;
    surplus[b] = 0;
    for (int64_t i = 0; i < counts[b]; ++i) {
      while (c < tree.C && tree.parents[at + c] != node) ++c;
      int64_t next = -1;
      for (; c < tree.C && tree.parents[at + c] == node; ++c) {
        judged[at + c] = 1;
        surplus[b] -= conditional[at + c];
        if (next < 0 && tokens[at + c] == emitted[i]) next = c;
      }
      if (next < 0) break;
      drawn[at + next] = 1;
      surplus[b] += 1;
      node = next;
    }
  }
}
