// The arithmetic of a round's choice, one call each: who drafts, which candidates are verified, and what is learned from what came true.
// Twin of `engine/steps.py:Steps` for the few candidates of a round, where array operations take longer than the arithmetic.
//
// Knows probabilities and costs; no model. Letters: B requests that decode, S of them that may speculate, L lines of candidates, C
// candidates of each, K draft steps, N nodes of a tree, R trees of late, Q kinds of requests, W widths: 0 of k rows
// a request in a draft step, 1 of one.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <numeric>
#include <vector>

constexpr int kHead = 0, kText = 1, kSources = 2;

// `engine/costs.py:Curve`: ms by rows, straight on behind the last.
struct Curve {
  const double* ms;
  int64_t count;
  double slope;

  double operator()(int64_t rows) const {
    if (rows <= 0 || count == 0) return 0.0;
    return rows < count ? ms[rows] : ms[count - 1] + slope * static_cast<double>(rows - count + 1);
  }
};

// `engine/acceptance.py:RequestAcceptance`.
struct Acceptance {
  int64_t greedy;
  double information[kSources], pull[kSources];
};

// All that rounds have taught, in the memory of NumPy's arrays, and the constants: `engine/steps.py:_Experience`.
struct Experience {
  int64_t K, k, N, is_fixed;  // k branches of a node
  int64_t depths, bins, groups, opinions, R, Q, W, num_bounds, at_once, rounds_to_pay;
  double bins_per_unit, belief, largest, memory, request_memory, first_gain, hope, unproposed;
  double* judged[kSources];  // the head's [2, depths, bins], text's [2, groups, opinions]: sampled or greedy first
  double* drawn[kSources];
  double* variance;                  // [2], of requests' shifts
  const double* first[kSources];     // what is believed of a bin, of a group
  const double *opinion_scale, *opinion_lift, *text_bounds;
  double* trees;                     // [W, Q, R, K, N] descending
  int64_t *reached, *num_seen;       // [W, Q, R] levels, [W, Q]
  double *brought, *grown_from;      // [W, K - 1]
  Curve target, decode, step, extend, enter;
};

// One round, from its plan to what came of it: `engine/steps.py:_Round`.
struct Round {
  // before drafting
  int64_t B, S, has_head;
  double known_factor, hoped_factor;
  const int64_t* pending;      // [S] entries that each lacks
  Acceptance* const* able;     // [S]
  const int64_t *num_chains, *chain_lens, *chain_tokens, *chain_kinds;  // text's, by request, by chain, by token
  uint8_t* drafting;           // [S]
  int64_t* kinds;              // [S]
  double* thresholds;          // [K]
  double rate;
  int64_t num_drafting, width;  // candidates of a request that a level grows from
  // after drafting
  int64_t L, C, depth;
  Acceptance* const* requests;  // [L]
  const int64_t* tokens;        // [L, C]
  const float* scores;          // [L, C] log-probability of the path
  const int32_t *parents, *depths;    // [L, C], -1 for the root; [C]
  const int32_t* text_cells;    // [L, C], -1 for none; null without text
  const uint8_t* grown;         // [L], lines that have candidates of the head; null without text
  double *conditional, *weighed, *paths;  // [L, C] by the head's counts, with text's, and of the whole path by these
  int64_t* cells;
  uint8_t* kept;
  int64_t num_nodes;
  double expected_tokens, predicted_ms;
  // after the round
  const int64_t *emitted, *num_emitted;  // by line; [L]
  int64_t by_source[3];        // accepted: the head's, text's, both
};

inline double precision(const Experience& known, const Acceptance& one, int source) {
  return 1.0 / known.variance[source] + one.information[source];
}

inline double log_odds(const Experience& known, const Acceptance& one, int source) {
  return one.pull[source] / precision(known, one, source);
}

