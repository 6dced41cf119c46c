// ggml's formats of quantised weights, laid out for 16 output columns at a time: what one holds,
// how it is packed, and how it is taken apart while it is multiplied. Knows one unit of a format:
// the least run of inputs that has scales of its own.
//
// A weight is scale * (code - offset) + min. Codes are unsigned, as the instruction wants them; the
// offset is taken from the sum of the products, where it is exact. Formats and names are ggml's
// (ggml-common.h, ggml-quants.c of llama.cpp).
//
//   line     64 bytes: the codes of 4 inputs of each of 16 columns, [column][input]; 4 bits each:
//   inputs i and i + 16 in a byte block    32 inputs: 8 lines of codes                   unit   1
//   block, 2 or 8, with its scales
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
  for (int i = 0; i < kBlockLines / 2; ++i) {
    const Bits two = load_bits(from + i * 64);
    use(i, two & low);
    use(i + kBlockLines / 2, words_right(two, 4) & low);
  }
}

// Numbers of 4 bits stand for those of a table; kBias is added to be unsigned.
template <int kBias, class Use>
INLINE void table_lines(const int8_t* table, const uint8_t* from, Use&& use) {
  const Bits numbers = as<int32_t>(as<uint8_t>(load_table(table)) + splat<uint8_t>(kBias));
  nibble_lines(from, [&](int i, Bits codes)
                         __attribute__((always_inline)) { use(i, look_up(numbers, codes)); });
}

// The codes of the 4 inputs of a line, of a column.
INLINE uint32_t four_codes(const uint8_t* codes, int line) {
  uint32_t four;
  std::memcpy(&four, codes + line * kLineInputs, kLineInputs);
  return four;
}
INLINE void put_four(uint32_t four, int line, int column, uint8_t* to) {
  std::memcpy(to + line * 64 + column * kLineInputs, &four, kLineInputs);
}

// Puts a column's 32 codes of 4 bits into its lines.
INLINE void put_nibbles(const uint8_t* codes, int column, uint8_t* to) {
  for (int i = 0; i < kBlockLines / 2; ++i)
    put_four((four_codes(codes, i) & 0x0f0f0f0f) |
                 (four_codes(codes, i + kBlockLines / 2) & 0x0f0f0f0f) << 4,
             i, column, to);
}

// Puts bit `from` of a column's codes into one line: bit i of a byte belongs to line i.
INLINE void put_bits(const uint8_t* codes, int from, int column, uint8_t* to) {
  uint32_t bits = 0;
  for (int i = 0; i < kBlockLines; ++i) bits |= (four_codes(codes, i) >> from & 0x01010101) << i;
  put_four(bits, 0, column, to);
}
// line i of them, as bit kTo of its bytes.
template <int kTo>
INLINE Bits bit_line(Bits bits, int i) {
  return (i < kTo ? words_left(bits, kTo - i) : words_right(bits, i - kTo)) & splat_bytes(1 << kTo);
}

// Puts 2 bits of a column's codes into two lines, each those of four.
INLINE void put_two_bits(const uint8_t* codes, int from, int column, uint8_t* to) {
  for (int line = 0; line < 2; ++line) {
    uint32_t bits = 0;
    for (int i = 0; i < 4; ++i)
      bits |= (four_codes(codes, line * 4 + i) >> from & 0x03030303) << 2 * i;
    put_four(bits, line, column, to);
  }
}
// line i of them, as bits kTo and the next of its bytes.
template <int kTo>
INLINE Bits two_bit_line(Bits four, int i) {
  const int by = i % 4 * 2 - kTo;
  return (by < 0 ? words_left(four, -by) : words_right(four, by)) & splat_bytes(3 << kTo);
}

// Nibbles and behind them a line of fifth bits.
template <class Use>
INLINE void fifth_bit_lines(const uint8_t* from, Use&& use) {
  const Bits bits = load_bits(from + 256);
  nibble_lines(from, [&](int i, Bits low)
                         __attribute__((always_inline)) { use(i, low | bit_line<4>(bits, i)); });
}

// Puts a column's 32 codes of 5 bits into its lines.
INLINE void put_five_bits(const uint8_t* codes, int column, uint8_t* to) {
  put_nibbles(codes, column, to);
  put_bits(codes, 4, column, to + 256);
}

