#include "pool.h"
#include "vec.h"

using namespace abyssal;

extern "C" {

// values, gates [rows, width]; partial [ring, 2, width]; source [groups, ratio]: a row, or -1 - index into `partial`
void abyssal_pool_groups(const float* values, const float* gates, float* partial, int64_t width, const int32_t* source,
                         int64_t groups, int64_t ratio, const int32_t* kept_rows, const int32_t* kept_dst, int64_t kept,
                         float* out) {
    parallel_for(groups, groups * ratio * width * 16, [&](int64_t g) {
        auto at = [&](int64_t t, bool gate) {
            const int64_t s = source[g * ratio + t];
            if (s >= 0) return (gate ? gates : values) + s * width;
            return static_cast<const float*>(partial + ((-1 - s) * 2 + gate) * width);
        };
        for (int64_t i = 0; i < width; i += LANES) {
            vf peak = load(at(0, true) + i);
            for (int64_t t = 1; t < ratio; t++) peak = vmax(peak, load(at(t, true) + i));
            vf total = {}, sum = {};
            for (int64_t t = 0; t < ratio; t++) {
                vf w = vexp(load(at(t, true) + i) - peak);
                total += w;
                sum += w * load(at(t, false) + i);
            }
            store(out + g * width + i, sum / total);
        }
    });
    for (int64_t i = 0; i < kept; i++) {
        float* dst = partial + kept_dst[i] * 2 * width;
        std::memcpy(dst, values + kept_rows[i] * width, width * sizeof(float));
        std::memcpy(dst + width, gates + kept_rows[i] * width, width * sizeof(float));
    }
}
}
