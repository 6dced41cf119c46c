// Who drafts, before any tree is known: `engine/outlook.py`. Letters as in choice.h.
#pragma once

#include "choice.h"

struct Outlook {
  const Experience& known;
  const Round& round;
  std::vector<double> text;          // [S, N] descending, 0 for none
  std::vector<double> usual, hoped;  // [S] exponentials of the log-odds, as known and as hoped
  std::vector<double> late, forwards;  // [S] ms of entries that are missing for long, by round; [S * N + 1]
  std::vector<int64_t> due;          // [S] entries
};

// Path probabilities of what text proposes to a request, as one tree, without the head: the N best, descending. Moves the four on.
struct Chains {
  const int64_t *counts, *lens, *tokens, *kinds;
};

inline void text_paths(const Experience& known, const Acceptance& request, Chains& chains, double* best) {
  struct Node {
    int64_t parent, token, kind, company;
    bool has_child;
    double path;
  };
  std::vector<Node> nodes{{-1, -1, 0, 0, false, 1.0}};
  const int64_t companies = 3;  // graft.py: no other text, another token of one before it, the same of one behind it
  for (int64_t n = *chains.counts++; n > 0; --n) {
    int64_t at = 0;
    for (int64_t left = *chains.lens++; left > 0; --left, ++chains.tokens, ++chains.kinds) {
      size_t found = at + 1;
      while (found < nodes.size() && (nodes[found].parent != at || nodes[found].token != *chains.tokens)) ++found;
      if (found == nodes.size())
        nodes.push_back({at, *chains.tokens, *chains.kinds, nodes[at].has_child, false, 0.0});
      else
        nodes[found].company = 2;
      nodes[at].has_child = true;
      at = found;
    }
  }
  if (nodes.size() == 1) return;
  const double shift = std::exp(log_odds(known, request, kText));
  for (size_t i = 1; i < nodes.size(); ++i) {
    Node& node = nodes[i];
    const int64_t cell = (request.greedy * known.groups + companies * node.kind + node.company) * known.opinions;
    node.path = nodes[node.parent].path * shifted(of_text(known, cell), shift);
    insert(best, known.N, node.path);
  }
}

inline Outlook outlook(const Experience& known, const Round& round) {
  const int64_t S = round.S, N = known.N;
  Outlook view{known, round, std::vector<double>(S * N), std::vector<double>(S), std::vector<double>(S), std::vector<double>(S),
               forwards(known, round.B, S * N), std::vector<int64_t>(S)};
  Chains chains{round.num_chains, round.chain_lens, round.chain_tokens, round.chain_kinds};
  for (int64_t s = 0; s < S; ++s) {
    Acceptance& request = *round.able[s];
    for (int source = 0; source < kSources; ++source)
      request.information[source] *= known.request_memory, request.pull[source] *= known.request_memory;
    if (round.num_chains != nullptr) text_paths(known, request, chains, view.text.data() + s * N);
    const double sum = std::accumulate(view.text.begin() + s * N, view.text.begin() + (s + 1) * N, 0.0);
    const double* bounds = known.text_bounds;
    round.kinds[s] = request.greedy + 2 * (std::upper_bound(bounds, bounds + known.num_bounds, sum) - bounds);
    const double shift = log_odds(known, request, kHead), deviation = 1.0 / std::sqrt(precision(known, request, kHead));
    view.usual[s] = std::exp(shift), view.hoped[s] = std::exp(shift + known.hope * deviation);
    const int64_t missing = round.pending[s];
    view.due[s] = std::min(missing, known.at_once);
    view.late[s] = missing > known.at_once ? known.enter(missing) / static_cast<double>(known.rounds_to_pay) : 0.0;
  }
  return view;
}

// Descending runs of path probabilities that become one; each has a number below all of them behind it, so that no end is asked for.
struct Runs {
  std::vector<double> values, other;
  std::vector<int64_t> starts;  // and where the next one would start

  void clear(size_t most) {
    values.resize(most), other.resize(most);
    starts.assign(1, 0);
  }

  double* next() { return values.data() + starts.back(); }

  void close(int64_t count) {  // the run in `next`
    next()[count] = -1.0;
    starts.push_back(starts.back() + count + 1);
  }

