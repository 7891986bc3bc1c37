//! Integration tests of the crate `ckpt`, in one binary, because each binary takes long to link.

mod large;
#[path = "../../../../tests/support/mutated_input.rs"]
mod mutated_input;
#[path = "../../../../tests/support/own_process.rs"]
mod own_process;
#[path = "../../examples/sparse_zero.rs"]
mod sparse_zero;
mod untrusted;
