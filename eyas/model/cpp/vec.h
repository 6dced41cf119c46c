// Vectors of 16 floats, and of the 64 bytes that these take, over whatever registers the processor
// has: kernels are written once. vec_avx512.h, vec_avx2.h and vec_neon.h have what each does in a
// way of its own, and all intrinsics but those of tiles (amx*.h).
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#define INLINE inline __attribute__((always_inline))

using bf16 = uint16_t;

constexpr int kLanes = 16;

#if defined(__AVX512F__)
constexpr int kRegisterBytes = 64;
#elif defined(__AVX2__)
constexpr int kRegisterBytes = 32;
#else
constexpr int kRegisterBytes = 16;
#endif
constexpr int kRegisters = 64 / kRegisterBytes;

// 64 bytes of numbers.
template <class E>
struct Wide {
  typedef E Register __attribute__((vector_size(kRegisterBytes)));
  typedef E Loose __attribute__((vector_size(kRegisterBytes), aligned(1), may_alias));
  static constexpr int kCount = 64 / sizeof(E);

  Register in[kRegisters];
};

using Vec = Wide<float>;
using Bits = Wide<int32_t>;  // also of bytes, words and pairs of bf16
using Doubles = Wide<double>;
using Longs = Wide<int64_t>;

#define EYAS_EACH _Pragma("GCC unroll 4") for (int i = 0; i < kRegisters; ++i)

#define EYAS_OPERATOR(OP)                            \
  template <class E>                                 \
  INLINE Wide<E> operator OP(Wide<E> a, Wide<E> b) { \
    EYAS_EACH a.in[i] = a.in[i] OP b.in[i];          \
    return a;                                        \
  }
EYAS_OPERATOR(+)
EYAS_OPERATOR(-)
EYAS_OPERATOR(*)
EYAS_OPERATOR(/)
EYAS_OPERATOR(&)
EYAS_OPERATOR(|)
EYAS_OPERATOR(^)
#undef EYAS_OPERATOR

template <class E>
INLINE Wide<E> operator<<(Wide<E> a, int by) {
  EYAS_EACH a.in[i] = a.in[i] << by;
  return a;
}
// Of signed numbers by copies of the sign.
template <class E>
INLINE Wide<E> operator>>(Wide<E> a, int by) {
  EYAS_EACH a.in[i] = a.in[i] >> by;
  return a;
}

// The same bits as numbers of another type.
template <class To, class From>
INLINE Wide<To> as(Wide<From> a) {
  Wide<To> to;
  EYAS_EACH to.in[i] = (typename Wide<To>::Register)a.in[i];
  return to;
}

template <class E>
INLINE Wide<E> splat(E x) {
  Wide<E> to;
  EYAS_EACH to.in[i] = x - typename Wide<E>::Register{};
  return to;
}
INLINE Bits splat_bytes(int x) { return as<int32_t>(splat(static_cast<uint8_t>(x))); }
// The 4 bytes at an address, 16 times.
INLINE Bits splat_four(const void* from) {
  int32_t four;
  std::memcpy(&four, from, 4);
  return splat(four);
}

template <class E>
INLINE Wide<E> load(const E* from) {
  Wide<E> to;
  EYAS_EACH to.in[i] = reinterpret_cast<const typename Wide<E>::Loose*>(from)[i];
  return to;
}
template <class E>
INLINE void store(E* to, Wide<E> a) {
  EYAS_EACH reinterpret_cast<typename Wide<E>::Loose*>(to)[i] = a.in[i];
}
INLINE Bits load_bits(const void* from) { return load(static_cast<const int32_t*>(from)); }
INLINE void store_bits(void* to, Bits a) { store(static_cast<int32_t*>(to), a); }

// Lanes of ones where a comparison holds.
#define EYAS_COMPARISON(OP)                                        \
  template <class E>                                               \
    requires(sizeof(E) == 8 || kRegisterBytes < 64)                \
  INLINE auto operator OP(Wide<E> a, Wide<E> b) {                  \
    Wide<std::conditional_t<sizeof(E) == 8, int64_t, int32_t>> to; \
    EYAS_EACH to.in[i] = a.in[i] OP b.in[i];                       \
    return to;                                                     \
  }
