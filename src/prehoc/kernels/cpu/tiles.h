// Many rows against few queries, the rows read once: tiles of dot products, and weighted sums of rows.
// Queries and sums are float32 in the order of the chunks (arrange); rows are pointers, each at least a chunk long. For every chunk
// that is read of rows, one of next is fetched (chunks share a cache line of 64 bytes): memory works while we compute, in even steps.
// Dim is int64_t or, for the common sizes, a constant (with_size).
#pragma once

#include <type_traits>

#include "simd.h"

namespace prehoc {

template <class F>
void with_size(int64_t dim, F f) {
    if (dim == 64) f(std::integral_constant<int64_t, 64>());
    else if (dim == 128) f(std::integral_constant<int64_t, 128>());
    else f(dim);
}

template <class Dim>
Dim size_as(int64_t dim) {
    if constexpr (std::is_same_v<Dim, int64_t>) return dim;
    else return Dim();
}

// keys of a tile: with G queries they fill the lanes of one register
constexpr int tile_keys(int groups) {
    int keys = kLanes;
    while (keys * groups > kLanes) keys /= 2;
    return keys;
}

// out[g * stride + j] = rows[j] . q[g] for the keys of one tile; kLanes sums are made horizontal together
template <int G, class T, class Dim>
inline void tile(const T* const* rows, const T* const* next, const float* q, Dim dim, float* out, int64_t stride) {
    constexpr int N = tile_keys(G), S = std::min(N, 4), P = Chunk<T>::parts, W = Chunk<T>::width;  // S rows side by side
    const int64_t size = padded<T>(dim);
    const bool whole = size == S * W;  // rows of S chunks are fetched one after another: memory prefers neighbours
    vec all[kLanes];
    unroll<kLanes>([&](auto i) PREHOC_INLINE { all[i] = vec{}; });
    unroll<N / S>([&](auto s) PREHOC_INLINE {
        const T *row[S], *then[S];
        unroll<S>([&](auto j) PREHOC_INLINE { row[j] = rows[s * S + j], then[j] = next[s * S + j]; });
        for (int64_t c = 0; c < size; c += W) {
            const int64_t at = std::min<int64_t>(c, dim - W);
            vec x[S * P];
            unroll<S>([&](auto j) PREHOC_INLINE {
                if (whole) {
                    if constexpr (j * W * sizeof(T) % 64 == 0) __builtin_prefetch(then[c / W] + j * W);
                } else if (c * sizeof(T) % 64 == 0) {
                    __builtin_prefetch(then[j] + at);
                }
                Chunk<T>::read(row[j] + at, x + j * P);
            });
            unroll<G * P>([&](auto i) PREHOC_INLINE {
                constexpr int g = i / P, p = i % P;
                vec query = load(q + g * size + c + p * kLanes);
                keep(query);
                unroll<S>([&](auto j) PREHOC_INLINE { all[g * N + s * S + j] += x[j * P + p] * query; });
            });
        }
    });
    float made[kLanes];
    store(made, sums(all));
    unroll<G>([&](auto g) PREHOC_INLINE { std::memcpy(out + g * stride, made + g * N, N * sizeof(float)); });
}

template <int G, class T, class Dim>
inline void score(const T* const* rows, const T* const* next, int64_t count, const float* q, Dim dim, float* out,
                  int64_t stride) {
    for (int64_t j = 0; j < count; j += tile_keys(G)) tile<G>(rows + j, next + j, q, dim, out + j, stride);
}

template <class T, class Dim>
inline void score(const T* const* rows, const T* const* next, int64_t count, const float* q, int64_t groups, Dim dim,
                  float* out, int64_t stride) {
    if (groups == 1) score<1>(rows, next, count, q, dim, out, stride);
    if (groups == 2) score<2>(rows, next, count, q, dim, out, stride);
    if (groups == 3) score<3>(rows, next, count, q, dim, out, stride);
    if (groups >= 4) score<4>(rows, next, count, q, dim, out, stride);
    if (groups > 4) score(rows, next, count, q + 4 * padded<T>(dim), groups - 4, dim, out + 4 * stride, stride);
}

// registers of a row that G sums each can be made of without spilling; one sum takes its row in as it comes
constexpr int held(int groups) {
    int count = 8;
    while (groups > 1 && (groups + 1) * count >= kRegisters) count /= 2;
    return count;
}

// acc[g] += sum over j of w[g][j] * rows[j], for C chunks of the row from element c on
template <int G, int C, class T, class Dim>
inline void weigh(const float* w, const T* const* rows, const T* const* next, int64_t count, int64_t c, Dim dim, float* acc) {
    constexpr int P = Chunk<T>::parts, W = Chunk<T>::width;
    const int64_t size = padded<T>(dim);
    vec all[G * C * P];
    unroll<G * C * P>([&](auto i) PREHOC_INLINE { all[i] = load(acc + i / (C * P) * size + c + i % (C * P) * kLanes); });
    int64_t place[C];
    unroll<C>([&](auto i) PREHOC_INLINE { place[i] = std::min<int64_t>(c + i * W, dim - W); });
    for (int64_t j = 0; j < count; ++j) {
        vec x[C * P];
        unroll<C>([&](auto i) PREHOC_INLINE {
            __builtin_prefetch(next[j] + place[i]);
            Chunk<T>::read(rows[j] + place[i], x + i * P);
        });
        unroll<G>([&](auto g) PREHOC_INLINE {
            const vec weight = splat(w[g * kBlock + j]);
            unroll<C * P>([&](auto i) PREHOC_INLINE { all[g * C * P + i] += x[i] * weight; });
        });
    }
    unroll<G * C * P>([&](auto i) PREHOC_INLINE { store(acc + i / (C * P) * size + c + i % (C * P) * kLanes, all[i]); });
}

// the chunks from element c on, C at a time while they last, then fewer
template <int G, int C, class T, class Dim>
inline void weigh_from(int64_t c, const float* w, const T* const* rows, const T* const* next, int64_t count, Dim dim,
                       float* acc) {
    for (; c + C * Chunk<T>::width <= padded<T>(dim); c += C * Chunk<T>::width)
        weigh<G, C>(w, rows, next, count, c, dim, acc);
    if constexpr (C > 1) weigh_from<G, C / 2>(c, w, rows, next, count, dim, acc);
}

// acc [G, padded] += w [G, kBlock] times rows
template <class T, class Dim>
inline void weigh(const float* w, const T* const* rows, const T* const* next, int64_t count, int64_t groups, Dim dim,
                  float* acc) {
    constexpr int P = Chunk<T>::parts;
    if (groups == 1) weigh_from<1, held(1) / P>(0, w, rows, next, count, dim, acc);
    if (groups == 2) weigh_from<2, held(2) / P>(0, w, rows, next, count, dim, acc);
    if (groups == 3) weigh_from<3, held(3) / P>(0, w, rows, next, count, dim, acc);
    if (groups >= 4) weigh_from<4, held(4) / P>(0, w, rows, next, count, dim, acc);
    if (groups > 4) weigh(w + 4 * kBlock, rows, next, count, groups - 4, dim, acc + 4 * padded<T>(dim));
}

}  // namespace prehoc
