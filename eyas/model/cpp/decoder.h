// What Python's calls reach: a decoder, which is a target or a draft.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "eyas.h"
#include "pool.h"

namespace {  // of one translation unit: decoder.cpp

enum Status : int {
  kDone = 0,
  kBadToken = 1,
  kBadPosition = 2,
  kBadSlot = 3,
  kBadRow = 4,
  kBadLogits = 5,
  kNoMemory = 6,
  kOtherKind = 7  // a target was asked what a draft answers, or the other way around
};

// A call returns a Status; `propose` and `grow` return levels drafted, or -Status.
class Decoder {
 public:
  virtual ~Decoder() = default;

  // Of a target.
  virtual int forward(const ForwardCall&) { return kOtherKind; }
  virtual int verify(const VerifyCall&) { return kOtherKind; }

  // Of a draft.
  virtual int extend(const StatesCall&) { return kOtherKind; }
  virtual int step(const StatesCall&) { return kOtherKind; }
  virtual int proposals(const ProposalsCall&) { return kOtherKind; }
  virtual int propose(const Growth&) { return -kOtherKind; }
  virtual int grow(const Growth&) { return -kOtherKind; }

  void set_positions(const Positions& to) {
    tables_.assign(to.tables, to.tables + 2 * to.ropes);
    query_scales_ = to.query_scales, positions_ = to.length;
  }

 protected:
  explicit Decoder(int64_t threads)
      : threads_(static_cast<int>(std::clamp<int64_t>(threads, 1, Pool::kMaxThreads - 1))) {}

  const int threads_;
  std::vector<const float*> tables_;  // see `Positions`
  const float* query_scales_ = nullptr;
  int64_t positions_ = 0;
};

}  // namespace