  // Returns how many `values` begins with then. Branches would be mispredicted half of the time.
  int64_t merge() {
    while (starts.size() > 2) {
      size_t kept = 0;
      double* out = other.data();
      for (size_t i = 0; i + 1 < starts.size(); i += 2) {
        const double* left = values.data() + starts[i];
        const bool is_alone = i + 2 == starts.size();
        const double* right = is_alone ? values.data() + starts[i + 1] - 1 : values.data() + starts[i + 1];
        const int64_t count = starts[is_alone ? i + 1 : i + 2] - starts[i] - (is_alone ? 1 : 2);
        for (int64_t n = 0; n < count; ++n) {
          const double x = *left, y = *right;
          const bool is_left = x >= y;
          *out++ = is_left ? x : y;
          left += is_left, right += !is_left;
        }
        *out++ = -1.0;
        starts[++kept] = out - other.data();
      }
      starts.resize(kept + 1);
      values.swap(other);
    }
    return starts.back() - (starts.size() > 1);
  }
};

// Tokens/ms of a round in which the head drafts for nobody, and text for all.
inline double text_rate(const Outlook& view) {
  const int64_t N = view.known.N, S = view.round.S;
  const double plain = static_cast<double>(view.round.B) / view.forwards[0];
  Runs paths;
  paths.clear(S * (N + 1));
  for (int64_t s = 0; s < S; ++s) {
    const double* own = view.text.data() + s * N;
    if (own[0] > 0) std::copy(own, own + N, paths.next()), paths.close(N);
  }
  const int64_t total = paths.merge();
  if (total == 0) return plain;
  const Choice best = best_prefix(paths.values.data(), total, view.forwards.data(), Budget{N, view.round.B, 0.0, plain});
  return std::max(plain, best.tokens / best.ms);
}

struct Rate {
  double rate;      // tokens/ms
  double unworthy;  // the best path that is not verified, mean over the rounds
};

// Of rounds in which the head drafts for these requests and text for all, and every node is worth `least`: the trees of late are dealt
// out to them.
struct TreeShape {
  int64_t depth = 0, w = 0;  // the width's place
};

inline double level_ms(const Experience& known, int64_t requests, int64_t w) { return known.step(requests * (w == 0 ? known.k : 1)); }

inline Rate rate_of(const Outlook& view, const std::vector<int64_t>& order, int64_t count, TreeShape shape, const std::vector<double>& shifts,
                    double factor, double least, Runs& paths) {
  const Experience& known = view.known;
  const int64_t N = known.N, *which = order.data();
  int64_t entries = 0, deals = 0;
  double late_ms = 0, all_tokens = 0, all_ms = 0, unworthy = 0;
  for (int64_t i = 0; i < count; ++i) entries += view.due[which[i]], late_ms += view.late[which[i]];
  const double before_ms = known.extend(entries) + late_ms, one_level_ms = level_ms(known, count, shape.w);
  std::vector<uint8_t> drafts(view.round.S);
  for (int64_t i = 0; i < count; ++i) drafts[which[i]] = 1;
  std::vector<double> of_others;
  for (int64_t s = 0; s < view.round.S; ++s) {
    const double* own = view.text.data() + s * N;
    if (!drafts[s] && own[0] > 0) of_others.insert(of_others.end(), own, own + N);
  }
  for (int64_t start = 0; start < known.R; start += count, ++deals) {
    int64_t levels = 0;
    paths.clear(view.round.S * (N + 1));
    for (int64_t i = 0; i < count; ++i) {
      const int64_t s = which[i], tree = (shape.w * known.Q + view.round.kinds[s]) * known.R + (start + i) % known.R;
      const double* usual = known.trees + (tree * known.K + shape.depth - 1) * N;
      const double *text = view.text.data() + s * N, shift = shifts[s];
      double* own = paths.next();
      levels = std::max(levels, known.reached[tree]);
      for (int64_t n = 0; n < N; ++n) own[n] = std::max(shifted(usual[n], shift), text[n]);
      int64_t length = N;  // both descend, so the larger of both does, and behind a 0 there is nothing
      while (length > 0 && own[length - 1] == 0.0) --length;
      paths.close(length);
    }
    for (size_t at = 0; at < of_others.size(); at += N) {
      std::copy(of_others.begin() + at, of_others.begin() + at + N, paths.next());
      paths.close(N);
    }
    const int64_t total = paths.merge();
    const double fixed_ms = before_ms + static_cast<double>(std::min(shape.depth, levels) - 1) * one_level_ms;
    const Choice best = best_prefix(paths.values.data(), total, view.forwards.data(), Budget{N, view.round.B, fixed_ms, least * factor});
    // a round that drafts in vain is not hoped to be faster than a plain one
    all_tokens += best.tokens, all_ms += best.ms * (best.num_nodes ? factor : std::max(1.0, factor));
    unworthy += best.num_nodes < total ? paths.values[best.num_nodes] : 0.0;
  }
  return {all_tokens / all_ms, unworthy / static_cast<double>(deals)};
}

