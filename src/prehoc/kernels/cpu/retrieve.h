// Exact retrieval: score a head's keys, put the scores of a group on one scale, take the best.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include <omp.h>

#include "simd.h"

namespace prehoc {

// the order of float32 scores as unsigned integers; the complement of the index decides ties for the lower one
inline uint64_t sortable(float score, int64_t index) {
    score += 0.0f;  // -0.0 becomes 0.0
    uint32_t bits;
    std::memcpy(&bits, &score, 4);
    bits = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return uint64_t(bits) << 32 | uint32_t(~uint32_t(index));
}

// move the `take` largest keys to the front, in falling order: bins of the leading bits leave little to partition
inline void select(std::vector<uint64_t>& keys, int64_t take) {
    constexpr int kShift = 52;
    const auto larger = std::greater<uint64_t>();
    std::vector<int64_t> held(size_t(1) << (64 - kShift), 0);
    for (uint64_t key : keys) ++held[key >> kShift];
    int64_t above = 0;
    size_t bin = held.size();
    while (bin > 0 && above < take) above += held[--bin];
    // everything in higher bins is in; the bin itself is partitioned
    std::vector<uint64_t> chosen, border;
    chosen.reserve(above);
    for (uint64_t key : keys) {
        if (key >> kShift > bin) chosen.push_back(key);
        else if (key >> kShift == bin) border.push_back(key);
    }
    const int64_t open = take - int64_t(chosen.size());
    if (open < int64_t(border.size())) std::nth_element(border.begin(), border.begin() + open, border.end(), larger);
    chosen.insert(chosen.end(), border.begin(), border.begin() + open);
    std::sort(chosen.begin(), chosen.end(), larger);
    std::copy(chosen.begin(), chosen.end(), keys.begin());
}

// logits [G, stride] of the keys [from, to) of one head; k is the head's column 0, out the place of column `from`
template <class T>
void score_keys(const float* q, const T* k, int64_t k_col, int64_t groups, int64_t dim, int64_t from, int64_t to, float* out,
                int64_t stride) {
    for (int64_t col = from; col < to; ++col) dots(k + col * k_col, q, groups, dim, out + col - from, stride);
}

// logits x [G, stride] of `count` visible keys and s [G, sink] of the sinks become one row of group scores of the first `middle`
// keys, in x: logit minus log-sum-exp of its query head, merged over the group by its maximum or its mean weight
inline void merge_group(float* x, int64_t stride, const float* s, int64_t sink, int64_t groups, int64_t count, int64_t middle,
                        bool mean) {
    for (int64_t g = 0; g < groups; ++g) {
        float* mine = x + g * stride;
        const float lse = log_sum_exp(mine, count, sink ? log_sum_exp(s + g * sink, sink, kNever) : kNever);
        for (int64_t j = 0; j < middle; ++j) mine[j] -= lse;
    }
    for (int64_t j = 0; j < middle; ++j) {
        float top = x[j];
        for (int64_t g = 1; g < groups; ++g) top = std::max(top, x[g * stride + j]);
        if (mean && groups > 1) {
            float total = 0.0f;
            for (int64_t g = 0; g < groups; ++g) total += std::exp(x[g * stride + j] - top);
            top += std::log(total);
        }
        x[j] = top;
    }
}

// the columns of the `topk` best of scores x [middle], best first, -1 behind the last; `begin` is the column of x[0]
inline void best_columns(const float* x, int64_t middle, int64_t begin, int64_t topk, int64_t* order) {
    std::vector<uint64_t> keys(std::max<int64_t>(middle, 0));
    for (int64_t j = 0; j < middle; ++j) keys[j] = sortable(x[j], j);
    const int64_t take = std::min<int64_t>(topk, keys.size());
    select(keys, take);
    for (int64_t j = 0; j < topk; ++j) order[j] = j < take ? begin + int64_t(uint32_t(~uint32_t(keys[j]))) : -1;
}

// order [r, topk] for the chosen flat (row, head) pairs
template <class T>
void retrieve(const float* q, const Cache& c, const int64_t* chosen, int64_t r, int64_t hkv, int64_t heads, int64_t groups,
              int64_t dim, const int64_t* first, const int64_t* start, int64_t sink, int64_t local, int64_t n, int64_t topk,
              bool need_lse, bool mean, int64_t* order) {
    const int64_t threads = omp_get_max_threads();
    const int64_t pieces = std::max<int64_t>(1, std::min((2 * threads + r - 1) / r, n / kSplit));
    const std::unique_ptr<float[]> logits(new float[r * groups * n]), sinks(new float[r * groups * std::max<int64_t>(sink, 1)]);
#pragma omp parallel for schedule(dynamic, 1)
    for (int64_t task = 0; task < r * pieces; ++task) {
        const int64_t i = task / pieces, piece = task % pieces, pair = chosen[i], row = pair / heads;
        const int64_t kv = pair % heads / (heads / hkv), begin = start[row], count = n - begin;
        const T* k = static_cast<const T*>(c.k) + row * c.k_row + kv * c.k_head;
        const float* query = q + pair * groups * dim;
        const int64_t from = count * piece / pieces, to = count * (piece + 1) / pieces;
        score_keys(query, k, c.k_col, groups, dim, begin + from, begin + to, logits.get() + i * groups * n + from, n);
        if (piece == 0 && need_lse)
            for (int64_t s = 0; s < sink; ++s)
                dots(k + std::min(first[row] + s, n - 1) * c.k_col, query, groups, dim, sinks.get() + i * groups * sink + s,
                     sink);
    }
#pragma omp parallel for schedule(dynamic, 1)
    for (int64_t i = 0; i < r; ++i) {
        const int64_t begin = start[chosen[i] / heads], count = n - begin, middle = count - local;
        float* x = logits.get() + i * groups * n;
        if (need_lse) merge_group(x, n, sinks.get() + i * groups * sink, sink, groups, count, middle, mean);
        best_columns(x, middle, begin, topk, order + i * topk);
    }
}

}  // namespace prehoc
