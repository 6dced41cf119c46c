// A vector is two registers of AVX2, with FMA and F16C; whether there is VNNI, the compiler says.
#pragma once

#include <immintrin.h>

INLINE Vec vec(__m256 low, __m256 high) { return {{low, high}}; }
INLINE __m256i raw(Bits x, int i) { return (__m256i)x.in[i]; }
INLINE Bits bits(__m256i low, __m256i high) {
  return {{(Bits::Register)low, (Bits::Register)high}};
}

INLINE unsigned bits_of(Mask mask) {
  return static_cast<unsigned>(_mm256_movemask_ps((__m256)mask.in[0]) |
                               _mm256_movemask_ps((__m256)mask.in[1]) << 8);
}
INLINE unsigned bits_of(Longs mask) {
  return static_cast<unsigned>(_mm256_movemask_pd((__m256d)mask.in[0]) |
                               _mm256_movemask_pd((__m256d)mask.in[1]) << 4);
}
INLINE Vec select(Mask mask, Vec yes, Vec no) {
  EYAS_EACH no.in[i] = _mm256_blendv_ps(no.in[i], yes.in[i], (__m256)mask.in[i]);
  return no;
}
INLINE Bits select(Mask mask, Bits yes, Bits no) {
  EYAS_EACH no.in[i] = (Bits::Register)_mm256_blendv_epi8(raw(no, i), raw(yes, i), raw(mask, i));
  return no;
}

INLINE void stream(float* to, Vec x) { EYAS_EACH _mm256_stream_ps(to + i * 8, x.in[i]); }
INLINE void end_streams() { _mm_sfence(); }
INLINE void fetch(uintptr_t at) { asm volatile("prefetcht0 (%0)" ::"r"(at)); }
INLINE void fetch_far(uintptr_t at) { asm volatile("prefetcht1 (%0)" ::"r"(at)); }
INLINE void relax() { _mm_pause(); }

INLINE Vec fma(Vec a, Vec b, Vec c) {
  EYAS_EACH c.in[i] = _mm256_fmadd_ps(a.in[i], b.in[i], c.in[i]);
  return c;
}
// c - a * b
INLINE Vec fnma(Vec a, Vec b, Vec c) {
  EYAS_EACH c.in[i] = _mm256_fnmadd_ps(a.in[i], b.in[i], c.in[i]);
  return c;
}
INLINE Vec max(Vec a, Vec b) {
  EYAS_EACH a.in[i] = _mm256_max_ps(a.in[i], b.in[i]);
  return a;
}
INLINE Vec min(Vec a, Vec b) {
  EYAS_EACH a.in[i] = _mm256_min_ps(a.in[i], b.in[i]);
  return a;
}
INLINE Vec rounded(Vec a) {
  EYAS_EACH a.in[i] = _mm256_round_ps(a.in[i], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  return a;
}
INLINE Bits to_ints(Vec a) {
  return bits(_mm256_cvtps_epi32(a.in[0]), _mm256_cvtps_epi32(a.in[1]));
}
INLINE Vec to_floats(Bits a) {
  return vec(_mm256_cvtepi32_ps(raw(a, 0)), _mm256_cvtepi32_ps(raw(a, 1)));
}

INLINE float sum_of(Vec a) {
  const __m256 eight = a.in[1] + a.in[0];
  const __m128 four = _mm256_extractf128_ps(eight, 1) + _mm256_castps256_ps128(eight),
               two = four + _mm_movehl_ps(four, four);
  return two[0] + two[1];
}
INLINE float max_of(Vec a) {
  const __m256 eight = _mm256_max_ps(a.in[1], a.in[0]);
  const __m128 four = _mm_max_ps(_mm256_extractf128_ps(eight, 1), _mm256_castps256_ps128(eight)),
               two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return std::max(two[0], two[1]);
}
INLINE int32_t sum_of(Bits a) {
  const __m256i eight = _mm256_add_epi32(raw(a, 0), raw(a, 1));
  const __m128i four =
      _mm_add_epi32(_mm256_extracti128_si256(eight, 1), _mm256_castsi256_si128(eight));
  const __m128i two = _mm_add_epi32(four, _mm_unpackhi_epi64(four, four));
  return _mm_cvtsi128_si32(two) + _mm_extract_epi32(two, 1);
}

// 16 numbers of bf16 or of half precision.
using Halves = __m256i;

INLINE Halves load_halves(const void* from) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(from));
}
INLINE void store(bf16* to, Halves x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), x); }
INLINE Vec widen(Halves x) {
  const auto wide = [](__m128i half) __attribute__((always_inline)) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
  };
  return vec(wide(_mm256_castsi256_si128(x)), wide(_mm256_extracti128_si256(x, 1)));
}
INLINE Halves narrow(Vec x) {
  const Bits all = as<int32_t>(x), even = as<int32_t>(as<uint32_t>(all) >> 16) & splat(1);
  const Bits half = as<int32_t>(as<uint32_t>(all + (even + splat(0x7fff))) >> 16);
  return _mm256_permute4x64_epi64(_mm256_packus_epi32(raw(half, 0), raw(half, 1)), 0xd8);
}
INLINE Vec from_half_precision(Halves x) {
  return vec(_mm256_cvtph_ps(_mm256_castsi256_si128(x)),
             _mm256_cvtph_ps(_mm256_extracti128_si256(x, 1)));
}
INLINE float from_half_precision(uint16_t bits) {
  return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(bits)));
}
INLINE uint16_t to_half_precision(float x) {
  return static_cast<uint16_t>(
      _mm_cvtsi128_si32(_mm_cvtps_ph(_mm_set_ss(x), _MM_FROUND_TO_NEAREST_INT)));
}

