// Retrieval: score a head's keys, exactly or by a compact copy, put the scores of a group on one scale, take the best.
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

// a compact copy of the keys: codes laid out as the keys are, with strides of their own, and scales [B, Hkv, n] at
// row * row + head * head, their columns side by side. It is scored first, and the `rerank` best by it exactly (0: none).
struct Compact {
    Cache codes;
    const float* scales;
    int64_t row, head, rerank;
};

// the `rerank` best columns by the scores x [middle], ranked again by exact ones
template <class T>
void rank_again(const float* q, const Head<T>& head, int64_t groups, int64_t dim, const float* x, int64_t middle, int64_t begin,
                int64_t rerank, const std::vector<float>& lse, bool mean, int64_t topk, int64_t* order) {
    const int64_t take = std::min(rerank, std::max<int64_t>(middle, 0));
    std::vector<int64_t> found(take);
    best_columns(x, middle, begin, take, found.data());
    std::vector<int32_t> best(found.begin(), found.end());
    std::sort(best.begin(), best.end());  // ties are decided by column
    std::vector<float> again(groups * take);
    score_columns(q, head, groups, dim, Columns{best.data(), 0, 0, 0}, take, again.data(), take);
    merge_group(again.data(), take, lse, take, mean);
    best_columns(again.data(), take, 0, topk, order);
    for (int64_t j = 0; j < std::min(topk, take); ++j) order[j] = best[order[j]];
}

// order [r, topk] for the chosen flat (row, head) pairs; row i sees the columns start[i] to ends[i] (null: n). With `cheap` the
// log-sum-exp of a group's heads comes from the compact scores.
template <class T>
void retrieve(const float* q, const Cache& c, const int64_t* chosen, int64_t r, int64_t hkv, int64_t heads, int64_t groups,
              int64_t dim, const int64_t* first, const int64_t* start, int64_t sink, int64_t local, int64_t n, int64_t topk,
              bool mean, int64_t* order, const int32_t* ends = nullptr, const Compact* cheap = nullptr) {
    const int64_t threads = omp_get_max_threads();
    const auto begin_row = [&](int64_t i, int64_t piece, int64_t pieces, float* x) {
        const int64_t row = chosen[i] / heads, kv = chosen[i] % heads / (heads / hkv), begin = start[row];
        const int64_t count = (ends ? ends[row] : n) - begin, from = count * piece / pieces, to = count * (piece + 1) / pieces;
        const float* query = q + chosen[i] * groups * dim;
        if (!cheap) return score_keys(query, Head<T>(c, row, kv), groups, dim, begin + from, begin + to, x + from, n);
        score_keys(query, Head<code>(cheap->codes, row, kv), groups, dim, begin + from, begin + to, x + from, n);
        const float* scales = cheap->scales + row * cheap->row + kv * cheap->head + begin;
        for (int64_t g = 0; g < groups; ++g)
            for (int64_t j = from; j < to; ++j) x[g * n + j] *= scales[j];
    };
    const auto finish = [&](int64_t i, float* x) {
        const int64_t row = chosen[i] / heads, begin = start[row], count = (ends ? ends[row] : n) - begin, middle = count - local;
        const float* query = q + chosen[i] * groups * dim;
        const Head<T> head(c, row, chosen[i] % heads / (heads / hkv));
        std::vector<float> lse(1, 0.0f);
        if (groups > 1 && middle > 0) {
            std::vector<float> sinks(groups * sink);
            score_keys(query, head, groups, dim, first[row], first[row] + sink, sinks.data(), sink);
            lse = group_lse(x, n, sinks.data(), sink, groups, count);
            merge_group(x, n, lse, middle, mean);
        }
        int64_t* out = order + i * topk;
        if (cheap && cheap->rerank) rank_again(query, head, groups, dim, x, middle, begin, cheap->rerank, lse, mean, topk, out);
        else best_columns(x, middle, begin, topk, out);
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