// Every format has: kBlocks of a unit; kBits of a code, of 8 bits with kByteBias added;
// kSourceBytes of a unit in a file, kBytes of a packed one of 16 columns; kOffset, by how many bits
// it is less than 128 (negative: none); kHasMin; kHalves of a block with scales of their own.
// dequantise(): the values of a source unit; pack_column(): puts one into a packed unit of zeros;
// scales() and lines() of a packed unit's block.

// scale | 16 bytes of nibbles, inputs i and i + 16
struct Q4_0 {
  static constexpr int kBlocks = 1, kBits = 4, kHalves = 1, kOffset = 4;
  static constexpr bool kHasMin = false;
  static constexpr size_t kSourceBytes = 18, kBytes = 4 * 64 + 32;

  static void codes(const uint8_t* nibbles, uint8_t* to) {
    for (int i = 0; i < 16; ++i) to[i] = nibbles[i] & 15, to[i + 16] = nibbles[i] >> 4;
  }
  static void dequantise(const uint8_t* source, float* to) {
    uint8_t code[kBlockInputs];
    codes(source + 2, code);
    for (int i = 0; i < kBlockInputs; ++i) to[i] = half(source) * static_cast<float>(code[i] - 8);
  }
  static void pack_column(const uint8_t* source, int column, uint8_t* to) {
    uint8_t code[kBlockInputs];
    codes(source + 2, code);
    put_nibbles(code, column, to);
    std::memcpy(to + 256 + 2 * column, source, 2);
  }
  static INLINE Scales scales(const uint8_t* unit, int, int) { return {halves(unit + 256), Vec{}}; }
  template <class Use>
  static INLINE void lines(const uint8_t* unit, int, Use&& use) {
    nibble_lines(unit, use);
  }
};

// scale, min | nibbles as of Q4_0
struct Q4_1 {
  static constexpr int kBlocks = 1, kBits = 4, kHalves = 1, kOffset = -1;
  static constexpr bool kHasMin = true;
  static constexpr size_t kSourceBytes = 20, kBytes = 4 * 64 + 64;

  static void codes(const uint8_t* source, uint8_t* to) { Q4_0::codes(source + 4, to); }
  static void dequantise(const uint8_t* source, float* to) {
    uint8_t code[kBlockInputs];
    codes(source, code);
    for (int i = 0; i < kBlockInputs; ++i)
      to[i] = half(source) * static_cast<float>(code[i]) + half(source + 2);
  }
  static void pack_column(const uint8_t* source, int column, uint8_t* to) {
    uint8_t code[kBlockInputs];
    codes(source, code);
    put_nibbles(code, column, to);
    std::memcpy(to + 256 + 2 * column, source, 2);
    std::memcpy(to + 288 + 2 * column, source + 2, 2);
  }
  static INLINE Scales scales(const uint8_t* unit, int, int) {
    return {halves(unit + 256), halves(unit + 288)};
  }
  template <class Use>
  static INLINE void lines(const uint8_t* unit, int, Use&& use) {
    nibble_lines(unit, use);
  }
};

// scale | 32 fifth bits | nibbles as of Q4_0
struct Q5_0 {
  static constexpr int kBlocks = 1, kBits = 5, kHalves = 1, kOffset = 3;
  static constexpr bool kHasMin = false;
  static constexpr size_t kSourceBytes = 22, kBytes = 5 * 64 + 32;

  // bits: the fifth ones, and the nibbles behind them.
  static void codes(const uint8_t* bits, uint8_t* to) {
    Q4_0::codes(bits + 4, to);
    for (int i = 0; i < kBlockInputs; ++i)
      to[i] = static_cast<uint8_t>(to[i] | (bits[i / 8] >> i % 8 & 1) << 4);
  }
  static void dequantise(const uint8_t* source, float* to) {
    uint8_t code[kBlockInputs];
    codes(source + 2, code);
    for (int i = 0; i < kBlockInputs; ++i) to[i] = half(source) * static_cast<float>(code[i] - 16);
  }
  static void pack_column(const uint8_t* source, int column, uint8_t* to) {
    uint8_t code[kBlockInputs];
    codes(source + 2, code);
    put_five_bits(code, column, to);
    std::memcpy(to + 320 + 2 * column, source, 2);
  }
  static INLINE Scales scales(const uint8_t* unit, int, int) { return {halves(unit + 320), Vec{}}; }
  template <class Use>
  static INLINE void lines(const uint8_t* unit, int, Use&& use) {
    fifth_bit_lines(unit, use);
  }
};

