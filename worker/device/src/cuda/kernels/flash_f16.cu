// Attention on tensor cores for f16 tensors with heads of at most 128 elements (flash.cuh and
// flash_backward.cuh).
//
// Kernels whose names end in `_any_f16` support a softcap and dropout. The grid has one block per
// 128 queries (128 keys in `flash_backward_kv_…`) of each head of each sequence.
#include "common.cuh"
constexpr int ELEMENT = F16;
#include "flash_backward.cuh"

KERNEL flash_forward_64_f16(FORWARD_PARAMETERS) { run_forward<64, true>(FORWARD_ARGUMENTS); }
KERNEL flash_forward_64_any_f16(FORWARD_PARAMETERS) { run_forward<64, false>(FORWARD_ARGUMENTS); }
KERNEL flash_forward_128_f16(FORWARD_PARAMETERS) { run_forward<128, true>(FORWARD_ARGUMENTS); }
KERNEL flash_forward_128_any_f16(FORWARD_PARAMETERS) { run_forward<128, false>(FORWARD_ARGUMENTS); }
KERNEL flash_backward_q_64_f16(BACKWARD_PARAMETERS) { run_backward_q<64, true>(BACKWARD_ARGUMENTS); }
KERNEL flash_backward_q_64_any_f16(BACKWARD_PARAMETERS) { run_backward_q<64, false>(BACKWARD_ARGUMENTS); }
KERNEL flash_backward_q_128_f16(BACKWARD_PARAMETERS) { run_backward_q<128, true>(BACKWARD_ARGUMENTS); }
KERNEL flash_backward_q_128_any_f16(BACKWARD_PARAMETERS) { run_backward_q<128, false>(BACKWARD_ARGUMENTS); }
KERNEL flash_backward_kv_64_f16(BACKWARD_PARAMETERS) { run_backward_kv<64, true>(BACKWARD_ARGUMENTS); }
KERNEL flash_backward_kv_64_any_f16(BACKWARD_PARAMETERS) { run_backward_kv<64, false>(BACKWARD_ARGUMENTS); }
KERNEL flash_backward_kv_128_f16(BACKWARD_PARAMETERS) { run_backward_kv<128, true>(BACKWARD_ARGUMENTS); }
KERNEL flash_backward_kv_128_any_f16(BACKWARD_PARAMETERS) { run_backward_kv<128, false>(BACKWARD_ARGUMENTS); }
