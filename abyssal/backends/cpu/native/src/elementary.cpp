// The functions that kernels are made of, callable by themselves: tests hold them against float64.
#include "softplus.h"
#include "vec.h"

using namespace abyssal;

namespace {

struct Elementary {
    int64_t function;  // 0 exp, 1 sigmoid, 2 silu, 3 softplus
    const float* x;
    int64_t count;  // a multiple of 16
    float* out;
};

}  // namespace

extern "C" void abyssal_elementary(const Elementary* a) {
    for (int64_t i = 0; i < a->count; i += LANES) {
        const vf x = load(a->x + i);
        store(a->out + i, a->function == 0 ? vexp(x) : a->function == 1 ? vsigmoid(x) : a->function == 2 ? vsilu(x) : x);
        if (a->function == 3) softplus16(a->out + i);
    }
}
