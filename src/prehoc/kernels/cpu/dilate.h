// Dilation: sinks, the best keys with the neighbours of the very best, and the local keys, as one ascending list a head.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

namespace prehoc {

// list [width] of one head from order [k], -1 behind; returns its length. See the reference backend for what the numbers mean;
// a limit of n or more is none
inline int32_t dilate(const int64_t* order, int64_t k, int64_t first, int64_t start, int64_t n, int64_t sink, int64_t local,
                      int64_t radius, int64_t best, int64_t critical, int64_t limit, int64_t per_best, int64_t width,
                      int32_t* list) {
    // the number of critical keys from which on a column belongs
    std::vector<int32_t> entry(n, std::numeric_limits<int32_t>::max());
    for (int64_t j = 0; j < k; ++j)
        if (order[j] >= 0) entry[order[j]] = int32_t(j + 1);
    for (int64_t j = 0; j < std::min(best, k); ++j) {
        if (order[j] < 0) continue;
        const int32_t at = int32_t((j + 1) * per_best);
        for (int64_t near = std::max(order[j] - radius, start); near <= std::min(order[j] + radius, n - local - 1); ++near)
            if (near != order[j]) entry[near] = std::min(entry[near], at);
    }
    for (int64_t col = std::max<int64_t>(n - local, 0); col < n; ++col) entry[col] = 0;
    for (int64_t col = first; col < std::min(first + sink, n); ++col) entry[col] = 0;
    std::vector<int32_t> some(n + 1);  // columns that may belong; without branches, which these would mislead
    int64_t many = 0, allowed = critical;
    for (int64_t col = 0; col < n; ++col) {
        some[many] = int32_t(col);
        many += entry[col] <= critical;
    }
    if (limit < n) {
        std::vector<int64_t> arrivals(k + 2, 0);
        for (int64_t j = 0; j < many; ++j) ++arrivals[std::min<int64_t>(entry[some[j]], k + 1)];
        int64_t held = arrivals[0], fits = 0;
        while (fits < k && held + arrivals[fits + 1] <= limit) held += arrivals[++fits];
        allowed = std::min(allowed, fits);
    }
    int64_t count = 0;
    for (int64_t j = 0; j < many; ++j) {
        some[count] = some[j];
        count += entry[some[j]] <= allowed;
    }
    std::copy_n(some.begin(), count, list);
    std::fill(list + count, list + width, -1);
    return int32_t(count);
}

}  // namespace prehoc