// scale, min | bits as of Q5_0
struct Q5_1 {
  static constexpr int kBlocks = 1, kBits = 5, kHalves = 1, kOffset = -1;
  static constexpr bool kHasMin = true;
  static constexpr size_t kSourceBytes = 24, kBytes = 5 * 64 + 64;

  static void dequantise(const uint8_t* source, float* to) {
    uint8_t code[kBlockInputs];
    Q5_0::codes(source + 4, code);
    for (int i = 0; i < kBlockInputs; ++i)
      to[i] = half(source) * static_cast<float>(code[i]) + half(source + 2);
  }
  static void pack_column(const uint8_t* source, int column, uint8_t* to) {
    uint8_t code[kBlockInputs];
    Q5_0::codes(source + 4, code);
    put_five_bits(code, column, to);
    std::memcpy(to + 320 + 2 * column, source, 2);
    std::memcpy(to + 352 + 2 * column, source + 2, 2);
  }
  static INLINE Scales scales(const uint8_t* unit, int, int) {
    return {halves(unit + 320), halves(unit + 352)};
  }
  template <class Use>
  static INLINE void lines(const uint8_t* unit, int, Use&& use) {
    fifth_bit_lines(unit, use);
  }
};

// scale | 32 signed bytes
struct Q8_0 {
  static constexpr int kBlocks = 1, kBits = 8, kHalves = 1, kOffset = kByteBias == 128 ? 0 : -1;
  static constexpr bool kHasMin = false;
  static constexpr size_t kSourceBytes = 34, kBytes = 8 * 64 + 32;

  static void codes(const uint8_t* source, uint8_t* to) {
    for (int i = 0; i < kBlockInputs; ++i) to[i] = source[2 + i] ^ 128;
  }
  static void dequantise(const uint8_t* source, float* to) {
    for (int i = 0; i < kBlockInputs; ++i)
      to[i] = half(source) * static_cast<float>(static_cast<int8_t>(source[2 + i]));
  }
  static void pack_column(const uint8_t* source, int column, uint8_t* to) {
    for (int i = 0; i < kBlockLines; ++i)
      put_four(four_codes(source + 2, i) ^ kByteBias * 0x01010101u, i, column, to);
    std::memcpy(to + 512 + 2 * column, source, 2);
  }
  static INLINE Scales scales(const uint8_t* unit, int, int) { return {halves(unit + 512), Vec{}}; }
  template <class Use>
  static INLINE void lines(const uint8_t* unit, int, Use&& use) {
#pragma GCC unroll 8
    for (int i = 0; i < kBlockLines; ++i) use(i, load_bits(unit + i * 64));
  }
};

// power of 2, as a byte | nibbles as of Q4_0, each one of 16 numbers (OCP Microscaling Formats 1.0;
// doubled, for whole numbers)
struct MXFP4 {
  static constexpr int kBlocks = 1, kBits = 5, kHalves = 1, kOffset = 3;
  static constexpr bool kHasMin = false;
  static constexpr size_t kSourceBytes = 17, kBytes = 4 * 64 + kLanes;
  static constexpr int8_t kNumbers[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

  static float power(uint8_t byte) { return std::ldexp(1.0f, byte - 128); }
  static void dequantise(const uint8_t* source, float* to) {
    uint8_t code[kBlockInputs];
    Q4_0::codes(source + 1, code);
    for (int i = 0; i < kBlockInputs; ++i) to[i] = power(source[0]) * kNumbers[code[i]];
  }
  static void pack_column(const uint8_t* source, int column, uint8_t* to) {
    uint8_t code[kBlockInputs];
    Q4_0::codes(source + 1, code);
    put_nibbles(code, column, to);
    to[256 + column] = source[0];
  }
  static INLINE Scales scales(const uint8_t* unit, int, int) {
    const Bits bytes = load_unsigned(unit + 256), exponents = (bytes - splat(1)) << 23;
    // below the normal numbers: 2^-128 and 2^-127
    const Bits least = (bytes << 21) + splat(1 << 21);
    return {as<float>(select(bytes < splat(2), least, exponents)), Vec{}};
  }
  template <class Use>
  static INLINE void lines(const uint8_t* unit, int, Use&& use) {
    table_lines<16>(kNumbers, unit, use);
  }
};

// scale | nibbles as of Q4_0, each one of 16 numbers
struct IQ4_NL {
  static constexpr int kBlocks = 1, kBits = 8, kHalves = 1, kOffset = Q8_0::kOffset;
  static constexpr bool kHasMin = false;
  static constexpr size_t kSourceBytes = 18, kBytes = Q4_0::kBytes;
  static constexpr int8_t kNumbers[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                          1,    13,   25,  38,  53,  69,  89,  113};