// 16 bytes as numbers; numbers of a byte each as 16 bytes.
INLINE Bits load_unsigned(const void* from) {
  const __m128i all = _mm_loadu_si128(static_cast<const __m128i*>(from));
  return bits(_mm256_cvtepu8_epi32(all), _mm256_cvtepu8_epi32(_mm_unpackhi_epi64(all, all)));
}
INLINE Bits load_signed(const void* from) {
  const __m128i all = _mm_loadu_si128(static_cast<const __m128i*>(from));
  return bits(_mm256_cvtepi8_epi32(all), _mm256_cvtepi8_epi32(_mm_unpackhi_epi64(all, all)));
}
INLINE void store_bytes(int8_t* to, Bits x) {
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(raw(x, 0), raw(x, 1)), 0xd8);
  _mm_storeu_si128(
      reinterpret_cast<__m128i*>(to),
      _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
}

// 16 bytes, four times: a table. Its entries by bytes below 16, or by the lower four bits of bytes.
INLINE Bits load_table(const void* from) {
  const __m256i two =
      _mm256_broadcastsi128_si256(_mm_loadu_si128(static_cast<const __m128i*>(from)));
  return bits(two, two);
}
INLINE Bits look_up(Bits table, Bits index) {
  return bits(_mm256_shuffle_epi8(raw(table, 0), raw(index, 0)),
              _mm256_shuffle_epi8(raw(table, 1), raw(index, 1)));
}
INLINE Bits look_up_low(Bits table, Bits index) { return look_up(table, index & splat_bytes(15)); }

// sum + four products in each lane, of codes of so many bits with signed bytes above -128: exact.
// Codes of 8 bits are unsigned where the bias is 128, else signed.
#if defined(__AVXVNNI__)
constexpr int kByteBias = 128, kChains = 4;

template <int kBits>
INLINE Bits dot_bytes(Bits sum, Bits codes, Bits x) {
  EYAS_EACH sum.in[i] =
      (Bits::Register)_mm256_dpbusd_avx_epi32(raw(sum, i), raw(codes, i), raw(x, i));
  return sum;
}
#else
#define EYAS_DOTS_IN_WORDS
constexpr int kByteBias = 0, kChains = 1;

// Sums of products of a block's lines. Two products of a code with 127 or 128 have room in 16 bits,
// those of small codes for several lines, which are added there before they are widened.
template <int kBits, int kLines>
class Dots {
 public:
  INLINE void begin(Bits) {}
  INLINE void add(int line, Bits codes, Bits x) {
    const __m256i ones = _mm256_set1_epi16(1);
    const bool first = line % kTogether == 0, last = line % kTogether == kTogether - 1;
    EYAS_EACH {
      const __m256i code = raw(codes, i);
      __m256i two = kBits < 8 ? _mm256_maddubs_epi16(code, raw(x, i))
                              : _mm256_maddubs_epi16(_mm256_abs_epi8(code),
                                                     _mm256_sign_epi8(raw(x, i), code));
      if (!first) two = _mm256_add_epi16(raw(words_, i), two);
      words_.in[i] = (Bits::Register)two;
      if (!last) continue;
      const auto four = (Bits::Register)_mm256_madd_epi16(two, ones);
      sum_.in[i] = line < kTogether ? four : sum_.in[i] + four;
    }
    // in this order: the compiler's own needs more registers than there are
    asm("" : "+x"(words_.in[0]), "+x"(words_.in[1]));
  }
  INLINE Bits end(Bits start) const { return sum_ + start; }

 private:
  static constexpr int kRoom = kBits <= 4   ? 8
                               : kBits == 5 ? 4
                               : kBits == 6 ? 2
                                            : 1,
                       kTogether = kRoom < kLines ? kRoom : kLines;

  Bits words_, sum_;
};
#endif

// Of four vectors with a sum in every lane of their quarters: (0 + 1) + (2 + 3), a fourth of the
// result from each.
INLINE Vec sums_of_quarters(Vec a, Vec b, Vec c, Vec d) {
  const auto two = [](Vec a, Vec b, int i) __attribute__((always_inline)) {
    return _mm256_permute2f128_ps(a.in[i], b.in[i], 0x20) +
           _mm256_permute2f128_ps(a.in[i], b.in[i], 0x31);
  };
  return vec(two(a, b, 0) + two(a, b, 1), two(c, d, 0) + two(c, d, 1));
}
template <int kQuarter>
INLINE void store_quarter(float* to, Vec a) {
  _mm_storeu_ps(to, _mm256_extractf128_ps(a.in[kQuarter / 2], kQuarter % 2));
}
// The quarters of two vectors by turns.
INLINE void zip_quarters(Vec& a, Vec& b) {
  const Vec low = a, high = b;
  a = vec(_mm256_permute2f128_ps(low.in[0], high.in[0], 0x20),
          _mm256_permute2f128_ps(low.in[0], high.in[0], 0x31));
  b = vec(_mm256_permute2f128_ps(low.in[1], high.in[1], 0x20),
          _mm256_permute2f128_ps(low.in[1], high.in[1], 0x31));
}

// How many rows are multiplied at once: what fills the registers.
constexpr int kMaxGroupRows = 4;
constexpr int kMaxTileRows = 6, kTileSums = 6, kFusedRows = 2;
// Quantised weights are taken apart for each group again (from 0 rows on: never once for all): what
// was taken apart would be read from memory where four rows already wait for their loads.
constexpr int kOpenedFrom = 0, kOpenedRows = 1, kOpenedBlocks = 1;
constexpr int kSumsInRegisters = 1;  // 4 rows' integers fill them
