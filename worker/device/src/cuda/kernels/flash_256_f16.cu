// Attention on tensor cores for f16 tensors with heads of 129 to 256 elements (flash.cuh and
// flash_backward.cuh).
//
// Kernels whose names end in `_any_f16` support a softcap and dropout. The grid has one block per
// tile of queries (of keys in `flash_backward_k_…` and `flash_backward_v_…`) of each head of each
// sequence.
#include "common.cuh"
constexpr int ELEMENT = F16;
#include "flash_backward.cuh"

KERNEL flash_forward_256_f16(FORWARD_PARAMETERS) { run_forward<256, true>(FORWARD_ARGUMENTS); }
KERNEL flash_forward_256_any_f16(FORWARD_PARAMETERS) { run_forward<256, false>(FORWARD_ARGUMENTS); }
KERNEL flash_backward_q_256_f16(BACKWARD_PARAMETERS) { run_backward_q<256, true>(BACKWARD_ARGUMENTS); }
KERNEL flash_backward_q_256_any_f16(BACKWARD_PARAMETERS) { run_backward_q<256, false>(BACKWARD_ARGUMENTS); }
KERNEL flash_backward_k_256_f16(BACKWARD_PARAMETERS) { run_backward_kv<256, true, OF_KEYS>(BACKWARD_ARGUMENTS); }
KERNEL flash_backward_k_256_any_f16(BACKWARD_PARAMETERS) { run_backward_kv<256, false, OF_KEYS>(BACKWARD_ARGUMENTS); }
KERNEL flash_backward_v_256_f16(BACKWARD_PARAMETERS) { run_backward_kv<256, true, OF_VALUES>(BACKWARD_ARGUMENTS); }
KERNEL flash_backward_v_256_any_f16(BACKWARD_PARAMETERS) { run_backward_kv<256, false, OF_VALUES>(BACKWARD_ARGUMENTS); }
