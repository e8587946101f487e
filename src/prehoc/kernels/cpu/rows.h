// Where the rows of one head are, in a plain or a paged cache.
#pragma once

#include <vector>

#include "simd.h"

namespace prehoc {

// where keys and values are: column j of a row at head * k_head + j * k_col, in elements, behind row * k_row, or with a block table
// (paged) behind table[j / block] * k_row, j counted inside its block
struct Cache {
    const void *k, *v;
    int64_t k_row, k_head, k_col, v_row, v_head, v_col;
    const int32_t* table = nullptr;  // [B, table_width]
    int64_t table_width = 0, block = 0;
};

// one head of the cache
template <class T>
struct Head {
    const T *k, *v;
    int64_t k_col, v_col, k_block, v_block, block;
    const int32_t* table;  // null: not paged
    Head(const Cache& c, int64_t row, int64_t head)
        : k(static_cast<const T*>(c.k) + (c.table ? 0 : row * c.k_row) + head * c.k_head),
          v(static_cast<const T*>(c.v) + (c.table ? 0 : row * c.v_row) + head * c.v_head),
          k_col(c.k_col), v_col(c.v_col), k_block(c.k_row), v_block(c.v_row), block(c.block),
          table(c.table ? c.table + row * c.table_width : nullptr) {}
    const T* key(int64_t col) const { return k + (table ? table[col / block] * k_block + col % block * k_col : col * k_col); }
    const T* value(int64_t col) const { return v + (table ? table[col / block] * v_block + col % block * v_col : col * v_col); }
};

// pointers to the rows of one block; rows shorter than a chunk are copied
template <class T>
struct Rows {
    const T* at[kBlock + kLanes];
    std::vector<T> copies;
    explicit Rows(int64_t dim) : copies(dim < Chunk<T>::width ? kBlock * Chunk<T>::width : 0) {}
    void finish(int64_t count, int64_t dim) {
        if (!copies.empty())
            for (int64_t j = 0; j < count; ++j)
                at[j] = static_cast<const T*>(std::memcpy(copies.data() + j * Chunk<T>::width, at[j], dim * sizeof(T)));
        std::fill_n(at + count, kLanes, at[count - 1]);  // tiles are whole
    }
};

}  // namespace prehoc