// Requests by what their trees are expected to bring, those that gain most first.
inline std::vector<int64_t> by_gain(const Outlook& view, TreeShape shape, double plain) {
  const Experience& known = view.known;
  const int64_t N = known.N, R = known.R, S = view.round.S;
  std::vector<double> mean(known.Q * N), gain(S);
  std::vector<uint8_t> is_there(known.Q);
  for (int64_t s = 0; s < S; ++s) is_there[view.round.kinds[s]] = 1;
  for (int64_t kind = 0; kind < known.Q; ++kind) {
    if (!is_there[kind]) continue;
    double* of_kind = mean.data() + kind * N;
    for (int64_t r = 0; r < R; ++r) {
      const double* usual = known.trees + (((shape.w * known.Q + kind) * R + r) * known.K + shape.depth - 1) * N;
      for (int64_t n = 0; n < N; ++n) of_kind[n] += usual[n];
    }
    for (int64_t n = 0; n < N; ++n) of_kind[n] /= static_cast<double>(R);
  }
  for (int64_t s = 0; s < S; ++s) {
    const double* of_kind = mean.data() + view.round.kinds[s] * N;
    for (int64_t n = 0; n < N; ++n) {
      const double text = view.text[s * N + n];
      gain[s] += std::max(shifted(of_kind[n], view.hoped[s]), text) - text;
    }
    gain[s] -= view.late[s] * plain;
  }
  std::vector<int64_t> order(S);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t x, int64_t y) { return gain[x] > gain[y]; });
  return order;
}

// Whether narrow trees of these requests are cheaper, and known: wide ones, of all these kinds, have told what they would be.
inline bool may_be_narrow(const Outlook& view, const std::vector<int64_t>& order, int64_t count) {
  const Experience& known = view.known;
  const auto is_known = [&](int64_t s) { return known.num_seen[view.round.kinds[s]] >= known.R; };
  return level_ms(known, count, 1) < level_ms(known, count, 0) && std::all_of(order.begin(), order.begin() + count, is_known);
}

// Fills in a round's plan: kinds, drafting, rate and thresholds. The requests forget a little.
inline void plan(const Experience& known, Round& round) {
  const Outlook view = outlook(known, round);
  const int64_t S = round.S, K = known.K;
  const double plain = text_rate(view);
  double best = plain;
  TreeShape found_shape;
  std::vector<int64_t> found;
  Runs paths;
  round.rate = plain, round.num_drafting = 0;
  if (!round.has_head) return;
  for (int64_t w = 0; w < known.W; ++w) {
    int64_t deepest = 0;
    for (int64_t s = 0; s < S; ++s)
      for (int64_t r = 0; r < known.R; ++r) deepest = std::max(deepest, known.reached[(w * known.Q + round.kinds[s]) * known.R + r]);
    for (TreeShape shape{1 + w, w}; shape.depth <= deepest; ++shape.depth) {  // of one level all widths are the same
      const std::vector<int64_t> order = by_gain(view, shape, plain);
      for (int64_t count = 1;; count = std::min(2 * count, S)) {
        if (w == 0 || may_be_narrow(view, order, count)) {
          const double now = rate_of(view, order, count, shape, view.hoped, round.hoped_factor, best, paths).rate;
          if (now > best) best = now, found_shape = shape, found.assign(order.begin(), order.begin() + count);
        }
        if (count == S) break;
      }
    }
  }
  if (found.empty()) return;
  const int64_t count = found.size();
  for (const int64_t s : found) round.drafting[s] = 1;
  Rate now{plain, 0.0};
  for (int turn = 0; turn < 3; ++turn) {  // Dinkelbach: the best trees for a rate, then the rate of these trees
    now = rate_of(view, found, count, found_shape, view.usual, round.known_factor, now.rate, paths);
    now.rate = std::max(plain, now.rate);
  }
  round.num_drafting = count, round.rate = now.rate * round.known_factor, round.width = found_shape.w == 0 ? known.k : 1;
  const double *brought = known.brought + found_shape.w * (K - 1), *grown_from = known.grown_from + found_shape.w * (K - 1);
  for (int64_t l = 0; l < K - 1; ++l) {
    const double gain = (brought[l] + known.belief * known.first_gain) / (grown_from[l] + known.belief);
    round.thresholds[l] = round.rate * level_ms(known, count, found_shape.w) / gain;
  }
  round.thresholds[K - 1] = now.unworthy;
}
