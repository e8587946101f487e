// Attention of one query a head over ranges or lists of keys, read in place: online softmax by blocks, merged over pieces.
#pragma once

#include <vector>

#include <omp.h>

#include "simd.h"

namespace prehoc {

constexpr int64_t kAhead = 12;  // keys between a prefetch and its use

// running softmax of G queries: largest logit, sum of exponentials, weighted sum of values
struct Partial {
    float* largest;  // [G]
    float* sum;      // [G]
    float* values;   // [G, Dv]
};

// add a block of keys: scores [G, kBlock] become weights
template <class T>
inline void absorb(float* scores, int64_t count, const T* const* rows, int64_t groups, int64_t dim, Partial part) {
    for (int64_t g = 0; g < groups; ++g) {
        float* s = scores + g * kBlock;
        const float top = largest(s, count, part.largest[g]);
        if (top == kNever) {
            std::fill_n(s, count, 0.0f);
            continue;
        }
        const float shrink = std::exp(part.largest[g] - top);
        if (shrink != 1.0f) {
            part.sum[g] *= shrink;
            float* acc = part.values + g * dim;
#pragma omp simd
            for (int64_t d = 0; d < dim; ++d) acc[d] *= shrink;
        }
        part.largest[g] = top;
        part.sum[g] += exponentials(s, count, top);
    }
    float* acc = part.values;
    for (; groups >= 4; groups -= 4, scores += 4 * kBlock, acc += 4 * dim) weigh<4>(scores, rows, count, dim, acc);
    if (groups == 3) weigh<3>(scores, rows, count, dim, acc);
    if (groups == 2) weigh<2>(scores, rows, count, dim, acc);
    if (groups == 1) weigh<1>(scores, rows, count, dim, acc);
}

// attend the keys column(j), j in [begin, end), of one selection head
template <class T, class Column>
void attend(const float* q, const T* k, const T* v, const Cache& c, int64_t groups, int64_t dim, int64_t dim_v,
            int64_t begin, int64_t end, Column column, Partial part) {
    std::vector<float> scores(groups * kBlock);
    const T* rows[kBlock];
    constexpr int64_t line = 64 / sizeof(T);
    for (int64_t at = begin; at < end; at += kBlock) {
        const int64_t count = std::min(kBlock, end - at);
        for (int64_t j = 0; j < count; ++j) {
            const int64_t col = column(at + j);
            rows[j] = v + col * c.v_col;
            if (at + j + kAhead < end) {
                const T* next = k + column(at + j + kAhead) * c.k_col;
                for (int64_t d = 0; d < dim; d += line) __builtin_prefetch(next + d);
            }
            for (int64_t d = 0; d < dim_v; d += line) __builtin_prefetch(rows[j] + d);  // read after this block's scores
            dots(k + col * c.k_col, q, groups, dim, scores.data() + j, kBlock);
        }
        absorb(scores.data(), count, rows, groups, dim_v, part);
    }
}

struct Buffers {
    std::vector<float> data;
    int64_t groups, dim;
    Buffers(int64_t tasks, int64_t g, int64_t d) : data(tasks * g * (d + 2)), groups(g), dim(d) {
        for (int64_t t = 0; t < tasks; ++t) std::fill_n(at(t).largest, g, kNever);
    }
    Partial at(int64_t task) {
        float* p = data.data() + task * groups * (dim + 2);
        return {p, p + groups, p + 2 * groups};
    }
};

// merge the partial softmaxes [first, last) of one head into out [G, Dv] and lse [G]
inline void merge(Buffers& parts, int64_t first, int64_t last, float* out, float* lse) {
    for (int64_t g = 0; g < parts.groups; ++g) {
        float top = kNever;
        for (int64_t t = first; t < last; ++t) top = std::max(top, parts.at(t).largest[g]);
        float total = 0.0f;
        float* target = out + g * parts.dim;
        std::fill_n(target, parts.dim, 0.0f);
        for (int64_t t = first; t < last; ++t) {
            const Partial p = parts.at(t);
            if (p.largest[g] == kNever) continue;
            const float w = std::exp(p.largest[g] - top);
            total += w * p.sum[g];
            for (int64_t d = 0; d < parts.dim; ++d) target[d] += w * p.values[g * parts.dim + d];
        }
        for (int64_t d = 0; d < parts.dim; ++d) target[d] = total > 0 ? target[d] / total : 0.0f;
        lse[g] = top + std::log(total);
    }
}

template <class T>
void decode(const float* q, const Cache& c, int64_t b, int64_t hkv, int64_t heads, int64_t groups, int64_t dim,
            int64_t dim_v, const int64_t* first, const int64_t* start, int64_t sink, int64_t n, const int32_t* indices,
            const int32_t* lengths, int64_t width, float* out, float* lse) {
    const int64_t pairs = b * heads, threads = omp_get_max_threads();
    // one head's keys: a list, or sinks and a range; long ones are split so that every thread has work
    const int64_t longest = indices ? width : n;
    const int64_t wanted = (2 * threads + pairs - 1) / pairs;
    const int64_t splits = std::max<int64_t>(1, std::min(wanted, longest / kSplit));
    Buffers parts(pairs * splits, groups, dim_v);
#pragma omp parallel for schedule(dynamic, 1)
    for (int64_t task = 0; task < pairs * splits; ++task) {
        const int64_t pair = task / splits, piece = task % splits, row = pair / heads, head = pair % heads;
        const int64_t kv = head / (heads / hkv);
        const T* k = static_cast<const T*>(c.k) + row * c.k_row + kv * c.k_head;
        const T* v = static_cast<const T*>(c.v) + row * c.v_row + kv * c.v_head;
        const float* query = q + pair * groups * dim;
        if (indices) {
            const int32_t* list = indices + pair * width;
            const int64_t count = lengths[pair];
            attend<T>(query, k, v, c, groups, dim, dim_v, count * piece / splits, count * (piece + 1) / splits,
                      [list](int64_t j) { return int64_t(list[j]); }, parts.at(task));
        } else {
            const int64_t lead = start[row] > first[row] + sink ? sink : 0;
            const int64_t begin = lead ? start[row] : (start[row] > first[row] + sink ? start[row] : first[row]);
            const int64_t count = lead + n - begin;
            const int64_t origin = first[row];
            attend<T>(query, k, v, c, groups, dim, dim_v, count * piece / splits, count * (piece + 1) / splits,
                      [=](int64_t j) { return j < lead ? origin + j : begin + j - lead; }, parts.at(task));
        }
    }
    for (int64_t pair = 0; pair < pairs; ++pair)
        merge(parts, pair * splits, (pair + 1) * splits, out + pair * groups * dim_v, lse + pair * groups);
}

}  // namespace prehoc
