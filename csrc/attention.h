#pragma once
#include "kernels.h"
#include "parallel.h"
#include "simd.h"
namespace specviz { namespace { void attention(const AttentionArgs&) {} } }
