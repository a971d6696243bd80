// Products of one warpgroup: D [64, N] += A [64, 16] B [16, N], bf16 to float32, A in registers and B in shared memory.
#pragma once
#include <cstdint>

namespace abyssal {

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most `Pending` committed groups are unfinished.
template <int Pending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}

// B as rows of 64 bf16 (128 bytes), swizzled by 128 bytes, eight rows to a kilobyte. Steps of 16 columns add 2.
__device__ __forceinline__ uint64_t wgmma_operand(uint32_t address) {
  return static_cast<uint64_t>((address & 0x3FFFF) >> 4) | (static_cast<uint64_t>(1024 >> 4) << 32) | (1ull << 62);
}

template <int N>
struct Wgmma;

#define ABYSSAL_R1 "%0,%1,%2,%3"
#define ABYSSAL_R2 ABYSSAL_R1 ",%4,%5,%6,%7"
#define ABYSSAL_R3 ABYSSAL_R2 ",%8,%9,%10,%11"
#define ABYSSAL_R4 ABYSSAL_R3 ",%12,%13,%14,%15"
#define ABYSSAL_R5 ABYSSAL_R4 ",%16,%17,%18,%19"
#define ABYSSAL_R6 ABYSSAL_R5 ",%20,%21,%22,%23"
#define ABYSSAL_R7 ABYSSAL_R6 ",%24,%25,%26,%27"
#define ABYSSAL_R8 ABYSSAL_R7 ",%28,%29,%30,%31"
#define ABYSSAL_R9 ABYSSAL_R8 ",%32,%33,%34,%35"
#define ABYSSAL_R10 ABYSSAL_R9 ",%36,%37,%38,%39"
#define ABYSSAL_R11 ABYSSAL_R10 ",%40,%41,%42,%43"
#define ABYSSAL_R12 ABYSSAL_R11 ",%44,%45,%46,%47"
#define ABYSSAL_R13 ABYSSAL_R12 ",%48,%49,%50,%51"
#define ABYSSAL_R14 ABYSSAL_R13 ",%52,%53,%54,%55"
#define ABYSSAL_R15 ABYSSAL_R14 ",%56,%57,%58,%59"
#define ABYSSAL_R16 ABYSSAL_R15 ",%60,%61,%62,%63"
#define ABYSSAL_R17 ABYSSAL_R16 ",%64,%65,%66,%67"
#define ABYSSAL_R18 ABYSSAL_R17 ",%68,%69,%70,%71"
#define ABYSSAL_D1(d) "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
#define ABYSSAL_D2(d) ABYSSAL_D1(d), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
#define ABYSSAL_D3(d) ABYSSAL_D2(d), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11])
#define ABYSSAL_D4(d) ABYSSAL_D3(d), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
#define ABYSSAL_D5(d) ABYSSAL_D4(d), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19])
#define ABYSSAL_D6(d) ABYSSAL_D5(d), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23])
#define ABYSSAL_D7(d) ABYSSAL_D6(d), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27])
#define ABYSSAL_D8(d) ABYSSAL_D7(d), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
#define ABYSSAL_D9(d) ABYSSAL_D8(d), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35])
#define ABYSSAL_D10(d) ABYSSAL_D9(d), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39])
#define ABYSSAL_D11(d) ABYSSAL_D10(d), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43])
#define ABYSSAL_D12(d) ABYSSAL_D11(d), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47])
#define ABYSSAL_D13(d) ABYSSAL_D12(d), "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51])
#define ABYSSAL_D14(d) ABYSSAL_D13(d), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55])
#define ABYSSAL_D15(d) ABYSSAL_D14(d), "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59])
#define ABYSSAL_D16(d) ABYSSAL_D15(d), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
#define ABYSSAL_D17(d) ABYSSAL_D16(d), "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67])
#define ABYSSAL_D18(d) ABYSSAL_D17(d), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71])

// The operand numbers of A and B follow those of D, N / 2 of them.
#define ABYSSAL_WGMMA(N, G, A0, A1, A2, A3, B)                                                                              \
  template <>                                                                                                               \
  struct Wgmma<N> {                                                                                                         \
    static __device__ __forceinline__ void multiply(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b) {                \
      asm volatile("{\n.reg .pred p;\nsetp.eq.u32 p, 0, 0;\nwgmma.mma_async.sync.aligned.m64n" #N                            \
                   "k16.f32.bf16.bf16 {" ABYSSAL_R##G "}, {%" #A0 ",%" #A1 ",%" #A2 ",%" #A3 "}, %" #B ", p, 1, 1, 0;\n}"      \
                   : ABYSSAL_D##G(d)                                                                                        \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                                   \
    }                                                                                                                       \
  };

ABYSSAL_WGMMA(8, 1, 4, 5, 6, 7, 8)
ABYSSAL_WGMMA(16, 2, 8, 9, 10, 11, 12)
ABYSSAL_WGMMA(24, 3, 12, 13, 14, 15, 16)
ABYSSAL_WGMMA(32, 4, 16, 17, 18, 19, 20)
ABYSSAL_WGMMA(48, 6, 24, 25, 26, 27, 28)
ABYSSAL_WGMMA(64, 8, 32, 33, 34, 35, 36)
ABYSSAL_WGMMA(72, 9, 36, 37, 38, 39, 40)
ABYSSAL_WGMMA(80, 10, 40, 41, 42, 43, 44)
ABYSSAL_WGMMA(96, 12, 48, 49, 50, 51, 52)
ABYSSAL_WGMMA(104, 13, 52, 53, 54, 55, 56)
ABYSSAL_WGMMA(112, 14, 56, 57, 58, 59, 60)
ABYSSAL_WGMMA(120, 15, 60, 61, 62, 63, 64)
ABYSSAL_WGMMA(128, 16, 64, 65, 66, 67, 68)
ABYSSAL_WGMMA(136, 17, 68, 69, 70, 71, 72)
ABYSSAL_WGMMA(144, 18, 72, 73, 74, 75, 76)

#undef ABYSSAL_WGMMA

}  // namespace abyssal
