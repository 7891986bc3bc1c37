//! Integration tests of the crate `launcher`, in one binary, because each binary takes long to
//! link.

#[path = "../../../tests/support/mutated_input.rs"]
mod mutated_input;
mod untrusted;