// An average request's probability as that of a request whose log-odds differ; shift: their exponential.
inline double shifted(double probability, double shift) {
  const double odds = shift * probability;
  return odds / (1.0 - probability + odds);
}

// What is believed at first, corrected by counts.
inline double corrected(const Experience& known, double first, double drawn, double judged) {
  return (drawn + known.belief * first) / (judged + known.belief);
}

inline double of_cell(const Experience& known, int source, int64_t cell, double pooled) {
  return std::min(corrected(known, pooled, known.drawn[source][cell], known.judged[source][cell]), known.largest);
}

// Of the head's bins, all depths together, [2, bins].
inline std::vector<double> pooled_bins(const Experience& known) {
  std::vector<double> pooled(2 * known.bins);
  for (int64_t i = 0; i < 2 * known.bins; ++i) {
    const int64_t bin = i % known.bins;
    double judged = 0, drawn = 0;
    for (int64_t depth = 0; depth < known.depths; ++depth) {
      const int64_t cell = (i / known.bins * known.depths + depth) * known.bins + bin;
      judged += known.judged[kHead][cell], drawn += known.drawn[kHead][cell];
    }
    pooled[i] = corrected(known, known.first[kHead][bin], drawn, judged);
  }
  return pooled;
}

inline double of_text(const Experience& known, int64_t cell) {
  const int64_t group = cell / known.opinions, opinion = cell % known.opinions;
  double judged = 0, drawn = 0;
  for (int64_t i = group * known.opinions; i < (group + 1) * known.opinions; ++i)
    judged += known.judged[kText][i], drawn += known.drawn[kText][i];
  const double of_group = corrected(known, known.first[kText][group % known.groups], drawn, judged);
  const double pooled = 1.0 - (1.0 - known.opinion_scale[opinion] * of_group) * (1.0 - known.opinion_lift[opinion]);
  return of_cell(known, kText, cell, pooled);
}

// Which candidates are verified

struct Budget {
  int64_t max_nodes, num_tokens;  // of a tree; emitted without any node
  double fixed_ms, rate;
};

struct Choice {
  int64_t num_nodes = 0;
  double tokens = 0, ms = 0;
};

// The best prefix of n descending paths, by tokens - rate * ms. forwards [n + 1].
inline Choice best_prefix(const double* paths, int64_t n, const double* forwards, const Budget& budget) {
  double sum = static_cast<double>(budget.num_tokens), top = -INFINITY;
  Choice best;
  for (int64_t i = 0; i <= n; ++i) {
    if (i > 0) sum += paths[i - 1];
    const double ms = forwards[i] + budget.fixed_ms, worth = sum - budget.rate * ms;
    if (worth > top) top = worth, best = Choice{i, sum, ms};
  }
  return best;
}

// Target forwards of `requests` roots with 0, 1 .. most nodes.
inline std::vector<double> forwards(const Experience& known, int64_t requests, int64_t most) {
  const double prefixes = std::max(0.0, known.decode(requests) - known.target(requests));
  std::vector<double> ms(most + 1);
  for (int64_t n = 0; n <= most; ++n) ms[n] = known.target(requests + n) + prefixes;
  return ms;
}

// Each line's best candidates by their values, and all of these together. At equal values the lower index goes first: a parent's is below
// its child's.
template <class Value>
std::vector<int64_t> ranked(const Round& round, int64_t max_nodes, const Value* values) {
  const int64_t width = std::min(round.C, max_nodes);
  std::vector<int64_t> pooled, own(round.C);
  pooled.reserve(round.L * width);
  const auto better = [&](int64_t x, int64_t y) { return values[x] > values[y] || (values[x] == values[y] && x < y); };
  for (int64_t b = 0; b < round.L; ++b) {
    std::iota(own.begin(), own.end(), b * round.C);
    std::partial_sort(own.begin(), own.begin() + width, own.end(), better);
    pooled.insert(pooled.end(), own.begin(), own.begin() + width);
  }
  return pooled;
}