  static void dequantise(const uint8_t* source, float* to) {
    uint8_t code[kBlockInputs];
    Q4_0::codes(source + 2, code);
    for (int i = 0; i < kBlockInputs; ++i) to[i] = half(source) * kNumbers[code[i]];
  }
  static void pack_column(const uint8_t* source, int column, uint8_t* to) {
    Q4_0::pack_column(source, column, to);
  }
  static INLINE Scales scales(const uint8_t* unit, int, int) { return {halves(unit + 256), Vec{}}; }
  template <class Use>
  static INLINE void lines(const uint8_t* unit, int, Use&& use) {
    table_lines<kByteBias>(kNumbers, unit, use);
  }
};

// Of super-blocks of 8 blocks.
// scale, scale of mins | 12 bytes: 8 scales and 8 mins of 6 bits | 4 times 32 bytes: nibbles of one
// block and the next
struct Q4_K {
  static constexpr int kBlocks = 8, kBits = 4, kHalves = 1, kOffset = -1;
  static constexpr bool kHasMin = true;
  static constexpr size_t kSourceBytes = 144, kLinesAt = 64 + 2 * 8 * kLanes,
                          kBytes = kLinesAt + 8 * 256;

  // The 6 bits of scale b (or of min b).
  static uint8_t six_bits(const uint8_t* source, int b, bool is_min) {
    const uint8_t* bits = source + 4 + (is_min ? 4 : 0);
    if (b < 4) return bits[b] & 63;
    const uint8_t low = source[4 + 8 + b - 4], upper = bits[b - 4] >> 6;
    return static_cast<uint8_t>((is_min ? low >> 4 : low & 15) | upper << 4);
  }
  static void codes(const uint8_t* source, int b, uint8_t* to) {
    for (int i = 0; i < kBlockInputs; ++i) to[i] = source[16 + b / 2 * 32 + i] >> b % 2 * 4 & 15;
  }
  static void dequantise(const uint8_t* source, float* to) {
    uint8_t code[kBlockInputs];
    for (int b = 0; b < kBlocks; ++b, to += kBlockInputs) {
      codes(source, b, code);
      const float scale = half(source) * six_bits(source, b, false),
                  min = half(source + 2) * six_bits(source, b, true);
      for (int i = 0; i < kBlockInputs; ++i) to[i] = scale * code[i] - min;
    }
  }
  static void pack_scales(const uint8_t* source, int column, uint8_t* to) {
    std::memcpy(to + 2 * column, source, 2);
    std::memcpy(to + 32 + 2 * column, source + 2, 2);
    for (int b = 0; b < kBlocks; ++b) {
      to[64 + b * 2 * kLanes + column] = six_bits(source, b, false);
      to[64 + (b * 2 + 1) * kLanes + column] = six_bits(source, b, true);
    }
  }
  static void pack_column(const uint8_t* source, int column, uint8_t* to) {
    pack_scales(source, column, to);
    uint8_t code[kBlockInputs];
    for (int b = 0; b < kBlocks; ++b) {
      codes(source, b, code);
      put_nibbles(code, column, to + kLinesAt + b * 256);
    }
  }
  static INLINE Scales scales(const uint8_t* unit, int b, int) {
    const uint8_t* six = unit + 64 + b * 2 * kLanes;
    const Vec min = halves(unit + 32) * from_bytes(six + kLanes);
    return {halves(unit) * from_bytes(six), Vec{} - min};
  }
  template <class Use>
  static INLINE void lines(const uint8_t* unit, int b, Use&& use) {
    nibble_lines(unit + kLinesAt + b * 256, use);
  }
};

// scale, scale of mins, 6 bits each as of Q4_K | 32 bytes: bit b of one belongs to block b |
// nibbles as of Q4_K
struct Q5_K {
  static constexpr int kBlocks = 8, kBits = 5, kHalves = 1, kOffset = -1;
  static constexpr bool kHasMin = true;
  static constexpr size_t kSourceBytes = 176, kLinesAt = Q4_K::kLinesAt,
                          kBytes = kLinesAt + 8 * 320;

