// A vector is four registers of NEON, with dotprod; whether there are products of bf16, the
// compiler says.
#pragma once

#include <arm_neon.h>

INLINE unsigned bits_of(Mask mask) {
  const int32x4_t place = {1, 2, 4, 8};
  unsigned all = 0;
  EYAS_EACH all |= static_cast<unsigned>(vaddvq_s32(mask.in[i] & place)) << 4 * i;
  return all;
}
INLINE unsigned bits_of(Longs mask) {
  unsigned all = 0;
  EYAS_EACH all |= static_cast<unsigned>((mask.in[i][0] & 1) | (mask.in[i][1] & 2)) << 2 * i;
  return all;
}
INLINE Bits select(Mask mask, Bits yes, Bits no) { return no ^ ((no ^ yes) & mask); }
INLINE Vec select(Mask mask, Vec yes, Vec no) {
  return as<float>(select(mask, as<int32_t>(yes), as<int32_t>(no)));
}

INLINE void stream(float* to, Vec x) { store(to, x); }
INLINE void end_streams() {}
INLINE void fetch(uintptr_t at) { asm volatile("prfm pldl2keep, [%0]" ::"r"(at)); }
INLINE void fetch_far(uintptr_t at) { fetch(at); }
INLINE void relax() { asm volatile("yield"); }

INLINE Vec fma(Vec a, Vec b, Vec c) {
  EYAS_EACH c.in[i] = vfmaq_f32(c.in[i], a.in[i], b.in[i]);
  return c;
}
// c - a * b
INLINE Vec fnma(Vec a, Vec b, Vec c) {
  EYAS_EACH c.in[i] = vfmsq_f32(c.in[i], a.in[i], b.in[i]);
  return c;
}
// Of a number and NaN the second one.
INLINE Vec max(Vec a, Vec b) {
  EYAS_EACH a.in[i] = vbslq_f32(vcgtq_f32(a.in[i], b.in[i]), a.in[i], b.in[i]);
  return a;
}
INLINE Vec min(Vec a, Vec b) {
  EYAS_EACH a.in[i] = vbslq_f32(vcltq_f32(a.in[i], b.in[i]), a.in[i], b.in[i]);
  return a;
}
INLINE Vec rounded(Vec a) {
  EYAS_EACH a.in[i] = vrndnq_f32(a.in[i]);
  return a;
}
INLINE Bits to_ints(Vec a) {
  Bits to;
  EYAS_EACH to.in[i] = vcvtnq_s32_f32(a.in[i]);
  return to;
}
INLINE Vec to_floats(Bits a) {
  Vec to;
  EYAS_EACH to.in[i] = vcvtq_f32_s32(a.in[i]);
  return to;
}

INLINE float sum_of(Vec a) {
  const float32x4_t four = (a.in[3] + a.in[1]) + (a.in[2] + a.in[0]);
  return (four[0] + four[2]) + (four[1] + four[3]);
}
INLINE float max_of(Vec a) {
  return vmaxvq_f32(vmaxq_f32(vmaxq_f32(a.in[0], a.in[1]), vmaxq_f32(a.in[2], a.in[3])));
}
INLINE int32_t sum_of(Bits a) { return vaddvq_s32((a.in[0] + a.in[1]) + (a.in[2] + a.in[3])); }

// 16 numbers of bf16 or of half precision.
struct Halves {
  uint16x8_t in[2];
};

INLINE Halves load_halves(const void* from) {
  const auto* words = static_cast<const uint16_t*>(from);
  return {{vld1q_u16(words), vld1q_u16(words + 8)}};
}
INLINE void store(bf16* to, Halves x) { vst1q_u16(to, x.in[0]), vst1q_u16(to + 8, x.in[1]); }
INLINE Vec widen(Halves x) {
  Vec to;
  EYAS_EACH to.in[i] = vreinterpretq_f32_u32(
      vshll_n_u16(i % 2 == 0 ? vget_low_u16(x.in[i / 2]) : vget_high_u16(x.in[i / 2]), 16));
  return to;
}
INLINE Halves narrow(Vec x) {
  const auto all = as<uint32_t>(x);
  const auto odd = (all >> 16) & splat<uint32_t>(1), up = all + (odd + splat<uint32_t>(0x7fff));
  return {{vcombine_u16(vshrn_n_u32(up.in[0], 16), vshrn_n_u32(up.in[1], 16)),
           vcombine_u16(vshrn_n_u32(up.in[2], 16), vshrn_n_u32(up.in[3], 16))}};
}
INLINE Vec from_half_precision(Halves x) {
  Vec to;
  EYAS_EACH to.in[i] = vcvt_f32_f16(
      vreinterpret_f16_u16(i % 2 == 0 ? vget_low_u16(x.in[i / 2]) : vget_high_u16(x.in[i / 2])));
  return to;
}
INLINE float from_half_precision(uint16_t bits) {
  __fp16 half;
  std::memcpy(&half, &bits, 2);
  return half;
}
INLINE uint16_t to_half_precision(float x) {
  const __fp16 half = static_cast<__fp16>(x);
  uint16_t bits;
  std::memcpy(&bits, &half, 2);
  return bits;
}

