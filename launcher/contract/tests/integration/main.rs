//! Integration tests of the crate `contract`, in one binary, because each binary takes long to
//! link.

mod events;