  static void codes(const uint8_t* source, int b, uint8_t* to) {
    Q4_K::codes(source + 32, b, to);
    for (int i = 0; i < kBlockInputs; ++i)
      to[i] = static_cast<uint8_t>(to[i] | (source[16 + i] >> b & 1) << 4);
  }
  static void dequantise(const uint8_t* source, float* to) {
    uint8_t code[kBlockInputs];
    for (int b = 0; b < kBlocks; ++b, to += kBlockInputs) {
      codes(source, b, code);
      const float scale = half(source) * Q4_K::six_bits(source, b, false),
                  min = half(source + 2) * Q4_K::six_bits(source, b, true);
      for (int i = 0; i < kBlockInputs; ++i) to[i] = scale * code[i] - min;
    }
  }
  static void pack_column(const uint8_t* source, int column, uint8_t* to) {
    Q4_K::pack_scales(source, column, to);
    uint8_t code[kBlockInputs];
    for (int b = 0; b < kBlocks; ++b) {
      codes(source, b, code);
      put_five_bits(code, column, to + kLinesAt + b * 320);
    }
  }
  static INLINE Scales scales(const uint8_t* unit, int b, int half) {
    return Q4_K::scales(unit, b, half);
  }
  template <class Use>
  static INLINE void lines(const uint8_t* unit, int b, Use&& use) {
    fifth_bit_lines(unit + kLinesAt + b * 320, use);
  }
};

// 2 times 64 bytes of the lower 4 bits of 4 blocks | 2 times 32 bytes of their upper 2 bits | 16
// signed scales, of 16 inputs each | scale
struct Q6_K {
  static constexpr int kBlocks = 8, kBits = 6, kHalves = 2, kOffset = 2;
  static constexpr bool kHasMin = false;
  static constexpr size_t kSourceBytes = 210, kLinesAt = 32 + 16 * kLanes, kBlockBytes = 256 + 128,
                          kBytes = kLinesAt + 8 * kBlockBytes;

  static void codes(const uint8_t* source, int b, uint8_t* to) {
    const uint8_t *low = source + b / 4 * 64 + b % 2 * 32, *upper = source + 128 + b / 4 * 32;
    for (int i = 0; i < kBlockInputs; ++i)
      to[i] =
          static_cast<uint8_t>((low[i] >> b % 4 / 2 * 4 & 15) | (upper[i] >> b % 4 * 2 & 3) << 4);
  }
  static void dequantise(const uint8_t* source, float* to) {
    uint8_t code[kBlockInputs];
    for (int b = 0; b < kBlocks; ++b) {
      codes(source, b, code);
      for (int i = 0; i < kBlockInputs; ++i)
        *to++ =
            half(source + 208) * static_cast<int8_t>(source[192 + b * 2 + i / 16]) * (code[i] - 32);
    }
  }
  static void pack_column(const uint8_t* source, int column, uint8_t* to) {
    std::memcpy(to + 2 * column, source + 208, 2);
    for (int s = 0; s < 16; ++s) to[32 + s * kLanes + column] = source[192 + s];
    uint8_t code[kBlockInputs];
    for (int b = 0; b < kBlocks; ++b) {
      uint8_t* lines = to + kLinesAt + b * kBlockBytes;
      codes(source, b, code);
      put_nibbles(code, column, lines);
      put_two_bits(code, 4, column, lines + 256);
    }
  }
  static INLINE Scales scales(const uint8_t* unit, int b, int half) {
    return {halves(unit) * from_signed_bytes(unit + 32 + (b * 2 + half) * kLanes), Vec{}};
  }
  template <class Use>
  static INLINE void lines(const uint8_t* unit, int b, Use&& use) {
    const uint8_t* from = unit + kLinesAt + b * kBlockBytes;
    const Bits upper[2] = {load_bits(from + 256), load_bits(from + 320)};
    nibble_lines(from, [&](int i, Bits low) __attribute__((always_inline)) {
      use(i, low | two_bit_line<4>(upper[i / 4], i));
    });
  }
};

// 16 bytes: 4 bits each of scale and of min, of 16 inputs | 2 times 32 bytes: 2 bits of each of 4
// blocks | scale, scale of mins
struct Q2_K {
  static constexpr int kBlocks = 8, kBits = 2, kHalves = 2, kOffset = -1;
  static constexpr bool kHasMin = true;
  static constexpr size_t kSourceBytes = 84, kLinesAt = 64 + 16 * kLanes,
                          kBytes = kLinesAt + 8 * 128;

