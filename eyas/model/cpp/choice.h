// How likely candidates are to be drawn, which of them to verify, and which came true: `engine/acceptance.py` and
// `engine/tree.py` for the few candidates of a round, where array operations take longer than the arithmetic.
//
// Knows probabilities and costs; no model. Letters: B requests, C candidates of each, D depths of the table, S bins.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
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

// `engine/text_acceptance.py`: what the head's counts say (conditional), corrected by the counts of text's candidates, those with a
// cell: table [2, E], sampled or greedy; of E cells each `opinions` have one kind, and from the third on the head proposes them too.
struct TextCounts {
  const int32_t* cells;  // [B, C], -1 for none
  const double* table;
  int64_t E, opinions;
  const uint8_t* greedy;   // [B]
  const double* log_odds;  // [B]
  double largest;
};

inline void weigh_text(const Candidates& tree, const TextCounts& text, const double* conditional, double* weighed, double* paths) {
  constexpr int32_t kPad = -9;  // the parent of a place without a candidate
  for (int64_t b = 0; b < tree.B; ++b) {
    const int64_t at = b * tree.C;
    const double factor = std::exp(text.log_odds[b]);
    for (int64_t c = at; c < at + tree.C; ++c) weighed[c] = tree.parents[c] == kPad ? 0.0 : conditional[c];
    for (int64_t c = at; c < at + tree.C; ++c) {
      if (text.cells[c] < 0) continue;
      const double given = text.table[text.greedy[b] * text.E + text.cells[c]], odds = factor * given;
      weighed[c] = odds / (1.0 - given + odds);
      const double before = text.cells[c] % text.opinions >= 2 ? conditional[c] : 0.0, left = (1.0 - weighed[c]) / (1.0 - before);
      for (int64_t other = at; other < at + tree.C; ++other)
        if (tree.parents[other] == tree.parents[c] && text.cells[other] < 0) weighed[other] *= left;
    }
    for (int64_t c = at; c < at + tree.C; ++c) {
      weighed[c] = std::min(weighed[c], text.largest);
      const int32_t above = tree.parents[c];
      paths[c] = weighed[c] * (above < 0 ? 1.0 : paths[at + above]);
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

// `engine/outlook.py`: who drafts, before any tree is known. S requests that may, of B; K draft steps; N nodes of a tree; R trees
// of late.
struct Outlook {
  int64_t B, S, K, N, R, Q;
  const double* usual;     // [Q, R, K, N] descending
  const int64_t* reached;  // [Q, R] levels
  const uint8_t* kind;     // [S] of Q kinds of requests
  const double* text;      // [S, N] descending, 0 for none
  const double *known, *hoped;  // [S] log-odds
  const int64_t* due;      // [S] entries
  const double *late, *forwards, *extends, *steps;  // [S], [S * N + 1], by entries, [S + 1]
  double known_factor, hoped_factor;
};

// An average request's path probability as that of a request whose log-odds differ; shift: their exponential.
inline double shifted(double path, double shift) {
  const double odds = shift * path;
  return odds / (1.0 - path + odds);
}

// Tokens/ms of a round in which the head drafts for nobody, and text for all.
inline double text_rate(const Outlook& outlook) {
  const int64_t N = outlook.N;
  const double plain = outlook.B / outlook.forwards[0];
  std::vector<double> paths;
  for (int64_t s = 0; s < outlook.S; ++s)
    if (outlook.text[s * N] > 0) paths.insert(paths.end(), outlook.text + s * N, outlook.text + (s + 1) * N);
  if (paths.empty()) return plain;
  double tokens = 0, ms = 0;
  std::vector<uint8_t> kept(paths.size());
  const Candidates trees{static_cast<int64_t>(paths.size()) / N, N, nullptr, nullptr, nullptr};
  choose(trees, paths.data(), Budget{outlook.forwards, outlook.S * N, N, outlook.B, 0.0, plain}, kept.data(), &tokens, &ms);
  return std::max(plain, tokens / ms);
}

// Tokens/ms of rounds in which the head drafts for these requests and text for all, and every node is worth `least`: the trees of
// late are dealt out to them.
inline double round_rate(const Outlook& outlook, const int64_t* which, int64_t count, int64_t depth, const double* log_odds, double factor,
                         double least) {
  const int64_t N = outlook.N;
  int64_t entries = 0;
  double before_ms = 0, all_tokens = 0, all_ms = 0;
  for (int64_t i = 0; i < count; ++i) entries += outlook.due[which[i]], before_ms += outlook.late[which[i]];
  before_ms += outlook.extends[entries];
  std::vector<double> of_others, paths, shifts(count);
  std::vector<uint8_t> drafts(outlook.S);
  for (int64_t i = 0; i < count; ++i) shifts[i] = std::exp(log_odds[which[i]]), drafts[which[i]] = 1;
  for (int64_t s = 0; s < outlook.S; ++s)
    if (!drafts[s] && outlook.text[s * N] > 0) of_others.insert(of_others.end(), outlook.text + s * N, outlook.text + (s + 1) * N);
  for (int64_t start = 0; start < outlook.R; start += count) {
    int64_t levels = 0;
    paths.resize(count * N);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t tree = outlook.kind[which[i]] * outlook.R + (start + i) % outlook.R;
      const double* usual = outlook.usual + (tree * outlook.K + depth - 1) * N;
      levels = std::max(levels, outlook.reached[tree]);
      for (int64_t n = 0; n < N; ++n) paths[i * N + n] = std::max(shifted(usual[n], shifts[i]), outlook.text[which[i] * N + n]);
    }
    paths.insert(paths.end(), of_others.begin(), of_others.end());
    if (static_cast<int64_t>(paths.size()) > N) std::sort(paths.begin(), paths.end(), std::greater<double>());
    // `choose`, of which only the sums are wanted
    const double fixed_ms = before_ms + (std::min(depth, levels) - 1) * outlook.steps[count];
    double sum = static_cast<double>(outlook.B), top = -INFINITY, tokens = 0, ms = 0;
    bool in_vain = true;  // such a round is not hoped to be faster than a plain one
    for (int64_t n = 0; n <= static_cast<int64_t>(paths.size()); ++n) {
      if (n > 0) sum += paths[n - 1];
      const double cost = outlook.forwards[n] + fixed_ms, worth = sum - least * factor * cost;
      if (worth > top) top = worth, tokens = sum, ms = cost, in_vain = n == 0;
    }
    all_tokens += tokens, all_ms += ms * (in_vain ? std::max(1.0, factor) : factor);
  }
  return all_tokens / all_ms;
}

// Requests by what their trees are expected to bring, those that gain most first.
inline std::vector<int64_t> by_gain(const Outlook& outlook, int64_t depth, double plain) {
  const int64_t N = outlook.N, R = outlook.R;
  std::vector<double> mean(outlook.Q * N), gain(outlook.S);
  for (int64_t kind = 0; kind < outlook.Q; ++kind)
    for (int64_t n = 0; n < N; ++n) {
      for (int64_t r = 0; r < R; ++r) mean[kind * N + n] += outlook.usual[((kind * R + r) * outlook.K + depth - 1) * N + n];
      mean[kind * N + n] /= R;
    }
  for (int64_t s = 0; s < outlook.S; ++s) {
    const double shift = std::exp(outlook.hoped[s]);
    gain[s] = -outlook.late[s] * plain;
    for (int64_t n = 0; n < N; ++n) {
      const double text = outlook.text[s * N + n];
      gain[s] += std::max(shifted(mean[outlook.kind[s] * N + n], shift), text) - text;
    }
  }
  std::vector<int64_t> order(outlook.S);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t x, int64_t y) { return gain[x] > gain[y]; });
  return order;
}

