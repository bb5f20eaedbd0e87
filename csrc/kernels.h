// What every variant of the kernels provides, and the plain structs that they take.
//
// Nothing here knows about torch: ops.cpp checks tensors and fills these structs in. Sizes are in elements,
// matrices are row-major, and an `out × in` weight matrix has one row an output feature, as torch.nn.Linear has.

#pragma once

#include <cstdint>

namespace specviz {

enum class Type : int { f32, bf16 };

// Activations that the fused expert knows; engine/kernels/experts.py has the same list.
enum class Activation : int { silu, gelu, gelu_tanh };

// One group of 32 weights shares a scale and a zero point (engine/offload/quantize.py).
constexpr int64_t kGroup = 32;

// out (rows, out_features) = x (rows, in_features) · weightᵀ + bias.
struct LinearArgs {
    Type type;  // of x, weight, bias and out
    const void* x;
    const void* weight;
    const void* bias;  // or null
    void* out;
    int64_t rows, in_features, out_features;
};

// The weights of one expert: gate_up (2I, H) and down (H, I).
// bits == 0: both in `Type`. Otherwise `gate_up` and `down` are codes (rows, groups, 4 · bits bytes), and the
// scales (rows, groups, 2) hold a bfloat16 (scale, zero) pair for each group.
struct ExpertWeights {
    const void* gate_up;
    const void* down;
    const uint16_t* gate_up_scales;
    const uint16_t* down_scales;
};

// The routed experts of one layer. Pair p sends row `rows[p]` of x through expert e, offsets[e] ≤ p < offsets[e+1],
// and writes to row `slots[p]` of `out` (float32).
struct ExpertsArgs {
    Type type;  // of x, and of the weights when bits == 0
    int bits;   // 0, or 8, 4, 3, 2
    Activation activation;
    const void* x;  // (rows, hidden)
    const ExpertWeights* experts;
    const int64_t* offsets;  // (experts + 1)
    const int64_t* rows;     // (pairs)
    const int64_t* slots;    // (pairs)
    float* out;              // (slots, hidden)
    int64_t n_experts, hidden, intermediate;
};

// out (rows, hidden) = Σ over position of weights (rows, top_k) · outputs (rows, top_k, hidden), in that order.
struct CombineArgs {
    Type type;  // of out
    const float* outputs;
    const float* weights;
    void* out;
    int64_t rows, top_k, hidden;
};

// out (rows, size) = weight (size) · x (rows, size) / √(mean of x² over the row + eps).
struct NormArgs {
    Type type;  // of x, weight and out
    const void* x;
    const void* weight;
    void* out;
    int64_t rows, size;
    float eps;
};

// Attention of a chunk of new rows over a KV cache that already holds them (SpecMoEOff, section 5.1).
// Row r of sequence b stands at position p = starts[b] + r and sees keys max(0, p − window + 1) … p of cache slot
// slots[b]; window 0 is no window. Strides are in elements; the innermost dimension is contiguous.
struct AttentionArgs {
    Type type;  // of q, k, v and out
    const void* q;
    int64_t q_batch, q_head, q_row;
    const void* k;
    int64_t k_slot, k_head, k_row;
    const void* v;
    int64_t v_slot, v_head, v_row;
    const int64_t* slots;   // (batch)
    const int64_t* starts;  // (batch)
    const float* sinks;     // (heads) a logit that takes weight but adds nothing, or null
    void* out;              // (batch, rows, heads, value_dim), contiguous
    int64_t batch, heads, kv_heads, rows, dim, value_dim;
    int64_t window;
    float scale;
};

// What a projection made of new rows, on its way to attention: queries and keys are normed where there are weights for
// it and rotated (RoFormer, arXiv 2104.09864, as halves), then queries go to `q`, keys and values to the cache.
struct PlaceArgs {
    Type type;           // of everything
    void* projected;     // (batch, rows, (heads + 2 · kv_heads) · dim): queries, keys, values; overwritten
    const void* q_norm;  // (q_norm_size): dim for each head alone, heads · dim for all of them; null: no norm
    const void* k_norm;
    int64_t q_norm_size, k_norm_size;
    float eps;
    const void* cos;  // (batch, rows, rotary): features beyond the first `rotary` of a head are not rotated
    const void* sin;
    int64_t rotary, angles_batch;  // angles_batch: from one sequence's angles to the next, 0 if they share them
    void* q;                       // (batch, rows, heads, dim)
    void* k;
    int64_t k_slot, k_head, k_row;
    void* v;
    int64_t v_slot, v_head, v_row;
    const int64_t* slots;   // (batch)
    const int64_t* starts;  // (batch)
    int64_t batch, heads, kv_heads, rows, dim;
};

// One implementation of everything.
struct Kernels {
    const char* name;
    void (*linear)(const LinearArgs&);
    void (*experts)(const ExpertsArgs&);
    void (*combine)(const CombineArgs&);
    void (*norm)(const NormArgs&);
    void (*place)(const PlaceArgs&);
    void (*attention)(const AttentionArgs&);
};

// The variant in use: the best that this machine supports, until specviz_use names another.
const Kernels& current();

}  // namespace specviz
