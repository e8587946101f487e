// What every kernel shares: loads that widen to float32, exp, tiles of dot products, weighted sums.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace prehoc {

constexpr float kNever = -std::numeric_limits<float>::infinity();
constexpr int64_t kBlock = 64;   // keys whose scores are kept between the two passes of online softmax
constexpr int64_t kSplit = 512;  // least keys worth a task of their own

// one register of floats; GCC makes poor code of vectors that are wider than a register
#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
#if defined(__AVX512F__) || !defined(__x86_64__)
constexpr int kRegisters = 32;
#else
constexpr int kRegisters = 16;
#endif
typedef float vec __attribute__((vector_size(4 * kLanes)));
typedef float vecu __attribute__((vector_size(4 * kLanes), aligned(4)));
typedef int32_t ivec __attribute__((vector_size(4 * kLanes)));
typedef uint32_t uvec __attribute__((vector_size(4 * kLanes)));
typedef uint32_t uvecu __attribute__((vector_size(4 * kLanes), aligned(2), may_alias));

struct bf16 { uint16_t bits; };
struct fp16 { uint16_t bits; };
struct code { int8_t bits; };  // a compact copy of keys, one scale a key

// f(0) ... f(N - 1) with constant arguments: arrays that are indexed by them live in registers
template <class F, int... I>
__attribute__((always_inline)) inline void unrolled(F f, std::integer_sequence<int, I...>) {
    (f(std::integral_constant<int, I>()), ...);
}
template <int N, class F>
__attribute__((always_inline)) inline void unroll(F f) { unrolled(f, std::make_integer_sequence<int, N>()); }
#define PREHOC_INLINE __attribute__((always_inline))

inline vec splat(float x) { return vec{} + x; }
inline vec load(const float* p) { return *reinterpret_cast<const vecu*>(p); }
inline void store(float* p, vec x) { *reinterpret_cast<vecu*>(p) = x; }
constexpr int64_t round_up(int64_t x, int64_t step) { return (x + step - 1) / step * step; }

// x stays in a register: the compiler would load it again at every use
template <class V>
PREHOC_INLINE inline void keep(V& x) {
#if defined(__x86_64__)
    asm("" : "+v"(x));
#elif defined(__aarch64__)
    asm("" : "+w"(x));
#endif
}

// zeros that begin at a register's boundary: a register across two cache lines is loaded twice
class Floats {
    std::vector<float> held;

public:
    explicit Floats(int64_t count) : held(count + kLanes) {}
    float* data() { return reinterpret_cast<float*>(round_up(reinterpret_cast<intptr_t>(held.data()), sizeof(vec))); }
};

inline float widen(float x) { return x; }
inline float widen(bf16 x) {
    const uint32_t bits = uint32_t(x.bits) << 16;
    float wide;
    std::memcpy(&wide, &bits, 4);
    return wide;
}
inline float widen(fp16 x) {
    _Float16 half;
    std::memcpy(&half, &x.bits, 2);
    return float(half);
}

// kLanes neighbouring elements in their order
inline vec spread(const float* p) { return load(p); }
inline vec spread(const code* p) {  // the compiler's own conversion goes element by element
#if defined(__AVX512F__)
    return reinterpret_cast<vec>(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))));
#elif defined(__AVX2__)
    return reinterpret_cast<vec>(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)))));
#else
    vec x;
    for (int i = 0; i < kLanes; ++i) x[i] = p[i].bits;
    return x;
