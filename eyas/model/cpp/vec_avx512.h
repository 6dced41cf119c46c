// A vector is a register of AVX-512; which of VNNI, bf16 and VBMI there is, the compiler says.
#pragma once

#include <immintrin.h>

INLINE Vec vec(__m512 x) { return {{x}}; }
INLINE Bits bits(__m512i x) { return {{(Bits::Register)x}}; }
INLINE __m512i raw(Bits x) { return (__m512i)x.in[0]; }

// The first lanes, 32 of them where numbers have 16 bits.
using Lanes = __mmask32;
using Mask = __mmask16;

INLINE Lanes first_lanes(int n) { return n >= 32 ? ~0u : (1u << n) - 1; }
INLINE bool is_all(Lanes lanes) { return (lanes & 0xffff) == 0xffff; }
INLINE Mask mask_of(Lanes lanes) { return static_cast<Mask>(lanes); }

INLINE Vec load(const float* from, Lanes lanes) {
  return vec(_mm512_maskz_loadu_ps(mask_of(lanes), from));
}
INLINE Vec load(const float* from, Lanes lanes, Vec others) {
  return vec(_mm512_mask_loadu_ps(others.in[0], mask_of(lanes), from));
}
INLINE void store(float* to, Lanes lanes, Vec x) {
  _mm512_mask_storeu_ps(to, mask_of(lanes), x.in[0]);
}
INLINE Bits load_words(const bf16* from, Lanes lanes) {
  return bits(_mm512_maskz_loadu_epi16(lanes, from));
}
// Past the caches, to 64 bytes.
INLINE void stream(float* to, Vec x) { _mm512_stream_ps(to, x.in[0]); }
INLINE void end_streams() { _mm_sfence(); }
INLINE void fetch(uintptr_t at) { asm volatile("prefetcht0 (%0)" ::"r"(at)); }
INLINE void fetch_far(uintptr_t at) { asm volatile("prefetcht1 (%0)" ::"r"(at)); }
INLINE void relax() { _mm_pause(); }

INLINE Vec fma(Vec a, Vec b, Vec c) { return vec(_mm512_fmadd_ps(a.in[0], b.in[0], c.in[0])); }
// c - a * b
INLINE Vec fnma(Vec a, Vec b, Vec c) { return vec(_mm512_fnmadd_ps(a.in[0], b.in[0], c.in[0])); }
INLINE Vec max(Vec a, Vec b) { return vec(_mm512_max_ps(a.in[0], b.in[0])); }
INLINE Vec min(Vec a, Vec b) { return vec(_mm512_min_ps(a.in[0], b.in[0])); }
INLINE Vec abs(Vec a) { return vec(_mm512_abs_ps(a.in[0])); }
INLINE Vec rounded(Vec a) { return vec(_mm512_roundscale_ps(a.in[0], 8)); }
INLINE Bits to_ints(Vec a) { return bits(_mm512_cvtps_epi32(a.in[0])); }
INLINE Vec to_floats(Bits a) { return vec(_mm512_cvtepi32_ps(raw(a))); }
// a * 2^n, for whole n
INLINE Vec times_power(Vec a, Vec n) { return vec(_mm512_scalef_ps(a.in[0], n.in[0])); }

INLINE Mask operator<(Vec a, Vec b) { return _mm512_cmp_ps_mask(a.in[0], b.in[0], _CMP_LT_OQ); }
INLINE Mask operator>(Vec a, Vec b) { return _mm512_cmp_ps_mask(a.in[0], b.in[0], _CMP_GT_OQ); }
INLINE Mask operator>=(Vec a, Vec b) { return _mm512_cmp_ps_mask(a.in[0], b.in[0], _CMP_GE_OQ); }
INLINE Mask operator!=(Vec a, Vec b) { return _mm512_cmp_ps_mask(a.in[0], b.in[0], _CMP_NEQ_UQ); }
INLINE Mask operator<(Bits a, Bits b) { return _mm512_cmplt_epi32_mask(raw(a), raw(b)); }
INLINE unsigned bits_of(Mask mask) { return mask; }
INLINE unsigned bits_of(Longs mask) { return _mm512_movepi64_mask((__m512i)mask.in[0]); }
INLINE Vec select(Mask mask, Vec yes, Vec no) {
  return vec(_mm512_mask_mov_ps(no.in[0], mask, yes.in[0]));
}
INLINE Bits select(Mask mask, Bits yes, Bits no) {
  return bits(_mm512_mask_mov_epi32(raw(no), mask, raw(yes)));
}

INLINE float sum_of(Vec a) { return _mm512_reduce_add_ps(a.in[0]); }
INLINE float max_of(Vec a) { return _mm512_reduce_max_ps(a.in[0]); }
INLINE int32_t sum_of(Bits a) { return _mm512_reduce_add_epi32(raw(a)); }

// 16 numbers of bf16 or of half precision.
using Halves = __m256i;