  // two: of the 2 times 32 bytes.
  static void codes(const uint8_t* two, int b, uint8_t* to) {
    for (int i = 0; i < kBlockInputs; ++i) to[i] = two[b / 4 * 32 + i] >> b % 4 * 2 & 3;
  }
  static void dequantise(const uint8_t* source, float* to) {
    uint8_t code[kBlockInputs];
    for (int b = 0; b < kBlocks; ++b) {
      codes(source + 16, b, code);
      for (int i = 0; i < kBlockInputs; ++i) {
        const uint8_t both = source[b * 2 + i / 16];
        const float scale = half(source + 80) * (both & 15), min = half(source + 82) * (both >> 4);
        *to++ = scale * code[i] - min;
      }
    }
  }
  static void pack_column(const uint8_t* source, int column, uint8_t* to) {
    std::memcpy(to + 2 * column, source + 80, 2);
    std::memcpy(to + 32 + 2 * column, source + 82, 2);
    for (int s = 0; s < 16; ++s) to[64 + s * kLanes + column] = source[s];
    uint8_t code[kBlockInputs];
    for (int b = 0; b < kBlocks; ++b) {
      codes(source + 16, b, code);
      put_two_bits(code, 0, column, to + kLinesAt + b * 128);
    }
  }
  static INLINE Scales scales(const uint8_t* unit, int b, int half) {
    const Bits both = load_unsigned(unit + 64 + (b * 2 + half) * kLanes);
    const Vec min = halves(unit + 32) * to_floats(both >> 4);
    return {halves(unit) * to_floats(both & splat(15)), Vec{} - min};
  }
  template <class Use>
  static INLINE void lines(const uint8_t* unit, int b, Use&& use) {
    const uint8_t* from = unit + kLinesAt + b * 128;
    const Bits four[2] = {load_bits(from), load_bits(from + 64)};
#pragma GCC unroll 8
    for (int i = 0; i < kBlockLines; ++i) use(i, two_bit_line<0>(four[i / 4], i));
  }
};

// 32 bytes: bit b of one is the third of block b | 2 bits as of Q2_K | 12 bytes: 16 scales of 6
// bits, of 16 inputs each | scale
struct Q3_K {
  static constexpr int kBlocks = 8, kBits = 3, kHalves = 2, kOffset = 5;
  static constexpr bool kHasMin = false;
  static constexpr size_t kSourceBytes = 110, kLinesAt = 32 + 16 * kLanes, kBlockBytes = 128 + 64,
                          kBytes = kLinesAt + 8 * kBlockBytes;

  static void codes(const uint8_t* source, int b, uint8_t* to) {
    Q2_K::codes(source + 32, b, to);
    for (int i = 0; i < kBlockInputs; ++i)
      to[i] = static_cast<uint8_t>(to[i] | (source[i] >> b & 1) << 2);
  }
  static int8_t scale(const uint8_t* source, int s) {
    const uint8_t low = source[96 + s % 8] >> s / 8 * 4 & 15,
                  upper = source[104 + s % 4] >> s / 4 * 2 & 3;
    return static_cast<int8_t>((low | upper << 4) - 32);
  }
  static void dequantise(const uint8_t* source, float* to) {
    uint8_t code[kBlockInputs];
    for (int b = 0; b < kBlocks; ++b) {
      codes(source, b, code);
      for (int i = 0; i < kBlockInputs; ++i)
        *to++ = half(source + 108) * scale(source, b * 2 + i / 16) * (code[i] - 4);
    }
  }
  static void pack_column(const uint8_t* source, int column, uint8_t* to) {
    std::memcpy(to + 2 * column, source + 108, 2);
    for (int s = 0; s < 16; ++s)
      to[32 + s * kLanes + column] = static_cast<uint8_t>(scale(source, s));
    uint8_t code[kBlockInputs];
    for (int b = 0; b < kBlocks; ++b) {
      uint8_t* lines = to + kLinesAt + b * kBlockBytes;
      codes(source, b, code);
      put_two_bits(code, 0, column, lines);
      put_bits(code, 2, column, lines + 128);
    }
  }
  static INLINE Scales scales(const uint8_t* unit, int b, int half) {
    return Q6_K::scales(unit, b, half);
  }
  template <class Use>
  static INLINE void lines(const uint8_t* unit, int b, Use&& use) {
    const uint8_t* from = unit + kLinesAt + b * kBlockBytes;
    const Bits four[2] = {load_bits(from), load_bits(from + 64)}, bits = load_bits(from + 128);
#pragma GCC unroll 8
    for (int i = 0; i < kBlockLines; ++i)
      use(i, two_bit_line<0>(four[i / 4], i) | bit_line<2>(bits, i));
  }
};

// scale | upper 2 bits of 8 scales, and 4 bytes of their lower 4 | 8 times 16 bytes of nibbles as
// of IQ4_NL
struct IQ4_XS {
  static constexpr int kBlocks = 8, kBits = 8, kHalves = 1, kOffset = Q8_0::kOffset;
  static constexpr bool kHasMin = false;
  static constexpr size_t kSourceBytes = 136, kLinesAt = 32 + 8 * kLanes,
                          kBytes = kLinesAt + 8 * 256;

