// What every matrix product streams: packed weights in blocks of 16 output columns, shared among
// threads in panels.
//
//   block    16 output columns
//   panel    up to 4 neighbouring blocks, one sequential stream
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "pool.h"
#include "simd.h"

constexpr int kPanelBlocks = 4, kPanelColumns = kPanelBlocks * kLanes;
// Bytes between what is worked on and what is fetched, into the first cache or (far) the second. Of
// floats all rows work on 8 KB before the next; of quantised weights few work on a unit.
constexpr size_t kLead = 12288, kFarLead = 24576, kQuantisedLead = 6144;

// make(R, W), a function for R rows and W blocks, both constants, from a table of all of them.
template <class Function, int most_rows, int most_blocks, class Make>
Function of_rows_and_width(int rows, int width, Make) {
  static constexpr auto functions = []<int... I>(std::integer_sequence<int, I...>) {
    return std::array<Function, sizeof...(I)>{
        Make()(std::integral_constant<int, I / most_blocks + 1>(),
               std::integral_constant<int, I % most_blocks + 1>())...};
  }(std::make_integer_sequence<int, most_rows * most_blocks>());
  return functions[(rows - 1) * most_blocks + width - 1];
}

struct Panel {
  int first, width;  // blocks
  size_t offset;     // bytes
  int first_chunk;   // counted over all panels
};

struct Source {
  const void* data;
  int rows;
};

// The sanitizer is told what of an arena has been handed out, and a line behind each piece has not.
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
constexpr size_t kGap = 64;
#else
#define ASAN_POISON_MEMORY_REGION(at, bytes)
#define ASAN_UNPOISON_MEMORY_REGION(at, bytes)
constexpr size_t kGap = 0;
#endif

// Memory for weights in huge pages, handed out in order: products packed one after the other lie
// behind each other.
class Arena {
 public:
  using Piece = std::shared_ptr<uint8_t>;

  static Piece take(size_t bytes) {
    static std::mutex mutex;
    static std::shared_ptr<Chunk> open;
    static size_t used = 0;
    const std::lock_guard<std::mutex> guard(mutex);
    [[maybe_unused]] const size_t asked = bytes;
    bytes = (bytes + 63) / 64 * 64 + kGap;
    if (open == nullptr || used + bytes > open->size) {
      open = std::make_shared<Chunk>(
          std::max(kChunk, (bytes + kHugePage - 1) / kHugePage * kHugePage));
      used = 0;
    }
    uint8_t* at = open->data + used;
    used += bytes;
    ASAN_UNPOISON_MEMORY_REGION(at, asked);
    return Piece(open, at);
  }

 private:
  static constexpr size_t kHugePage = size_t(2) << 20, kChunk = size_t(64) << 20;

  struct Chunk {
    explicit Chunk(size_t bytes)
        : size(bytes), data(static_cast<uint8_t*>(std::aligned_alloc(kHugePage, bytes))) {
      if (data == nullptr) throw std::bad_alloc();
      madvise(data, bytes, MADV_HUGEPAGE);
      ASAN_POISON_MEMORY_REGION(data, bytes);
    }
    ~Chunk() {
      ASAN_UNPOISON_MEMORY_REGION(data, size);
      std::free(data);
    }
    const size_t size;
    uint8_t* const data;
  };
};

// The weights [N, K] of one product, whatever they are stored as.
class Product {
 public:
  Product(int K, bool gated, bool is_quantised) : K(K), gated(gated), is_quantised(is_quantised) {}
  Product(const Product&) = delete;
  Product& operator=(const Product&) = delete;
  virtual ~Product() = default;

  // The panels of thread t of T: [share(t, T), share(t + 1, T)).
  int share(int t, int T) const {
    const int first = static_cast<int>(static_cast<int64_t>(blocks) * t / T);
    return static_cast<int>(std::lower_bound(panels.begin(), panels.end(), first,
                                             [](const Panel& p, int b) { return p.first < b; }) -
                            panels.begin());
  }

  // Where the weights of thread t begin and, at t + 1, end.
  const uint8_t* share_weights(int t, int T) const {
    const int p = share(t, T);
    return data_.get() + (p < static_cast<int>(panels.size()) ? panels[p].offset : num_bytes_);
  }

