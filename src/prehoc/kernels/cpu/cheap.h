// The compact copy that a cheap retrieval scores first: keys rounded to eight bits, one scale a key.
#pragma once

#include <cmath>

#include "rows.h"

namespace prehoc {

// codes [B, Hkv, room, D] and scales [B, Hkv, room], contiguous, of the columns before `coded`; null codes: there is no copy
struct Copy {
    code* codes;
    float* scales;
    int64_t room, coded;
};

// add the columns up to n of every head; the same numbers as the reference backend's
template <class T>
void code_keys(const Cache& c, int64_t rows, int64_t hkv, int64_t dim, int64_t n, const Copy& copy) {
#pragma omp parallel if (rows * hkv * (n - copy.coded) * dim > 16384)
    {
        Floats held(padded<T>(dim));
        float* key = held.data();
#pragma omp for collapse(2) schedule(static)
        for (int64_t pair = 0; pair < rows * hkv; ++pair)
            for (int64_t col = copy.coded; col < n; ++col) {
                const T* at = Head<T>(c, pair / hkv, pair % hkv).key(col);
                float top = 0.0f;
                for (int64_t d = 0; d < dim; ++d) key[d] = widen(at[d]), top = std::max(top, std::abs(key[d]));
                const int64_t place = pair * copy.room + col;
                const float scale = top / 127;
                copy.scales[place] = scale;
                const float least = std::max(scale, std::numeric_limits<float>::min());
                for (int64_t d = 0; d < dim; ++d) copy.codes[place * dim + d].bits = int8_t(std::nearbyint(key[d] / least));
            }
    }
}

}  // namespace prehoc
