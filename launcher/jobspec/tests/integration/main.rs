//! Integration tests of the crate `jobspec`, in one binary, because each binary takes long to link.

mod docs;
mod loading;
mod printing;
mod wrong_jobs;