  const float* bias() const { return bias_.get(); }
  size_t bytes() const { return num_bytes_; }

  INLINE void add_bias(const Panel& panel, int M, float* sums) const {
    if (!has_bias) return;
    for (int m = 0; m < M; ++m)
      for (int w = 0; w < panel.width; ++w) {
        float* at = sums + m * kPanelColumns + w * kLanes;
        store(at, load(at) + load(bias() + (panel.first + w) * kLanes));
      }
  }

  int K, blocks = 0;
  bool gated, is_quantised, has_bias = false;
  int N = 0;  // columns with outputs
  std::vector<Panel> panels;

 protected:
  // The source row of each packed column, -1 for padding; their biases are kept.
  std::vector<int> columns(const std::vector<Source>& parts, const float* bias) {
    std::vector<int> rows;
    for (const Source& part : parts) N += part.rows;
    if (gated) {
      const int half = parts[0].rows;
      for (int first = 0; first < half; first += kLanes)
        for (int part = 0; part < 2; ++part)
          for (int c = first; c < first + kLanes; ++c)
            rows.push_back(c < half ? part * half + c : -1);
    } else {
      for (int c = 0; c < round_up(N, kLanes); ++c) rows.push_back(c < N ? c : -1);
    }
    blocks = static_cast<int>(rows.size()) / kLanes;
    has_bias = bias != nullptr;
    float* biases = bias_.reserve(rows.size());
    for (size_t c = 0; has_bias && c < rows.size(); ++c)
      biases[c] = rows[c] < 0 ? 0.0f : bias[rows[c]];
    return rows;
  }

  // Even shares of blocks for the threads, each in panels as wide as possible.
  std::vector<Panel> shares(int threads) const {
    const int grain = gated ? 2 : 1, grains = blocks / grain;
    std::vector<Panel> made;
    for (int t = 0; t < threads; ++t) {
      int first = static_cast<int>(static_cast<int64_t>(grains) * t / threads) * grain;
      const int end = static_cast<int>(static_cast<int64_t>(grains) * (t + 1) / threads) * grain;
      for (; first < end; first += made.back().width)
        made.push_back({first, std::min(kPanelBlocks, end - first), 0, 0});
    }
    return made;
  }

  size_t num_bytes_ = 0;
  Arena::Piece data_;

 private:
  Buffer<float> bias_;
};

// Where bytes lie that will be read later; 0 for none. No pointer: it may lie outside of all.
using Address = uintptr_t;

INLINE void prefetch(Address at, size_t bytes, bool is_far = false) {
  for (size_t i = 0; i < bytes; i += 64) is_far ? fetch_far(at + i) : fetch(at + i);
}

// Fetches what a thread will read later: of its share of one product, then of the next.
class Stream {
 public:
  Stream(const Product& product, const Product* next, int t, int T)
      : past_(address(product.share_weights(t + 1, T))),
        then_(next == nullptr ? 0 : address(next->share_weights(t, T))) {}

  Address ahead(const uint8_t* weights, size_t lead = kLead) const {
    const Address at = address(weights) + lead;
    return at < past_ ? at : then_ == 0 ? 0 : then_ + (at - past_);
  }

  INLINE void fetch_ahead(const uint8_t* weights, size_t bytes, size_t lead = kLead,
                          bool is_far = false) const {
    if (const Address at = ahead(weights, lead); at != 0) prefetch(at, bytes, is_far);
  }

 private:
  static Address address(const uint8_t* weights) { return reinterpret_cast<Address>(weights); }

  Address past_, then_;
};

// What is ahead of a stretch of weights, fetched in as many bursts as the work on it has units.
class Bursts {
 public:
  Bursts(const Stream& stream, const uint8_t* weights, size_t bytes, size_t units)
      : stream_(stream),
        at_(weights),
        end_(weights + bytes),
        burst_((bytes / 64 + units - 1) / units * 64) {}

  INLINE void one() {
    if (at_ >= end_) return;
    const size_t bytes = std::min<size_t>(burst_, end_ - at_);
    stream_.fetch_ahead(at_, bytes);
    at_ += bytes;
  }

 private:
  const Stream& stream_;
  const uint8_t *at_, *end_;
  size_t burst_;
};
