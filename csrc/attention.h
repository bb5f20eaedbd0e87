// Attention of a few new rows of each sequence over a long KV cache (AttentionArgs in kernels.h).
//
// The keys are cut into blocks at fixed positions of the sequence. A task is one block of one KV head for a tile of
// queries (rows × the query heads that share the KV head), so K and V are read once for all of them, and one sequence
// keeps every core busy. It leaves, for each query, the largest logit, the sum of probabilities relative to it, and
// the weighted sum of values. Whoever finishes a tile's last block merges its blocks, in the order of their positions.
//
// Row-invariance: all that a query's arithmetic depends on is its own position, its q and the keys that it sees. A key
// that only others see has probability 0 there, and adding 0 · v changes nothing as long as v is finite; where it is
// not, rows are computed one by one (see `attend`).

#pragma once

#include "attention_tiles.h"
#include "kernels.h"
#include "parallel.h"
#include "products.h"
#include "simd.h"

namespace specviz {
namespace {

constexpr int64_t kBlockKeys = 512;
// Values that are packed at a time: with 128 features in bfloat16, a panel of them fills half a 32 KiB cache.
constexpr int64_t kValueKeys = 128;
// Queries of one task: more share a pass over K and V, but scores must stay in the second-level cache.
constexpr int64_t kMostQueries = 64;
// Bytes of partial results at a time; more rows than fit are computed in several rounds.
constexpr int64_t kPartialBytes = 16 << 20;
// Multiply-adds that are worth waking a thread for.
constexpr int64_t kLeastWork = 1 << 19;
constexpr float kLog2e = 1.44269504088896341f, kInfinity = __builtin_inff();

// Queries first … first + count of one sequence and KV head, and the blocks of keys that any of them sees.
// Query i is row i / group, query head i % group of the KV head.
struct Tile {
    int64_t sequence, kv_head, first, count, first_block, blocks;
    float* partials;  // (blocks, count, entry)
    int64_t left;     // blocks that are not done
};

struct Task {
    int64_t tile, block;
};

// How much there is of each, and the multiply-adds in all.
struct Plan {
    int64_t tiles, tasks, partials, work;
};

// Keys begin … end of the sequence, those that a row sees.
struct Span {
    int64_t begin, end;
};

inline Span seen(const AttentionArgs& a, int64_t sequence, int64_t row) {
    const int64_t position = a.starts[sequence] + row;
    return {a.window && position >= a.window ? position - a.window + 1 : 0, position + 1};
}

// Probabilities of one query over lanes begin … end of a block, of which it sees those in `mine`, in powers of two:
// 2^(score · scale − most).
template <class Unit>
inline void softmax(float* scores, typename Unit::Step* probabilities, int64_t begin, int64_t end, Span mine,
                    float scale, float* most, float* total) {
    if (!(scale > 0)) {
        for (int64_t k = begin; k < end; k += kLanes) store(scores + k, load<vf>(scores + k) * scale);
        scale = 1;
    }
    const vf nothing = splat(-kInfinity);
    vf top = nothing;
    for (int64_t k = begin; k < end; k += kLanes) {
        vf score = load<vf>(scores + k);
        if (k < mine.begin || k + kLanes > mine.end) {
            vi lane;
            for (int i = 0; i < kLanes; i++) lane[i] = static_cast<int>(k) + i;
            const vi visible = (lane >= static_cast<int>(mine.begin)) & (lane < static_cast<int>(mine.end));
            score = visible ? score : nothing;
            store(scores + k, score);
        }
        top = max(score, top);
    }
    *most = largest(top) * scale;
    const float zero = *most == -kInfinity ? 0.0f : *most;
    vf sums{};
    for (int64_t k = begin; k < end; k += kPair)
        sums += Unit::keep(probabilities + k / Unit::kTerms, exp2<Unit::kCoarse>(load<vf>(scores + k) * scale - zero),
                           exp2<Unit::kCoarse>(load<vf>(scores + k + kLanes) * scale - zero));
    *total = sum(sums);
}

// Whether the exponents of all are below the highest, as those of infinity and NaN are not.
inline bool finite(const float* x, int64_t n) {
    uint32_t most = 0;
    for (int64_t i = 0; i < n; i++) {
        const uint32_t exponent = load<uint32_t>(x + i) & 0x7f800000;
        most = exponent > most ? exponent : most;
    }
    return most < 0x7f800000;
}

inline bool finite(const uint16_t* x, int64_t n) {
    uint16_t most = 0;
    for (int64_t i = 0; i < n; i++) {
        const uint16_t exponent = x[i] & 0x7f80;
        most = exponent > most ? exponent : most;
    }
    return most < 0x7f80;
}

// Everything for caches of one type.
template <class Unit>
struct Attention {
    using Stored = typename Unit::Stored;
    using Step = typename Unit::Step;

