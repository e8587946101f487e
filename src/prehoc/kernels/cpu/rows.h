// Where the rows of one head are, in a plain or a paged cache.
#pragma once

#include <iterator>
#include <vector>

#include "simd.h"

namespace prehoc {

// where keys and values are: column j of a row at head * k_head + j * k_col, in elements, behind row * k_row, or with a block table
// (paged) behind table[j / block] * k_row, j counted inside its block. k_dim is the distance between a key's elements; other than 1
// (then k_col is 1: a block holds [D, block]), keys are scored in strips of kLanes neighbours, and blocks are multiples of kLanes.
struct Cache {
    const void *k, *v;
    int64_t k_row, k_head, k_col, v_row, v_head, v_col;
    const int32_t* table = nullptr;  // [B, table_width]
    int64_t table_width = 0, block = 0, k_dim = 1;
};

// one head of the cache
template <class T>
struct Head {
    const T *k, *v;
    int64_t k_col, v_col, k_block, v_block, block, k_dim;
    const int32_t* table;  // null: not paged
    Head(const Cache& c, int64_t row, int64_t head)
        : k(static_cast<const T*>(c.k) + (c.table ? 0 : row * c.k_row) + head * c.k_head),
          v(static_cast<const T*>(c.v) + (c.table ? 0 : row * c.v_row) + head * c.v_head),
          k_col(c.k_col), v_col(c.v_col), k_block(c.k_row), v_block(c.v_row), block(c.block), k_dim(c.k_dim),
          table(c.table ? c.table + row * c.table_width : nullptr) {}
    const T* key(int64_t col) const { return k + (table ? table[col / block] * k_block + col % block * k_col : col * k_col); }
    const T* value(int64_t col) const { return v + (table ? table[col / block] * v_block + col % block * v_col : col * v_col); }
};

// the columns that one head reads, in order: a list, or `lead` columns from `origin` on and then all from `begin` on
struct Columns {
    const int32_t* list;
    int64_t lead, origin, begin;
    int64_t operator()(int64_t j) const { return list ? list[j] : j < lead ? origin + j : begin + j - lead; }
};

// pointers to the rows of a few keys, at most kBlock; rows shorter than a chunk are copied
template <class T>
struct Rows {
    const T* at[kBlock + kLanes];
    int lane[kBlock];  // place inside its strip, when keys are scored in strips
    std::vector<T> copies;
    explicit Rows(int64_t dim) : copies(dim < Chunk<T>::width ? kBlock * Chunk<T>::width : 0) {}

    template <class Column>
    void keys(const Head<T>& head, int64_t dim, int64_t count, Column column) {
        for (int64_t j = 0; j < count; ++j) {
            const int64_t col = column(j);
            lane[j] = head.k_dim == 1 ? 0 : col % kLanes;
            at[j] = head.key(col - lane[j]);
        }
        if (head.k_dim == 1) finish(count, dim);
        else std::fill(at + count, std::end(at), at[count - 1]);
    }

    template <class Column>
    void values(const Head<T>& head, int64_t dim, int64_t count, Column column) {
        for (int64_t j = 0; j < count; ++j) at[j] = head.value(column(j));
        finish(count, dim);
    }

private:
    void finish(int64_t count, int64_t dim) {
        if (!copies.empty())
            for (int64_t j = 0; j < count; ++j)
                at[j] = static_cast<const T*>(std::memcpy(copies.data() + j * Chunk<T>::width, at[j], dim * sizeof(T)));
        std::fill(at + count, std::end(at), at[count - 1]);  // tiles are whole, and what is fetched ahead exists
    }
};

// the same as score of tiles.h for keys that lie in strips: out[g * stride + j] = key j . q[g], q [G, dim] as it came
template <class T>
void score_strips(const Rows<T>& rows, int64_t k_dim, int64_t count, const float* q, int64_t groups, int64_t dim, float* out,
                  int64_t stride) {
    for (int64_t g = 0; g < groups; ++g, q += dim, out += stride) {
        const T* strip = nullptr;
        float made[kLanes];
        for (int64_t j = 0; j < count; ++j) {
            if (rows.at[j] != strip) {
                strip = rows.at[j];
                vec all[2] = {};
                int64_t d = 0;
                for (; d + 2 <= dim; d += 2) {
                    all[0] += spread(strip + d * k_dim) * q[d];
                    all[1] += spread(strip + (d + 1) * k_dim) * q[d + 1];
                }
                if (d < dim) all[0] += spread(strip + d * k_dim) * q[d];
                store(made, all[0] + all[1]);
            }
            out[j] = made[rows.lane[j]];
        }
    }
}

}  // namespace prehoc
