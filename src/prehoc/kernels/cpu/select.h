// The k largest of a row of scores, best first, equal ones by lower column.
#pragma once

#include <vector>

#include "simd.h"

namespace prehoc {

constexpr int kDigit = 11;  // bits that one pass of counting tells apart

// float32 in the order of unsigned integers; both zeros are one
inline uint32_t ordered(float score) {
    score += 0.0f;  // -0.0 becomes 0.0
    uint32_t bits;
    std::memcpy(&bits, &score, 4);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

inline int bits_of(uint32_t x) { return x ? 32 - __builtin_clz(x) : 0; }

// the take-th largest of keys, and how many are larger than it; work is overwritten
inline std::pair<uint32_t, int64_t> threshold(const uint32_t* keys, int64_t count, int64_t take, std::vector<uint32_t>& work) {
    uint32_t low = ~0u, high = 0;
    for (int64_t j = 0; j < count; ++j) low = std::min(low, keys[j]), high = std::max(high, keys[j]);
    int64_t above = 0;
    for (;;) {  // bins of equal width over [low, high]; the one that holds the threshold is looked into
        const int shift = std::max(bits_of(high - low) - kDigit, 0);
        int32_t held[2][1 << kDigit] = {};  // two, as neighbours often fall into the same bin
        for (int64_t j = 0; j + 1 < count; j += 2) {
            ++held[0][(keys[j] - low) >> shift];
            ++held[1][(keys[j + 1] - low) >> shift];
        }
        if (count % 2) ++held[0][(keys[count - 1] - low) >> shift];
        int64_t bin = (high - low) >> shift;
        for (; above + held[0][bin] + held[1][bin] < take; --bin) above += held[0][bin] + held[1][bin];
        const uint32_t from = low + (uint32_t(bin) << shift);
        if (shift == 0) return {from, above};
        const uint32_t width = (1u << shift) - 1;
        std::vector<uint32_t> inside(held[0][bin] + held[1][bin] + 1);
        int64_t found = 0;
        for (int64_t j = 0; j < count; ++j) {
            inside[found] = keys[j];
            found += keys[j] - from <= width;
        }
        work.swap(inside);
        keys = work.data(), count = found, low = from, high = from + width;
    }
}

// sort pairs (key, column) by falling key, stable: columns that were ascending decide ties
inline void sort_down(std::vector<uint64_t>& pairs, std::vector<uint64_t>& work) {
    uint32_t all = 0;
    for (uint64_t pair : pairs) all |= uint32_t(pair >> 32) ^ uint32_t(pairs[0] >> 32);
    work.resize(pairs.size());
    for (int shift = 0; shift < bits_of(all); shift += kDigit) {
        constexpr uint32_t mask = (1u << kDigit) - 1;
        int32_t at[1 << kDigit] = {}, total = 0;
        for (uint64_t pair : pairs) ++at[mask - (pair >> 32 >> shift & mask)];
        for (int32_t& bin : at) {
            const int32_t held = bin;
            bin = total;
            total += held;
        }
        for (uint64_t pair : pairs) work[at[mask - (pair >> 32 >> shift & mask)]++] = pair;
        pairs.swap(work);
    }
}

// the columns of the `topk` best of scores x [count], best first, -1 behind the last; `begin` is the column of x[0]
inline void best_columns(const float* x, int64_t count, int64_t begin, int64_t topk, int64_t* order) {
    const int64_t take = std::min(topk, std::max<int64_t>(count, 0));
    std::fill(order + take, order + topk, -1);
    if (take == 0) return;
    std::vector<uint32_t> keys(count), work;
    for (int64_t j = 0; j < count; ++j) keys[j] = ordered(x[j]);
    const auto [least, above] = threshold(keys.data(), count, take, work);
    std::vector<uint64_t> pairs(take + 1), sorted;
    int64_t found = 0, ties = take - above;
    for (int64_t j = 0; j < count; ++j) {
        pairs[found] = uint64_t(keys[j]) << 32 | uint32_t(j);
        const bool tie = keys[j] == least && ties > 0;
        ties -= tie;
        found += keys[j] > least || tie;
    }
    pairs.resize(take);
    sort_down(pairs, sorted);
    for (int64_t j = 0; j < take; ++j) order[j] = begin + int64_t(uint32_t(pairs[j]));
}

}  // namespace prehoc
