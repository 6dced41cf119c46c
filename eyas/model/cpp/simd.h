// Vectors of 16 floats, activations in bf16 or fp32, and aligned memory.
#pragma once

#include <immintrin.h>
#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

#define INLINE inline __attribute__((always_inline))

using Vec = __m512;
using Bits = __m512i;
using bf16 = uint16_t;

constexpr int kLanes = 16;

INLINE int round_up(int n, int unit) { return (n + unit - 1) / unit * unit; }
INLINE __mmask16 first_lanes(int n) {
  return n >= 16 ? 0xffff : static_cast<__mmask16>((1u << n) - 1);
}

// A bf16 is the upper half of a float.
INLINE Vec widen(__m256i half) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

INLINE __m256i narrow(Vec x) {
#ifdef __AVX512BF16__
  return (__m256i)_mm512_cvtneps_pbh(x);
#else
  const Bits bits = _mm512_castps_si512(x);
  const Bits odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(
      _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16));
#endif
}

INLINE Vec even_of_pairs(Bits pairs) { return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)); }
INLINE Vec odd_of_pairs(Bits pairs) {
  return _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(0xffff0000)));
}

// sum + a.even * b.even + a.odd * b.odd in each lane, for pairs of bf16.
INLINE Vec dot_pairs(Vec sum, Bits a, Bits b) {
#ifdef __AVX512BF16__
  return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
#else
  sum = _mm512_fmadd_ps(even_of_pairs(a), even_of_pairs(b), sum);
  return _mm512_fmadd_ps(odd_of_pairs(a), odd_of_pairs(b), sum);
#endif
}

// sum + four products in each lane, of unsigned bytes with signed ones: exact, and the same by
// either way.
INLINE Bits dot_bytes(Bits sum, Bits a, Bits b) {
#ifdef __AVX512VNNI__
  return _mm512_dpbusd_epi32(sum, a, b);
#else
  const Bits even = _mm512_madd_epi16(_mm512_and_si512(a, _mm512_set1_epi16(255)),
                                      _mm512_srai_epi16(_mm512_slli_epi16(b, 8), 8));
  const Bits odd = _mm512_madd_epi16(_mm512_srli_epi16(a, 8), _mm512_srai_epi16(b, 8));
  return _mm512_add_epi32(sum, _mm512_add_epi32(even, odd));
#endif
}

// e^x to about one unit in the last place; 0 far below.
INLINE Vec exp_of(Vec x) {
  x = _mm512_min_ps(_mm512_max_ps(x, _mm512_set1_ps(-120.0f)), _mm512_set1_ps(88.7f));
  const Vec n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504088896341f)), 8);
  Vec r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693145751953125f), x);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(1.42860677e-6f), r);
  Vec p = _mm512_set1_ps(1.0f / 720);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 120));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 24));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 6));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.5f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(p, n);
}

// tanh x to about one unit in the last place: by Cephes' polynomial where e^x would lose it.
INLINE Vec tanh_of(Vec x) {
  const Vec one = _mm512_set1_ps(1.0f), two = _mm512_set1_ps(2.0f), size = _mm512_abs_ps(x),
            square = _mm512_mul_ps(x, x);
  Vec p = _mm512_set1_ps(-5.70498872745e-3f);
  p = _mm512_fmadd_ps(p, square, _mm512_set1_ps(2.06390887954e-2f));
  p = _mm512_fmadd_ps(p, square, _mm512_set1_ps(-5.37397155531e-2f));
  p = _mm512_fmadd_ps(p, square, _mm512_set1_ps(1.33314422036e-1f));
  p = _mm512_fmadd_ps(p, square, _mm512_set1_ps(-3.33332819422e-1f));
  const Vec small = _mm512_fmadd_ps(_mm512_mul_ps(p, square), x, x);
  const Vec grown = _mm512_add_ps(one, exp_of(_mm512_mul_ps(two, size)));
  const Vec large = _mm512_sub_ps(one, _mm512_div_ps(two, grown));
  const Vec signed_large = _mm512_or_ps(large, _mm512_and_ps(x, _mm512_set1_ps(-0.0f)));
  return _mm512_mask_mov_ps(signed_large,
                            _mm512_cmp_ps_mask(size, _mm512_set1_ps(0.625f), _CMP_NGE_UQ), small);
}

