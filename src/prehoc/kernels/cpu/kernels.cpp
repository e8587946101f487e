// CPU kernels of prehoc on raw pointers: no torch headers. Storage T is float, bfloat16 or float16; all sums are float32.
// Shapes: q [B, H, D] contiguous float32 (already scaled); k, v [B, Hkv, n, D] with strides in elements and unit stride in D.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <vector>

#include <omp.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

constexpr float kNever = -std::numeric_limits<float>::infinity();
constexpr int64_t kBlock = 64;   // keys whose scores are kept between the two passes of online softmax
constexpr int64_t kSplit = 512;  // least keys worth a task of their own
constexpr int64_t kAhead = 12;   // keys between a prefetch and its use

// sixteen floats: one register with AVX-512, two with AVX2, four with NEON; the compiler splits them
typedef float v16 __attribute__((vector_size(64)));
typedef float v16u __attribute__((vector_size(64), aligned(4)));
typedef int32_t i16v __attribute__((vector_size(64)));
typedef uint32_t u16v __attribute__((vector_size(64)));
typedef uint16_t h16u __attribute__((vector_size(32), aligned(2)));

struct bf16 { uint16_t bits; };
struct fp16 { uint16_t bits; };

inline v16 splat(float x) { return v16{} + x; }

inline v16 load16(const float* p) { return *reinterpret_cast<const v16u*>(p); }
inline v16 load16(const bf16* p) {
    const h16u narrow = *reinterpret_cast<const h16u*>(p);
    return reinterpret_cast<v16>(__builtin_convertvector(narrow, u16v) << 16);
}
inline float load1(float x) { return x; }
inline float load1(bf16 x) {
    const uint32_t wide = uint32_t(x.bits) << 16;
    float out;
    std::memcpy(&out, &wide, 4);
    return out;
}
inline float load1(fp16 x) {
    _Float16 half;
    std::memcpy(&half, &x.bits, 2);
    return float(half);
}
inline v16 load16(const fp16* p) {
#if defined(__AVX512F__)
    return reinterpret_cast<v16>(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
#elif defined(__F16C__)
    union { __m256 half[2]; v16 all; } out;
    out.half[0] = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    out.half[1] = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)));
    return out.all;
#else
    v16 out;
    for (int i = 0; i < 16; ++i) out[i] = load1(p[i]);
    return out;
#endif
}

inline float sum16(v16 x) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps(reinterpret_cast<__m512>(x));
#else
    float total = 0.0f;
    for (int i = 0; i < 16; ++i) total += x[i];
    return total;
#endif
}

// exp(x) for x <= 0, relative error about 2e-7; zero below -87, where float32 ends
inline v16 exp16(v16 x) {
    const i16v tiny = x < splat(-87.0f);
    x = tiny ? splat(-87.0f) : x;
    const v16 shifted = x * 1.44269504f + 12582912.0f;  // 1.5 * 2^23 rounds to an integer in the low bits
    const v16 n = shifted - 12582912.0f;
    const v16 r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    v16 p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    const i16v power = (__builtin_convertvector(n, i16v) + 127) << 23;
    return tiny ? v16{} : p * reinterpret_cast<v16>(power);
}

// exp(x[i] - top) in place, returns the sum
inline float exponentials(float* x, int64_t count, float top) {
    v16 total{};
    int64_t i = 0;
    for (; i + 16 <= count; i += 16) {
        const v16 e = exp16(load16(x + i) - top);
        *reinterpret_cast<v16u*>(x + i) = e;
        total += e;
    }
    float sum = sum16(total);
    for (; i < count; ++i) sum += x[i] = std::exp(x[i] - top);
    return sum;
}

inline float largest(const float* x, int64_t count, float top) {
#pragma omp simd reduction(max : top)
    for (int64_t i = 0; i < count; ++i) top = std::max(top, x[i]);
    return top;
}

// logits of one key row for G queries: the row is read once
template <int G, class T>
inline void dots(const T* row, const float* q, int64_t dim, float* out, int64_t stride) {
    v16 sum[G] = {};
    int64_t d = 0;
    for (; d + 16 <= dim; d += 16) {
        const v16 x = load16(row + d);
        for (int g = 0; g < G; ++g) sum[g] += x * load16(q + g * dim + d);
    }
    for (int g = 0; g < G; ++g) out[g * stride] = sum16(sum[g]);
    for (; d < dim; ++d)
        for (int g = 0; g < G; ++g) out[g * stride] += load1(row[d]) * q[g * dim + d];
}

