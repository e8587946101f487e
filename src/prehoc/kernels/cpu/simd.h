// What every kernel shares: sixteen floats at a time, loads that widen to float32, exp, dot products, weighted sums.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace prehoc {

constexpr float kNever = -std::numeric_limits<float>::infinity();
constexpr int64_t kBlock = 64;   // keys whose scores are kept between the two passes of online softmax
constexpr int64_t kSplit = 512;  // least keys worth a task of their own

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

// log(sum of exp) of x and of what was summed before; x is left as it is
inline float log_sum_exp(const float* x, int64_t count, float before) {
    const float top = largest(x, count, before);
    if (top == kNever) return kNever;
    v16 sums{};
    int64_t i = 0;
    for (; i + 16 <= count; i += 16) sums += exp16(load16(x + i) - top);
    float total = sum16(sums) + (before == kNever ? 0.0f : std::exp(before - top));
    for (; i < count; ++i) total += std::exp(x[i] - top);
    return top + std::log(total);
}

struct Cache {
    const void *k, *v;
    int64_t k_row, k_head, k_col, v_row, v_head, v_col;  // strides in elements
};

// call f with a value of the storage type that Python's number stands for
template <class F>
void with_type(int type, F f) {
    if (type == 0) f(float{});
    if (type == 1) f(bf16{});
    if (type == 2) f(fp16{});
}

}  // namespace prehoc
