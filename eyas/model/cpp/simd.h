// Functions of vectors, activations in bf16 or fp32, and aligned memory.
#pragma once

#include <sys/mman.h>

#include <cstdlib>
#include <new>

#include "vec.h"

INLINE int round_up(int n, int unit) { return (n + unit - 1) / unit * unit; }

// Calls work with count, 1 .. 4, as a constant.
template <class Work>
INLINE void with_up_to_four(int count, Work&& work) {
  switch (count) {
    case 1:
      return work(std::integral_constant<int, 1>());
    case 2:
      return work(std::integral_constant<int, 2>());
    case 3:
      return work(std::integral_constant<int, 3>());
    default:
      return work(std::integral_constant<int, 4>());
  }
}

// e^x to about one unit in the last place; 0 far below.
INLINE Vec exp_of(Vec x) {
  x = min(max(x, splat(-120.0f)), splat(88.7f));
  const Vec n = rounded(x * splat(1.44269504088896341f));
  Vec r = fnma(n, splat(0.693145751953125f), x);
  r = fnma(n, splat(1.42860677e-6f), r);
  Vec p = splat(1.0f / 720);
  for (const float c : {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) p = fma(p, r, splat(c));
  return times_power(p, n);
}

// tanh x to about one unit in the last place: by Cephes' polynomial where e^x would lose it.
INLINE Vec tanh_of(Vec x) {
  const Vec one = splat(1.0f), two = splat(2.0f), size = abs(x), square = x * x;
  Vec p = splat(-5.70498872745e-3f);
  for (const float c :
       {2.06390887954e-2f, -5.37397155531e-2f, 1.33314422036e-1f, -3.33332819422e-1f})
    p = fma(p, square, splat(c));
  const Vec small = fma(p * square, x, x), large = one - two / (one + exp_of(two * size));
  const Bits sign = as<int32_t>(x) & splat(INT32_MIN);
  return select(size >= splat(0.625f), as<float>(as<int32_t>(large) | sign), small);
}

INLINE Vec capped(Vec x, Vec cap) { return cap * tanh_of(x / cap); }

// x / (1 + e^(-slope x))
INLINE Vec sigmoid_times(Vec x, float slope) {
  return x / (splat(1.0f) + exp_of(splat(-slope) * x));
}

// What an MLP makes of its gate and up, as `eyas/families.py` names them.
struct Silu {
  static INLINE Vec of(Vec gate, Vec up) { return sigmoid_times(gate, 1.0f) * up; }
};

struct GeluTanh {
  static INLINE Vec of(Vec gate, Vec up) {
    const Vec half = splat(0.5f) * gate, cube = gate * gate * gate;
    const Vec turned = tanh_of(splat(0.7978845608f) * fma(splat(0.044715f), cube, gate));
    return fma(half, turned, half) * up;
  }
};

struct ClampedSilu {
  static INLINE Vec of(Vec gate, Vec up) {
    const Vec limit = splat(7.0f);
    up = max(min(up, limit), splat(-7.0f));
    const Vec glu = sigmoid_times(min(gate, limit), 1.702f);
    return fma(glu, up, glu);
  }
};

// What activations, keys and values are stored as.
struct Bf16 {
  using T = bf16;
  static constexpr bool is_bf16 = true;
  static INLINE float number(T x) {
    const uint32_t bits = static_cast<uint32_t>(x) << 16;
    float found;
    std::memcpy(&found, &bits, 4);
    return found;
  }
  static INLINE void store(T* to, Vec x) { ::store(to, narrow(x)); }
  static INLINE void store(T* to, Lanes lanes, Vec x) { ::store(to, lanes, narrow(x)); }
  static INLINE Vec load(const T* from) { return widen(load_halves(from)); }
  static INLINE Vec load(const T* from, Lanes lanes) { return widen(load_halves(from, lanes)); }
};

struct Fp32 {
  using T = float;
  static constexpr bool is_bf16 = false;
  static INLINE float number(T x) { return x; }
  static INLINE void store(T* to, Vec x) { ::store(to, x); }
  static INLINE void store(T* to, Lanes lanes, Vec x) { ::store(to, lanes, x); }
  static INLINE Vec load(const T* from) { return ::load(from); }
  static INLINE Vec load(const T* from, Lanes lanes) { return ::load(from, lanes); }
};

// 1 / sqrt(mean(x^2) + eps) of n channels; the same bits wherever it is called from.
INLINE float inverse_size(const float* x, int n, float eps) {
  Vec squares[2] = {Vec{}, Vec{}};
  int i = 0;
  for (; i + 2 * kLanes <= n; i += 2 * kLanes) {
    const Vec a = load(x + i), b = load(x + i + kLanes);
    squares[0] = fma(a, a, squares[0]);
    squares[1] = fma(b, b, squares[1]);
  }
  for (; i < n; i += kLanes) {
    const Vec a = load(x + i, first_lanes(n - i));
    squares[0] = fma(a, a, squares[0]);
  }
  const float mean = sum_of(squares[0] + squares[1]) / static_cast<float>(n);
  return 1.0f / std::sqrt(mean + eps);
}

// x * weight * factor of n channels.
template <class Store>
INLINE void scale(const float* x, const float* weight, float by, int n, Store&& store) {
  const Vec factor = splat(by);
  for (int i = 0; i < n; i += kLanes) {
    const Lanes lanes = first_lanes(n - i);
    const Vec scaled = load(x + i, lanes) * factor;
    store(i, lanes, scaled * load(weight + i, lanes));
  }
}

// x * weight / sqrt(mean(x^2) + eps); null is a weight of ones without the norm.
template <class Store>
INLINE void normalise(const float* x, const float* weight, int n, float eps, Store&& store) {
  if (weight != nullptr) return scale(x, weight, inverse_size(x, n, eps), n, store);
  for (int i = 0; i < n; i += kLanes) store(i, first_lanes(n - i), load(x + i, first_lanes(n - i)));
}

// A zeroed array on 64 bytes that only grows; growing forgets what was in it.
template <class T>
class Buffer {
 public:
  Buffer() = default;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { std::free(data_); }

  T* reserve(size_t count) {
    if (count > count_) {
      std::free(data_);
      data_ = nullptr, count_ = 0;  // a failed allocation leaves an empty buffer
      const size_t unit = sizeof(T) * count >= (1u << 21) ? (1u << 21) : 64;
      const size_t bytes = (sizeof(T) * count + unit - 1) / unit * unit;
      data_ = static_cast<T*>(std::aligned_alloc(unit, bytes));
      if (data_ == nullptr) throw std::bad_alloc();
      if (unit > 64) madvise(data_, bytes, MADV_HUGEPAGE);
      std::memset(static_cast<void*>(data_), 0, bytes);
      count_ = count;
    }
    return data_;
  }
  // The same, and the first numbers stay.
  T* grow(size_t count, size_t kept) {
    if (count <= count_) return data_;
    Buffer wider;
    wider.reserve(std::max(count, 2 * count_));
    if (kept > 0) std::memcpy(wider.data_, data_, kept * sizeof(T));
    swap(wider);
    return data_;
  }
  void swap(Buffer& other) { std::swap(data_, other.data_), std::swap(count_, other.count_); }
  T* get() const { return data_; }

 private:
  T* data_ = nullptr;
  size_t count_ = 0;
};
