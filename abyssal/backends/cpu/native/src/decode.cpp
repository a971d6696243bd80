// Stored bytes to float32 panels: 16 x 16 values at a time, transposed while they are still narrow.
#include <algorithm>

#include "matrix.h"
#include "pool.h"

namespace abyssal {

namespace {

typedef uint8_t bytes16 __attribute__((vector_size(16)));
typedef uint16_t words8 __attribute__((vector_size(16)));
typedef float floats4 __attribute__((vector_size(16)));
typedef int32_t ints4 __attribute__((vector_size(16)));
typedef int64_t longs2 __attribute__((vector_size(16)));

template <class V>
ABYSSAL_INLINE V load_as(const void* p) {
    V v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

ABYSSAL_INLINE bytes16 load_8_bytes(const void* p) {
    const longs2 v = {load_as<int64_t>(p), 0};
    return (bytes16)v;
}

// Lanes of a and b in turn, from the first or from the middle on.
template <bool High, class Mask, class V, size_t... I>
ABYSSAL_INLINE V interleave(V a, V b, std::index_sequence<I...>) {
    constexpr int L = sizeof...(I), from = High ? L / 2 : 0;
#if defined(__clang__)
    return __builtin_shufflevector(a, b, int(from + I / 2 + I % 2 * L)...);
#else
    return __builtin_shuffle(a, b, Mask{(typename std::decay<decltype(Mask{}[0])>::type)(from + I / 2 + I % 2 * L)...});
#endif
}

// One round of a transpose of N vectors: the index of an element, vector then lane, is rotated left by one bit. As many rounds
// as a lane's index has bits transpose the whole.
template <class Mask, class V, int N>
ABYSSAL_INLINE void transpose_round(V (&t)[N]) {
    const auto lanes = std::make_index_sequence<sizeof(V) / sizeof(t[0][0])>();
    V u[N];
    for (int i = 0; i < N / 2; i++) {
        u[2 * i] = interleave<false, Mask>(t[i], t[i + N / 2], lanes);
        u[2 * i + 1] = interleave<true, Mask>(t[i], t[i + N / 2], lanes);
    }
    for (int i = 0; i < N; i++) t[i] = u[i];
}

ABYSSAL_INLINE vi widen(bytes16 b) {
    vi r;
#if defined(__AVX512F__)
    r.part[0] = (int_part)_mm512_cvtepu8_epi32((__m128i)b);
#elif defined(__AVX2__)
    r.part[0] = (int_part)_mm256_cvtepu8_epi32((__m128i)b);
    r.part[1] = (int_part)_mm256_cvtepu8_epi32(_mm_srli_si128((__m128i)b, 8));
#elif defined(__aarch64__)
    const uint16x8_t low = vmovl_u8(vget_low_u8((uint8x16_t)b)), high = vmovl_u8(vget_high_u8((uint8x16_t)b));
    r.part[0] = (int_part)vmovl_u16(vget_low_u16(low));
    r.part[1] = (int_part)vmovl_u16(vget_high_u16(low));
    r.part[2] = (int_part)vmovl_u16(vget_low_u16(high));
    r.part[3] = (int_part)vmovl_u16(vget_high_u16(high));
#else
    for (int i = 0; i < LANES; i++) r.part[i / WIDTH][i % WIDTH] = b[i];
#endif
    return r;
}

ABYSSAL_INLINE vi widen(words8 a, words8 b) {
    vi r;
#if defined(__AVX512F__)
    r.part[0] = (int_part)_mm512_cvtepu16_epi32(_mm256_set_m128i((__m128i)b, (__m128i)a));
#elif defined(__AVX2__)
    r.part[0] = (int_part)_mm256_cvtepu16_epi32((__m128i)a);
    r.part[1] = (int_part)_mm256_cvtepu16_epi32((__m128i)b);
#elif defined(__aarch64__)
    r.part[0] = (int_part)vmovl_u16(vget_low_u16((uint16x8_t)a));
    r.part[1] = (int_part)vmovl_u16(vget_high_u16((uint16x8_t)a));
    r.part[2] = (int_part)vmovl_u16(vget_low_u16((uint16x8_t)b));
    r.part[3] = (int_part)vmovl_u16(vget_high_u16((uint16x8_t)b));
#else
    for (int i = 0; i < LANES; i++) r.part[i / WIDTH][i % WIDTH] = i < 8 ? a[i] : b[i - 8];
#endif
    return r;
}

// E8M0: 2^(byte - 127), NaN for 255.
ABYSSAL_INLINE vf powers_of_two(vi byte) {
    vf normal = from_bits(shift_left<23>(byte));
    vf value = where_equal(byte, splat(0), splat(0x1p-127f), normal);
    return where_equal(byte, splat(255), from_bits(splat(0x7fc00000)), value);
}

// Exponent and fraction moved into place. Subnormals get an exponent and lose what it adds, rather than pass through
// subnormal floats, with which processors are slow.
template <int FRACTION, int BIAS>
ABYSSAL_INLINE vf magnitude(vi code) {
    vi moved = shift_left<23 - FRACTION>(code);
    vf normal = from_bits(moved + ((127 - BIAS) << 23));
    vf subnormal = from_bits(moved | ((128 - BIAS) << 23)) - from_bits(splat((128 - BIAS) << 23));
    return where_equal(shift_right<FRACTION>(code), splat(0), subnormal, normal);
}

ABYSSAL_INLINE vf e4m3(vi b) {
    vi code = b & 0x7f;
    vf value = where_equal(code, splat(0x7f), from_bits(splat(0x7fc00000)), magnitude<3, 7>(code));
    return from_bits(bits(value) | shift_left<24>(b & 0x80));
}

ABYSSAL_INLINE vf e2m1(vi code) {
    vf value;
#if defined(__AVX2__)
    for (int i = 0; i < PARTS; i++) {
#if defined(__AVX512F__)
        const __m512 table = _mm512_setr_ps(0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6);
        value.part[i] = (float_part)_mm512_permutexvar_ps((__m512i)code.part[i], table);
#else
        const __m256 table = _mm256_setr_ps(0, 0.5, 1, 1.5, 2, 3, 4, 6);  // by the lowest three bits
        value.part[i] = (float_part)_mm256_permutevar8x32_ps(table, (__m256i)code.part[i]);
#endif
    }
#else
    value = magnitude<1, 1>(code & 7);
#endif
    return WIDTH == LANES ? value : from_bits(bits(value) | shift_left<28>(code & 8));
}

// Rows `row` to `row` + 15 of a segment; where it has fewer, its last row stands in, for nobody looks at those outputs.
struct Source {
    const Segment* segment;
    int64_t row, width;

    int64_t row_of(int64_t i) const { return std::min(row + i, segment->rows - 1); }
    const uint8_t* at(int64_t i, int64_t bytes_of_row, int64_t offset) const {
        return segment->data + row_of(i) * bytes_of_row + offset;
    }
};

void fp8_tiles(const Source& s, int64_t k0, int64_t k1, float* out) {
    const uint8_t* scales = s.segment->scale + s.row / 32 * (s.width / 32);
    for (int64_t k = k0; k < k1; k += LANES) {
        bytes16 t[LANES];
        for (int64_t i = 0; i < LANES; i++) t[i] = load_as<bytes16>(s.at(i, s.width, k));
        for (int round = 0; round < 4; round++) transpose_round<bytes16>(t);
        const vf scale = powers_of_two(splat(int32_t(scales[k / 32])));
        for (int i = 0; i < LANES; i++, out += LANES) store(out, e4m3(widen(t[i])) * scale);
    }
}

void fp4_rows(const Source& s, int64_t k0, int64_t k1, float* out) {
    const int64_t groups = s.width / 32;
    vf scale = zero();
    for (int64_t k = k0; k < k1; k += LANES) {
        if (k % 32 == 0) {
            uint8_t byte[LANES];
            for (int64_t i = 0; i < LANES; i++) byte[i] = s.segment->scale[s.row_of(i) * groups + k / 32];
            scale = powers_of_two(widen(load_as<bytes16>(byte)));
        }
        // 8 bytes of each row: the first round takes two rows to a vector
        bytes16 t[8];
        for (int64_t i = 0; i < 8; i++) {
            const bytes16 a = load_8_bytes(s.at(i, s.width / 2, k / 2)), b = load_8_bytes(s.at(i + 8, s.width / 2, k / 2));
            t[i] = interleave<false, bytes16>(a, b, std::make_index_sequence<16>());
        }
        for (int round = 0; round < 3; round++) transpose_round<bytes16>(t);
        for (int i = 0; i < 8; i++, out += 2 * LANES) {
            store(out, e2m1(widen(t[i] & 15)) * scale);
            store(out + LANES, e2m1(widen(t[i] >> 4)) * scale);
        }
    }
}

void bf16(const Source& s, int64_t k0, int64_t k1, float* out) {
    for (int64_t k = k0; k < k1; k += 8, out += 8 * LANES) {
        words8 t[2][8];
        for (int64_t i = 0; i < LANES; i++) t[i / 8][i % 8] = load_as<words8>(s.at(i, 2 * s.width, 2 * k));
        for (int half = 0; half < 2; half++)
            for (int round = 0; round < 3; round++) transpose_round<words8>(t[half]);
        for (int i = 0; i < 8; i++) store(out + i * LANES, from_bits(shift_left<16>(widen(t[0][i], t[1][i]))));
    }
}

void f32(const Source& s, int64_t k0, int64_t k1, float* out) {
    for (int64_t k = k0; k < k1; k += 4, out += 4 * LANES)
        for (int64_t i = 0; i < LANES; i += 4) {
            floats4 t[4];
            for (int64_t j = 0; j < 4; j++) t[j] = load_as<floats4>(s.at(i + j, 4 * s.width, 4 * k));
            for (int round = 0; round < 2; round++) transpose_round<ints4>(t);
            for (int j = 0; j < 4; j++) std::memcpy(out + j * LANES + i, &t[j], sizeof t[j]);
        }
}

int64_t bytes_of(int64_t format, int64_t values) {
    return format == FP4_ROWS ? values / 2 : format == FP8_TILES ? values : format == BF16 ? 2 * values : 4 * values;
}

struct DecodePanels {
    const Matrix* matrix;
    float* out;
};

}  // namespace

void decode_panel(const Matrix& m, int64_t row, int64_t k0, int64_t k1, float* out) {
    const Segment* segment = m.segments;
    while (row >= segment->rows) row -= (segment++)->rows;
    const Source source = {segment, row, m.in};
    switch (segment->format) {
        case FP8_TILES: return fp8_tiles(source, k0, k1, out);
        case FP4_ROWS: return fp4_rows(source, k0, k1, out);
        case BF16: return bf16(source, k0, k1, out);
        default: return f32(source, k0, k1, out);
    }
}

void prefetch_panel(const Matrix& m, int64_t row, int64_t k0, int64_t k1) {
    const Segment* segment = m.segments;
    while (row >= segment->rows) row -= (segment++)->rows;
    const Source source = {segment, row, m.in};
    const int64_t stride = bytes_of(segment->format, m.in);
    const int64_t first = bytes_of(segment->format, k0), last = bytes_of(segment->format, std::min(k1, m.in));
    for (int64_t i = 0; i < LANES; i++)
        for (int64_t b = first; b < last; b += 64) __builtin_prefetch(source.at(i, stride, b));
}

}  // namespace abyssal

using namespace abyssal;

extern "C" void abyssal_decode_panels(const DecodePanels* a) {
    const Matrix& m = *a->matrix;
    parallel_for(num_panels(m), m.out * m.in, [&](int64_t p) {
        decode_panel(m, p * LANES, 0, m.in, a->out + p * m.in * LANES);
    });
}
