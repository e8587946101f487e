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

// read the selected rows of keys and values in the order of decode, fetched as far ahead, and compute nothing
template <class T>
uint32_t gather(const Cache& c, int64_t b, int64_t hkv, int64_t heads, int64_t dim, int64_t dim_v, const int32_t* indices,
                const int32_t* lengths, int64_t width) {
    constexpr int64_t line = 64, bytes = sizeof(uvec);
    uint32_t total = 0;
#pragma omp parallel for schedule(dynamic, 1) reduction(^ : total)
    for (int64_t pair = 0; pair < b * heads; ++pair) {
        const Head<T> head(c, pair / heads, pair % heads / (heads / hkv));
        const int32_t* list = indices + pair * width;
        const int64_t count = lengths[pair];
        uvec held{};
        const auto fetch = [](const T* row, int64_t size) {
            for (int64_t i = 0; i < size; i += line) __builtin_prefetch(reinterpret_cast<const char*>(row) + i);
        };
        const auto read = [&](const T* row, int64_t size) {
            const char* from = reinterpret_cast<const char*>(row);
            for (int64_t i = 0; i + bytes <= size; i += bytes) held ^= *reinterpret_cast<const uvecu*>(from + i);
        };
        const int64_t key = dim * int64_t(sizeof(T)), value = dim_v * int64_t(sizeof(T));
        for (int64_t at = 0; at < count; at += kBlock) {
            const int64_t end = std::min(at + kBlock, count);
            for (int64_t j = at; j < end; ++j) fetch(head.value(list[j]), value), read(head.key(list[j]), key);
            for (int64_t j = at; j < end; ++j) {
                if (j + kBlock < count) fetch(head.key(list[j + kBlock]), key);
                read(head.value(list[j]), value);
            }
        }
        for (int lane = 0; lane < kLanes; ++lane) total ^= held[lane];
    }
    return total;
}

}  // namespace prehoc
