// The kernels as torch operators, in torch's stable ABI: light to compile, and good for later torch releases.
//
// Everything that could make a kernel read or write out of bounds is checked here; dtypes are checked by name.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

[[noreturn]] void fail(const char* op, const std::string& what) {
    throw std::runtime_error(std::string("specviz::") + op + ": " + what);
}

// A macro, so that the text is only put together when it is needed.
#define REQUIRE(holds, what)          \
    do {                              \
        if (!(holds)) fail(op, what); \
    } while (0)

std::string text_of(const int64_t* sizes, int64_t n) {
    std::string text = "(";
    for (int64_t i = 0; i < n; i++) text += (i ? ", " : "") + (sizes[i] < 0 ? "*" : std::to_string(sizes[i]));
    return text + ")";
}

std::string shape_of(const Tensor& t) { return text_of(t.sizes().data(), t.dim()); }

specviz::Type type_of(const char* op, const char* name, const Tensor& t) {
    if (t.scalar_type() == ScalarType::Float) return specviz::Type::f32;
    REQUIRE(t.scalar_type() == ScalarType::BFloat16, std::string(name) + " must be float32 or bfloat16");
    return specviz::Type::bf16;
}

void check_type(const char* op, const char* name, const Tensor& t, ScalarType type, const char* type_name) {
    REQUIRE(t.scalar_type() == type, std::string(name) + " must be " + type_name);
}

// A contiguous CPU tensor of exactly this shape; -1 takes any size.
void check_shape(const char* op, const char* name, const Tensor& t, std::initializer_list<int64_t> shape) {
    const int64_t n = shape.size();
    const auto sizes = t.sizes();
    bool same = static_cast<int64_t>(sizes.size()) == n;
    for (int64_t i = 0; same && i < n; i++) same = shape.begin()[i] < 0 || sizes[i] == shape.begin()[i];
    REQUIRE(same, std::string(name) + " has shape " + shape_of(t) + ", expected " + text_of(shape.begin(), n));
    REQUIRE(t.is_cpu(), std::string(name) + " must be on the CPU");
    REQUIRE(t.is_contiguous(), std::string(name) + " must be contiguous");
}

const int64_t* indices(const char* op, const char* name, const Tensor& t, int64_t count, int64_t limit) {
    check_shape(op, name, t, {count});
    check_type(op, name, t, ScalarType::Long, "int64");
    const int64_t* values = static_cast<const int64_t*>(t.const_data_ptr());
    for (int64_t i = 0; i < t.size(0); i++)
        REQUIRE(values[i] >= 0 && values[i] < limit, std::string(name) + "[" + std::to_string(i) +
                                                         "] = " + std::to_string(values[i]) + " is not below " +
                                                         std::to_string(limit));
    return values;
}

specviz::Activation activation_of(const char* op, const std::string& name) {
    if (name == "silu") return specviz::Activation::silu;
    if (name == "gelu") return specviz::Activation::gelu;
    REQUIRE(name == "gelu_tanh", "unknown activation " + name + ": use silu, gelu or gelu_tanh");
    return specviz::Activation::gelu_tanh;
}

Tensor linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
    const char* op = "linear";
    REQUIRE(x.dim() >= 1, "x needs a dimension of features");
    const int64_t in = x.size(x.dim() - 1);
    REQUIRE(in > 0, "x has no features");
    const int64_t rows = x.numel() / in;
    check_shape(op, "weight", weight, {-1, in});
    REQUIRE(x.is_cpu(), "x must be on the CPU");
    const auto type = type_of(op, "x", x);
    REQUIRE(weight.scalar_type() == x.scalar_type(), "weight and x must have one dtype");
    if (bias) {
        check_shape(op, "bias", *bias, {weight.size(0)});
        REQUIRE(bias->scalar_type() == x.scalar_type(), "bias and x must have one dtype");
    }
    const Tensor packed = x.is_contiguous() ? x : torch::stable::contiguous(x);
    std::vector<int64_t> shape(x.sizes().begin(), x.sizes().end());
    shape.back() = weight.size(0);
    Tensor out = torch::stable::new_empty(x, shape);
    if (rows && weight.size(0))
        specviz::current().linear({type, packed.const_data_ptr(), weight.const_data_ptr(),
                                   bias ? bias->const_data_ptr() : nullptr, out.mutable_data_ptr(), rows, in,
                                   weight.size(0)});
    return out;
}

