// ggml's formats of quantised weights, laid out for 16 output columns at a time: what one holds,
// how it is packed, and how it is taken apart while it is multiplied. Knows one unit of a format:
// the least run of inputs that has scales of its own.
//
// A weight is scale * (code - offset) + min. Codes are unsigned, as the instruction wants them; the
// offset is taken from the sum of the products, where it is exact. Formats and names are ggml's
// (ggml-common.h, ggml-quants.c of llama.cpp).
//
//   line     64 bytes: the codes of 4 inputs of each of 16 columns, [column][input]; of
//            fewer than 8 bits, those of several lines together
//   block    32 inputs: 8 lines of codes
//   unit     1 block, 2 or 8, with its scales
#pragma once

#include "simd.h"

// As in a file.
enum class Format : int {
  q4_0 = 2,
  q4_1 = 3,
  q5_0 = 6,
  q5_1 = 7,
  q8_0 = 8,
  q2_k = 10,
  q3_k = 11,
  q4_k = 12,
  q5_k = 13,
  q6_k = 14,
  iq4_nl = 20,
  iq4_xs = 23,
  mxfp4 = 39,
  two_bits = 1000,  // of no file: `eyas/model/packed.py:two_bit_rows` makes it
};

constexpr int kBlockInputs = 32, kLineInputs = 4, kBlockLines = kBlockInputs / kLineInputs,
              kMaxUnitInputs = 256;

INLINE float half(const uint8_t* from) {
  uint16_t bits;
  std::memcpy(&bits, from, 2);
  return from_half_precision(bits);
}

INLINE Vec halves(const uint8_t* from) { return from_half_precision(load_halves(from)); }
INLINE Vec from_bytes(const uint8_t* from) { return to_floats(load_unsigned(from)); }
INLINE Vec from_signed_bytes(const uint8_t* from) { return to_floats(load_signed(from)); }

// Of one half of a block (or of all of it), by column.
struct Scales {
  Vec scale, min;
};

// Lines of nibbles: use(i, line) sees the 8 lines of codes.
template <class Use>
INLINE void nibble_lines(const uint8_t* from, Use&& use) {
  const Bits low = splat_bytes(15);
#pragma GCC unroll 4
  for (int i = 0; i < kBlockLines; i += 2) {
    const Bits two = load_bits(from + i * 32);
    use(i, two & low);
    use(i + 1, words_right(two, 4) & low);
  }
}

// Puts kWidth bits of a column's codes, those from bit `first` on, into as many lines: each has
// them of 8 / kWidth lines of codes, the first one's in the lowest bits.
template <int kWidth>
INLINE void put_bits(const uint8_t* codes, int first, int column, uint8_t* to) {
  constexpr int together = 8 / kWidth;
  for (int line = 0; line < kWidth; ++line) {
    uint32_t bits = 0;
    for (int i = 0; i < together; ++i) {
      uint32_t four;
      std::memcpy(&four, codes + (line * together + i) * kLineInputs, kLineInputs);
      bits |= (four >> first & 0x01010101u * ((1 << kWidth) - 1)) << i * kWidth;
    }
    std::memcpy(to + line * 64 + column * kLineInputs, &bits, kLineInputs);
  }
}
// Those of line i of codes, of the line that has them, as the bits from kTo on of its bytes.
template <int kWidth, int kTo>
INLINE Bits bits_of_line(Bits together, int i) {
  const int by = i % (8 / kWidth) * kWidth - kTo;
  return (by < 0 ? words_left(together, -by) : words_right(together, by)) &
         splat_bytes(((1 << kWidth) - 1) << kTo);
}

// A block's codes of 16 columns, a line a bit. Where kBits is a sum of 4, 2 and 1, the lower bits
// of a code lie in lines of nibbles, the next in lines of two bits, the last in a line of its own.
template <int kBits>
struct BlockLines {
  static constexpr size_t kBytes = kBits * 64;

  // Puts a column's 32 codes into lines of zeros.
  static void put(const uint8_t* codes, int column, uint8_t* to) {
    if constexpr (kBits == 8) put_bits<8>(codes, 0, column, to);
    if constexpr (kBits & 4) put_bits<4>(codes, 0, column, to);
    if constexpr (kBits & 2) put_bits<2>(codes, kBits & 4, column, to + (kBits & 4) * 64);
    if constexpr (kBits & 1) put_bits<1>(codes, kBits & 6, column, to + (kBits & 6) * 64);
  }

