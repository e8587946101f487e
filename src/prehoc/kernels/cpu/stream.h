// The yardstick: how fast this machine's threads read memory.
#pragma once

#include <omp.h>

#include "simd.h"

namespace prehoc {

// the sum of x [count], each thread reading its own stretch
inline float stream(const float* x, int64_t count) {
    constexpr int64_t step = 4 * kLanes;
    float total = 0.0f;
#pragma omp parallel reduction(+ : total)
    {
        const int64_t me = omp_get_thread_num(), all = omp_get_num_threads(), steps = count / step;
        vec held[4] = {};
        for (int64_t i = steps * me / all * step; i < steps * (me + 1) / all * step; i += step)
            for (int k = 0; k < 4; ++k) held[k] += load(x + i + k * kLanes);
        total += sum(held[0] + held[1] + held[2] + held[3]);
    }
    for (int64_t i = count / step * step; i < count; ++i) total += x[i];
    return total;
}

}  // namespace prehoc
