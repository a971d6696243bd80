#include "pool.h"
#include "vec.h"

using namespace abyssal;

namespace {

struct PoolGroups {
    const float *values, *gates;  // [rows, width]
    float* partial;               // [ring, 2, width]
    int64_t width;
    const int32_t* source;  // [groups, ratio]: a row, or -1 - index into `partial`
    int64_t groups, ratio;
    const int32_t *kept_rows, *kept_dst;
    int64_t kept;
    float* out;  // [groups, width]

    const float* at(int64_t token, bool gate) const {
        const int64_t s = source[token];
        return s >= 0 ? (gate ? gates : values) + s * width : partial + ((-1 - s) * 2 + gate) * width;
    }
};

void pool_group(const PoolGroups& a, int64_t g) {
    const int64_t first = g * a.ratio, end = first + a.ratio;
    for (int64_t i = 0; i < a.width; i += LANES) {
        vf peak = load(a.at(first, true) + i);
        for (int64_t t = first + 1; t < end; t++) peak = vmax(peak, load(a.at(t, true) + i));
        vf total = zero(), sum = zero();
        for (int64_t t = first; t < end; t++) {
            const vf w = vexp(load(a.at(t, true) + i) - peak);
            total = total + w;
            sum = fma(w, load(a.at(t, false) + i), sum);
        }
        store(a.out + g * a.width + i, sum / total);
    }
}

}  // namespace

extern "C" void abyssal_pool_groups(const PoolGroups* a) {
    parallel_for(a->groups, a->groups * a->ratio * a->width * 16, [=](int64_t g) { pool_group(*a, g); });
    for (int64_t i = 0; i < a->kept; i++) {
        float* dst = a->partial + a->kept_dst[i] * 2 * a->width;
        std::memcpy(dst, a->values + a->kept_rows[i] * a->width, a->width * sizeof(float));
        std::memcpy(dst + a->width, a->gates + a->kept_rows[i] * a->width, a->width * sizeof(float));
    }
}