    const AttentionArgs& a;
    const int64_t group = a.heads / a.kv_heads;
    const int64_t steps = (a.dim + Unit::kTerms - 1) / Unit::kTerms;
    const int64_t features = round_up(a.value_dim, kPair);
    // A query's partial result: largest logit, sum, and from `kLanes` on the values' weighted sum.
    const int64_t entry = kLanes + features;

    // What a thread needs at a time.
    struct Room {
        Step* queries;        // (queries, steps)
        Step* keys;           // (steps, kPanel)
        float* scores;        // (queries, kBlockKeys); `features` floats while a tile is merged
        Step* probabilities;  // (queries, kBlockKeys / kTerms)
        Step* values;         // (kValueKeys / kTerms, features)
    };

    int64_t scores_words(int64_t queries) const {
        return queries * kBlockKeys > features ? queries * kBlockKeys : features;
    }

    // Four-byte words of a Room for that many queries, each part at a multiple of 64 bytes.
    int64_t room_words(int64_t queries) const {
        return round_up(queries * steps, 16) + steps * kPanel + scores_words(queries) +
               queries * kBlockKeys / Unit::kTerms + kValueKeys / Unit::kTerms * features;
    }

    Room room(float* words, int64_t queries) const {
        Room r;
        r.queries = reinterpret_cast<Step*>(words);
        r.keys = r.queries + round_up(queries * steps, 16);
        r.scores = reinterpret_cast<float*>(r.keys + steps * kPanel);
        r.probabilities = reinterpret_cast<Step*>(r.scores + scores_words(queries));
        r.values = r.probabilities + queries * kBlockKeys / Unit::kTerms;
        return r;
    }

    const Stored* keys_of(const Tile& t) const {
        return static_cast<const Stored*>(a.k) + a.slots[t.sequence] * a.k_slot + t.kv_head * a.k_head;
    }
    const Stored* values_of(const Tile& t) const {
        return static_cast<const Stored*>(a.v) + a.slots[t.sequence] * a.v_slot + t.kv_head * a.v_head;
    }

    // Whether all values are finite that some, but not all, of rows first … last see.
    bool uneven_finite(const Tile& t, Span block, int64_t first, int64_t last) const {
        const Span one = seen(a, t.sequence, first), other = seen(a, t.sequence, last);
        const Span edges[] = {{one.begin, other.begin}, {one.end, other.end}};
        for (const Span& edge : edges)
            for (int64_t k = edge.begin > block.begin ? edge.begin : block.begin; k < least(edge.end, block.end); k++)
                if (!finite(values_of(t) + k * a.v_row, a.value_dim)) return false;
        return true;
    }