// the same for any number of queries, four at a time
template <class T>
inline void dots(const T* row, const float* q, int64_t groups, int64_t dim, float* out, int64_t stride) {
    for (; groups >= 4; groups -= 4, q += 4 * dim, out += 4 * stride) dots<4>(row, q, dim, out, stride);
    if (groups == 3) dots<3>(row, q, dim, out, stride);
    if (groups == 2) dots<2>(row, q, dim, out, stride);
    if (groups == 1) dots<1>(row, q, dim, out, stride);
}

// acc[g] += sum_j w[g][j] * rows[j], for G queries and V sixteens of the head dimension held in registers
template <int G, int V, class T>
inline void weigh(const float* w, const T* const* rows, int64_t count, int64_t at, int64_t dim, float* acc) {
    v16 sum[G][V];
    for (int g = 0; g < G; ++g)
        for (int i = 0; i < V; ++i) sum[g][i] = load16(acc + g * dim + at + 16 * i);
    for (int64_t j = 0; j < count; ++j) {
        v16 x[V];
        for (int i = 0; i < V; ++i) x[i] = load16(rows[j] + at + 16 * i);
        for (int g = 0; g < G; ++g)
            for (int i = 0; i < V; ++i) sum[g][i] += x[i] * w[g * kBlock + j];
    }
    for (int g = 0; g < G; ++g)
        for (int i = 0; i < V; ++i) *reinterpret_cast<v16u*>(acc + g * dim + at + 16 * i) = sum[g][i];
}

template <int G, class T>
inline void weigh(const float* w, const T* const* rows, int64_t count, int64_t dim, float* acc) {
    int64_t d = 0;
    for (; d + 64 <= dim; d += 64) weigh<G, 4>(w, rows, count, d, dim, acc);
    for (; d + 16 <= dim; d += 16) weigh<G, 1>(w, rows, count, d, dim, acc);
    for (; d < dim; ++d)
        for (int64_t j = 0; j < count; ++j)
            for (int g = 0; g < G; ++g) acc[g * dim + d] += w[g * kBlock + j] * load1(rows[j][d]);
}

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

// log(sum of exp) of x and of what was summed before; x is left as it is
float log_sum_exp(const float* x, int64_t count, float before) {
    const float top = largest(x, count, before);
    if (top == kNever) return kNever;
    v16 sums{};
    int64_t i = 0;
    for (; i + 16 <= count; i += 16) sums += exp16(load16(x + i) - top);
    float total = sum16(sums) + (before == kNever ? 0.0f : std::exp(before - top));
    for (; i < count; ++i) total += std::exp(x[i] - top);
    return top + std::log(total);
}

// the order of float32 scores as unsigned integers; the complement of the index decides ties for the lower one
inline uint64_t sortable(float score, int64_t index) {
    score += 0.0f;  // -0.0 becomes 0.0
    uint32_t bits;
    std::memcpy(&bits, &score, 4);
    bits = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return uint64_t(bits) << 32 | uint32_t(~uint32_t(index));
}

// move the `take` largest keys to the front, in falling order: bins of the leading bits leave little to partition
void select(std::vector<uint64_t>& keys, int64_t take) {
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
        const int64_t from = begin + count * piece / pieces, to = begin + count * (piece + 1) / pieces;
        for (int64_t col = from; col < to; ++col)
            dots(k + col * c.k_col, query, groups, dim, logits.get() + i * groups * n + col - begin, n);
        if (piece == 0 && need_lse)
            for (int64_t s = 0; s < sink; ++s)
                dots(k + std::min(first[row] + s, n - 1) * c.k_col, query, groups, dim, sinks.get() + i * groups * sink + s, sink);
    }
#pragma omp parallel for schedule(dynamic, 1)
    for (int64_t i = 0; i < r; ++i) {
        const int64_t row = chosen[i] / heads, begin = start[row], count = n - begin, middle = count - local;
        float* all = logits.get() + i * groups * n;
        if (need_lse) {
            for (int64_t g = 0; g < groups; ++g) {
                float* x = all + g * n;
                const float* s = sinks.get() + (i * groups + g) * sink;
                const float lse = log_sum_exp(x, count, sink ? log_sum_exp(s, sink, kNever) : kNever);
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
        select(keys, take);
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
}
