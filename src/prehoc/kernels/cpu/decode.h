// Attention of one query a head over ranges or lists of keys, read in place: online softmax by blocks, merged over pieces.
#pragma once

#include <vector>

#include <omp.h>

#include "rows.h"
#include "tiles.h"

namespace prehoc {

// running softmax of G queries: largest logit, sum of exponentials, weighted sum of values
struct Partial {
    float* largest;  // [G]
    float* sum;      // [G]
    float* values;   // [G, padded Dv], in the order of the chunks
};

// scores [G, kBlock] of a block of keys become weights, what was summed before shrinks to the new largest logit
inline void soften(float* scores, int64_t count, int64_t groups, int64_t size, Partial part) {
    const int64_t wide = round_up(count, kLanes);
    for (int64_t g = 0; g < groups; ++g) {
        float* s = scores + g * kBlock;
        std::fill(s + count, s + wide, kNever);
        const float top = largest(s, wide, part.largest[g]);
        if (top == kNever) {
            std::fill_n(s, wide, 0.0f);
            continue;
        }
        if (top > part.largest[g]) {
            const float shrink = std::exp(part.largest[g] - top);
            part.sum[g] *= shrink;
            float* acc = part.values + g * size;
            for (int64_t i = 0; i < size; i += kLanes) store(acc + i, load(acc + i) * shrink);
        }
        part.largest[g] = top;
        vec all{};
        for (int64_t j = 0; j < wide; j += kLanes) {
            const vec e = exponential(load(s + j) - top);
            store(s + j, e);
            all += e;
        }
        part.sum[g] += sum(all);
    }
}

// attend the keys column(j), j in [begin, end), of one selection head; while a block's keys are scored its values are fetched,
// while its values are weighed the next block's keys. logits, if not null, receives logit j of query g at g * stride + j
template <class T, class Dim>
void attend(const float* q, const Head<T>& head, int64_t groups, Dim dim, Dim dim_v, int64_t begin, int64_t end, Columns column,
            Partial part, float* logits = nullptr, int64_t stride = 0) {
    if (begin >= end) return;
    Floats scores(groups * kBlock), query(groups * padded<T>(dim));
    arrange<T>(q, groups, dim, query.data());
    Rows<T> keys[2] = {Rows<T>(dim), Rows<T>(dim)}, values[2] = {Rows<T>(dim_v), Rows<T>(dim_v)};
    const auto find = [&](int64_t at, int64_t count, Rows<T>& k, Rows<T>& v) {
        const auto from = [&](int64_t j) { return column(at + j); };
        k.keys(head, dim, count, from);
        v.values(head, dim_v, count, from);
    };
    find(begin, std::min(kBlock, end - begin), keys[0], values[0]);
    for (int64_t at = begin, turn = 0; at < end; at += kBlock, turn ^= 1) {
        const int64_t count = std::min(kBlock, end - at), follow = std::min(kBlock, end - at - kBlock);
        const T *const *k = keys[turn].at, *const *v = values[turn].at, *const *next = v;
        const auto run = [&](auto wide_k, auto wide_v) {
            if (head.k_dim == 1) score(k, v, count, query.data(), groups, wide_k, scores.data(), kBlock);
            else score_strips(keys[turn], head.k_dim, count, q, groups, dim, scores.data(), kBlock);
            if (logits)
                for (int64_t g = 0; g < groups; ++g)
                    std::copy_n(scores.data() + g * kBlock, count, logits + g * stride + at);
            soften(scores.data(), count, groups, padded<T>(dim_v), part);
            if (follow > 0) {
                find(at + kBlock, follow, keys[turn ^ 1], values[turn ^ 1]);
                if (head.k_dim == 1) next = keys[turn ^ 1].at;
            }
            weigh(scores.data(), v, next, count, groups, wide_v, part.values);
        };
        if constexpr (std::is_same_v<Dim, int64_t>)
            run(std::max<int64_t>(dim, Chunk<T>::width), std::max<int64_t>(dim_v, Chunk<T>::width));
        else run(dim, dim_v);
    }
}

struct Buffers {
    std::vector<float> data;
    int64_t groups, size;  // size: padded Dv
    Buffers(int64_t tasks, int64_t g, int64_t d) : data(tasks * g * (d + 2)), groups(g), size(d) {
        for (int64_t t = 0; t < tasks; ++t) std::fill_n(at(t).largest, g, kNever);
    }
    Partial at(int64_t task) {
        float* p = data.data() + task * groups * (size + 2);
        return {p, p + groups, p + 2 * groups};
    }
};

// merge the partial softmaxes [first, last) of one head into out [G, Dv] and lse [G]
template <class T>
void merge(Buffers& parts, int64_t first, int64_t last, int64_t dim_v, float* out, float* lse) {
    std::vector<float> all(parts.size);
    for (int64_t g = 0; g < parts.groups; ++g) {
        float top = kNever, total = 0.0f;
        for (int64_t t = first; t < last; ++t) top = std::max(top, parts.at(t).largest[g]);
        std::fill(all.begin(), all.end(), 0.0f);
        for (int64_t t = first; t < last; ++t) {
            const Partial p = parts.at(t);
            if (p.largest[g] == kNever) continue;
            const float w = std::exp(p.largest[g] - top);
            total += w * p.sum[g];
            for (int64_t d = 0; d < parts.size; ++d) all[d] += w * p.values[g * parts.size + d];
        }
        rearrange<T>(all.data(), dim_v, total > 0 ? 1.0f / total : 0.0f, out + g * dim_v);
        lse[g] = top + std::log(total);
    }
}

// weights [B, heads, n], if not null and all keys are read: each key's attention, summed over the queries of its head
template <class T>
void decode(const float* q, const Cache& c, int64_t b, int64_t hkv, int64_t heads, int64_t groups, int64_t dim,
            int64_t dim_v, const int64_t* first, const int64_t* start, int64_t sink, int64_t n, const int32_t* indices,
            const int32_t* lengths, int64_t width, float* out, float* lse, float* weights = nullptr) {
    const int64_t pairs = b * heads, threads = omp_get_max_threads();
    // one head's keys: a list, or sinks and a range; long ones are split so that every thread has work
    const int64_t longest = indices ? width : n;
    const int64_t wanted = (4 * threads + pairs - 1) / pairs;
    const int64_t splits = std::max<int64_t>(1, std::min(wanted, longest / kSplit));
    Buffers parts(pairs * splits, groups, padded<T>(dim_v));
    std::vector<float> logits(weights ? pairs * groups * n : 0);
    with_size(dim == dim_v ? dim : 0, [&](auto constant) {
        using Dim = decltype(constant);
#pragma omp parallel for schedule(dynamic, 1)
        for (int64_t task = 0; task < pairs * splits; ++task) {
            const int64_t pair = task / splits, piece = task % splits, row = pair / heads;
            Columns columns{indices ? indices + pair * width : nullptr, 0, first[row], first[row]};
            int64_t count = indices ? lengths[pair] : 0;
            if (!indices) {
                if (start[row] > first[row] + sink) columns.lead = sink, columns.begin = start[row];
                count = columns.lead + (lengths ? lengths[row] : n) - columns.begin;
            }
            attend<T, Dim>(q + pair * groups * dim, Head<T>(c, row, pair % heads / (heads / hkv)), groups, size_as<Dim>(dim),
                           size_as<Dim>(dim_v),
                           count * piece / splits, count * (piece + 1) / splits, columns, parts.at(task),
                           weights ? logits.data() + pair * groups * n + first[row] : nullptr, n);
        }
    });
    for (int64_t pair = 0; pair < pairs; ++pair)
        merge<T>(parts, pair * splits, (pair + 1) * splits, dim_v, out + pair * groups * dim_v, lse + pair * groups);
    if (!weights) return;
#pragma omp parallel for schedule(dynamic, 1)
    for (int64_t pair = 0; pair < pairs; ++pair) {
        float* to = weights + pair * n;
        std::fill_n(to, n, 0.0f);
        for (int64_t g = 0; g < groups; ++g) {
            const float* from = logits.data() + (pair * groups + g) * n;
            const float all = lse[pair * groups + g];
            int64_t j = first[pair / heads];
            for (; j + kLanes <= n; j += kLanes) store(to + j, load(to + j) + exponential(load(from + j) - all));
            for (; j < n; ++j) to[j] += std::exp(from[j] - all);
        }
    }
}

}  // namespace prehoc
