// A round of several requests as rows: what their draft has to catch up on, and the trees that
// their target judges.
//
// Knows columns, pages and trees; no weights. A request b has lens[b] columns in the target's
// cache; its root, the last token emitted, is to lie in the next one.
//
// Letters: B requests, P pages of the longest, M rows, C candidates of a request, N nodes of its
// tree, the root among them.
#pragma once

#include <cstdint>
#include <vector>

#include "attention.h"

// The rows of a forward, one after the other.
class RowList {
 public:
  void clear() {
    for (auto* column : {&token_, &request_, &position_, &slot_, &prefix_len_, &seen_})
      column->clear();
  }
  void add(int64_t token, int64_t request, int64_t position, int64_t slot, int64_t prefix_len,
           uint64_t seen) {
    token_.push_back(token), request_.push_back(request), position_.push_back(position);
    slot_.push_back(slot), prefix_len_.push_back(prefix_len),
        seen_.push_back(static_cast<int64_t>(seen));
  }
  size_t size() const { return token_.size(); }
  int64_t token(size_t m) const { return token_[m]; }
  int64_t slot(size_t m) const { return slot_[m]; }
  int64_t position(size_t m) const { return position_[m]; }
  uint64_t seen(size_t m) const { return static_cast<uint64_t>(seen_[m]); }
  RowsView view(const Lines& lines, int64_t first_column) const {
    return RowsView{token_.data(),
                    request_.data(),
                    position_.data(),
                    slot_.data(),
                    prefix_len_.data(),
                    seen_.data(),
                    lines.page_table,
                    lines.B,
                    lines.P,
                    first_column,
                    lines.page_size,
                    lines.num_slots,
                    static_cast<int64_t>(size())};
  }

 private:
  std::vector<int64_t> token_, request_, position_, slot_, prefix_len_, seen_;
};

// The draft's rows of columns starts[b] .. lens[b], the root's; features[m] is the slot of row m's
// feature, the column before.
struct EntryRows {
  RowList rows;
  std::vector<int64_t> features, ends;

  bool line_up(const Lines& lines, const int64_t* starts, const int64_t* tokens) {
    rows.clear(), features.clear(), ends.clear();
    for (int64_t b = 0; b < lines.B; ++b) {
      if (starts[b] < 1 || starts[b] > lines.lens[b] || !lines.has(lines.lens[b])) return false;
      for (int64_t column = starts[b]; column <= lines.lens[b]; ++column) {
        features.push_back(lines.slot(b, column - 1));
        if (features.back() < 0 || features.back() >= lines.num_slots) return false;
        rows.add(*tokens++, b, column - 1, lines.slot(b, column), column + 1, 0);
      }
      ends.push_back(static_cast<int64_t>(rows.size()));
    }
    return true;
  }
};

// The trees of all requests beside each other, as rows of the target's forward.
class TreeRows {
 public:
  RowList rows;

  bool line_up(const Lines& lines, const Chosen& chosen) {
    rows.clear(), parent_.clear(), start_.assign(1, 0);
    node_.resize(chosen.C);
    for (int64_t b = 0; b < lines.B; ++b) {
      if (!add(lines, b, chosen.roots[b], -1)) return false;
      const int64_t at = static_cast<int64_t>(chosen.line[b]) * chosen.C;
      for (int64_t c = 0; at >= 0 && c < chosen.C; ++c) {
        if (!chosen.kept[at + c]) continue;
        const int32_t above = chosen.parents[at + c];
        if (above >= c || (above >= 0 && !chosen.kept[at + above])) return false;
        node_[c] = static_cast<int>(rows.size());
        if (!add(lines, b, chosen.tokens[at + c], above < 0 ? start_.back() : node_[above]))
          return false;
      }
      start_.push_back(static_cast<int>(rows.size()));
    }
    return true;
  }

  // The way that the target's own tokens take through the tree of b: calls next(row), which gives
  // the token after it, for the rows from the root on, and puts those tokens into `drawn` and the
  // rows into `path`. False where there is no token (< 0).
  template <class Next>
  bool walk(int64_t b, std::vector<int>& path, std::vector<int64_t>& drawn, Next&& next) const {
    path.assign(1, start_[b]), drawn.assign(1, next(start_[b]));
    for (int m = start_[b] + 1; m < start_[b + 1] && drawn.back() >= 0;
         ++m)  // parents come first, so one pass finds every child
      if (parent_[m] == path.back() && rows.token(m) == drawn.back())
        path.push_back(m), drawn.push_back(next(m));
    return drawn.back() >= 0;
  }

  int first(int64_t b) const { return start_[b]; }
  int end(int64_t b) const { return start_[b + 1]; }

 private:
  bool add(const Lines& lines, int64_t b, int64_t token, int parent) {
    const int64_t node = static_cast<int64_t>(rows.size()) - start_.back(), n = lines.lens[b];
    if (node >= kTreeColumns || n < 0 || !lines.has(n + node)) return false;
    const bool is_root = parent < 0;
    const uint64_t own = uint64_t{1} << node;
    rows.add(token, b, is_root ? n : rows.position(parent) + 1, lines.slot(b, n + node), n,
             is_root ? own : rows.seen(parent) | own);
    parent_.push_back(parent);
    return true;
  }

  std::vector<int> start_, parent_, node_;
};