  // use(i, line) sees the 8 lines of codes, a byte each.
  template <class Use>
  static INLINE void each(const uint8_t* from, Use&& use) {
    Bits two[2] = {}, one = {};
    if constexpr (kBits & 2)
      for (int i = 0; i < 2; ++i) two[i] = load_bits(from + ((kBits & 4) + i) * 64);
    if constexpr (kBits & 1) one = load_bits(from + (kBits & 6) * 64);
    const auto whole = [&](int i, Bits code) __attribute__((always_inline)) {
      if constexpr (kBits & 2) code = code | bits_of_line<2, (kBits & 4)>(two[i / 4], i);
      if constexpr (kBits & 1) code = code | bits_of_line<1, (kBits & 6)>(one, i);
      use(i, code);
    };
    if constexpr (kBits & 4) return nibble_lines(from, whole);
#pragma GCC unroll 8
    for (int i = 0; i < kBlockLines; ++i) whole(i, kBits == 8 ? load_bits(from + i * 64) : Bits{});
  }
};

// Puts a column's number of half precision among those of 16.
INLINE void put_half(const uint8_t* source, int column, uint8_t* to) {
  std::memcpy(to + 2 * column, source, 2);
}

// 16 bytes of nibbles, inputs i and i + 16 in a byte.
INLINE void nibbles_apart(const uint8_t* from, uint8_t* to) {
  for (int i = 0; i < 16; ++i) to[i] = from[i] & 15, to[i + 16] = from[i] >> 4;
}

// A unit of a format Q: so many blocks, `halves` of each with scales of their own, and
// kSourceBytes in a file. Packed, for 16 columns, it is kLinesAt bytes of scales and then the
// lines of each block.
//
// Q has kHasMin; kOffset, by how many bits its offset is less than 128 (negative: none);
// codes() of a block of a source unit, value() of one of them, pack_scales() of a column, and
// scales() of a packed unit's block. kBits: of a code as it is multiplied, of 8 bits with kByteBias
// added.
template <class Q, int kStoredBits, int blocks, int halves, size_t source_bytes, size_t scale_bytes>
struct Unit {
  using Lines = BlockLines<kStoredBits>;
  static constexpr int kBlocks = blocks, kBits = kStoredBits, kHalves = halves;
  static constexpr size_t kSourceBytes = source_bytes, kLinesAt = scale_bytes,
                          kBytes = kLinesAt + kBlocks * Lines::kBytes;

  static void dequantise(const uint8_t* source, float* to) {
    uint8_t code[kBlockInputs];
    for (int b = 0; b < kBlocks; ++b) {
      Q::codes(source, b, code);
      for (int i = 0; i < kBlockInputs; ++i)
        *to++ = Q::value(source, b * kHalves + i * kHalves / kBlockInputs, code[i]);
    }
  }
  // Into a packed unit of zeros.
  static void pack_column(const uint8_t* source, int column, uint8_t* to) {
    Q::pack_scales(source, column, to);
    uint8_t code[kBlockInputs];
    for (int b = 0; b < kBlocks; ++b) {
      Q::codes(source, b, code);
      Lines::put(code, column, to + kLinesAt + b * Lines::kBytes);
    }
  }
  template <class Use>
  static INLINE void lines(const uint8_t* unit, int b, Use&& use) {
    Lines::each(unit + kLinesAt + b * Lines::kBytes, use);
  }
};

// Blocks of their own: scale, and min where there is one | the fifth bits of 32 codes, where they
// have five | 16 bytes of nibbles
template <int kCodeBits, bool has_min>
struct Blocks : Unit<Blocks<kCodeBits, has_min>, kCodeBits, 1, 1, (has_min ? 4 : 2) + 4 * kCodeBits,
                     has_min ? 64 : 32> {
  static constexpr bool kHasMin = has_min;
  static constexpr int kOffset = kHasMin ? -1 : 8 - kCodeBits;

  static void codes(const uint8_t* source, int, uint8_t* to) {
    const uint8_t* bits = source + (kHasMin ? 4 : 2);
    nibbles_apart(bits + (kCodeBits == 5 ? 4 : 0), to);
    for (int i = 0; kCodeBits == 5 && i < kBlockInputs; ++i)
      to[i] = static_cast<uint8_t>(to[i] | (bits[i / 8] >> i % 8 & 1) << 4);
  }
  static float value(const uint8_t* source, int, int code) {
    if constexpr (kHasMin) return half(source) * static_cast<float>(code) + half(source + 2);
    return half(source) * static_cast<float>(code - (128 >> std::max(0, kOffset)));
  }
  static void pack_scales(const uint8_t* source, int column, uint8_t* to) {
    put_half(source, column, to);
    if (kHasMin) put_half(source + 2, column, to + 32);
  }
  static INLINE Scales scales(const uint8_t* unit, int, int) {
    return {halves(unit), kHasMin ? halves(unit + 32) : Vec{}};
  }
};
using Q4_0 = Blocks<4, false>;
using Q4_1 = Blocks<4, true>;
using Q5_0 = Blocks<5, false>;
using Q5_1 = Blocks<5, true>;