// Offsets must rise from 0 to the number of pairs.
const int64_t* check_offsets(const char* op, const Tensor& offsets, int64_t experts, int64_t pairs) {
    const int64_t* values = indices(op, "offsets", offsets, experts + 1, pairs + 1);
    REQUIRE(values[0] == 0 && values[experts] == pairs, "offsets must go from 0 to the number of rows");
    for (int64_t e = 0; e < experts; e++) REQUIRE(values[e] <= values[e + 1], "offsets must not fall");
    return values;
}

void expert_ffn(const Tensor& x, const std::vector<Tensor>& gate_up, const std::vector<Tensor>& down,
                const Tensor& offsets, const Tensor& rows, const Tensor& slots, Tensor out,
                const std::string& activation) {
    const char* op = "expert_ffn";
    check_shape(op, "x", x, {-1, -1});
    const auto type = type_of(op, "x", x);
    const int64_t n = gate_up.size(), hidden = x.size(1);
    REQUIRE(gate_up.size() == down.size() && n > 0, "gate_up and down must be lists of as many matrices, at least one");
    check_shape(op, "out", out, {-1, hidden});
    check_type(op, "out", out, ScalarType::Float, "float32");
    std::vector<specviz::ExpertWeights> experts;
    REQUIRE(down[0].dim() == 2, "down must hold matrices (hidden, intermediate)");
    const int64_t intermediate = down[0].size(1);
    for (int64_t e = 0; e < n; e++) {
        check_shape(op, "gate_up", gate_up[e], {2 * intermediate, hidden});
        check_shape(op, "down", down[e], {hidden, intermediate});
        REQUIRE(gate_up[e].scalar_type() == x.scalar_type() && down[e].scalar_type() == x.scalar_type(),
                "experts and x must have one dtype");
        experts.push_back({gate_up[e].const_data_ptr(), down[e].const_data_ptr(), nullptr, nullptr});
    }
    const int64_t pairs = rows.numel();
    const int64_t* row_values = indices(op, "rows", rows, pairs, x.size(0));
    const int64_t* slot_values = indices(op, "slots", slots, pairs, out.size(0));
    const int64_t* starts = check_offsets(op, offsets, n, pairs);
    if (pairs && hidden && intermediate)
        specviz::current().experts({type, 0, activation_of(op, activation), x.const_data_ptr(), experts.data(), starts,
                                    row_values, slot_values, static_cast<float*>(out.mutable_data_ptr()), n, hidden,
                                    intermediate});
}

// Σ over position, in order; outputs (rows, top_k, hidden) float32, weights (rows, top_k) float32.
void combine_into(Tensor& out, specviz::Type type, const float* outputs, const Tensor& weights) {
    specviz::current().combine({type, outputs, static_cast<const float*>(weights.const_data_ptr()),
                                out.mutable_data_ptr(), out.size(0), weights.size(1), out.size(1)});
}

Tensor combine(const Tensor& outputs, const Tensor& weights, const Tensor& like) {
    const char* op = "combine";
    check_shape(op, "weights", weights, {-1, -1});
    check_type(op, "weights", weights, ScalarType::Float, "float32");
    check_shape(op, "outputs", outputs, {weights.size(0), weights.size(1), -1});
    check_type(op, "outputs", outputs, ScalarType::Float, "float32");
    const auto type = type_of(op, "like", like);
    Tensor out = torch::stable::new_empty(like, {weights.size(0), outputs.size(2)});
    combine_into(out, type, static_cast<const float*>(outputs.const_data_ptr()), weights);
    return out;
}

Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps) {
    const char* op = "rms_norm";
    REQUIRE(x.dim() >= 1, "x needs a dimension of features");
    REQUIRE(x.is_cpu(), "x must be on the CPU");
    const auto type = type_of(op, "x", x);
    const int64_t size = x.size(x.dim() - 1);
    check_shape(op, "weight", weight, {size});
    REQUIRE(weight.scalar_type() == x.scalar_type(), "weight and x must have one dtype");
    const Tensor packed = x.is_contiguous() ? x : torch::stable::contiguous(x);
    Tensor out = torch::stable::new_empty(x, std::vector<int64_t>(x.sizes().begin(), x.sizes().end()));
    if (x.numel())
        specviz::current().norm({type, packed.const_data_ptr(), weight.const_data_ptr(), out.mutable_data_ptr(),
                                 x.numel() / size, size, static_cast<float>(eps)});
    return out;
}