INLINE Halves load_halves(const void* from) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(from));
}
INLINE Halves load_halves(const bf16* from, Lanes lanes) {
  return _mm256_maskz_loadu_epi16(mask_of(lanes), from);
}
INLINE void store(bf16* to, Halves x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), x); }
INLINE void store(bf16* to, Lanes lanes, Halves x) {
  _mm256_mask_storeu_epi16(to, mask_of(lanes), x);
}
INLINE Vec widen(Halves x) {
  return vec(_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)));
}
INLINE Halves narrow(Vec x) {
#ifdef __AVX512BF16__
  return (__m256i)_mm512_cvtneps_pbh(x.in[0]);
#else
  const Bits all = as<int32_t>(x), odd = bits(_mm512_srli_epi32(raw(all), 16)) & splat(1);
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(raw(all + (odd + splat(0x7fff))), 16));
#endif
}
INLINE Vec from_half_precision(Halves x) { return vec(_mm512_cvtph_ps(x)); }
INLINE float from_half_precision(uint16_t bits) {
  return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(bits)));
}
INLINE uint16_t to_half_precision(float x) {
  return static_cast<uint16_t>(
      _mm_cvtsi128_si32(_mm_cvtps_ph(_mm_set_ss(x), _MM_FROUND_TO_NEAREST_INT)));
}

// 16 bytes as numbers; numbers of a byte each as 16 bytes.
INLINE Bits load_unsigned(const void* from) {
  return bits(_mm512_cvtepu8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(from))));
}
INLINE Bits load_signed(const void* from) {
  return bits(_mm512_cvtepi8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(from))));
}
INLINE void store_bytes(int8_t* to, Bits x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(raw(x)));
}

// 16 bytes, four times: a table. Its entries by bytes below 16, or by the lower four bits of bytes.
INLINE Bits load_table(const void* from) {
  return bits(_mm512_broadcast_i32x4(_mm_loadu_si128(static_cast<const __m128i*>(from))));
}
INLINE Bits look_up(Bits table, Bits index) {
  return bits(_mm512_shuffle_epi8(raw(table), raw(index)));
}
INLINE Bits look_up_low(Bits table, Bits index) {
#ifdef __AVX512VBMI__
  return bits(_mm512_permutexvar_epi8(raw(index), raw(table)));  // by six bits of the whole
#else
  return look_up(table, index & splat_bytes(15));
#endif
}

#ifdef __AVX512BF16__
#define EYAS_DOT_OF_BF16
INLINE Vec dot_pairs_at_once(Vec sum, Bits a, Bits b) {
  return vec(_mm512_dpbf16_ps(sum.in[0], (__m512bh)raw(a), (__m512bh)raw(b)));
}
#endif

constexpr int kByteBias = 128;  // codes of 8 bits have it added: they are unsigned
constexpr int kChains = 4;

// sum + four products in each lane, of codes of so many bits with signed bytes above -128: exact.
template <int kBits>
INLINE Bits dot_bytes(Bits sum, Bits codes, Bits x) {
#ifdef __AVX512VNNI__
  return bits(_mm512_dpbusd_epi32(raw(sum), raw(codes), raw(x)));
#else
  const __m512i ones = _mm512_set1_epi16(1);
  if constexpr (kBits < 8)
    return sum + bits(_mm512_madd_epi16(_mm512_maddubs_epi16(raw(codes), raw(x)), ones));
  const __m512i even = _mm512_madd_epi16(raw(codes & splat(0x00ff00ff)),
                                         _mm512_srai_epi16(raw(words_left(x, 8)), 8));
  const __m512i odd = _mm512_madd_epi16(raw(words_right(codes, 8)), _mm512_srai_epi16(raw(x), 8));
  return sum + bits(_mm512_add_epi32(even, odd));
#endif
}

// Of four vectors with a sum in every lane of their quarters: (0 + 1) + (2 + 3), a fourth of the
// result from each.
INLINE Vec sums_of_quarters(Vec a, Vec b, Vec c, Vec d) {
  const auto halved = [](Vec a, Vec b) {
    return vec(_mm512_shuffle_f32x4(a.in[0], b.in[0], 0x88) +
               _mm512_shuffle_f32x4(a.in[0], b.in[0], 0xdd));
  };
  return halved(halved(a, b), halved(c, d));
}
template <int kQuarter>
INLINE void store_quarter(float* to, Vec a) {
  _mm_storeu_ps(to, _mm512_extractf32x4_ps(a.in[0], kQuarter));
}
// The quarters of two vectors by turns.
INLINE void zip_quarters(Vec& a, Vec& b) {
  const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i second =
      _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
  const __m512 low = a.in[0];
  a = vec(_mm512_permutex2var_ps(low, first, b.in[0]));
  b = vec(_mm512_permutex2var_ps(low, second, b.in[0]));
}
INLINE Bits of_quarters(const void* a, const void* b, const void* c, const void* d) {
  const auto quarter = [](const void* from) __attribute__((always_inline)) {
    return _mm_loadu_si128(static_cast<const __m128i*>(from));
  };
  __m512i line = _mm512_castsi128_si512(quarter(a));
  line = _mm512_inserti32x4(line, quarter(b), 1);
  line = _mm512_inserti32x4(line, quarter(c), 2);
  return bits(_mm512_inserti32x4(line, quarter(d), 3));
}

// How many rows are multiplied at once: what fills the registers.
constexpr int kMaxGroupRows = 12;  // 12 sums, 12 integers and a line with its scales fill 32
constexpr int kMaxTileRows = 6, kTileSums = 24, kFusedRows = 6;  // 6 rows x 4 blocks
// From so many rows on quantised weights are taken apart once for all: so many rows by blocks.
constexpr int kOpenedFrom = 33, kOpenedRows = 3, kOpenedBlocks = 4;
constexpr int kSumsInRegisters = 12;