// Blocks with one scale and nothing else.
template <class Q, int kCodeBits, int blocks, size_t source_bytes>
struct Scaled : Unit<Q, kCodeBits, blocks, 1, source_bytes, 32> {
  static void pack_scales(const uint8_t* source, int column, uint8_t* to) {
    put_half(source, column, to);
  }
  static INLINE Scales scales(const uint8_t* unit, int, int) { return {halves(unit), Vec{}}; }
};

// scale | 32 signed bytes
struct Q8_0 : Scaled<Q8_0, 8, 1, 34> {
  static constexpr int kOffset = kByteBias == 128 ? 0 : -1;
  static constexpr bool kHasMin = false;

  static void codes(const uint8_t* source, int, uint8_t* to) {
    for (int i = 0; i < kBlockInputs; ++i) to[i] = source[2 + i] ^ kByteBias;
  }
  static float value(const uint8_t* source, int, int code) {
    return half(source) * static_cast<float>(static_cast<int8_t>(code ^ kByteBias));
  }
};

// Codes of 4 bits that stand for the numbers of a table; kBias is added to be unsigned.
template <int kBias, class Use>
INLINE void table_lines(const int8_t* table, const uint8_t* from, Use&& use) {
  const Bits numbers = as<int32_t>(as<uint8_t>(load_table(table)) + splat<uint8_t>(kBias));
  nibble_lines(from, [&](int i, Bits codes)
                         __attribute__((always_inline)) { use(i, look_up(numbers, codes)); });
}

// power of 2, as a byte | nibbles as of Q4_0, each one of 16 numbers (OCP Microscaling Formats 1.0;
// doubled, for whole numbers)
struct MXFP4 : Unit<MXFP4, 4, 1, 1, 17, kLanes> {
  static constexpr int kBits = 5, kOffset = 3;
  static constexpr bool kHasMin = false;
  static constexpr int8_t kNumbers[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

  static void codes(const uint8_t* source, int, uint8_t* to) { nibbles_apart(source + 1, to); }
  static float value(const uint8_t* source, int, int code) {
    return std::ldexp(1.0f, source[0] - 128) * kNumbers[code];
  }
  static void pack_scales(const uint8_t* source, int column, uint8_t* to) {
    to[column] = source[0];
  }
  static INLINE Scales scales(const uint8_t* unit, int, int) {
    const Bits bytes = load_unsigned(unit), exponents = (bytes - splat(1)) << 23;
    // below the normal numbers: 2^-128 and 2^-127
    const Bits least = (bytes << 21) + splat(1 << 21);
    return {as<float>(select(bytes < splat(2), least, exponents)), Vec{}};
  }
  template <class Use>
  static INLINE void lines(const uint8_t* unit, int, Use&& use) {
    table_lines<16>(kNumbers, unit + kLinesAt, use);
  }
};

// scale | nibbles as of Q4_0, each one of 16 numbers
struct IQ4_NL : Scaled<IQ4_NL, 4, 1, 18> {
  static constexpr int kBits = 8, kOffset = Q8_0::kOffset;
  static constexpr bool kHasMin = false;
  static constexpr int8_t kNumbers[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                          1,    13,   25,  38,  53,  69,  89,  113};

  static void codes(const uint8_t* source, int, uint8_t* to) { nibbles_apart(source + 2, to); }
  static float value(const uint8_t* source, int, int code) { return half(source) * kNumbers[code]; }
  template <class Use>
  static INLINE void lines(const uint8_t* unit, int, Use&& use) {
    table_lines<kByteBias>(kNumbers, unit + kLinesAt, use);
  }
};

// scale | 16 bytes: 4 codes of 2 bits in a byte. For a first look at which outputs are large: a
// weight is one of four numbers.
struct TwoBits : Scaled<TwoBits, 2, 2, 18> {
  static constexpr int kOffset = -1;
  static constexpr bool kHasMin = true;
  static constexpr float kMiddle = 1.5f;