const uint16_t* check_quantized(const char* op, const char* name, const Tensor& codes, const Tensor& scales,
                                int64_t experts, int64_t rows, int64_t columns, int64_t bits) {
    const int64_t groups = (columns + specviz::kGroup - 1) / specviz::kGroup;
    check_shape(op, name, codes, {experts, rows, groups, specviz::kGroup / 8 * bits});
    check_type(op, name, codes, ScalarType::Byte, "uint8");
    const std::string scales_name = std::string(name) + "_scales";
    check_shape(op, scales_name.c_str(), scales, {experts, rows, groups, 2});
    check_type(op, scales_name.c_str(), scales, ScalarType::BFloat16, "bfloat16");
    return static_cast<const uint16_t*>(scales.const_data_ptr());
}

Tensor quantized_moe(const Tensor& x, const Tensor& gate_up, const Tensor& gate_up_scales, const Tensor& down,
                     const Tensor& down_scales, const Tensor& index, const Tensor& weights, int64_t bits,
                     const std::string& activation, int64_t intermediate) {
    const char* op = "quantized_moe";
    check_shape(op, "x", x, {-1, -1});
    const auto type = type_of(op, "x", x);
    REQUIRE(bits == 8 || bits == 4 || bits == 3 || bits == 2, "bits must be 8, 4, 3 or 2");
    REQUIRE(intermediate > 0, "intermediate must be positive");
    REQUIRE(gate_up.dim() == 4, "gate_up must be codes (experts, rows, groups, bytes)");
    const int64_t n = gate_up.size(0), tokens = x.size(0), hidden = x.size(1);
    const uint16_t* up_scales =
        check_quantized(op, "gate_up", gate_up, gate_up_scales, n, 2 * intermediate, hidden, bits);
    const uint16_t* down_scales_data = check_quantized(op, "down", down, down_scales, n, hidden, intermediate, bits);
    check_shape(op, "index", index, {tokens, -1});
    check_type(op, "index", index, ScalarType::Long, "int64");
    const int64_t top_k = index.size(1), pairs = tokens * top_k;
    check_shape(op, "weights", weights, {tokens, top_k});
    check_type(op, "weights", weights, ScalarType::Float, "float32");
    Tensor out = torch::stable::new_empty(x, {tokens, hidden});

    // Group the pairs by expert: a counting sort, which keeps rows in order.
    const int64_t* chosen = static_cast<const int64_t*>(index.const_data_ptr());
    std::vector<int64_t> offsets(n + 1), rows(pairs), slots(pairs);
    for (int64_t p = 0; p < pairs; p++) {
        REQUIRE(chosen[p] >= 0 && chosen[p] < n, "index holds " + std::to_string(chosen[p]) + ", which is no expert");
        offsets[chosen[p] + 1]++;
    }
    for (int64_t e = 0; e < n; e++) offsets[e + 1] += offsets[e];
    std::vector<int64_t> next(offsets.begin(), offsets.end() - 1);
    for (int64_t p = 0; p < pairs; p++) {
        const int64_t at = next[chosen[p]]++;
        rows[at] = p / top_k;
        slots[at] = p;
    }
    std::vector<specviz::ExpertWeights> experts;
    const auto* up_codes = static_cast<const uint8_t*>(gate_up.const_data_ptr());
    const auto* down_codes = static_cast<const uint8_t*>(down.const_data_ptr());
    for (int64_t e = 0; e < n; e++)
        experts.push_back({up_codes + e * (gate_up.numel() / n), down_codes + e * (down.numel() / n),
                           up_scales + e * (gate_up_scales.numel() / n),
                           down_scales_data + e * (down_scales.numel() / n)});
    const std::unique_ptr<float[]> outputs(new float[pairs * hidden]);
    if (pairs && hidden && intermediate)
        specviz::current().experts({type, static_cast<int>(bits), activation_of(op, activation), x.const_data_ptr(),
                                    experts.data(), offsets.data(), rows.data(), slots.data(), outputs.get(), n, hidden,
                                    intermediate});
    combine_into(out, type, outputs.get(), weights);
    return out;
}

// Rows of queries, wherever a head's rows lie; strides in elements.
struct Queries {
    const void* data;
    int64_t batch, heads, rows, dim;
    int64_t batch_stride, head_stride, row_stride;
};

// The new rows' places in the caches, whose last row must lie in them.
struct Places {
    const int64_t* slots;
    const int64_t* starts;
};

