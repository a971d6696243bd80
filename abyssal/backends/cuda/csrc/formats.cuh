// Packed weights: how a chunk of 64 rows x 128 columns lies in memory, and how a warpgroup turns it into wgmma operands.
//
// Row r of a chunk belongs to warp r / 16; lane 4 g + c holds rows g and g + 8 of the warp's 16. A step of 16 columns takes four
// registers: a0 (row g, columns 2c, 2c+1), a1 (row g+8, the same), a2 (row g, columns 2c+8, 2c+9), a3 (row g+8, those). A chunk
// is read in halves of 64 columns, 16 bytes at a time by consecutive threads.
//
// Codes become bf16 by moving bits: sign to bit 15, exponent and fraction around bit 7. That is the value times a power of two,
// subnormal codes included, because bf16 below its smallest normal number is spaced like them. One bf16 product with the scale,
// exact, gives value * 2^-64 in all formats, and the sums are multiplied by 2^64 at the end: small enough for the multiplier's
// exponent (scale byte + 62 or + 56) to exist for all scales up to 2^65, large enough for float32 sums.
#pragma once
#include <cstdint>
#include <cuda_bf16.h>

namespace abyssal {

constexpr int CHUNK_ROWS = 64;
constexpr int CHUNK_COLUMNS = 128;

// Plain matrices: row g of a warp is output channel_of(g) of its 16, row g + 8 the one two further on, so that after transposing
// a lane holds four neighbours of one token.
__host__ __device__ constexpr int channel_of(int g) { return (g >> 1) * 4 + (g & 1); }

__device__ __forceinline__ uint4 load_shared_16(uint32_t address) {
  uint4 r;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w) : "r"(address));
  return r;
}

__device__ __forceinline__ uint32_t load_shared_4(uint32_t address) {
  uint32_t r;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(r) : "r"(address));
  return r;
}

__device__ __forceinline__ uint32_t multiply_bf16x2(uint32_t a, uint32_t b) {
  uint32_t r;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}

// Byte `i` of a word as the exponent of two equal bf16 numbers.
template <int i>
__device__ __forceinline__ uint32_t power_of_two(uint32_t word) {
  return __byte_perm(word, 0, 0x4440 + i) * 0x00800080u;
}

// Sixteen columns x 16 rows of a warp are one word a lane. In each half of the word, which holds one column of a pair:
//   a0: sign 15, code 8..6     a1: sign 12, code 5..3     a2: sign 14, code 2..0     a3: sign 13, code 11..9
// Then 256 bytes: for each warp and g, four scales (columns by 32) as (g: 0, 1; g+8: 0, 1) of the first half, then the second.
struct Fp4 {
  static constexpr int DATA = CHUNK_ROWS * CHUNK_COLUMNS / 2;
  static constexpr int CHUNK = DATA + CHUNK_ROWS * CHUNK_COLUMNS / 32;
  static constexpr int EXPONENT_SHIFT = 62;
  static constexpr float UNDO = 18446744073709551616.0f;

  struct Raw {
    uint4 data;
    uint32_t scale;
  };

  static __device__ __forceinline__ Raw load(uint32_t chunk, int half, int thread) {
    Raw raw;
    raw.data = load_shared_16(chunk + half * (DATA / 2) + thread * 16);
    raw.scale = load_shared_4(chunk + DATA + (thread >> 2) * 8 + half * 4);
    return raw;
  }

  static __device__ __forceinline__ void decode(const Raw& raw, uint32_t (&a)[4][4]) {
    const uint32_t word[4] = {raw.data.x, raw.data.y, raw.data.z, raw.data.w};
    const uint32_t upper[2] = {power_of_two<0>(raw.scale), power_of_two<1>(raw.scale)};
    const uint32_t lower[2] = {power_of_two<2>(raw.scale), power_of_two<3>(raw.scale)};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const uint32_t w = word[i];
      a[i][0] = multiply_bf16x2(w & 0x81C081C0u, upper[i / 2]);
      a[i][1] = multiply_bf16x2((w << 3) & 0x81C081C0u, lower[i / 2]);
      a[i][2] = multiply_bf16x2(((w << 6) & 0x01C001C0u) | ((w << 1) & 0x80008000u), upper[i / 2]);
      a[i][3] = multiply_bf16x2(((w >> 3) & 0x01C001C0u) | ((w << 2) & 0x80008000u), lower[i / 2]);
    }
  }
};

// Sixteen columns are two words a lane, (a0, a1) and (a2, a3). In each half: the first has its sign at 15 and seven bits at
// 10..4; the second its sign at 11, the upper three of seven bits at 14..12 and the lower four at 3..0.
// Then 16 bytes: for each pair of warps, the scales of its rows g (columns by 32: 0, 1) and g+8 (0, 1), first half and second.
struct Fp8 {
  static constexpr int DATA = CHUNK_ROWS * CHUNK_COLUMNS;
  static constexpr int CHUNK = DATA + 16;
  static constexpr int EXPONENT_SHIFT = 56;
  static constexpr float UNDO = 18446744073709551616.0f;

  struct Raw {
    uint4 data[2];
    uint32_t scale;
  };

  static __device__ __forceinline__ Raw load(uint32_t chunk, int half, int thread) {
    Raw raw;
    raw.data[0] = load_shared_16(chunk + half * (DATA / 2) + thread * 16);
    raw.data[1] = load_shared_16(chunk + half * (DATA / 2) + DATA / 4 + thread * 16);
    raw.scale = load_shared_4(chunk + DATA + (thread >> 6) * 8 + half * 4);
    return raw;
  }

  static __device__ __forceinline__ void decode(const Raw& raw, uint32_t (&a)[4][4]) {
    const uint32_t word[8] = {raw.data[0].x, raw.data[0].y, raw.data[0].z, raw.data[0].w,
                              raw.data[1].x, raw.data[1].y, raw.data[1].z, raw.data[1].w};
    const uint32_t upper[2] = {power_of_two<0>(raw.scale), power_of_two<1>(raw.scale)};
    const uint32_t lower[2] = {power_of_two<2>(raw.scale), power_of_two<3>(raw.scale)};
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const uint32_t w = word[i];
      a[i / 2][(i & 1) * 2] = multiply_bf16x2(w & 0x87F087F0u, upper[i / 4]);
      a[i / 2][(i & 1) * 2 + 1] = multiply_bf16x2(((w << 4) & 0x80F080F0u) | ((w >> 4) & 0x07000700u), lower[i / 4]);
    }
  }
};

// Sixteen columns are four words a lane, the registers themselves.
struct Bf16 {
  static constexpr int DATA = CHUNK_ROWS * CHUNK_COLUMNS * 2;
  static constexpr int CHUNK = DATA;
  static constexpr float UNDO = 1.0f;

  struct Raw {
    uint4 data[4];
  };

  static __device__ __forceinline__ Raw load(uint32_t chunk, int half, int thread) {
    Raw raw;
#pragma unroll
    for (int i = 0; i < 4; i++) raw.data[i] = load_shared_16(chunk + half * (DATA / 2) + i * (DATA / 8) + thread * 16);
    return raw;
  }

  static __device__ __forceinline__ void decode(const Raw& raw, uint32_t (&a)[4][4]) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      a[i][0] = raw.data[i].x;
      a[i][1] = raw.data[i].y;
      a[i][2] = raw.data[i].z;
      a[i][3] = raw.data[i].w;
    }
  }
};

}  // namespace abyssal
