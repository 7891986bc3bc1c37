//! The executable `launch`, which runs, depending on its first argument, as a worker, as the
//! sandbox process of a worker, or as the launcher.
use std::process::ExitCode;
use worker::{GpuCheckOptions, GpuCheckTask, PartFilter};

/// Runs this process as a worker or sandbox process if the first argument is `worker` or `sandbox`,
/// and otherwise as the launcher, which starts and supervises workers. Returns the exit code of the
/// role.
fn main() -> ExitCode {
    // Crate `launcher` does not depend on crate `worker`, so the worker's roles are dispatched
    // here.
    let mut args = std::env::args_os();
    // Called as torchrun, the first argument is an argument of torchrun.
    let is_other = args.next().is_some_and(|name| launcher::is_other_launcher(&name));
    let code = match args.next().filter(|_| !is_other) {
        Some(role) if role == "worker" => worker::main(),
        Some(role) if role == worker::SANDBOX_ARGUMENT => worker::run_sandbox(),
        _ => launcher::main(std::env::args_os(), &worker::TrainPreflight, |args| {
            worker::run_gpu_check(to_gpu_check_options(args))
        }),
    };
    ExitCode::from(code)
}

/// Converts the parsed arguments of `launch gpu-check` to the options of the crate that implements
/// the check.
fn to_gpu_check_options(args: launcher::GpuCheckArgs) -> GpuCheckOptions {
    let task = match (args.run_part, args.model, args.profile) {
        (Some(name), ..) => {
            GpuCheckTask::RunPart { name, launch_log: args.launch_log, rank_memory: args.rank_memory }
        }
        (_, Some(number), _) => GpuCheckTask::MeasureModel(number),
        (.., Some(number)) => GpuCheckTask::ProfileModel(number),
        _ if args.models => GpuCheckTask::ListModels,
        _ if args.list => GpuCheckTask::ListParts(args.only),
        _ => GpuCheckTask::Check {
            only: args.only,
            seconds: args.seconds,
            part_seconds: args.part_seconds,
            report: args.report,
            resume: args.resume,
        },
    };
    let filter = PartFilter { quick: args.quick, tiny: args.tiny, ops_only: args.ops };
    GpuCheckOptions { device: args.device, filter, task }
}
