// Cheap retrieval: a compact copy of the keys is scored first, and only the best of it exactly.
#pragma once

#include "retrieve.h"

namespace prehoc {

// As retrieve. codes are laid out like the keys with strides of their own, scales [B, Hkv, n] with theirs and unit stride in n; the
// `rerank` best keys by compact score are scored exactly. The log-sum-exp of a group's heads comes from the compact scores.
template <class T>
void retrieve_cheap(const float* q, const Cache& c, const Cache& codes, const float* scales, int64_t scale_row, int64_t scale_head,
                    const int64_t* chosen, int64_t r, int64_t hkv, int64_t heads, int64_t groups, int64_t dim,
                    const int64_t* first, const int64_t* start, int64_t sink, int64_t local, int64_t n, int64_t topk,
                    int64_t rerank, bool mean, int64_t* order) {
#pragma omp parallel
    {
        const std::unique_ptr<float[]> x(new float[groups * n]);
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < r; ++i) {
            const int64_t row = chosen[i] / heads, kv = chosen[i] % heads / (heads / hkv), begin = start[row];
            const int64_t count = n - begin, middle = std::max<int64_t>(count - local, 0), take = std::min(rerank, middle);
            const float* query = q + chosen[i] * groups * dim;
            const Head<T> exact(c, row, kv);
            score_keys(query, Head<code>(codes, row, kv), groups, dim, begin, n, x.get(), n);
            const float* mine = scales + row * scale_row + kv * scale_head + begin;
            for (int64_t g = 0; g < groups; ++g)
                for (int64_t j = 0; j < count; ++j) x[g * n + j] *= mine[j];
            std::vector<float> lse(1, 0.0f), sinks(groups * sink), again(groups * take);
            if (groups > 1 && middle > 0) {
                score_keys(query, exact, groups, dim, first[row], first[row] + sink, sinks.data(), sink);
                lse = group_lse(x.get(), n, sinks.data(), sink, groups, count);
            }
            merge_group(x.get(), n, lse, middle, mean);
            std::vector<int64_t> found(take);
            best_columns(x.get(), middle, begin, take, found.data());
            std::vector<int32_t> best(found.begin(), found.end());
            std::sort(best.begin(), best.end());  // ties are decided by column
            score_columns(query, exact, groups, dim, Columns{best.data(), 0, 0, 0}, take, again.data(), take);
            merge_group(again.data(), take, lse, take, mean);
            int64_t* out = order + i * topk;
            best_columns(again.data(), take, 0, topk, out);
            for (int64_t j = 0; j < std::min(topk, take); ++j) out[j] = best[out[j]];
        }
    }
}

}  // namespace prehoc
