// One variant of all kernels: compiled several times, each time with the flags and the name of one instruction set.

#include "attention.h"
#include "experts.h"
#include "kernels.h"
#include "norm.h"
#include "place.h"

#if !defined(SPECVIZ_VARIANT)
#error "compile with -DSPECVIZ_VARIANT=portable (or avx2, avx512, avx512bf16, amx): engine/kernels/build.py does"
#endif

namespace specviz {

#define SPECVIZ_NAME_(variant) kernels_##variant
#define SPECVIZ_NAME(variant) SPECVIZ_NAME_(variant)
#define SPECVIZ_STRING_(variant) #variant
#define SPECVIZ_STRING(variant) SPECVIZ_STRING_(variant)

extern const Kernels SPECVIZ_NAME(SPECVIZ_VARIANT);
const Kernels SPECVIZ_NAME(SPECVIZ_VARIANT) = {
    SPECVIZ_STRING(SPECVIZ_VARIANT), linear, experts, combine, norm, place, attention,
};

}  // namespace specviz
