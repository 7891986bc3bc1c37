//! The executable `launch`. Depending on its first argument, it runs as a worker, as the GPU check,
//! or as the launcher with all other commands.
use std::process::ExitCode;

/// Runs the role that the first argument names: `worker`, `gpu-check`, or else the launcher.
/// Returns the exit code of the role.
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