inline void calibrate(const Experience& known, Round& round) {
  const std::vector<double> pooled = pooled_bins(known);
  for (int64_t b = 0; b < round.L; ++b) {
    const int64_t at = b * round.C, greedy = round.requests[b]->greedy;
    const double factor = std::exp(log_odds(known, *round.requests[b], kHead));
    for (int64_t c = 0; c < round.C; ++c) {
      const int32_t above = round.parents[at + c];
      const float step = (above < 0 ? 0.0f : round.scores[at + above]) - round.scores[at + c];
      const double place = step > 0 ? std::sqrt(step) * known.bins_per_unit : 0;  // a NaN is no place in the table
      const int64_t depth = std::min<int64_t>(round.depths[c], known.depths) - 1;
      const int64_t bin = static_cast<int64_t>(std::min(place, static_cast<double>(known.bins - 1)));
      const int64_t cell = (greedy * known.depths + depth) * known.bins + bin;
      round.cells[at + c] = cell;
      round.conditional[at + c] = shifted(of_cell(known, kHead, cell, pooled[greedy * known.bins + bin]), factor);
      round.paths[at + c] = round.conditional[at + c] * (above < 0 ? 1.0 : round.paths[at + above]);
    }
  }
}

// What the head's counts say, corrected by the counts of text's candidates; the tokens beside one share what it leaves.
inline void weigh_text(const Experience& known, Round& round) {
  constexpr int32_t kPad = -9;  // the parent of a place without a candidate
  for (int64_t b = 0; b < round.L; ++b) {
    const int64_t at = b * round.C, end = at + round.C;
    const Acceptance& request = *round.requests[b];
    const double factor = std::exp(log_odds(known, request, kText));
    double* weighed = round.weighed;
    for (int64_t c = at; c < end; ++c) weighed[c] = round.parents[c] == kPad ? 0.0 : round.conditional[c];
    for (int64_t c = at; c < end; ++c) {
      const int32_t cell = round.text_cells[c];
      if (cell < 0) continue;
      weighed[c] = shifted(of_text(known, request.greedy * known.groups * known.opinions + cell), factor);
      const double before = cell % known.opinions >= 2 ? round.conditional[c] : 0.0, left = (1.0 - weighed[c]) / (1.0 - before);
      for (int64_t other = at; other < end; ++other)
        if (round.parents[other] == round.parents[c] && round.text_cells[other] < 0) weighed[other] *= left;
    }
    for (int64_t c = at; c < end; ++c) {
      weighed[c] = std::min(weighed[c], known.largest);
      const int32_t above = round.parents[c];
      round.paths[c] = weighed[c] * (above < 0 ? 1.0 : round.paths[at + above]);
    }
  }
}

// ms of what precedes the target's forward.
inline double before_ms(const Experience& known, const Round& round) {
  int64_t entries = 0, far = 0, count = 0;
  for (int64_t s = 0; s < round.S; ++s) {
    if (!round.drafting[s]) continue;
    const bool is_far = round.pending[s] > known.at_once;
    entries += is_far ? 1 : round.pending[s], far += is_far ? round.pending[s] : 0, ++count;
  }
  const double steps = static_cast<double>(std::max<int64_t>(0, round.depth - 1));
  return known.extend(entries) + known.enter(far) + steps * known.step(count * round.width);
}