  static void codes(const uint8_t* source, int b, uint8_t* to) {
    for (int i = 0; i < kBlockInputs; ++i) to[i] = source[2 + b * 8 + i / 4] >> i % 4 * 2 & 3;
  }
  static float value(const uint8_t* source, int, int code) {
    return half(source) * (static_cast<float>(code) - kMiddle);
  }
  static INLINE Scales scales(const uint8_t* unit, int, int) {
    const Vec scale = halves(unit);
    return {scale, scale * splat(-kMiddle)};
  }
};

// Super-blocks of 8 blocks: scale, scale of mins | 12 bytes: 8 scales and 8 mins of 6 bits | of 5
// bits 32 bytes: bit b of one belongs to block b | 4 times 32 bytes: nibbles of one block and the
// next
template <int kCodeBits>
struct SuperBlocks
    : Unit<SuperBlocks<kCodeBits>, kCodeBits, 8, 1, 16 + 32 * kCodeBits, 64 + 2 * 8 * kLanes> {
  static constexpr int kOffset = -1;
  static constexpr bool kHasMin = true;

  // The 6 bits of scale b (or of min b).
  static uint8_t six_bits(const uint8_t* source, int b, bool is_min) {
    const uint8_t* bits = source + 4 + (is_min ? 4 : 0);
    if (b < 4) return bits[b] & 63;
    const uint8_t low = source[4 + 8 + b - 4], upper = bits[b - 4] >> 6;
    return static_cast<uint8_t>((is_min ? low >> 4 : low & 15) | upper << 4);
  }
  static void codes(const uint8_t* source, int b, uint8_t* to) {
    const uint8_t* nibbles = source + (kCodeBits == 5 ? 48 : 16) + b / 2 * 32;
    for (int i = 0; i < kBlockInputs; ++i) {
      const int fifth = kCodeBits == 5 ? source[16 + i] >> b & 1 : 0;
      to[i] = static_cast<uint8_t>((nibbles[i] >> b % 2 * 4 & 15) | fifth << 4);
    }
  }
  static float value(const uint8_t* source, int b, int code) {
    const float scale = half(source) * six_bits(source, b, false),
                min = half(source + 2) * six_bits(source, b, true);
    return scale * code - min;
  }
  static void pack_scales(const uint8_t* source, int column, uint8_t* to) {
    put_half(source, column, to);
    put_half(source + 2, column, to + 32);
    for (int i = 0; i < 16; ++i) to[64 + i * kLanes + column] = six_bits(source, i / 2, i % 2 == 1);
  }
  static INLINE Scales scales(const uint8_t* unit, int b, int) {
    const uint8_t* six = unit + 64 + b * 2 * kLanes;
    const Vec min = halves(unit + 32) * from_bytes(six + kLanes);
    return {halves(unit) * from_bytes(six), Vec{} - min};
  }
};
using Q4_K = SuperBlocks<4>;
using Q5_K = SuperBlocks<5>;

// 16 bytes: 4 bits each of scale and of min, of 16 inputs | 2 times 32 bytes: 2 bits of each of 4
// blocks | scale, scale of mins
struct Q2_K : Unit<Q2_K, 2, 8, 2, 84, 64 + 16 * kLanes> {
  static constexpr int kOffset = -1;
  static constexpr bool kHasMin = true;