// Caches (slots, kv_heads, length, dim), any strides but contiguous rows, that those queries may read.
Places check_caches(const char* op, const Queries& q, const Tensor& key, const Tensor& value, const Tensor& slots,
                    const Tensor& starts, int64_t window) {
    const int64_t kv_heads = key.size(1);
    REQUIRE(key.stride(3) == 1 && value.stride(3) == 1, "the last dimension of key and value must be contiguous");
    REQUIRE(key.is_cpu() && value.is_cpu(), "key and value must be on the CPU");
    REQUIRE(key.size(3) == q.dim,
            "key has head size " + std::to_string(key.size(3)) + ", query " + std::to_string(q.dim));
    REQUIRE(value.size(0) == key.size(0) && value.size(1) == kv_heads && value.size(2) == key.size(2),
            "key " + shape_of(key) + " and value " + shape_of(value) + " are caches of different sizes");
    REQUIRE(kv_heads > 0 && q.heads % kv_heads == 0,
            std::to_string(q.heads) + " query heads cannot share " + std::to_string(kv_heads) + " KV heads");
    REQUIRE(window >= 0, "window must be 0 (none) or more");
    return {indices(op, "slots", slots, q.batch, key.size(0)),
            indices(op, "starts", starts, q.batch, key.size(2) - q.rows + 1)};
}

// The operators' common end; everything is checked. Returns (batch, rows, heads, value_dim) like `like`.
Tensor attend(specviz::Type type, const Tensor& like, const Queries& q, const Tensor& key, const Tensor& value,
              const Places& places, double scale, int64_t window, const float* sinks) {
    const int64_t value_dim = value.size(3);
    Tensor out = torch::stable::new_empty(like, {q.batch, q.rows, q.heads, value_dim});
    if (out.numel())
        specviz::current().attention({type,
                                      q.data,
                                      q.batch_stride,
                                      q.head_stride,
                                      q.row_stride,
                                      key.const_data_ptr(),
                                      key.stride(0),
                                      key.stride(1),
                                      key.stride(2),
                                      value.const_data_ptr(),
                                      value.stride(0),
                                      value.stride(1),
                                      value.stride(2),
                                      places.slots,
                                      places.starts,
                                      sinks,
                                      out.mutable_data_ptr(),
                                      q.batch,
                                      q.heads,
                                      key.size(1),
                                      q.rows,
                                      q.dim,
                                      value_dim,
                                      window,
                                      static_cast<float>(scale)});
    return out;
}

// q (batch, heads, rows, dim) with any strides but contiguous rows.
Tensor chunked_attention(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& slots,
                         const Tensor& starts, double scale, int64_t window, const std::optional<Tensor>& sinks) {
    const char* op = "chunked_attention";
    REQUIRE(query.dim() == 4 && key.dim() == 4 && value.dim() == 4,
            "query, key and value must be (batch or slots, heads, rows, dim)");
    const auto type = type_of(op, "query", query);
    REQUIRE(key.scalar_type() == query.scalar_type() && value.scalar_type() == query.scalar_type(),
            "query, key and value must have one dtype");
    REQUIRE(query.is_cpu(), "query must be on the CPU");
    REQUIRE(query.stride(3) == 1, "the last dimension of query must be contiguous");
    const Queries q{query.const_data_ptr(), query.size(0),   query.size(1),   query.size(2),
                    query.size(3),          query.stride(0), query.stride(1), query.stride(2)};
    const Places places = check_caches(op, q, key, value, slots, starts, window);
    if (sinks) {
        check_shape(op, "sinks", *sinks, {q.heads});
        check_type(op, "sinks", *sinks, ScalarType::Float, "float32");
    }
    return attend(type, query, q, key, value, places, scale, window,
                  sinks ? static_cast<const float*>(sinks->const_data_ptr()) : nullptr);
}

// The weight of a norm over each head (dim) or over all of them; 0 without one.
int64_t check_norm(const char* op, const char* name, const std::optional<Tensor>& weight, const Tensor& x,
                   int64_t heads, int64_t dim) {
    if (!weight) return 0;
    const int64_t size = weight->numel();
    check_shape(op, name, *weight, {size == dim ? dim : heads * dim});
    REQUIRE(weight->scalar_type() == x.scalar_type(), std::string(name) + " and x must have one dtype");
    return size;
}

