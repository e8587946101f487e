// The yardsticks: how fast this machine's threads read memory, in order and where a selection points.
#pragma once

#include <omp.h>

#include "rows.h"

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

// read the selected rows of keys and values as decode does, long enough ahead, and compute nothing
template <class T>
uint32_t gather(const Cache& c, int64_t b, int64_t hkv, int64_t heads, int64_t dim, int64_t dim_v, const int32_t* indices,
                const int32_t* lengths, int64_t width) {
    constexpr int64_t ahead = 32, line = 64, bytes = sizeof(uvec);  // rows ahead: with more nothing is faster
    uint32_t total = 0;
#pragma omp parallel for schedule(dynamic, 1) reduction(^ : total)
    for (int64_t pair = 0; pair < b * heads; ++pair) {
        const Head<T> head(c, pair / heads, pair % heads / (heads / hkv));
        const int32_t* list = indices + pair * width;
        uvec held{};
        const auto pass = [&](auto row, int64_t size) {
            for (int64_t j = 0; j < lengths[pair]; ++j) {
                if (j + ahead < lengths[pair])
                    for (int64_t i = 0; i < size; i += line) __builtin_prefetch(row(list[j + ahead]) + i);
                const char* from = row(list[j]);
                for (int64_t i = 0; i + bytes <= size; i += bytes) held ^= *reinterpret_cast<const uvecu*>(from + i);
            }
        };
        pass([&](int64_t col) { return reinterpret_cast<const char*>(head.key(col)); }, dim * int64_t(sizeof(T)));
        pass([&](int64_t col) { return reinterpret_cast<const char*>(head.value(col)); }, dim_v * int64_t(sizeof(T)));
        for (int lane = 0; lane < kLanes; ++lane) total ^= held[lane];
    }
    return total;
}

}  // namespace prehoc
