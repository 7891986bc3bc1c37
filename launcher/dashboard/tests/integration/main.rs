//! Integration tests of the crate `dashboard`, in one binary, because each binary takes long to
//! link.

mod http;
mod run_directory;