    // The partial results of queries first … first + count of a tile over one block.
    void attend(const Tile& t, int64_t block, int64_t first, int64_t count, const Room& r) const {
        const int64_t row = first / group, last_row = (first + count - 1) / group, origin = block * kBlockKeys;
        const Span whole{origin, origin + kBlockKeys};
        if (row != last_row && !uneven_finite(t, whole, row, last_row)) {
            // 0 · NaN is NaN: nobody may meet a value that he does not see.
            for (int64_t i = first, n; i < first + count; i += n) {
                n = least(group - i % group, first + count - i);
                attend(t, block, i, n, r);
            }
            return;
        }
        // What the queries see of the block, counted from its start, and the whole pairs of vectors around it.
        const Span from = seen(a, t.sequence, row), to = seen(a, t.sequence, last_row);
        const int64_t low = from.begin > origin ? from.begin - origin : 0, high = least(to.end - origin, kBlockKeys);
        float* out = t.partials + ((block - t.first_block) * t.count + (first - t.first)) * entry;
        if (high <= low) return nothing(out, count);
        const int64_t begin = low - low % kPair, end = round_up(high, kPair);

        for (int64_t i = 0; i < count; i++) pack_query<Unit>(query(t, first + i), a.dim, r.queries + i * steps);
        const Stored* keys = keys_of(t) + origin * a.k_row;
        for (int64_t k = begin, width; k < end; k += width) {
            width = panel_width(end, k);
            pack_keys<Unit>(keys + k * a.k_row, a.k_row, a.dim, low - k, high - k, width, r.keys);
            multiply<Unit>(count, r.queries, steps, r.keys, width, steps, r.scores + k, kBlockKeys, true,
                           k + width < end ? next_keys(t, origin + k + width, origin + high)
                                           : next_values(t, origin + begin, origin + high));
        }
        for (int64_t i = 0; i < count; i++) {
            const Span all = seen(a, t.sequence, (first + i) / group);
            const Span mine{all.begin - origin > 0 ? all.begin - origin : 0, least(all.end - origin, kBlockKeys)};
            softmax<Unit>(r.scores + i * kBlockKeys, r.probabilities + i * kBlockKeys / Unit::kTerms, begin, end, mine,
                          a.scale * kLog2e, out + i * entry, out + i * entry + 1);
        }
        const Stored* values = values_of(t) + origin * a.v_row;
        for (int64_t k = begin; k < end; k += kValueKeys) {
            const int64_t n = least(kValueKeys, end - k), value_steps = n / Unit::kTerms;
            pack_values<Unit>(values + k * a.v_row, a.v_row, a.value_dim, low - k, high - k, n, r.values);
            for (int64_t d = 0, width; d < features; d += width) {
                width = panel_width(features, d);
                multiply<Unit>(count, r.probabilities + k / Unit::kTerms, kBlockKeys / Unit::kTerms,
                               r.values + d * value_steps, width, value_steps, out + kLanes + d, entry, k == begin,
                               d == 0 ? next_values(t, origin + k + n, origin + high) : Ahead{nullptr, 0});
            }
        }
    }

    Ahead next_keys(const Tile& t, int64_t from, int64_t end) const {
        return Ahead::rows(keys_of(t) + from * a.k_row, least(kPanel, end - from), a.k_row * sizeof(Stored),
                           a.dim * sizeof(Stored));
    }
    Ahead next_values(const Tile& t, int64_t from, int64_t end) const {
        return Ahead::rows(values_of(t) + from * a.v_row, least(kValueKeys, end - from), a.v_row * sizeof(Stored),
                           a.value_dim * sizeof(Stored));
    }

    const Stored* query(const Tile& t, int64_t i) const {
        return static_cast<const Stored*>(a.q) + t.sequence * a.q_batch + (t.kv_head * group + i % group) * a.q_head +
               i / group * a.q_row;
    }

    void nothing(float* out, int64_t count) const {
        std::memset(out, 0, count * entry * sizeof(float));
        for (int64_t i = 0; i < count; i++) out[i * entry] = -kInfinity;
    }

    // The blocks of query i of a tile in one, into the operator's output; `total` has room for `features` floats.
    void merge(const Tile& t, int64_t i, float* total) const {
        const int64_t head = t.kv_head * group + (t.first + i) % group, row = (t.first + i) / group;
        const float* first = t.partials + i * entry;
        const int64_t next = t.count * entry;
        float most = a.sinks ? a.sinks[head] * kLog2e : -kInfinity;
        for (int64_t j = 0; j < t.blocks; j++) most = first[j * next] > most ? first[j * next] : most;
        float sum = a.sinks ? exp2(a.sinks[head] * kLog2e - most) : 0.0f;
        std::memset(total, 0, features * sizeof(float));
        for (int64_t j = 0; j < t.blocks; j++) {
            const float* part = first + j * next;
            const float weight = exp2(part[0] - most);
            sum += weight * part[1];
            for (int64_t d = 0; d < features; d += kLanes)
                store(total + d, load<vf>(total + d) + weight * load<vf>(part + kLanes + d));
        }
        Stored* out = static_cast<Stored*>(a.out) + ((t.sequence * a.rows + row) * a.heads + head) * a.value_dim;
        for (int64_t d = 0; d < features; d += kPair) {
            vf low = load<vf>(total + d) / sum, high = load<vf>(total + d + kLanes) / sum;
            Unit::restore(low, high);
            Stored rounded[kPair];
            put_floats(rounded, low);
            put_floats(rounded + kLanes, high);
            std::memcpy(out + d, rounded, least(kPair, a.value_dim - d) * sizeof(Stored));
        }
    }