inline int64_t who_drafts(const Outlook& outlook, uint8_t* drafting, double* rate) {
  const int64_t S = outlook.S;
  const double plain = text_rate(outlook);
  std::vector<int64_t> found;
  double best = plain;
  int64_t found_depth = 0;
  const int64_t deepest = *std::max_element(outlook.reached, outlook.reached + outlook.Q * outlook.R);
  for (int64_t depth = 1; depth <= deepest; ++depth) {
    const std::vector<int64_t> order = by_gain(outlook, depth, plain);
    for (int64_t count = 1;; count = std::min(2 * count, S)) {
      const double now = round_rate(outlook, order.data(), count, depth, outlook.hoped, outlook.hoped_factor, best);
      if (now > best) best = now, found_depth = depth, found.assign(order.begin(), order.begin() + count);
      if (count == S) break;
    }
  }
  *rate = plain;
  if (found.empty()) return 0;
  for (const int64_t s : found) drafting[s] = 1;
  double known = plain;
  for (int turn = 0; turn < 3; ++turn)  // Dinkelbach: the best trees for a rate, then the rate of these trees
    known = std::max(plain, round_rate(outlook, found.data(), found.size(), found_depth, outlook.known, outlook.known_factor, known));
  *rate = known * outlook.known_factor;
  return found.size();
}

// Down the drawn tokens of each request: candidates whose parent was drawn, those drawn themselves, and by how much more of
// them were drawn than expected.
inline void judge(const Candidates& tree, const int64_t* tokens, const int64_t* emitted, const int64_t* counts, const double* conditional,
                  uint8_t* judged, uint8_t* drawn, double* surplus) {
  std::fill(judged, judged + tree.B * tree.C, uint8_t{0});
  std::fill(drawn, drawn + tree.B * tree.C, uint8_t{0});
  for (int64_t b = 0; b < tree.B; emitted += counts[b++]) {
    const int64_t at = b * tree.C;
    int64_t node = -1;
    surplus[b] = 0;
    for (int64_t i = 0; i < counts[b]; ++i) {
      int64_t next = -1;
      for (int64_t c = node + 1; c < tree.C; ++c) {
        if (tree.parents[at + c] != node) continue;
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
