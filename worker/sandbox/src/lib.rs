//! Crate `sandbox`: runs libraries that interpret untrusted files in a process without access to
//! files and network (a sandbox process).
//!
//! The process has a limit of memory, of CPU time per request and of bytes per reply. It opens no
//! file, has no network, starts no process, and gets no environment variables. Requests, replies
//! and open files pass through one socket. [`SandboxProcess`] is the caller's side, and [`serve`]
//! is the process. A panic, a crash or an exceeded limit of the process becomes a [`SandboxError`]
//! in the caller. docs/design/sandbox.md describes the design.
mod confinement;
mod cpu_watch;
mod error;
mod limits;
mod messages;
mod sandbox_process;
mod server;
mod system_calls;

pub use confinement::Confinement;
pub use cpu_watch::{limit_cpu_time, limit_process_cpu_time};
pub use error::{SandboxError, SandboxFailure};
pub use limits::{RequestLimits, STACK_BYTES, SandboxSettings};
pub use messages::{ReplyDecoder, decode_replies};
pub use sandbox_process::{SandboxCommand, SandboxProcess};
pub use server::{ReportStepFn, RequestHandler, serve, take_panic_message};

#[cfg(test)]
mod tests;
