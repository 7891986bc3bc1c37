//! The one executable: dispatches on the role.
use std::process::ExitCode;

fn main() -> ExitCode {
    let role = std::env::args_os().nth(1);
    // The worker's role is another crate's: the launcher's never knows it.
    let code = match role {
        Some(role) if role == "worker" => worker::main(),
        Some(role) if role == "gpu-check" => {
            worker::gpu_check(std::env::args_os().skip(2).map(|a| a.to_string_lossy().into_owned()))
        }
        _ => launcher::main(std::env::args_os(), &worker::Judge),
    };
    ExitCode::from(code)
}
