// Random shapes, strides, padding, lists and block tables through the C++ kernels, against naive loops in double. Every buffer is
// exactly as large as it must be, so that AddressSanitizer sees a read beside it. Usage: fuzz SEED ROUNDS

#include <cstdio>
#include <cstdlib>
#include <random>

#include "cheap.h"
#include "decode.h"
#include "dilate.h"
#include "retrieve.h"
#include "stream.h"

using namespace prehoc;

namespace {

std::mt19937 random_bits;

int64_t between(int64_t low, int64_t high) { return low + int64_t(random_bits() % uint32_t(high - low + 1)); }

void require(bool good, const char* what) {
    if (good) return;
    std::printf("wrong: %s\n", what);
    std::exit(1);
}

double value(float x) { return x; }
double value(bf16 x) {
    const uint32_t wide = uint32_t(x.bits) << 16;
    float out;
    std::memcpy(&out, &wide, 4);
    return out;
}
double value(fp16 x) { return widen(x); }

void draw(float& x) { x = float(between(-2000, 2000)) / 1000; }
void draw(bf16& x) { x.bits = uint16_t(0x3f00 + between(0, 0xff) + (between(0, 1) << 15)); }
void draw(fp16& x) { x.bits = uint16_t(0x3800 + between(0, 0x7ff) + (between(0, 1) << 15)); }

template <class T>
std::vector<T> drawn(int64_t count) {
    std::vector<T> out(count);
    for (T& x : out) draw(x);
    return out;
}

// a cache [rows or blocks, heads, columns, dim]: how far apart its parts are, and the number of its elements
struct Layout {
    int64_t row, head, col, dim, total;
};

Layout plain(int64_t rows, int64_t heads, int64_t columns, int64_t dim) {
    const int64_t col = dim + between(0, 3), head = (columns - 1) * col + dim + between(0, 20);
    const int64_t row = (heads - 1) * head + (columns - 1) * col + dim + between(0, 20);
    return {row, head, col, 1, (rows - 1) * row + (heads - 1) * head + (columns - 1) * col + dim};
}

Layout in_strips(int64_t rows, int64_t heads, int64_t columns, int64_t dim) {
    const int64_t head = columns * dim, row = heads * head;
    return {row, head, 1, columns, rows * row};
}

template <class T>
struct Case {
    int64_t b = between(1, 3), hkv = between(1, 3), share = between(0, 1), group = between(1, 9), n = between(1, 300);
    int64_t heads = share ? hkv * group : hkv, groups = share ? 1 : group, dim = between(1, 150), dim_v = between(0, 2) ? dim : between(1, 150);
    bool paged = between(0, 1);
    int64_t block = int64_t(16) << between(0, 3), blocks = (n + block - 1) / block, spare = between(0, 2);
    Layout k, v;
    std::vector<int32_t> table;
    std::vector<T> keys, values;
    std::vector<float> q = drawn<float>(b * heads * groups * dim);