inline void choose(const Experience& known, Round& round) {
  calibrate(known, round);
  if (round.text_cells != nullptr) weigh_text(known, round);
  std::fill(round.kept, round.kept + round.L * round.C, uint8_t{0});
  const double fixed_ms = before_ms(known, round);
  if (known.is_fixed) {
    const std::vector<int64_t> nodes = ranked(round, known.N, round.scores);
    round.num_nodes = nodes.size();
    round.expected_tokens = static_cast<double>(round.B);
    for (const int64_t node : nodes) round.kept[node] = 1, round.expected_tokens += round.paths[node];
    round.predicted_ms = fixed_ms + forwards(known, round.B, round.num_nodes).back();
    return;
  }
  std::vector<int64_t> nodes = ranked(round, known.N, round.paths);
  const double* paths = round.paths;
  std::sort(nodes.begin(), nodes.end(), [&](int64_t x, int64_t y) { return paths[x] > paths[y] || (paths[x] == paths[y] && x < y); });
  std::vector<double> values(nodes.size());
  for (size_t i = 0; i < nodes.size(); ++i) values[i] = paths[nodes[i]];
  const std::vector<double> ms = forwards(known, round.B, nodes.size());
  const Choice best = best_prefix(values.data(), values.size(), ms.data(), Budget{known.N, round.B, fixed_ms, round.rate});
  for (int64_t n = 0; n < best.num_nodes; ++n) round.kept[nodes[n]] = 1;
  round.num_nodes = best.num_nodes, round.expected_tokens = best.tokens, round.predicted_ms = best.ms;
}

// What came true

// Of one line: what one source's candidates say of the request and of their cells.
struct Judged {
  double surplus = 0, information = 0;
  std::vector<int64_t> cells, drawn;

  void add(double expected, int64_t cell, bool is_drawn) {
    surplus += is_drawn - expected, information += expected * (1.0 - expected);
    cells.push_back(cell);
    if (is_drawn) drawn.push_back(cell);
  }
};

// Down the drawn tokens of line b: candidates whose parent was drawn. All tokens but the last were accepted drafts.
inline void judge(const Experience& known, Round& round, int64_t b, const int64_t* emitted, Judged* of) {
  const int64_t at = b * round.C, of_greedy = round.requests[b]->greedy * known.groups * known.opinions;
  int64_t node = -1;
  if (round.text_cells == nullptr) round.by_source[0] += std::max<int64_t>(0, round.num_emitted[b] - 1);
  for (int64_t i = 0; i < round.num_emitted[b]; ++i) {
    int64_t next = -1;
    for (int64_t c = at + node + 1; c < at + round.C; ++c) {
      if (round.parents[c] != node) continue;
      const bool is_drawn = next < 0 && round.tokens[c] == emitted[i];
      if (is_drawn) next = c;
      const int32_t cell = round.text_cells == nullptr ? -1 : round.text_cells[c];
      if (round.text_cells == nullptr || round.scores[c] > known.unproposed) of[kHead].add(round.conditional[c], round.cells[c], is_drawn);
      if (cell >= 0) of[kText].add(round.weighed[c], of_greedy + cell, is_drawn);
    }
    if (next < 0) return;
    if (round.text_cells != nullptr && i + 1 < round.num_emitted[b]) {
      const int32_t cell = round.text_cells[next];
      ++round.by_source[cell < 0 ? 0 : cell % known.opinions >= 2 ? 2 : 1];
    }
    node = next - at;
  }
}

// Counts and requests of one source. Nothing is forgotten in a round that says nothing.
inline void count(const Experience& known, const Round& round, int source, const std::vector<Judged>& of) {
  int64_t num_requests = 0;
  double shown = 0;
  for (int64_t b = 0; b < round.L; ++b) {
    const Judged& line = of[b * kSources + source];
    if (line.cells.empty()) continue;
    Acceptance& request = *round.requests[b];
    const double before = log_odds(known, request, source);
    request.information[source] += line.information;
    request.pull[source] = precision(known, request, source) * before + line.surplus;
    const double after = log_odds(known, request, source);
    shown += after * after + 1.0 / precision(known, request, source), ++num_requests;
  }
  if (num_requests == 0) return;
  known.variance[source] += (1.0 - known.memory) * (shown / static_cast<double>(num_requests) - known.variance[source]);
  const int64_t size = 2 * (source == kHead ? known.depths * known.bins : known.groups * known.opinions);
  for (int64_t i = 0; i < size; ++i) known.judged[source][i] *= known.memory, known.drawn[source][i] *= known.memory;
  for (int64_t b = 0; b < round.L; ++b) {
    for (const int64_t cell : of[b * kSources + source].cells) known.judged[source][cell] += 1.0;
    for (const int64_t cell : of[b * kSources + source].drawn) known.drawn[source][cell] += 1.0;
  }
}