EYAS_COMPARISON(<)
EYAS_COMPARISON(<=)
EYAS_COMPARISON(>)
EYAS_COMPARISON(>=)
EYAS_COMPARISON(==)
EYAS_COMPARISON(!=)
#undef EYAS_COMPARISON

// 0, 1, 2, ...
template <class E>
INLINE Wide<E> count_up() {
  alignas(64) static constexpr auto numbers = [] {
    std::array<E, Wide<E>::kCount> made{};
    for (int i = 0; i < Wide<E>::kCount; ++i) made[i] = static_cast<E>(i);
    return made;
  }();
  return load(numbers.data());
}

// In every 16 bytes, the numbers of their lower halves (of the upper ones) by turns.
template <bool kUpper, class E>
INLINE Wide<E> zip(Wide<E> a, Wide<E> b) {
  constexpr int quarter = 16 / sizeof(E), all = kRegisterBytes / sizeof(E);
  EYAS_EACH a.in[i] = [&]<int... I>(
                          std::integer_sequence<int, I...>) __attribute__((always_inline)) {
    return __builtin_shufflevector(
        a.in[i], b.in[i],
        (I / quarter * quarter + (kUpper ? quarter / 2 : 0) + I % quarter / 2 + I % 2 * all)...);
  }(std::make_integer_sequence<int, all>());
  return a;
}
// The same of numbers of E in bits.
template <class E>
INLINE Bits zip_low(Bits a, Bits b) {
  return as<int32_t>(zip<false>(as<E>(a), as<E>(b)));
}
template <class E>
INLINE Bits zip_high(Bits a, Bits b) {
  return as<int32_t>(zip<true>(as<E>(a), as<E>(b)));
}

// Of words of 16 bits.
INLINE Bits words_left(Bits a, int by) { return as<int32_t>(as<uint16_t>(a) << by); }
INLINE Bits words_right(Bits a, int by) { return as<int32_t>(as<uint16_t>(a) >> by); }

// Of pairs of bf16: one is the upper half of a float.
INLINE Vec even_of_pairs(Bits pairs) { return as<float>(pairs << 16); }
INLINE Vec odd_of_pairs(Bits pairs) { return as<float>(pairs & splat<int32_t>(~0xffff)); }

#ifndef __AVX512F__  // which has masks of its own

// The first lanes, 32 of them where numbers have 16 bits.
struct Lanes {
  int count;
};
using Mask = Bits;

INLINE Lanes first_lanes(int n) { return {std::max(n, 0)}; }
INLINE bool is_all(Lanes lanes) { return lanes.count >= kLanes; }

#endif

#if defined(__AVX512F__)
#include "vec_avx512.h"
#elif defined(__AVX2__)
#include "vec_avx2.h"
#else
#include "vec_neon.h"
#endif

#ifndef __AVX512F__  // masks are vectors, and there is no instruction for the first lanes

INLINE Mask mask_of(Lanes lanes) { return count_up<int32_t>() < splat(lanes.count); }
INLINE Vec load(const float* from, Lanes lanes, Vec others = {}) {
  if (is_all(lanes)) return load(from);
  float room[kLanes];
  store(room, others);
  std::copy_n(from, lanes.count, room);
  return load(room);
}
INLINE void store(float* to, Lanes lanes, Vec x) {
  if (is_all(lanes)) return store(to, x);
  float room[kLanes];
  store(room, x);
  std::copy_n(room, lanes.count, to);
}
INLINE Halves load_halves(const bf16* from, Lanes lanes) {
  if (is_all(lanes)) return load_halves(from);
  bf16 room[kLanes] = {};
  std::copy_n(from, lanes.count, room);
  return load_halves(room);
}
INLINE void store(bf16* to, Lanes lanes, Halves x) {
  if (is_all(lanes)) return store(to, x);
  bf16 room[kLanes];
  store(room, x);
  std::copy_n(room, lanes.count, to);
}
INLINE Bits load_words(const bf16* from, Lanes lanes) {
  if (lanes.count >= 2 * kLanes) return load_bits(from);
  bf16 room[2 * kLanes] = {};
  std::copy_n(from, lanes.count, room);
  return load_bits(room);
}