  static void codes(const uint8_t* source, int b, uint8_t* to) {
    for (int i = 0; i < kBlockInputs; ++i) to[i] = source[16 + b / 4 * 32 + i] >> b % 4 * 2 & 3;
  }
  static float value(const uint8_t* source, int s, int code) {
    const float scale = half(source + 80) * (source[s] & 15),
                min = half(source + 82) * (source[s] >> 4);
    return scale * code - min;
  }
  static void pack_scales(const uint8_t* source, int column, uint8_t* to) {
    put_half(source + 80, column, to);
    put_half(source + 82, column, to + 32);
    for (int s = 0; s < 16; ++s) to[64 + s * kLanes + column] = source[s];
  }
  static INLINE Scales scales(const uint8_t* unit, int b, int half) {
    const Bits both = load_unsigned(unit + 64 + (b * 2 + half) * kLanes);
    const Vec min = halves(unit + 32) * to_floats(both >> 4);
    return {halves(unit) * to_floats(both & splat(15)), Vec{} - min};
  }
};

// Super-blocks of 8 blocks with a scale, at Q::kScaleAt, and Q::scale(), one signed byte for each
// block or half of one. A code stands for Q::number().
template <class Q, int kCodeBits, int halves_of_block, size_t source_bytes>
struct SignedScales
    : Unit<Q, kCodeBits, 8, halves_of_block, source_bytes, 32 + 8 * halves_of_block * kLanes> {
  static constexpr int kOffset = 8 - kCodeBits, kCount = 8 * halves_of_block;
  static constexpr bool kHasMin = false;

  static int number(int code) { return code - (128 >> kOffset); }
  static float value(const uint8_t* source, int s, int code) {
    return half(source + Q::kScaleAt) * Q::scale(source, s) * Q::number(code);
  }
  static void pack_scales(const uint8_t* source, int column, uint8_t* to) {
    put_half(source + Q::kScaleAt, column, to);
    for (int s = 0; s < kCount; ++s)
      to[32 + s * kLanes + column] = static_cast<uint8_t>(Q::scale(source, s));
  }
  static INLINE Scales scales(const uint8_t* unit, int b, int half) {
    const int s = b * halves_of_block + half;
    return {halves(unit) * from_signed_bytes(unit + 32 + s * kLanes), Vec{}};
  }
};

// 2 times 64 bytes of the lower 4 bits of 4 blocks | 2 times 32 bytes of their upper 2 bits | 16
// signed scales, of 16 inputs each | scale
struct Q6_K : SignedScales<Q6_K, 6, 2, 210> {
  static constexpr size_t kScaleAt = 208;

  static void codes(const uint8_t* source, int b, uint8_t* to) {
    const uint8_t *low = source + b / 4 * 64 + b % 2 * 32, *upper = source + 128 + b / 4 * 32;
    for (int i = 0; i < kBlockInputs; ++i)
      to[i] =
          static_cast<uint8_t>((low[i] >> b % 4 / 2 * 4 & 15) | (upper[i] >> b % 4 * 2 & 3) << 4);
  }
  static int8_t scale(const uint8_t* source, int s) { return static_cast<int8_t>(source[192 + s]); }
};

// 32 bytes: bit b of one is the third of block b | 2 bits as of Q2_K | 12 bytes: 16 scales of 6
// bits, of 16 inputs each | scale
struct Q3_K : SignedScales<Q3_K, 3, 2, 110> {
  static constexpr size_t kScaleAt = 108;

  static void codes(const uint8_t* source, int b, uint8_t* to) {
    Q2_K::codes(source + 16, b, to);
    for (int i = 0; i < kBlockInputs; ++i)
      to[i] = static_cast<uint8_t>(to[i] | (source[i] >> b & 1) << 2);
  }
  static int8_t scale(const uint8_t* source, int s) {
    const uint8_t low = source[96 + s % 8] >> s / 8 * 4 & 15,
                  upper = source[104 + s % 4] >> s / 4 * 2 & 3;
    return static_cast<int8_t>((low | upper << 4) - 32);
  }
};

// scale | upper 2 bits of 8 scales, and 4 bytes of their lower 4 | 8 times 16 bytes of nibbles as
// of IQ4_NL
struct IQ4_XS : SignedScales<IQ4_XS, 4, 1, 136> {
  static constexpr int kBits = 8, kOffset = Q8_0::kOffset;
  static constexpr size_t kScaleAt = 0;

  static void codes(const uint8_t* source, int b, uint8_t* to) {
    nibbles_apart(source + 8 + b * 16, to);
  }
  static int number(int code) { return IQ4_NL::kNumbers[code]; }
  static int8_t scale(const uint8_t* source, int b) {
    const uint8_t low = source[4 + b / 2] >> b % 2 * 4 & 15,
                  upper = source[2 + b / 4] >> b % 4 * 2 & 3;
    return static_cast<int8_t>((low | upper << 4) - 32);
  }
  template <class Use>
  static INLINE void lines(const uint8_t* unit, int b, Use&& use) {
    table_lines<kByteBias>(IQ4_NL::kNumbers, unit + kLinesAt + b * Lines::kBytes, use);
  }
};