// A decoder layer's whole self-attention: x (batch, rows, features) → (batch, rows, features of out_weight).
Tensor self_attention(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                      const std::optional<Tensor>& q_norm, const std::optional<Tensor>& k_norm, double eps,
                      const Tensor& cos, const Tensor& sin, Tensor key, Tensor value, const Tensor& slots,
                      const Tensor& starts, double scale, int64_t window, const Tensor& out_weight,
                      const std::optional<Tensor>& out_bias) {
    const char* op = "self_attention";
    check_shape(op, "x", x, {-1, -1, -1});
    const auto type = type_of(op, "x", x);
    REQUIRE(key.dim() == 4 && value.dim() == 4, "key and value must be (slots, heads, length, dim)");
    for (const Tensor* t :
         {&weight, &out_weight, &cos, &sin, static_cast<const Tensor*>(&key), static_cast<const Tensor*>(&value)})
        REQUIRE(t->scalar_type() == x.scalar_type(), "x, weights, angles and caches must have one dtype");
    const int64_t batch = x.size(0), rows = x.size(1), kv_heads = key.size(1), dim = key.size(3);
    check_shape(op, "out_weight", out_weight, {-1, -1});
    REQUIRE(dim > 0 && out_weight.size(1) % dim == 0, "out_weight must take whole heads");
    const int64_t heads = out_weight.size(1) / dim, features = (heads + 2 * kv_heads) * dim;
    check_shape(op, "weight", weight, {features, -1});
    REQUIRE(value.size(3) == dim, "keys and values must have one head size");
    const int64_t rotary = cos.dim() == 3 ? cos.size(2) : 0;
    REQUIRE(rotary > 0 && rotary % 2 == 0 && rotary <= dim, "cos must be (batch or 1, rows, an even part of dim)");
    REQUIRE(cos.size(0) == batch || cos.size(0) == 1, "cos must be for each sequence, or for one");
    check_shape(op, "cos", cos, {-1, rows, rotary});
    check_shape(op, "sin", sin, {cos.size(0), rows, rotary});
    const int64_t q_size = check_norm(op, "q_norm", q_norm, x, heads, dim);
    const int64_t k_size = check_norm(op, "k_norm", k_norm, x, kv_heads, dim);
    Tensor query = torch::stable::new_empty(x, {batch, rows, heads, dim});
    const Queries q{query.const_data_ptr(), batch, heads, rows, dim, rows * heads * dim, dim, heads * dim};
    const Places places = check_caches(op, q, key, value, slots, starts, window);

    Tensor projected = linear(x, weight, bias);
    if (batch && rows)
        specviz::current().place({type,
                                  projected.mutable_data_ptr(),
                                  q_norm ? q_norm->const_data_ptr() : nullptr,
                                  k_norm ? k_norm->const_data_ptr() : nullptr,
                                  q_size,
                                  k_size,
                                  static_cast<float>(eps),
                                  cos.const_data_ptr(),
                                  sin.const_data_ptr(),
                                  rotary,
                                  cos.size(0) == 1 ? 0 : rows * rotary,
                                  query.mutable_data_ptr(),
                                  key.mutable_data_ptr(),
                                  key.stride(0),
                                  key.stride(1),
                                  key.stride(2),
                                  value.mutable_data_ptr(),
                                  value.stride(0),
                                  value.stride(1),
                                  value.stride(2),
                                  places.slots,
                                  places.starts,
                                  batch,
                                  heads,
                                  kv_heads,
                                  rows,
                                  dim});
    const Tensor attended = attend(type, x, q, key, value, places, scale, window, nullptr);
    return linear(torch::stable::view(attended, {batch, rows, heads * dim}), out_weight, out_bias);
}

}  // namespace

STABLE_TORCH_LIBRARY(specviz, m) {
    m.def("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor");
    m.def(
        "expert_ffn(Tensor x, Tensor[] gate_up, Tensor[] down, Tensor offsets, Tensor rows, Tensor slots, "
        "Tensor(a!) out, str activation) -> ()");
    m.def("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor");
    m.def("combine(Tensor outputs, Tensor weights, Tensor like) -> Tensor");
    m.def(
        "quantized_moe(Tensor x, Tensor gate_up, Tensor gate_up_scales, Tensor down, Tensor down_scales, "
        "Tensor index, Tensor weights, int bits, str activation, int intermediate) -> Tensor");
    m.def(
        "chunked_attention(Tensor query, Tensor key, Tensor value, Tensor slots, Tensor starts, float scale, "
        "int window, Tensor? sinks) -> Tensor");
    m.def(
        "self_attention(Tensor x, Tensor weight, Tensor? bias, Tensor? q_norm, Tensor? k_norm, float eps, Tensor cos, "
        "Tensor sin, Tensor(a!) key, Tensor(b!) value, Tensor slots, Tensor starts, float scale, int window, "
        "Tensor out_weight, Tensor? out_bias) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(specviz, CPU, m) {
    m.impl("linear", TORCH_BOX(&linear));
    m.impl("expert_ffn", TORCH_BOX(&expert_ffn));
    m.impl("rms_norm", TORCH_BOX(&rms_norm));
    m.impl("combine", TORCH_BOX(&combine));
    m.impl("quantized_moe", TORCH_BOX(&quantized_moe));
    m.impl("chunked_attention", TORCH_BOX(&chunked_attention));
    m.impl("self_attention", TORCH_BOX(&self_attention));
}