// 16 bytes as numbers; numbers of a byte each as 16 bytes.
INLINE Bits load_unsigned(const void* from) {
  const uint8x16_t all = vld1q_u8(static_cast<const uint8_t*>(from));
  const uint16x8_t low = vmovl_u8(vget_low_u8(all)), high = vmovl_high_u8(all);
  return as<int32_t>(Wide<uint32_t>{{vmovl_u16(vget_low_u16(low)), vmovl_high_u16(low),
                                     vmovl_u16(vget_low_u16(high)), vmovl_high_u16(high)}});
}
INLINE Bits load_signed(const void* from) {
  const int8x16_t all = vld1q_s8(static_cast<const int8_t*>(from));
  const int16x8_t low = vmovl_s8(vget_low_s8(all)), high = vmovl_high_s8(all);
  return {{vmovl_s16(vget_low_s16(low)), vmovl_high_s16(low), vmovl_s16(vget_low_s16(high)),
           vmovl_high_s16(high)}};
}
INLINE void store_bytes(int8_t* to, Bits x) {
  const int16x8_t low = vcombine_s16(vmovn_s32(x.in[0]), vmovn_s32(x.in[1])),
                  high = vcombine_s16(vmovn_s32(x.in[2]), vmovn_s32(x.in[3]));
  vst1q_s8(to, vcombine_s8(vmovn_s16(low), vmovn_s16(high)));
}

// 16 bytes, four times: a table. Its entries by bytes below 16, or by the lower four bits of bytes.
INLINE Bits load_table(const void* from) {
  Bits to;
  EYAS_EACH to.in[i] = vreinterpretq_s32_u8(vld1q_u8(static_cast<const uint8_t*>(from)));
  return to;
}
INLINE Bits look_up(Bits table, Bits index) {
  EYAS_EACH table.in[i] = vreinterpretq_s32_u8(
      vqtbl1q_u8(vreinterpretq_u8_s32(table.in[i]), vreinterpretq_u8_s32(index.in[i])));
  return table;
}
INLINE Bits look_up_low(Bits table, Bits index) { return look_up(table, index & splat_bytes(15)); }

#ifdef __ARM_FEATURE_BF16
#define EYAS_DOT_OF_BF16
INLINE Vec dot_pairs_at_once(Vec sum, Bits a, Bits b) {
  EYAS_EACH sum.in[i] = vbfdotq_f32(sum.in[i], (bfloat16x8_t)a.in[i], (bfloat16x8_t)b.in[i]);
  return sum;
}
#endif

constexpr int kByteBias = 0;  // codes of 8 bits are signed
constexpr int kChains = 1;

// sum + four products in each lane, of codes of so many bits with signed bytes: exact.
template <int kBits>
INLINE Bits dot_bytes(Bits sum, Bits codes, Bits x) {
  EYAS_EACH sum.in[i] =
      vdotq_s32(sum.in[i], vreinterpretq_s8_s32(codes.in[i]), vreinterpretq_s8_s32(x.in[i]));
  return sum;
}

// Of four vectors with a sum in every lane of their quarters: (0 + 1) + (2 + 3), a fourth of the
// result from each.
INLINE Vec sums_of_quarters(Vec a, Vec b, Vec c, Vec d) {
  const auto sum = [](Vec v) __attribute__((always_inline)) {
    return (v.in[0] + v.in[1]) + (v.in[2] + v.in[3]);
  };
  return {{sum(a), sum(b), sum(c), sum(d)}};
}
template <int kQuarter>
INLINE void store_quarter(float* to, Vec a) {
  vst1q_f32(to, a.in[kQuarter]);
}
// The quarters of two vectors by turns.
INLINE void zip_quarters(Vec& a, Vec& b) {
  const Vec low = a, high = b;
  a = {{low.in[0], high.in[0], low.in[1], high.in[1]}};
  b = {{low.in[2], high.in[2], low.in[3], high.in[3]}};
}

// How many rows are multiplied at once: what fills the registers.
constexpr int kMaxGroupRows = 3;
constexpr int kMaxTileRows = 6, kTileSums = 6, kFusedRows = 2;
// From so many rows on quantised weights are taken apart once for all: so many rows by blocks.
constexpr int kOpenedFrom = 13, kOpenedRows = 3, kOpenedBlocks = 1;
constexpr int kSumsInRegisters = 12;
