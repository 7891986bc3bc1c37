//! Integration tests of the crate `protocol`, in one binary, because each binary takes long to
//! link.

mod events;