    // Tiles and tasks of rows first … first + rows; says how much of each there is, and writes nothing without `tasks`.
    Plan plan(int64_t first, int64_t rows, Tile* tiles, Task* tasks, float* partials) const {
        Plan size{0, 0, 0, 0};
        const int64_t queries = rows * group, parts = (queries + kMostQueries - 1) / kMostQueries;
        for (int64_t b = 0; b < a.batch; b++)
            for (int64_t h = 0; h < a.kv_heads; h++)
                for (int64_t part = 0; part < parts; part++, size.tiles++) {
                    const int64_t begin = queries * part / parts, end = queries * (part + 1) / parts;
                    Tile t{b, h, first * group + begin, end - begin, 0, 0, partials + size.partials, 0};
                    const Span from = seen(a, b, t.first / group), to = seen(a, b, (t.first + t.count - 1) / group);
                    t.first_block = from.begin / kBlockKeys;
                    t.left = t.blocks = (to.end - 1) / kBlockKeys + 1 - t.first_block;
                    if (tasks) {
                        tiles[size.tiles] = t;
                        for (int64_t j = 0; j < t.blocks; j++) tasks[size.tasks + j] = {size.tiles, t.first_block + j};
                    }
                    size.tasks += t.blocks;
                    size.partials += t.blocks * t.count * entry;
                    size.work += (to.end - from.begin) * t.count * (a.dim + a.value_dim);
                }
        return size;
    }

    // How many rows' partial results fit.
    int64_t rows_at_once() const {
        int64_t blocks = 0;
        for (int64_t b = 0; b < a.batch; b++) {
            const Span all{seen(a, b, 0).begin, seen(a, b, a.rows - 1).end};
            blocks += (all.end - 1) / kBlockKeys + 1 - all.begin / kBlockKeys;
        }
        const int64_t rows = kPartialBytes / (blocks * a.heads * entry * static_cast<int64_t>(sizeof(float)));
        return rows > 1 ? least(rows, a.rows) : 1;
    }
};

template <class Unit>
void run_attention(const AttentionArgs& a) {
    static thread_local Scratch tile_scratch, task_scratch, partial_scratch, room_scratch;
    const Attention<Unit> attention{a};
    const int64_t at_once = attention.rows_at_once();
    for (int64_t first = 0; first < a.rows; first += at_once) {
        const int64_t rows = least(at_once, a.rows - first), queries = least(kMostQueries, rows * attention.group);
        const Plan size = attention.plan(first, rows, nullptr, nullptr, nullptr);
        Tile* tiles = tile_scratch.get<Tile>(size.tiles);
        Task* tasks = task_scratch.get<Task>(size.tasks);
        attention.plan(first, rows, tiles, tasks, partial_scratch.get<float>(size.partials));
        // Each worker takes tasks, in order, until there are none: it keeps its room, and nothing is allocated.
        const int64_t workers = least(least(threads(), size.tasks), size.work / kLeastWork + 1);
        const int64_t words = attention.room_words(queries);
        float* rooms = room_scratch.get<float>(workers * words);
        int64_t next = 0;
        parallel_for(workers, [&](int64_t worker) {
            const auto room = attention.room(rooms + worker * words, queries);
            for (int64_t at; (at = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED)) < size.tasks;) {
                Tile& tile = tiles[tasks[at].tile];
                attention.attend(tile, tasks[at].block, tile.first, tile.count, room);
                // The last one sees what the others wrote.
                if (__atomic_sub_fetch(&tile.left, 1, __ATOMIC_ACQ_REL) > 0) continue;
                for (int64_t i = 0; i < tile.count; i++) attention.merge(tile, i, room.scores);
            }
        });
    }
}

void attention(const AttentionArgs& args) {
    if (args.type == Type::f32) return run_attention<FloatUnit32>(args);
    run_attention<BfloatUnit16>(args);
}

}  // namespace
}  // namespace specviz
