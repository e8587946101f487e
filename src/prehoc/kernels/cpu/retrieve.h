// Exact retrieval: score a head's keys, put the scores of a group on one scale, take the best.
#pragma once

#include <memory>
#include <vector>

#include <omp.h>

#include "rows.h"
#include "select.h"
#include "tiles.h"

namespace prehoc {

// logits of the keys column(0) ... column(to - 1) of one head for G queries q [G, dim], out[g * stride + j]
template <class T>
void score_columns(const float* q, const Head<T>& head, int64_t groups, int64_t dim, Columns column, int64_t to, float* out,
                   int64_t stride) {
    if (to <= 0) return;
    Floats made(groups * kBlock), query(groups * padded<T>(dim));
    arrange<T>(q, groups, dim, query.data());
    Rows<T> rows[2] = {Rows<T>(dim), Rows<T>(dim)};
    const auto find = [&](int64_t at, Rows<T>& now) {
        const int64_t count = std::min(kBlock, to - at);
        now.keys(head, dim, count, [&](int64_t j) { return column(at + j); });
    };
    find(0, rows[0]);
    with_size(std::max<int64_t>(dim, Chunk<T>::width), [&](auto wide) {
        for (int64_t at = 0, turn = 0; at < to; at += kBlock, turn ^= 1) {
            const int64_t count = std::min(kBlock, to - at);
            const bool more = at + kBlock < to;
            if (more) find(at + kBlock, rows[turn ^ 1]);
            if (head.k_dim == 1)
                score(rows[turn].at, rows[more ? turn ^ 1 : turn].at, count, query.data(), groups, wide, made.data(), kBlock);
            else score_strips(rows[turn], head.k_dim, count, q, groups, dim, made.data(), kBlock);
            for (int64_t g = 0; g < groups; ++g) std::copy_n(made.data() + g * kBlock, count, out + g * stride + at);
        }
    });
}

// the same for the columns [from, to)
template <class T>
void score_keys(const float* q, const Head<T>& head, int64_t groups, int64_t dim, int64_t from, int64_t to, float* out,
                int64_t stride) {
    score_columns(q, head, groups, dim, Columns{nullptr, 0, 0, from}, to - from, out, stride);
}

// lse [G] of logits x [G, stride] of `count` visible keys and s [G, sink] of the sinks
inline std::vector<float> group_lse(const float* x, int64_t stride, const float* s, int64_t sink, int64_t groups, int64_t count) {
    std::vector<float> lse(groups);
    for (int64_t g = 0; g < groups; ++g)
        lse[g] = log_sum_exp(x + g * stride, count, sink ? log_sum_exp(s + g * sink, sink, kNever) : kNever);
    return lse;
}

// logits x [G, stride] of `count` keys become one row of group scores, in x: logit minus log-sum-exp of its query head, merged over
// the group by its maximum or its mean weight
inline void merge_group(float* x, int64_t stride, const std::vector<float>& lse, int64_t count, bool mean) {
    const int64_t groups = int64_t(lse.size());
    for (int64_t j = 0; j < count; ++j) x[j] -= lse[0];
    for (int64_t g = 1; g < groups && !mean; ++g) {
        const float* other = x + g * stride;
        for (int64_t j = 0; j < count; ++j) x[j] = std::max(x[j], other[j] - lse[g]);
    }
    for (int64_t j = 0; j < count && mean && groups > 1; ++j) {
        float top = x[j], total = 0.0f;
        for (int64_t g = 1; g < groups; ++g) top = std::max(top, x[g * stride + j] -= lse[g]);
        for (int64_t g = 0; g < groups; ++g) total += std::exp(x[g * stride + j] - top);
        x[j] = top + std::log(total);
    }
}

// order [r, topk] for the chosen flat (row, head) pairs; row i sees the columns start[i] to ends[i] (null: n)
template <class T>
void retrieve(const float* q, const Cache& c, const int64_t* chosen, int64_t r, int64_t hkv, int64_t heads, int64_t groups,
              int64_t dim, const int64_t* first, const int64_t* start, int64_t sink, int64_t local, int64_t n, int64_t topk,
              bool need_lse, bool mean, int64_t* order, const int32_t* ends = nullptr) {
    const int64_t threads = omp_get_max_threads();
    const auto begin_row = [&](int64_t i, int64_t piece, int64_t pieces, float* x) {
        const int64_t row = chosen[i] / heads, begin = start[row], count = (ends ? ends[row] : n) - begin;
        const int64_t from = count * piece / pieces, to = count * (piece + 1) / pieces;
        score_keys(q + chosen[i] * groups * dim, Head<T>(c, row, chosen[i] % heads / (heads / hkv)), groups, dim, begin + from,
                   begin + to,
                   x + from, n);
    };
    const auto finish = [&](int64_t i, float* x) {
        const int64_t row = chosen[i] / heads, end = ends ? ends[row] : n, count = end - start[row], middle = count - local;
        if (need_lse && middle > 0) {
            std::vector<float> sinks(groups * sink);
            score_keys(q + chosen[i] * groups * dim, Head<T>(c, row, chosen[i] % heads / (heads / hkv)), groups, dim, first[row],
                       first[row] + sink, sinks.data(), sink);
            merge_group(x, n, group_lse(x, n, sinks.data(), sink, groups, count), middle, mean);
        }
        best_columns(x, middle, start[row], topk, order + i * topk);
    };
    if (r >= 2 * threads) {  // one row of scores a worker
#pragma omp parallel
        {
            const std::unique_ptr<float[]> x(new float[groups * n]);
#pragma omp for schedule(dynamic, 1)
            for (int64_t i = 0; i < r; ++i) {
                begin_row(i, 0, 1, x.get());
                finish(i, x.get());
            }
        }
        return;
    }
    // few heads: the workers share each row
    const int64_t pieces = std::max<int64_t>(1, std::min((4 * threads + r - 1) / std::max<int64_t>(r, 1), n / kSplit));
    const std::unique_ptr<float[]> x(new float[r * groups * n]);
#pragma omp parallel
    {
#pragma omp for schedule(dynamic, 1)
        for (int64_t task = 0; task < r * pieces; ++task)
            begin_row(task / pieces, task % pieces, pieces, x.get() + task / pieces * groups * n);
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < r; ++i) finish(i, x.get() + i * groups * n);
    }
}

}  // namespace prehoc
