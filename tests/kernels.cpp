// The library's kernels on odd sizes, for tests. A line for each result: "=" and a hash where every
// variant must have the same bits, "~" and the numbers' bits where products of bf16 are summed in
// the processor's own way. Ends with 1 where a row's bits depend on the rows beside it.
#include <bit>
#include <cstdio>

#include "attention.h"
#include "draw.h"
#include "experts.h"
#include "linear.h"
#include "quantised.h"

namespace {

using Floats = std::vector<float>;

bool all_alone = true;

template <class T>
void say(const char* name, int size, const std::vector<T>& numbers, bool same_in_all = true) {
  std::printf("%s %d %c", name, size, same_in_all ? '=' : '~');
  uint64_t hash = 0xcbf29ce484222325;
  for (const T& number : numbers) {
    uint64_t bits = 0;
    std::memcpy(&bits, &number, sizeof(T));
    hash = (hash ^ bits) * 0x100000001b3;
    if (!same_in_all) std::printf(" %08x", static_cast<unsigned>(bits));
  }
  if (same_in_all) std::printf(" %016llx", static_cast<unsigned long long>(hash));
  std::printf("\n");
}

// Row m of `all` must have the bits of `alone`.
void compare(const char* name, const Floats& all, int m, const Floats& alone) {
  if (std::memcmp(all.data() + m * alone.size(), alone.data(), alone.size() * sizeof(float)) == 0)
    return;
  std::printf("%s: row %d depends on the rows beside it\n", name, m);
  all_alone = false;
}

uint64_t state = 1;
uint64_t draw() { return splitmix(state++); }
float draw_number() {
  return static_cast<float>(static_cast<int64_t>(draw() >> 40) - (1 << 23)) * 0x1p-23f;
}

template <class A>
typename A::T as(float x) {
  if constexpr (A::is_bf16) {
    bf16 to[kLanes];
    Bf16::store(to, splat(x));
    return to[0];
  } else {
    return x;
  }
}

template <class A>
std::vector<typename A::T> numbers(size_t count, float size = 1) {
  std::vector<typename A::T> made(count);
  for (auto& number : made) number = as<A>(draw_number() * size);
  return made;
}

// x [M, K] -> y [M, 16 * blocks].
void multiply(const QuantisedProduct& weights, const float* x, int M, int T, float* y) {
  const int stride = weights.blocks * kLanes;
  Buffer<RowBlock> blocks;
  const RowBlocks rows{blocks.reserve(M * (weights.K / kBlockInputs) + kAmxRows),
                       weights.K / kBlockInputs, M};
  for (int m = 0; m < rows.M; ++m)
    quantise_row<Fp32>(x + static_cast<size_t>(m) * weights.K, rows, m);
  std::vector<float> sums(T * M * kPanelColumns);
  Pool::shared().run(T, [&](int t) {
    multiply_quantised(weights, nullptr, rows, t, T, sums.data() + t * M * kPanelColumns,
                       [&](const Panel& panel, const float* out) {
                         for (int m = 0; m < rows.M; ++m)
                           std::memcpy(y + m * stride + panel.first * kLanes,
                                       out + m * kPanelColumns,
                                       panel.width * kLanes * sizeof(float));
                       });
  });
}

constexpr int kRows[] = {1, 2, 3, 7, 13, 40};

void quantised_products() {
  const int N = 70, K = 512;
  using enum Format;
  for (const Format format : {q4_0, q4_1, q5_0, q5_1, q8_0, q4_k, q5_k, q6_k, mxfp4, q2_k, q3_k,
                              iq4_nl, iq4_xs, two_bits}) {
    std::vector<uint8_t> blocks(N * row_bytes(format, K));
    with_format(format, [&](auto q) {
      float values[kMaxUnitInputs];
      for (uint8_t* unit = blocks.data(); unit < blocks.data() + blocks.size();
           unit += q.kSourceBytes)
        do {
          for (size_t i = 0; i < q.kSourceBytes; ++i) unit[i] = static_cast<uint8_t>(draw());
          q.dequantise(unit, values);
        } while (!std::all_of(values, values + q.kBlocks * kBlockInputs,
                              [](float value) { return std::abs(value) < 1e4f; }));
    });
    Floats x = numbers<Fp32>(kRows[5] * K, 3);
    if (format == q8_0) {  // the largest sums of products there are: codes of -128 by codes of 127
      for (size_t i = 0; i < 8 * row_bytes(format, K); ++i)
        if (i % row_bytes(format, kBlockInputs) > 1) blocks[i] = 128;
      std::fill_n(x.begin(), 2 * K, 3.0f);
    }
    const QuantisedProduct product({{blocks.data(), N}}, {format}, K, false, nullptr, 2);
    const int stride = product.blocks * kLanes;
    for (const int M : kRows) {
      Floats y(M * stride), one(stride);
      multiply(product, x.data(), M, 2, y.data());
      say("quantised product", static_cast<int>(format) * 100 + M, y);
      multiply(product, x.data() + (M - 1) * K, 1, 1, one.data());
      compare("quantised product", y, M - 1, one);
    }
  }
}

template <class A>
Floats product_of(const Linear& linear, const typename A::T* x, int stride, int M, int T) {
  const int columns = linear.blocks * kLanes;
  Floats y(M * columns), sums(T * M * kPanelColumns);
  Pool::shared().run(T, [&](int t) {
    multiply<A>(linear, nullptr, x, stride, M, t, T, sums.data() + t * M * kPanelColumns,
                [&](const Panel& panel, const float* out) {
                  for (int m = 0; m < M; ++m)
                    std::copy_n(out + m * kPanelColumns, panel.width * kLanes,
                                y.data() + m * columns + panel.first * kLanes);
                });
  });
  return y;
}

template <class A>
void products(const char* name) {
  const int N = 90;
  for (const int K : {41, 320}) {
    const int stride = round_up(K, 32) + 32;
    const Floats plain = numbers<Fp32>(N * K), bias = numbers<Fp32>(N);
    std::vector<bf16> half(N * K);
    for (int i = 0; i < N * K; ++i) half[i] = as<Bf16>(plain[i]);
    std::vector<typename A::T> x(kRows[5] * stride);
    for (int i = 0; i < kRows[5] * stride; ++i)
      if (i % stride < K) x[i] = as<A>(draw_number());
    const Linear fp32({{plain.data(), N}}, K, Packed::fp32, false, bias.data(), 2),
        bf16s({{half.data(), N}}, K, Packed::bf16, false, bias.data(), 2),
        squeezed({{half.data(), N}}, K, Packed::squeezed, false, bias.data(), 2);
    for (const int M : kRows) {
      const Floats y = product_of<A>(bf16s, x.data(), stride, M, 2);
      say(name, K * 100 + M, y, !A::is_bf16);
      compare(name, y, M - 1, product_of<A>(bf16s, x.data() + (M - 1) * stride, stride, 1, 1));
      compare("squeezed weights", y, 0, product_of<A>(squeezed, x.data(), stride, M, 2));
      if constexpr (!A::is_bf16)
        say("product of fp32", K * 100 + M, product_of<A>(fp32, x.data(), stride, M, 2));
    }
  }
}

template <class A>
void attention(const char* name, int D, float softcap) {
  using T = typename A::T;
  constexpr int kPages = 16, kPageSize = 4, kHq = 6, kHk = 2, kTile = 4;
  constexpr int kRowsOfAll = 7, kPrefix[] = {1, 20, 33, 33, 33, 40, 41};
  const int width = 2 * kHk * D, padded = round_up(D, 32), stride = kHq * D;
  const std::vector<T> cache = numbers<A>(kPages * kPageSize * width);
  std::vector<T> queries(kRowsOfAll * kHq * padded);
  for (size_t i = 0; i < queries.size(); ++i)
    if (static_cast<int>(i) % padded < D) queries[i] = as<A>(draw_number());
  const Floats sinks = numbers<Fp32>(kHq);
  int32_t pages[kPages];
  for (int i = 0; i < kPages; ++i) pages[i] = (i * 5 + 3) % kPages;
  int64_t position[kRowsOfAll], slot[kRowsOfAll], request[kRowsOfAll] = {}, prefix[kRowsOfAll],
                                                  seen[kRowsOfAll] = {1, 0, 1, 3, 5, 1, 0};
  for (int m = 0; m < kRowsOfAll; ++m)
    slot[m] = m, prefix[m] = kPrefix[m], position[m] = kPrefix[m] + 2;
  for (const int64_t window : {0, 11}) {
    const auto mixed = [&](int first, int count) {
      const RowsView rows{
          nullptr, request, position + first, slot, prefix + first, seen + first,
          pages,   1,       kPages,           0,    kPageSize,      kPages * kPageSize,
          count};
      Visible visible(window, 0);
      if (!visible.plan(rows, kTile / (kHq / kHk), kMaxApart)) std::abort();
      std::vector<T> out(count * stride);
      const AttentionView<A> view{cache.data(),
                                  queries.data() + first * kHq * padded,
                                  out.data(),
                                  static_cast<size_t>(padded),
                                  static_cast<size_t>(stride),
                                  static_cast<size_t>(width),
                                  kHq,
                                  kHk,
                                  D,
                                  {0.3f, softcap, window == 0 ? nullptr : sinks.data()}};
      const size_t scratch_stride = visible.longest + 64;
      Floats scratch(kTileQueries * scratch_stride);
      for (const RowTile& tile : visible.tiles)
        for (int g = 0; g < kHk; ++g)
          attend(view, visible, tile, g, g * 3, 3, scratch.data(), scratch_stride, {});
      Floats found(out.size());
      for (size_t i = 0; i < out.size(); ++i) {
        if constexpr (A::is_bf16)
          found[i] = std::bit_cast<float>(static_cast<uint32_t>(out[i]) << 16);
        else
          found[i] = out[i];
      }
      return found;
    };
    const Floats all = mixed(0, kRowsOfAll);
    say(name, D * 100 + static_cast<int>(window), all, !A::is_bf16);
    for (int m = 0; m < kRowsOfAll; ++m) compare(name, all, m, mixed(m, 1));
  }
}

void draws() {
  struct Cuts {
    int64_t top_k;
    double top_p, min_p, temperature;
  };
  for (const int V : {1, 8, 19, 1003}) {
    Floats logits(V);
    for (float& logit : logits) logit = std::round(draw_number() * 32) / 4;
    for (const Cuts& cuts : {Cuts{0, 1, 0, 1}, Cuts{7, 1, 0, 0.7}, Cuts{0, 0.9, 0, 1.3},
                             Cuts{50, 0.5, 0.01, 2}, Cuts{0, 1, 0.05, 1}, Cuts{0, 1, 0, 0}}) {
      DrawState params{};
      params.temperature = cuts.temperature, params.top_p = cuts.top_p, params.min_p = cuts.min_p;
      params.top_k = cuts.top_k, params.repetition = 1, params.num_top = std::min(V, 5);
      std::vector<int64_t> ints(kMostPlaces * (1 + params.num_top)), tokens;
      Floats scored(kMostPlaces * (2 + params.num_top));
      params.scored_ints = ints.data(), params.scored_logits = scored.data();
      TokenSampler sampler;
      sampler.begin(params, V);
      for (int i = 0; i < 40; ++i) tokens.push_back(sampler.next(logits.data()));
      say("drawn tokens", V, tokens), say("sums of weights", V, ints),
          say("best logits", V, scored);
    }
  }
}

template <class Function>
void say_function(const char* name, Function&& function) {
  Floats made;
  for (float x = -130; x < 130; x += 0.37f) {
    float sixteen[kLanes];
    for (int i = 0; i < kLanes; ++i) sixteen[i] = x / static_cast<float>(1 << i);
    store(sixteen, function(load(sixteen)));
    made.insert(made.end(), sixteen, sixteen + kLanes);
  }
  say(name, 0, made);
}

void functions() {
  say_function("exp", exp_of), say_function("tanh", tanh_of);
  say_function("silu", [](Vec x) { return Silu::of(x, splat(1.5f)); });
  say_function("gelu", [](Vec x) { return GeluTanh::of(x, splat(1.5f)); });
  say_function("clamped silu", [](Vec x) { return ClampedSilu::of(x, splat(1.5f)); });
  say_function("bf16", [](Vec x) { return widen(narrow(x)); });
  say_function("sums", [](Vec x) {
    Vec all[kLanes];
    for (int i = 0; i < kLanes; ++i) all[i] = x * splat(static_cast<float>(i) - 3.7f);
    return sums_of(all) + splat(sum_of(x)) + splat(max_of(x));
  });
  say_function("first lanes", [](Vec x) {
    float made[kLanes] = {}, from[kLanes];
    store(from, x);
    for (int i = 0; i <= kLanes; ++i)
      store(made, first_lanes(i), load(made) + load(from, first_lanes(i), splat(0.5f)));
    return load(made);
  });
  for (const int n : {1, 31, 64, 100}) {
    const Floats x = numbers<Fp32>(n), weight = numbers<Fp32>(n);
    Floats y(n);
    normalise(x.data(), weight.data(), n, 1e-5f,
              [&](int c, Lanes lanes, Vec v) { store(y.data() + c, lanes, v); });
    say("norm", n, y);
  }
  Experts<float> experts(19, 3, true, false);
  experts.reserve(1, 1, 1);
  for (int e = 0; e < 19; ++e) experts.logits.get()[e] = draw_number() * 9;
  experts.choose(0);
  experts.group(1);
  std::vector<int> ids;
  for (int i = 0; i < experts.num_groups(); ++i) ids.push_back(experts[i].expert);
  say("experts", 19, ids);
}

}  // namespace

int main() {
  quantised_products();
  products<Fp32>("product of bf16 weights"), products<Bf16>("product of bf16");
  for (const int D : {48, 64, 80})
    for (const float softcap : {0.0f, 5.0f})
      attention<Fp32>("attention", D, softcap), attention<Bf16>("attention in bf16", D, softcap);
  draws();
  functions();
  return all_alone ? 0 : 1;
}