INLINE Vec capped(Vec x, Vec cap) { return _mm512_mul_ps(cap, tanh_of(_mm512_div_ps(x, cap))); }

// x / (1 + e^(-slope x))
INLINE Vec sigmoid_times(Vec x, float slope) {
  const Vec one = _mm512_set1_ps(1.0f);
  return _mm512_div_ps(x, _mm512_add_ps(one, exp_of(_mm512_mul_ps(_mm512_set1_ps(-slope), x))));
}

// What an MLP makes of its gate and up, as `eyas/families.py` names them.
struct Silu {
  static INLINE Vec of(Vec gate, Vec up) { return _mm512_mul_ps(sigmoid_times(gate, 1.0f), up); }
};

struct GeluTanh {
  static INLINE Vec of(Vec gate, Vec up) {
    const Vec half = _mm512_mul_ps(_mm512_set1_ps(0.5f), gate);
    const Vec cube = _mm512_mul_ps(_mm512_mul_ps(gate, gate), gate);
    const Vec inner = _mm512_fmadd_ps(_mm512_set1_ps(0.044715f), cube, gate);
    const Vec turned = tanh_of(_mm512_mul_ps(_mm512_set1_ps(0.7978845608f), inner));
    return _mm512_mul_ps(_mm512_fmadd_ps(half, turned, half), up);
  }
};

struct ClampedSilu {
  static INLINE Vec of(Vec gate, Vec up) {
    const Vec limit = _mm512_set1_ps(7.0f);
    up = _mm512_max_ps(_mm512_min_ps(up, limit), _mm512_set1_ps(-7.0f));
    const Vec glu = sigmoid_times(_mm512_min_ps(gate, limit), 1.702f);
    return _mm512_fmadd_ps(glu, up, glu);
  }
};

// The sums of 16 vectors, in the 16 lanes of one. Every vector is summed by the same tree, wherever
// it stands.
INLINE Vec sums_of(const Vec* v) {
  Vec pairs[8], fours[4], eights[2];
  for (int i = 0; i < 8; ++i)
    pairs[i] = _mm512_add_ps(_mm512_unpacklo_ps(v[2 * i], v[2 * i + 1]),
                             _mm512_unpackhi_ps(v[2 * i], v[2 * i + 1]));
  for (int i = 0; i < 4; ++i) {
    const __m512d a = _mm512_castps_pd(pairs[2 * i]), b = _mm512_castps_pd(pairs[2 * i + 1]);
    fours[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)),
                             _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
  }
  for (int i = 0; i < 2; ++i) {
    const Vec a = fours[2 * i], b = fours[2 * i + 1];
    eights[i] = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
  }
  return _mm512_add_ps(_mm512_shuffle_f32x4(eights[0], eights[1], 0x88),
                       _mm512_shuffle_f32x4(eights[0], eights[1], 0xdd));
}

// What activations, keys and values are stored as.
struct Bf16 {
  using T = bf16;
  static constexpr bool is_bf16 = true;
  static INLINE void store(T* to, Vec x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), narrow(x));
  }
  static INLINE void store(T* to, __mmask16 lanes, Vec x) {
    _mm256_mask_storeu_epi16(to, lanes, narrow(x));
  }
  static INLINE Vec load(const T* from, __mmask16 lanes) {
    return widen(_mm256_maskz_loadu_epi16(lanes, from));
  }
};

struct Fp32 {
  using T = float;
  static constexpr bool is_bf16 = false;
  static INLINE void store(T* to, Vec x) { _mm512_storeu_ps(to, x); }
  static INLINE void store(T* to, __mmask16 lanes, Vec x) { _mm512_mask_storeu_ps(to, lanes, x); }
  static INLINE Vec load(const T* from, __mmask16 lanes) {
    return _mm512_maskz_loadu_ps(lanes, from);
  }
};

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
    std::swap(data_, wider.data_), std::swap(count_, wider.count_);
    return data_;
  }
  T* get() const { return data_; }

 private:
  T* data_ = nullptr;
  size_t count_ = 0;
};
