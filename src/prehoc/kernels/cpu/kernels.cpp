// The doors of the CPU kernels for Python: raw pointers, no torch headers. Storage is float, bfloat16 or float16; sums are float32.
// Shapes: q [B, H, D] contiguous float32 (already scaled); k, v [B, Hkv, n, D] with strides in elements and unit stride in D, or
// with a block table [B, width] their blocks [NB, Hkv, block, D]; pages = (table width, block).

#include "cis.h"
#include "decode.h"
#include "dilate.h"
#include "retrieve.h"
#include "stream.h"

using namespace prehoc;

extern "C" {

int prehoc_threads() { return omp_get_max_threads(); }

float prehoc_stream(const float* x, int64_t count) { return stream(x, count); }

// sizes: B, Hkv, selection heads, D, Dv, width of the lists
uint32_t prehoc_gather(int type, const void* k, const void* v, const int64_t* strides, const int64_t* sizes,
                       const int32_t* indices, const int32_t* lengths) {
    const Cache c{k, v, strides[0], strides[1], strides[2], strides[3], strides[4], strides[5]};
    uint32_t read = 0;
    with_type(type, [&](auto t) {
        read = gather<decltype(t)>(c, sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], indices, lengths, sizes[5]);
    });
    return read;
}

void prehoc_decode(int type, const float* q, const void* k, const void* v, const int64_t* strides, const int32_t* table,
                   const int64_t* pages, const int64_t* sizes, const int64_t* first, const int64_t* start, const int32_t* indices,
                   const int32_t* lengths, float* out, float* lse, float* weights) {
    const Cache c{k, v, strides[0], strides[1], strides[2], strides[3], strides[4], strides[5],
                  table, pages[0], pages[1], strides[6]};
    with_type(type, [&](auto t) {
        decode<decltype(t)>(q, c, sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], first, start, sizes[6],
                            sizes[7], indices, lengths, sizes[8], out, lse, weights);
    });
}

void prehoc_retrieve(int type, const float* q, const void* k, const int64_t* strides, const int32_t* table, const int64_t* pages,
                     const int64_t* sizes, const int64_t* chosen, const int64_t* first, const int64_t* start, const int32_t* ends,
                     int64_t* order) {
    const Cache c{k, nullptr, strides[0], strides[1], strides[2], 0, 0, 0, table, pages[0], pages[1], strides[6]};
    with_type(type, [&](auto t) {
        retrieve<decltype(t)>(q, c, chosen, sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], first, start, sizes[5], sizes[6],
                              sizes[7], sizes[8], sizes[9] != 0, order, ends);
    });
}

// strides: of keys (3), codes (3), scales (row, head)
void prehoc_retrieve_cheap(int type, const float* q, const void* k, const int8_t* codes, const float* scales,
                           const int64_t* strides, const int64_t* sizes, const int64_t* chosen, const int64_t* first,
                           const int64_t* start, int64_t* order) {
    const Cache c{k, nullptr, strides[0], strides[1], strides[2], 0, 0, 0};
    const Compact cheap{{codes, nullptr, strides[3], strides[4], strides[5], 0, 0, 0}, scales, strides[6], strides[7], sizes[10]};
    with_type(type, [&](auto t) {
        retrieve<decltype(t)>(q, c, chosen, sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], first, start, sizes[5], sizes[6],
                              sizes[7], sizes[8], sizes[9] != 0, order, nullptr, &cheap);
    });
}

// lists [r, width] and lengths [r] from order [r, k]; limit may be null
void prehoc_dilate(const int64_t* order, int64_t r, int64_t k, const int64_t* first, const int64_t* start, int64_t n,
                   int64_t sink, int64_t local, int64_t radius, const int64_t* best, const int64_t* critical,
                   const int64_t* limit, int64_t per_best, int64_t width, int32_t* lists, int32_t* lengths) {
#pragma omp parallel for schedule(dynamic, 1)
    for (int64_t i = 0; i < r; ++i)
        lengths[i] = dilate(order + i * k, k, first[i], start[i], n, sink, local, radius, best[i], critical[i],
                            limit ? limit[i] : n, per_best, width, lists + i * width);
}

// one step of CIS: the state tensors are updated in place; limit may be null, and axes [B, Hkv, D, width]: then width is D.
// codes [B, Hkv, room, D] and scales [B, Hkv, room] may be null; cheap = room, columns that they hold, keys that are ranked again
void prehoc_cis(int type, const float* q, const float* axes, int64_t width, double scale, double tau, const void* k,
                const int64_t* strides, const int64_t* sizes, const int64_t* first, const int64_t* start,
                const int64_t* critical, const int64_t* best, const int64_t* limit, int8_t* codes, float* scales,
                const int64_t* cheap, int32_t* indices, int32_t* lengths, int32_t* age, float* anchor, bool* retrieved,
                float* cosine) {
    const Cache c{k, nullptr, strides[0], strides[1], strides[2], 0, 0, 0};
    CisSizes s;
    static_assert(sizeof(s) == 14 * sizeof(int64_t));
    std::memcpy(&s, sizes, sizeof(s));
    const Copy copy{reinterpret_cast<code*>(codes), scales, cheap[0], cheap[1]};
    with_type(type, [&](auto t) {
        cis_step<decltype(t)>(q, {axes, width}, float(scale), tau, c, s, copy, cheap[2], first, start, critical, best,
                              limit, {indices, lengths, age, anchor}, retrieved, cosine);
    });
}
}
