//! The executable `launch`: calls the worker, the GPU check or the launcher, depending on the first
//! argument.
use std::process::ExitCode;

/// Calls the role that the first argument names, and returns its exit code.
fn main() -> ExitCode {
    let role = std::env::args_os().nth(1);
    // Crate `launcher` does not depend on crate `worker`, so the worker's roles are dispatched
    // here.
    let code = match role {
        Some(role) if role == "worker" => worker::main(),
        Some(role) if role == "gpu-check" => {
            worker::gpu_check(std::env::args_os().skip(2).map(|a| a.to_string_lossy().into_owned()))
        }
        _ => launcher::main(std::env::args_os(), &worker::TrainPreflight),
    };
    ExitCode::from(code)
}
