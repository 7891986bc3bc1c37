//! Integration tests of the crate `comm`, in one binary, because each binary takes long to link.

mod conformance;
#[path = "../emulated_nccl/mod.rs"]
mod emulated_nccl;
mod nccl;