    Case() {
        for (float& x : q) x *= 0.1f;
        const int64_t rows = paged ? b * blocks + spare : b, columns = paged ? block : n;
        k = paged && between(0, 1) ? in_strips(rows, hkv, columns, dim) : plain(rows, hkv, columns, dim);
        v = plain(rows, hkv, columns, dim_v);
        keys = drawn<T>(k.total), values = drawn<T>(v.total);
        for (int64_t i = 0; i < rows; ++i) table.push_back(int32_t(i));
        std::shuffle(table.begin(), table.end(), random_bits);
        table.resize(b * blocks);
        table.shrink_to_fit();
    }
    Cache cache() const {
        if (!paged) return {keys.data(), values.data(), k.row, k.head, k.col, v.row, v.head, v.col};
        return {keys.data(), values.data(), k.row, k.head, k.col, v.row, v.head, v.col, table.data(), blocks, block, k.dim};
    }
    double element(const Layout& at, const std::vector<T>& x, int64_t row, int64_t kv, int64_t col, int64_t d) const {
        if (paged) row = table[row * blocks + col / block], col %= block;
        return value(x[row * at.row + kv * at.head + col * at.col + d * at.dim]);
    }
    double logit(int64_t pair, int64_t g, int64_t col) const {
        double sum = 0;
        for (int64_t d = 0; d < dim; ++d)
            sum += q[(pair * groups + g) * dim + d] * element(k, keys, pair / heads, pair % heads / (heads / hkv), col, d);
        return sum;
    }
};

template <class T>
void attention() {
    const Case<T> c;
    const bool lists = between(0, 1);
    const int64_t pairs = c.b * c.heads, sink = between(0, 5);
    std::vector<int64_t> first(c.b), start(c.b);
    std::vector<int32_t> ends(c.b, int32_t(c.n)), lengths(pairs);
    for (int64_t row = 0; row < c.b; ++row) {
        if (c.paged) ends[row] = int32_t(between(1, c.n));
        else first[row] = between(0, std::max<int64_t>(c.n - 1 - sink, 0)), start[row] = between(0, c.n - 1);
    }
    std::vector<std::vector<int32_t>> seen(pairs);
    size_t width = 0;
    for (int64_t pair = 0; pair < pairs; ++pair) {
        const int64_t row = pair / c.heads, open = first[row], from = start[row];
        for (int64_t col = 0; col < ends[row]; ++col)
            if (lists ? between(0, 2) == 0 : c.paged || (col >= open && (col < open + sink || col >= from))) seen[pair].push_back(int32_t(col));
        lengths[pair] = int32_t(seen[pair].size());
        width = std::max(width, seen[pair].size());
    }
    std::vector<int32_t> indices(pairs * width, -1);
    for (int64_t pair = 0; pair < pairs; ++pair) std::copy(seen[pair].begin(), seen[pair].end(), indices.begin() + pair * width);
    std::vector<float> out(pairs * c.groups * c.dim_v), lse(pairs * c.groups);
    decode<T>(c.q.data(), c.cache(), c.b, c.hkv, c.heads, c.groups, c.dim, c.dim_v, first.data(), start.data(), c.paged ? 0 : sink,
              c.n, lists ? indices.data() : nullptr, lists ? lengths.data() : c.paged ? ends.data() : nullptr, int64_t(width),
              out.data(), lse.data());
    for (int64_t pair = 0; pair < pairs; ++pair)
        for (int64_t g = 0; g < c.groups; ++g) {
            double total = 0;
            std::vector<double> wanted(c.dim_v, 0.0);
            for (int32_t col : seen[pair]) {
                const double w = std::exp(c.logit(pair, g, col));
                total += w;
                for (int64_t d = 0; d < c.dim_v; ++d)
                    wanted[d] += w * c.element(c.v, c.values, pair / c.heads, pair % c.heads / (c.heads / c.hkv), col, d);
            }
            const int64_t at = pair * c.groups + g;
            require(seen[pair].empty() ? lse[at] == kNever : std::abs(lse[at] - std::log(total)) < 1e-4, "log of the sum");
            for (int64_t d = 0; d < c.dim_v; ++d)
                require(std::abs(out[at * c.dim_v + d] - (total > 0 ? wanted[d] / total : 0)) < 1e-4, "attention");
        }
}

template <class T>
void weights() {
    const Case<T> c;
    if (c.paged) return;
    const int64_t pairs = c.b * c.heads;
    std::vector<int64_t> first(c.b);
    for (int64_t& begin : first) begin = between(0, c.n - 1);
    std::vector<float> out(pairs * c.groups * c.dim_v), lse(pairs * c.groups), found(pairs * c.n);
    decode<T>(c.q.data(), c.cache(), c.b, c.hkv, c.heads, c.groups, c.dim, c.dim_v, first.data(), first.data(), 0, c.n, nullptr,
              nullptr, 0, out.data(), lse.data(), found.data());
    for (int64_t pair = 0; pair < pairs; ++pair) {
        std::vector<double> wanted(c.n, 0.0);
        for (int64_t g = 0; g < c.groups; ++g) {
            double total = 0;
            for (int64_t col = first[pair / c.heads]; col < c.n; ++col) total += std::exp(c.logit(pair, g, col));
            for (int64_t col = first[pair / c.heads]; col < c.n; ++col) wanted[col] += std::exp(c.logit(pair, g, col)) / total;
        }
        for (int64_t col = 0; col < c.n; ++col) require(std::abs(found[pair * c.n + col] - wanted[col]) < 1e-4, "weights");
    }
}

// a compact copy made in two goes, each code within half a step of its element
template <class T>
Compact coded(const Case<T>& c, std::vector<code>& codes, std::vector<float>& scales) {
    const int64_t room = c.n + between(0, 3), some = between(0, c.n);
    codes.resize(c.b * c.hkv * room * c.dim), scales.resize(c.b * c.hkv * room);
    code_keys<T>(c.cache(), c.b, c.hkv, c.dim, some, {codes.data(), scales.data(), room, 0});
    code_keys<T>(c.cache(), c.b, c.hkv, c.dim, c.n, {codes.data(), scales.data(), room, some});
    for (int64_t head = 0; head < c.b * c.hkv; ++head)
        for (int64_t col = 0; col < c.n; ++col)
            for (int64_t d = 0; d < c.dim; ++d) {
                const int64_t at = head * room + col;
                const double wanted = c.element(c.k, c.keys, head / c.hkv, head % c.hkv, col, d);
                require(std::abs(codes[at * c.dim + d].bits * scales[at] - wanted) <= 0.501 * scales[at], "codes");
            }
    return {{codes.data(), nullptr, c.hkv * room * c.dim, room * c.dim, c.dim, 0, 0, 0}, scales.data(), c.hkv * room, room, c.n};
}

template <class T>
void retrieval() {
    const Case<T> c;
    const int64_t pairs = c.b * c.heads, sink = between(0, 4), local = between(1, 6), topk = between(1, 40), mean = between(0, 1);
    std::vector<int64_t> first(c.b), start(c.b), chosen;
    std::vector<int32_t> ends(c.b, int32_t(c.n));
    for (int64_t row = 0; row < c.b; ++row) {
        first[row] = c.paged ? 0 : between(0, c.n / 3);
        start[row] = first[row] + sink + (c.paged ? 0 : between(0, 5));
        if (c.paged) ends[row] = int32_t(between(1, c.n));
        if (start[row] > ends[row]) return;  // such rows have no middle and never come here
    }
    for (int64_t pair = 0; pair < pairs; ++pair)
        if (between(0, 2)) chosen.push_back(pair);
    std::vector<int64_t> order(chosen.size() * topk, -7);
    const bool cheap = !c.paged && between(0, 1);  // every key is ranked again: only the scale of a group's heads is rounded
    const double near = cheap && c.groups > 1 ? 0.1 : 1e-4;
    std::vector<code> codes;
    std::vector<float> scales;
    Compact compact{};
    if (cheap) compact = coded(c, codes, scales);
    retrieve<T>(c.q.data(), c.cache(), chosen.data(), int64_t(chosen.size()), c.hkv, c.heads, c.groups, c.dim, first.data(),
                start.data(), sink, local, c.n, topk, mean != 0, order.data(), c.paged ? ends.data() : nullptr,
                cheap ? &compact : nullptr);
    for (size_t i = 0; i < chosen.size(); ++i) {
        const int64_t pair = chosen[i], row = pair / c.heads, end = ends[row];
        std::vector<double> score(std::max<int64_t>(end - local - start[row], 0), mean ? 0.0 : -1e300);
        for (int64_t g = 0; g < c.groups; ++g) {
            double total = 0;
            for (int64_t col = first[row]; col < end; ++col)
                if (col < first[row] + sink || col >= start[row]) total += std::exp(c.logit(pair, g, col));
            for (size_t j = 0; j < score.size(); ++j) {
                const double weight = c.logit(pair, g, start[row] + int64_t(j)) - (c.groups > 1 ? std::log(total) : 0);
                score[j] = mean ? score[j] + std::exp(weight) : std::max(score[j], weight);
            }
        }
        std::vector<double> sorted = score;
        std::sort(sorted.rbegin(), sorted.rend());
        for (int64_t j = 0; j < topk; ++j) {
            const int64_t got = order[i * topk + j];
            if (j >= int64_t(sorted.size())) require(got == -1, "padding of a retrieval");
            else require(got >= start[row] && got < end - local && std::abs(score[got - start[row]] - sorted[j]) < near * (1 + std::abs(sorted[j])), "retrieval");
        }
    }
}

void selection() {
    const int64_t count = between(0, 4000), take = between(1, 5000), kind = between(0, 3);
    std::vector<float> x = drawn<float>(count);
    for (float& s : x) {
        if (kind == 1) s = std::round(s * 3);  // many equal
        if (kind == 2 && between(0, 3) == 0) s = kNever;
        if (kind == 3) s = std::exp(40 * s);
    }
    std::vector<int64_t> order(take), wanted(count);
    best_columns(x.data(), count, 5, take, order.data());
    for (int64_t j = 0; j < count; ++j) wanted[j] = j;
    std::stable_sort(wanted.begin(), wanted.end(), [&](int64_t a, int64_t b) { return x[a] > x[b]; });
    for (int64_t j = 0; j < take; ++j) require(order[j] == (j < count ? wanted[j] + 5 : -1), "top-k");
}

void dilation() {
    const int64_t n = between(1, 80), first = between(0, n / 4), sink = between(0, 4), start = first + sink + between(0, 3);
    const int64_t local = between(1, 6), radius = between(0, 3), k = between(1, 12), critical = between(0, k), best = between(0, k);
    std::vector<int64_t> middle, order(k, -1);
    for (int64_t col = start; col < n - local; ++col) middle.push_back(col);
    std::shuffle(middle.begin(), middle.end(), random_bits);
    std::copy_n(middle.begin(), std::min<int64_t>(k, middle.size()), order.begin());
    std::vector<int32_t> list(n, 0);
    const int32_t length = dilate(order.data(), k, first, start, n, sink, local, radius, std::min(best, critical), critical, n, 1, n, list.data());
    std::vector<bool> in(n, false);
    for (int64_t j = 0; j < critical; ++j)
        for (int64_t near = order[j] - radius; order[j] >= 0 && near <= order[j] + radius; ++near)
            if (near == order[j] || (j < best && near >= start && near < n - local)) in[near] = true;
    for (int64_t col = 0; col < n; ++col)
        if (col >= n - local || (col >= first && col < first + sink)) in[col] = true;
    std::vector<int32_t> wanted;
    for (int64_t col = 0; col < n; ++col)
        if (in[col]) wanted.push_back(int32_t(col));
    wanted.resize(n, -1);
    require(list == wanted && length == std::count(in.begin(), in.end(), true), "dilation");
}

template <class T>
void all() {
    attention<T>();
    weights<T>();
    retrieval<T>();
}

}  // namespace

int main(int, char** arguments) {
    random_bits.seed(uint32_t(std::atoi(arguments[1])));
    for (int round = 0; round < std::atoi(arguments[2]); ++round) {
#ifdef ONLY  // one storage type: a third of the time to compile
        all<ONLY>();
#else
        all<float>();
        all<bf16>();
        all<fp16>();
#endif
        selection();
        dilation();
        const std::vector<float> x(between(0, 500), 1.0f);
        require(stream(x.data(), int64_t(x.size())) == float(x.size()), "stream");
    }
    std::printf("no fault\n");
}