#endif
}
inline vec spread(const bf16* p) {
    typedef uint16_t half __attribute__((vector_size(2 * kLanes), aligned(2), may_alias));
    return reinterpret_cast<vec>(__builtin_convertvector(*reinterpret_cast<const half*>(p), uvec) << 16);
}
inline vec spread(const fp16* p) {
#if defined(__AVX512F__)
    return reinterpret_cast<vec>(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
#elif defined(__F16C__)
    return reinterpret_cast<vec>(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#else
    vec x;
    for (int i = 0; i < kLanes; ++i) x[i] = widen(p[i]);
    return x;
#endif
}

// How a row is read: chunks of `width` elements, each as `parts` registers. The last chunk of a row ends with the row and overlaps
// the one before it; rows shorter than a chunk must be copied. element(part, lane) is the place inside the chunk.
template <class T>
struct Chunk;

template <>
struct Chunk<float> {
    static constexpr int parts = 1, width = kLanes;
    static int element(int, int lane) { return lane; }
    static void read(const float* p, vec* x) { x[0] = load(p); }
};

template <>
struct Chunk<fp16> {
    static constexpr int parts = 2, width = 2 * kLanes;
    static int element(int part, int lane) { return part * kLanes + lane; }
    static void read(const fp16* p, vec* x) { x[0] = spread(p), x[1] = spread(p + kLanes); }
};

template <>
struct Chunk<code> {
    static constexpr int parts = 1, width = kLanes;
    static int element(int, int lane) { return lane; }
    static void read(const code* p, vec* x) { x[0] = spread(p); }
};

// two neighbours in one word: one load and two cheap operations make two registers, the even and the odd elements
template <>
struct Chunk<bf16> {
    static constexpr int parts = 2, width = 2 * kLanes;
    static int element(int part, int lane) { return 2 * lane + part; }
    static void read(const bf16* p, vec* x) {
        uvec both = *reinterpret_cast<const uvecu*>(p);
        keep(both);
        x[0] = reinterpret_cast<vec>(both << 16);
        x[1] = reinterpret_cast<vec>(both & 0xffff0000u);
    }
};

template <class T>
constexpr int64_t padded(int64_t dim) { return round_up(dim, Chunk<T>::width); }

// where chunk c of a row begins
template <class T>
int64_t place(int64_t c, int64_t dim) {
    return std::min(c * Chunk<T>::width, std::max<int64_t>(dim - Chunk<T>::width, 0));
}

// q [G, dim] in the order of the chunks, [G, padded]; elements that an earlier chunk holds are zero in the last one
template <class T>
void arrange(const float* q, int64_t groups, int64_t dim, float* out) {
    constexpr int width = Chunk<T>::width;
    for (int64_t g = 0; g < groups; ++g, q += dim)
        for (int64_t c = 0; c * width < dim; ++c)
            for (int i = 0; i < width; ++i) {
                const int64_t e = place<T>(c, dim) + Chunk<T>::element(i / kLanes, i % kLanes);
                *out++ = e >= c * width && e < dim ? q[e] : 0.0f;
            }
}

// the reverse for sums of values: x [padded] in the order of the chunks becomes out [dim], times `scale`
template <class T>
void rearrange(const float* x, int64_t dim, float scale, float* out) {
    constexpr int width = Chunk<T>::width;
    for (int64_t c = 0; c * width < dim; ++c)
        for (int i = 0; i < width; ++i) {
            const int64_t e = place<T>(c, dim) + Chunk<T>::element(i / kLanes, i % kLanes);
            if (e < dim) out[e] = x[c * width + i] * scale;
        }
}

inline float sum(vec x) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps(reinterpret_cast<__m512>(x));
#else
    float total = 0.0f;
    for (int i = 0; i < kLanes; ++i) total += x[i];
    return total;
#endif
}

// lane i of the result is the sum of x[i]: all horizontal sums at once
PREHOC_INLINE inline vec sums(const vec* x) {
#if defined(__AVX512F__)
    __m512 a[8], b[4], c[2];
    const auto at = [x](int i) PREHOC_INLINE { return reinterpret_cast<__m512>(x[i]); };
    unroll<8>([&](auto i) PREHOC_INLINE {  // halves: the low ones of i beside the low ones of i + 8
        const __m512 low = _mm512_shuffle_f32x4(at(i), at(i + 8), 0x44), high = _mm512_shuffle_f32x4(at(i), at(i + 8), 0xee);
        a[i] = _mm512_add_ps(low, high);
    });
    unroll<4>([&](auto i) PREHOC_INLINE {  // quarters: i, i + 8, i + 4, i + 12
        b[i] = _mm512_add_ps(_mm512_shuffle_f32x4(a[i], a[i + 4], 0x88), _mm512_shuffle_f32x4(a[i], a[i + 4], 0xdd));
    });
    unroll<2>([&](auto i) PREHOC_INLINE {
        c[i] = _mm512_add_ps(_mm512_unpacklo_ps(b[i], b[i + 2]), _mm512_unpackhi_ps(b[i], b[i + 2]));
    });
    const __m512 d = _mm512_add_ps(_mm512_unpacklo_ps(c[0], c[1]), _mm512_unpackhi_ps(c[0], c[1]));
    return reinterpret_cast<vec>(_mm512_shuffle_f32x4(d, d, 0xd8));  // quarters in order
#elif defined(__AVX__)
    const auto at = [x](int i) PREHOC_INLINE { return reinterpret_cast<__m256>(x[i]); };
    const __m256 a = _mm256_hadd_ps(_mm256_hadd_ps(at(0), at(1)), _mm256_hadd_ps(at(2), at(3)));
    const __m256 b = _mm256_hadd_ps(_mm256_hadd_ps(at(4), at(5)), _mm256_hadd_ps(at(6), at(7)));
    return reinterpret_cast<vec>(_mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31)));
#else
    vec out;
    for (int i = 0; i < kLanes; ++i) out[i] = sum(x[i]);
    return out;
#endif
}

// exp(x) for x <= 0, relative error about 2e-7; zero below -87, where float32 ends
inline vec exponential(vec x) {
    const ivec tiny = x < splat(-87.0f);
    x = tiny ? splat(-87.0f) : x;
    const vec shifted = x * 1.44269504f + 12582912.0f;  // 1.5 * 2^23 rounds to an integer in the low bits
    const vec n = shifted - 12582912.0f;
    const vec r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    vec p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    const ivec power = (__builtin_convertvector(n, ivec) + 127) << 23;
    return tiny ? vec{} : p * reinterpret_cast<vec>(power);
}

inline float largest(const float* x, int64_t count, float top) {
    vec most = splat(top);
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) {
        const vec now = load(x + i);
        most = now > most ? now : most;
    }
#if defined(__AVX512F__)
    top = _mm512_reduce_max_ps(reinterpret_cast<__m512>(most));
#else
    for (int lane = 0; lane < kLanes; ++lane) top = std::max(top, most[lane]);
#endif
    for (; i < count; ++i) top = std::max(top, x[i]);
    return top;
}

// log(sum of exp) of x and of what was summed before; x is left as it is
inline float log_sum_exp(const float* x, int64_t count, float before) {
    const float top = largest(x, count, before);
    if (top == kNever) return kNever;
    vec all{};
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) all += exponential(load(x + i) - top);
    float total = sum(all) + (before == kNever ? 0.0f : std::exp(before - top));
    for (; i < count; ++i) total += std::exp(x[i] - top);
    return top + std::log(total);
}

// call f with a value of the storage type that Python's number stands for
template <class F>
void with_type(int type, F f) {
    if (type == 0) f(float{});
    if (type == 1) f(bf16{});
    if (type == 2) f(fp16{});
}

}  // namespace prehoc