INLINE Vec abs(Vec a) { return as<float>(as<int32_t>(a) & splat(0x7fffffff)); }

// a * 2^n, for whole n: in two steps, of which one at most is rounded.
INLINE Vec times_power(Vec a, Vec n) {
  const Bits whole = to_ints(n), half = whole >> 1, bias = splat(127);
  return a * as<float>((half + bias) << 23) * as<float>((whole - half + bias) << 23);
}

#endif

// In the first lanes one, in the others another.
INLINE Vec first_of(Lanes lanes, Vec a, Vec others = {}) {
  return select(mask_of(lanes), a, others);
}

#ifndef EYAS_DOTS_IN_WORDS
// Sums of products of a block's lines: begin(start), add each, end(start).
template <int kBits, int>
class Dots {
 public:
  INLINE void begin(Bits start) { sum_ = start; }
  INLINE void add(int, Bits codes, Bits x) { sum_ = dot_bytes<kBits>(sum_, codes, x); }
  INLINE Bits end(Bits) const { return sum_; }

 private:
  Bits sum_;
};
#endif

// sum + a.even * b.even + a.odd * b.odd in each lane, for pairs of bf16.
INLINE Vec dot_pairs(Vec sum, Bits a, Bits b) {
#ifdef EYAS_DOT_OF_BF16
  return dot_pairs_at_once(sum, a, b);
#else
  sum = fma(even_of_pairs(a), even_of_pairs(b), sum);
  return fma(odd_of_pairs(a), odd_of_pairs(b), sum);
#endif
}

// The first `count` of 8 floats, up to all, and 0.
INLINE Doubles load_as_doubles(const float* from, int count = 8) {
  float room[8] = {};
  if (count < 8) std::copy(from, from + count, room), from = room;
  typedef float Half __attribute__((vector_size(kRegisterBytes / 2), aligned(1), may_alias));
  Doubles to;
  EYAS_EACH to.in[i] =
      __builtin_convertvector(reinterpret_cast<const Half*>(from)[i], typename Doubles::Register);
  return to;
}
INLINE void store_as_floats(float* to, Doubles a) {
  typedef float Half __attribute__((vector_size(kRegisterBytes / 2), aligned(1), may_alias));
  EYAS_EACH reinterpret_cast<Half*>(to)[i] = __builtin_convertvector(a.in[i], Half);
}
// Whole numbers below 2^51 in size, and the nearest of a number.
INLINE Longs to_longs(Doubles a) {
  const Doubles shift = splat(0x1.8p52);
  return as<int64_t>(a + shift) - as<int64_t>(shift);
}
INLINE Doubles to_doubles(Longs a) {
  const Doubles shift = splat(0x1.8p52);
  return as<double>(a + as<int64_t>(shift)) - shift;
}
INLINE int64_t sum_of(Longs a) {
  int64_t all = 0;
  EYAS_EACH for (size_t j = 0; j < 8 / kRegisters; ++j) all += a.in[i][j];
  return all;
}
INLINE Doubles select(Longs mask, Doubles yes, Doubles no) {
  EYAS_EACH no.in[i] = mask.in[i] ? yes.in[i] : no.in[i];
  return no;
}

// The sums of 16 vectors, in the 16 lanes of one. Every vector is summed by the same tree, wherever
// it stands.
INLINE Vec sums_of(const Vec* v) {
  Vec pairs[8], fours[4];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i)
    pairs[i] = zip<false>(v[2 * i], v[2 * i + 1]) + zip<true>(v[2 * i], v[2 * i + 1]);
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const Doubles a = as<double>(pairs[2 * i]), b = as<double>(pairs[2 * i + 1]);
    fours[i] = as<float>(zip<false>(a, b)) + as<float>(zip<true>(a, b));
  }
  return sums_of_quarters(fours[0], fours[1], fours[2], fours[3]);
}
