// One step of CIS for one layer: gate, growth of the shared sets, and retrieval with dilation where the gate fails.
#pragma once

#include <cmath>
#include <vector>

#include "cheap.h"
#include "dilate.h"
#include "retrieve.h"

namespace prehoc {

struct CisSizes {
    int64_t rows, hkv, heads, groups, dim, sink, local, columns, topk, radius;
    int64_t per_best, width, block_size, frozen;
};

// the state of the layer: sets [B, Hs, width], their lengths and ages [B, Hs] (age < 0: no set), unit anchors [B, H, C]
struct CisState {
    int32_t *indices, *lengths, *age;
    float* anchor;
};

// directions [B, Hkv, D, size] along which the gate sees the queries; null: it compares the queries themselves, size = D
struct Axes {
    const float* at;
    int64_t size;
};

// one head's queries [groups, dim] along its axes: [groups, size]
inline void project(const float* q, const float* axes, int64_t groups, int64_t dim, int64_t size, float* along) {
    std::fill_n(along, groups * size, 0.0f);
    for (int64_t g = 0; g < groups; ++g, q += dim, along += size)
        for (int64_t d = 0; d < dim; ++d)
#pragma omp simd
            for (int64_t w = 0; w < size; ++w) along[w] += q[d] * axes[d * size + w];
}

// unit vectors of what one head's queries are compared by, and their least cosine with the anchors; a zero or no anchor gives
// NaN. `unit` may be `q`.
inline float least_cosine(const float* q, const float* anchor, int64_t groups, int64_t dim, float* unit) {
    float least = 1.0f;
    for (int64_t g = 0; g < groups; ++g, q += dim, anchor += dim, unit += dim) {
        float squares = 0.0f, product = 0.0f;
#pragma omp simd reduction(+ : squares)
        for (int64_t d = 0; d < dim; ++d) squares += q[d] * q[d];
        const float norm = std::sqrt(squares);
        for (int64_t d = 0; d < dim; ++d) unit[d] = q[d] / norm;
#pragma omp simd reduction(+ : product)
        for (int64_t d = 0; d < dim; ++d) product += unit[d] * anchor[d];
        least = product > least || std::isnan(least) ? least : product;
    }
    return least;
}

// let one head's set follow the newest column: append it, or move the last `local` columns on
inline void follow(const CisSizes& s, int32_t* list, int32_t& length) {
    if (!s.frozen) {
        for (int64_t j = std::max<int64_t>(length - s.local, 0); j < length; ++j) ++list[j];
        return;
    }
    const int32_t last = int32_t(s.width) - 1;  // a set past its block is replaced in this very step, so it may overwrite
    list[std::min(length, last)] = int32_t(s.columns) - 1;
    length = std::min(length + 1, last + 1);
}

// with a copy of the keys, what it lacks is added when a head retrieves, and its `rerank` best keys (0: none) are scored exactly
template <class T>
void cis_step(const float* q, const Axes& axes, float scale, double tau, const Cache& c, const CisSizes& s, const Copy& copy,
              int64_t rerank, const int64_t* first, const int64_t* start, const int64_t* critical, const int64_t* best,
              const int64_t* limit, const CisState& state, bool* retrieved, float* cosine) {
    const int64_t pairs = s.rows * s.heads, span = s.groups * s.dim, wide = s.groups * axes.size;
    const int64_t together = s.heads / s.hkv;
    std::vector<float> unit(pairs * wide), scaled(pairs * span);
#pragma omp parallel for schedule(static) if (pairs * span > 16384)
    for (int64_t pair = 0; pair < pairs; ++pair) {
        const float* mine = q + pair * span;
        for (int64_t d = 0; d < span; ++d) scaled[pair * span + d] = mine[d] * scale;
        if (axes.at) {
            const float* own = axes.at + pair / together * s.dim * axes.size;
            project(mine, own, s.groups, s.dim, axes.size, &unit[pair * wide]);
            mine = &unit[pair * wide];
        }
        cosine[pair] = least_cosine(mine, state.anchor + pair * wide, s.groups, axes.size, &unit[pair * wide]);
        int32_t& age = state.age[pair];
        age += age >= 0;
        follow(s, state.indices + pair * s.width, state.lengths[pair]);
        retrieved[pair] = !(cosine[pair] > tau) || age < 0 || age >= s.block_size;
    }
    std::vector<int64_t> chosen;
    for (int64_t pair = 0; pair < pairs; ++pair)
        if (retrieved[pair]) chosen.push_back(pair);
    const int64_t many = int64_t(chosen.size());
    if (!many) return;
    std::vector<int64_t> order(many * s.topk);
    if (copy.codes) code_keys<T>(c, s.rows, s.hkv, s.dim, s.columns, copy);
    const int64_t head = copy.room * s.dim, row = s.hkv * head;
    const Compact cheap{{copy.codes, nullptr, row, head, s.dim, 0, 0, 0}, copy.scales, s.hkv * copy.room, copy.room, rerank};
    retrieve<T>(scaled.data(), c, chosen.data(), many, s.hkv, s.heads, s.groups, s.dim, first, start, s.sink, s.local,
                s.columns, s.topk, false, order.data(), nullptr, copy.codes ? &cheap : nullptr);
#pragma omp parallel for schedule(dynamic, 1)
    for (int64_t i = 0; i < many; ++i) {
        const int64_t pair = chosen[i], b = pair / s.heads;
        state.lengths[pair] =
            dilate(order.data() + i * s.topk, s.topk, first[b], start[b], s.columns, s.sink, s.local, s.radius, best[b], critical[b],
                   limit ? limit[b] : s.columns, s.per_best, s.width, state.indices + pair * s.width);
        state.age[pair] = 0;
        std::copy_n(&unit[pair * wide], wide, state.anchor + pair * wide);
    }
}

}  // namespace prehoc