  static int8_t scale(const uint8_t* source, int b) {
    const uint8_t low = source[4 + b / 2] >> b % 2 * 4 & 15,
                  upper = source[2 + b / 4] >> b % 4 * 2 & 3;
    return static_cast<int8_t>((low | upper << 4) - 32);
  }
  static void dequantise(const uint8_t* source, float* to) {
    uint8_t code[kBlockInputs];
    for (int b = 0; b < kBlocks; ++b) {
      Q4_0::codes(source + 8 + b * 16, code);
      for (int i = 0; i < kBlockInputs; ++i)
        *to++ = half(source) * scale(source, b) * IQ4_NL::kNumbers[code[i]];
    }
  }
  static void pack_column(const uint8_t* source, int column, uint8_t* to) {
    std::memcpy(to + 2 * column, source, 2);
    uint8_t code[kBlockInputs];
    for (int b = 0; b < kBlocks; ++b) {
      to[32 + b * kLanes + column] = static_cast<uint8_t>(scale(source, b));
      Q4_0::codes(source + 8 + b * 16, code);
      put_nibbles(code, column, to + kLinesAt + b * 256);
    }
  }
  static INLINE Scales scales(const uint8_t* unit, int b, int) {
    return {halves(unit) * from_signed_bytes(unit + 32 + b * kLanes), Vec{}};
  }
  template <class Use>
  static INLINE void lines(const uint8_t* unit, int b, Use&& use) {
    IQ4_NL::lines(unit + kLinesAt + b * 256, 0, use);
  }
};

// scale | 16 bytes: 4 codes of 2 bits in a byte. For a first look at which outputs are large: a
// weight is one of four numbers.
struct TwoBits {
  static constexpr int kBlocks = 2, kBits = 2, kHalves = 1, kOffset = -1;
  static constexpr bool kHasMin = true;
  static constexpr size_t kSourceBytes = 18, kLinesAt = 32, kBytes = kLinesAt + 2 * 128;
  static constexpr float kMiddle = 1.5f;

  static void codes(const uint8_t* source, int b, uint8_t* to) {
    for (int i = 0; i < kBlockInputs; ++i) to[i] = source[2 + b * 8 + i / 4] >> i % 4 * 2 & 3;
  }
  static void dequantise(const uint8_t* source, float* to) {
    uint8_t code[kBlockInputs];
    for (int b = 0; b < kBlocks; ++b) {
      codes(source, b, code);
      for (int i = 0; i < kBlockInputs; ++i)
        *to++ = half(source) * (static_cast<float>(code[i]) - kMiddle);
    }
  }
  static void pack_column(const uint8_t* source, int column, uint8_t* to) {
    std::memcpy(to + 2 * column, source, 2);
    uint8_t code[kBlockInputs];
    for (int b = 0; b < kBlocks; ++b) {
      codes(source, b, code);
      put_two_bits(code, 0, column, to + kLinesAt + b * 128);
    }
  }
  static INLINE Scales scales(const uint8_t* unit, int, int) {
    const Vec scale = halves(unit);
    return {scale, scale * splat(-kMiddle)};
  }
  template <class Use>
  static INLINE void lines(const uint8_t* unit, int b, Use&& use) {
    const uint8_t* from = unit + kLinesAt + b * 128;
    const Bits four[2] = {load_bits(from), load_bits(from + 64)};
#pragma GCC unroll 8
    for (int i = 0; i < kBlockLines; ++i) use(i, two_bit_line<0>(four[i / 4], i));
  }
};