// A value's place among the N largest so far, descending.
inline void insert(double* best, int64_t N, double value) {
  if (!(value > best[N - 1])) return;
  int64_t n = N - 1;
  for (; n > 0 && best[n - 1] < value; --n) best[n] = best[n - 1];
  best[n] = value;
}

// A tree that the head has grown, as it would be of an average request, in place of the oldest of width w; and what each level has
// brought. narrow: as if each level had grown from its best candidate alone.
inline void keep_tree(const Experience& known, const Round& round, int64_t b, int64_t kind, int64_t w, bool narrow) {
  const int64_t K = known.K, N = known.N, C = round.C, at = b * C, row = w * known.Q + kind;
  const int64_t tree = row * known.R + known.num_seen[row]++ % known.R;
  const double least = round.thresholds[K - 1], shift = std::exp(-log_odds(known, *round.requests[b], kHead));
  double *brought = known.brought + w * (K - 1), *grown_from = known.grown_from + w * (K - 1);
  known.reached[tree] = round.depth;
  std::vector<double> best(N);
  if (round.text_cells != nullptr)
    for (int64_t c = at; c < at + C; ++c)
      if (round.text_cells[c] >= 0) insert(best.data(), N, round.paths[c]);
  double before = 0;
  int64_t above = -1;
  for (int64_t c = 0, level = 0; level < K; ++level) {
    double* usual = known.trees + (tree * K + level) * N;
    float frontier = -INFINITY;
    int64_t best_of_level = C;  // no candidate's parent
    for (; c < C && round.depths[c] == level + 1; ++c) {
      if (narrow && round.parents[at + c] != above) continue;
      if (round.text_cells == nullptr || round.text_cells[at + c] < 0) insert(best.data(), N, round.paths[at + c]);
      if (best_of_level == C || round.scores[at + c] > frontier) frontier = round.scores[at + c], best_of_level = c;
    }
    above = best_of_level;
    double value = 0;
    for (int64_t n = 0; n < N; ++n) value += std::max(best[n] - least, 0.0), usual[n] = shifted(best[n], shift);
    if (level > 0 && level < round.depth) brought[level - 1] += value - before;
    if (level + 1 < round.depth) grown_from[level] += std::max(std::exp(static_cast<double>(frontier)) - least, 0.0);
    before = value;
  }
}

inline void keep_trees(const Experience& known, const Round& round) {
  const int64_t first = round.width < known.k;
  for (int64_t i = first * (known.K - 1); i < known.W * (known.K - 1); ++i) known.brought[i] *= known.memory, known.grown_from[i] *= known.memory;
  for (int64_t b = 0, s = -1; b < round.L; ++b) {
    if (round.grown != nullptr && !round.grown[b]) continue;
    while (++s < round.S && !round.drafting[s]) {
    }
    if (s == round.S) return;  // more trees than requests that draft
    for (int64_t w = first; w < known.W; ++w) keep_tree(known, round, b, round.kinds[s], w, w > first);
  }
}

inline void learn(const Experience& known, Round& round) {
  if (!known.is_fixed && round.num_drafting > 0) keep_trees(known, round);
  std::vector<Judged> of(round.L * kSources);
  std::fill(round.by_source, round.by_source + 3, int64_t{0});
  const int64_t* emitted = round.emitted;
  for (int64_t b = 0; b < round.L; emitted += round.num_emitted[b++]) judge(known, round, b, emitted, &of[b * kSources]);
  for (int source = 0; source < kSources; ++source) count(known, round, source, of);
}
