// CPU kernels of prehoc on raw pointers: no torch headers. Storage T is float, bfloat16 or float16; all sums are float32.
// Shapes: q [B, H, D] contiguous float32 (already scaled); k, v [B, Hkv, n, D] with strides in elements and unit stride in D.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include <omp.h>

namespace {

constexpr float kNever = -std::numeric_limits<float>::infinity();
constexpr int64_t kBlock = 64;   // keys whose scores are kept between the two passes of online softmax
constexpr int64_t kSplit = 512;  // least keys worth a task of their own

struct bf16 { uint16_t bits; };
struct fp16 { _Float16 value; };

inline float load(float x) { return x; }
inline float load(bf16 x) {
    uint32_t wide = uint32_t(x.bits) << 16;
    float out;
    std::memcpy(&out, &wide, 4);
    return out;
}
inline float load(fp16 x) { return float(x.value); }

// dot products of one key row with the G queries of its group: the row is read once
template <class T>
inline void dots(const T* row, const float* q, int64_t groups, int64_t dim, float* out, int64_t stride) {
    for (int64_t g = 0; g < groups; ++g) {
        const float* query = q + g * dim;
        float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
        for (int64_t d = 0; d < dim; ++d) sum += load(row[d]) * query[d];
        out[g * stride] = sum;
    }
}

// running softmax of G queries: largest logit, sum of exponentials, weighted sum of values
struct Partial {
    float* largest;  // [G]
    float* sum;      // [G]
    float* values;   // [G, Dv]
};

template <class T>
inline void absorb(const float* scores, int64_t count, const T* const* rows, int64_t groups, int64_t dim, Partial part) {
    float weights[kBlock];
    for (int64_t g = 0; g < groups; ++g) {
        const float* s = scores + g * kBlock;
        float top = part.largest[g];
        for (int64_t j = 0; j < count; ++j) top = std::max(top, s[j]);
        if (top == kNever) continue;
        float* acc = part.values + g * dim;
        const float shrink = std::exp(part.largest[g] - top);
        if (shrink != 1.0f) {
            part.sum[g] *= shrink;
#pragma omp simd
            for (int64_t d = 0; d < dim; ++d) acc[d] *= shrink;
        }
        part.largest[g] = top;
        float total = 0.0f;
        for (int64_t j = 0; j < count; ++j) {
            weights[j] = std::exp(s[j] - top);
            total += weights[j];
        }
        part.sum[g] += total;
        for (int64_t j = 0; j < count; ++j) {
            const float w = weights[j];
            const T* row = rows[j];
#pragma omp simd
            for (int64_t d = 0; d < dim; ++d) acc[d] += w * load(row[d]);
        }
    }
}

struct Cache {
    const void *k, *v;
    int64_t k_row, k_head, k_col, v_row, v_head, v_col;  // strides in elements
};

// attend the keys column(j), j in [begin, end), of one selection head
template <class T, class Column>
void attend(const float* q, const T* k, const T* v, const Cache& c, int64_t groups, int64_t dim, int64_t dim_v,
            int64_t begin, int64_t end, Column column, Partial part) {
    std::vector<float> scores(groups * kBlock);
    const T* rows[kBlock];
    for (int64_t at = begin; at < end; at += kBlock) {
        const int64_t count = std::min(kBlock, end - at);
        for (int64_t j = 0; j < count; ++j) {
            const int64_t col = column(at + j);
            rows[j] = v + col * c.v_col;
            if (at + j + 8 < end) __builtin_prefetch(k + column(at + j + 8) * c.k_col);
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
void merge(Buffers& parts, int64_t first, int64_t last, float* out, float* lse) {
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

float log_sum_exp(const float* x, int64_t count, float top, float sum) {
    float larger = top;
    for (int64_t i = 0; i < count; ++i) larger = std::max(larger, x[i]);
    if (larger == kNever) return kNever;
    float total = top == kNever ? 0.0f : sum * std::exp(top - larger);
    for (int64_t i = 0; i < count; ++i) total += std::exp(x[i] - larger);
    return larger + std::log(total);
}

// the order of float32 scores as unsigned integers; the complement of the index decides ties for the lower one
inline uint64_t sortable(float score, int64_t index) {
    score += 0.0f;  // -0.0 becomes 0.0
    uint32_t bits;
    std::memcpy(&bits, &score, 4);
    bits = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return uint64_t(bits) << 32 | uint32_t(~uint32_t(index));
}

template <class T>
void retrieve(const float* q, const Cache& c, const int64_t* chosen, int64_t r, int64_t hkv, int64_t heads, int64_t groups,
              int64_t dim, const int64_t* first, const int64_t* start, int64_t sink, int64_t local, int64_t n, int64_t topk,
              bool need_lse, bool mean, int64_t* order) {
    const int64_t threads = omp_get_max_threads();
    const int64_t pieces = std::max<int64_t>(1, std::min((2 * threads + r - 1) / r, n / kSplit));
    std::vector<float> logits(r * groups * n), sinks(r * groups * std::max<int64_t>(sink, 1));
#pragma omp parallel for schedule(dynamic, 1)
    for (int64_t task = 0; task < r * pieces; ++task) {
        const int64_t i = task / pieces, piece = task % pieces, pair = chosen[i], row = pair / heads;
        const int64_t kv = pair % heads / (heads / hkv), begin = start[row], count = n - begin;
        const T* k = static_cast<const T*>(c.k) + row * c.k_row + kv * c.k_head;
        const float* query = q + pair * groups * dim;
        const int64_t from = begin + count * piece / pieces, to = begin + count * (piece + 1) / pieces;
        for (int64_t col = from; col < to; ++col)
            dots(k + col * c.k_col, query, groups, dim, logits.data() + i * groups * n + col - begin, n);
        if (piece == 0 && need_lse)
            for (int64_t s = 0; s < sink; ++s)
                dots(k + std::min(first[row] + s, n - 1) * c.k_col, query, groups, dim, sinks.data() + i * groups * sink + s, sink);
    }
#pragma omp parallel for schedule(dynamic, 1)
    for (int64_t i = 0; i < r; ++i) {
        const int64_t row = chosen[i] / heads, begin = start[row], count = n - begin, middle = count - local;
        float* all = logits.data() + i * groups * n;
        if (need_lse) {
            for (int64_t g = 0; g < groups; ++g) {
                float* x = all + g * n;
                const float* s = sinks.data() + (i * groups + g) * sink;
                const float lse_sink = sink ? log_sum_exp(s, sink, kNever, 0) : kNever;
                const float lse = log_sum_exp(x, count, lse_sink, 1.0f);
                for (int64_t j = 0; j < middle; ++j) x[j] -= lse;
            }
            for (int64_t j = 0; j < middle; ++j) {
                float top = all[j];
                for (int64_t g = 1; g < groups; ++g) top = std::max(top, all[g * n + j]);
                if (mean && groups > 1) {
                    float total = 0.0f;
                    for (int64_t g = 0; g < groups; ++g) total += std::exp(all[g * n + j] - top);
                    top += std::log(total);
                }
                all[j] = top;
            }
        }
        std::vector<uint64_t> keys(std::max<int64_t>(middle, 0));
        for (int64_t j = 0; j < middle; ++j) keys[j] = sortable(all[j], j);
        const int64_t take = std::min<int64_t>(topk, keys.size());
        auto larger = [](uint64_t a, uint64_t b) { return a > b; };
        if (take < int64_t(keys.size())) std::nth_element(keys.begin(), keys.begin() + take, keys.end(), larger);
        std::sort(keys.begin(), keys.begin() + take, larger);
        for (int64_t j = 0; j < topk; ++j) order[i * topk + j] = j < take ? begin + int64_t(uint32_t(~uint32_t(keys[j]))) : -1;
    }
}

template <class F>
int with_type(int type, F f) {
    switch (type) {
        case 0: f(float{}); return 0;
        case 1: f(bf16{}); return 0;
        case 2: f(fp16{}); return 0;
    }
    return 1;
}

}  // namespace

extern "C" {

int prehoc_threads() { return omp_get_max_threads(); }

int prehoc_decode(int type, const float* q, const void* k, const void* v, const int64_t* strides, const int64_t* sizes,
                  const int64_t* first, const int64_t* start, const int32_t* indices, const int32_t* lengths, float* out,
                  float* lse) {
    const Cache c{k, v, strides[0], strides[1], strides[2], strides[3], strides[4], strides[5]};
    return with_type(type, [&](auto t) {
        decode<decltype(t)>(q, c, sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], first, start, sizes[6],
                            sizes[7], indices, lengths, sizes[8], out, lse);
    });
}

int prehoc_retrieve(int type, const float* q, const void* k, const int64_t* strides, const int64_t* sizes,
                    const int64_t* chosen, const int64_t* first, const int64_t* start, int64_t* order) {
    const Cache c{k, nullptr, strides[0], strides[1], strides[2], 0, 0, 0};
    return with_type(type, [&](auto t) {
        retrieve<decltype(t)>(q, c, chosen, sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], first, start, sizes[5],
                              sizes[6], sizes[7], sizes[8], sizes[9] != 0, sizes[10] != 0, order);
    });
}

// lists [r, width] and lengths [r] from order [r, k]; see the reference backend for what the numbers per row mean
void prehoc_dilate(const int64_t* order, int64_t r, int64_t k, const int64_t* first, const int64_t* start, int64_t n,
                   int64_t sink, int64_t local, int64_t radius, const int64_t* best, const int64_t* critical,
                   const int64_t* limit, int64_t per_best, int64_t width, int32_t* lists, int32_t* lengths) {
    constexpr int32_t far = std::numeric_limits<int32_t>::max();
#pragma omp parallel for schedule(dynamic, 1)
    for (int64_t i = 0; i < r; ++i) {
        std::vector<int32_t> entry(n, far);  // the number of critical keys from which on a column belongs
        const int64_t* mine = order + i * k;
        for (int64_t j = 0; j < k; ++j)
            if (mine[j] >= 0) entry[mine[j]] = int32_t(j + 1);
        for (int64_t j = 0; j < std::min(best[i], k); ++j) {
            if (mine[j] < 0) continue;
            const int32_t at = int32_t((j + 1) * per_best);
            for (int64_t near = std::max(mine[j] - radius, start[i]); near <= std::min(mine[j] + radius, n - local - 1); ++near)
                if (near != mine[j]) entry[near] = std::min(entry[near], at);
        }
        for (int64_t col = std::max<int64_t>(n - local, 0); col < n; ++col) entry[col] = 0;
        for (int64_t col = first[i]; col < std::min(first[i] + sink, n); ++col) entry[col] = 0;
        int64_t allowed = critical[i];
        if (limit) {
            std::vector<int64_t> arrivals(k + 2, 0);
            for (int64_t col = 0; col < n; ++col) ++arrivals[std::min<int64_t>(entry[col], k + 1)];
            int64_t held = arrivals[0], fits = 0;
            while (fits < k && held + arrivals[fits + 1] <= limit[i]) held += arrivals[++fits];
            allowed = std::min(allowed, fits);
        }
        int32_t* list = lists + i * width;
        int64_t count = 0;
        for (int64_t col = 0; col < n; ++col)
            if (entry[col] <= allowed) list[count++] = int32_t(col);
        lengths[i] = int32_t(count);
        std::fill(list + count, list + width, -1);
    }
}

// sum of a float32 buffer by all threads: the yardstick of memory bandwidth
double prehoc_stream(const float* data, int64_t count) {
    double total = 0;
#pragma omp parallel for schedule(static) reduction(+ : total)
    for (int64_t chunk = 0; chunk < count / 4096; ++chunk) {
        float sum = 0;
        const float* p = data + chunk * 4096;
#pragma omp simd reduction(+ : sum)
        for (int64_t i = 0; i < 4096; ++i) sum += p[i];
        total += sum;
    }
    return total;
}
}
