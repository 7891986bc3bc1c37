//! `launch attach`: starts another controller for a run whose controller was lost.
use super::{
    context::CommandContext,
    controller_replacement::parse_supervised_option,
    job_preparation::discover_inventory,
    output,
    ps::resolve_run,
    run::{PREPARE_PROGRAM_RESUME_FN, build_hosts_error, find_cluster},
    run_args::parse_detached_option,
};
use crate::{
    cluster,
    controller::{
        self, AttachOptions, ControlFile, FilteredHostfile, JournalSummary, RunOptions, RunRequest,
    },
    detached_controller::{DetachedStart, start_detached_controller},
    mlflow::{self, MlflowSettings},
    plan::Plan,
    private_files::open_private_file_for_appending,
    report::command_output,
    runs::{Run, RunFilter, RunState, read_command},
    secrets::SecretVariables,
};
use clap::Args;
use diagnostic::{
    Diagnostic,
    codes::{command, run as run_codes},
};
use jobspec::{ControllerLossAction, JobSpec, ids::RunId};
use protocol::control::ExitStatus;
use std::{
    ffi::OsString,
    fs::File,
    io::{self, Read, Seek, SeekFrom},
    path::Path,
};

/// Arguments of `launch attach`.
#[derive(Debug, Args)]
pub(crate) struct AttachArgs {
    /// Name of a run or its first characters, name of a job, or run directory
    /// [default: the only run without a controller]
    #[arg(value_name = "RUN")]
    run: Option<String>,
    /// Take over the run even if half of its hosts or more do not answer
    #[arg(long)]
    force: bool,
    /// Return when the run is taken over; the controller continues without this terminal
    #[arg(long)]
    detach: bool,
    /// Internal: name of the run and descriptor of a detached controller
    #[arg(long, hide = true, value_name = "RUN:FD", conflicts_with = "detach")]
    detached: Option<String>,
    /// Internal: name of the run and descriptor of a controller that another process supervises
    #[arg(long, hide = true, value_name = "RUN:FD", conflicts_with_all = ["detach", "detached"])]
    supervised: Option<String>,
}

/// Runs `launch attach`: takes over a run whose controller was lost, in this process or, with
/// `--detach`, in a detached process. Returns the exit code of the run.
pub(crate) fn run(args: AttachArgs, context: &CommandContext) -> diagnostic::Result<u8> {
    let run = resolve_run(args.run.as_deref(), RunFilter::Unattended)?;
    if let RunState::Ended(code, _) = run.state {
        let message = format!("run {} has ended with exit code {code}", run.record.run);
        return Err(Diagnostic::error(run_codes::RUN_NOT_ATTACHABLE, message).with_subject(run.record.run));
    }
    match args.detach {
        true => start_detached_takeover(&args, &run, context),
        false => take_over_run(&args, run, context),
    }
}

/// Takes over a run whose controller was lost, and runs a new controller in this process until the
/// run ends.
fn take_over_run(args: &AttachArgs, run: Run, context: &CommandContext) -> diagnostic::Result<u8> {
    let record = run.record;
    let command = read_command(&record);
    let starter =
        args.detached.as_deref().map(parse_detached_option).transpose()?.map(|(_, starter)| starter);
    let signals =
        args.supervised.as_deref().map(parse_supervised_option).transpose()?.map(|(_, signals)| signals);
    let directory = &record.run_dir;
    let control = ControlFile::read(directory).map_err(|error| error.with_subject(&record.run))?;
    let job = controller::read_stored_job(directory)?;
    if control.hosts.iter().any(|host| host.local) && !record.controller.is_on_this_boot() {
        let host = &record.controller.host;
        let message =
            format!("the workers of run {} are on {host}, on which the run was started", record.run);
        return Err(Diagnostic::error(run_codes::RUN_NOT_ATTACHABLE, message)
            .with_subject(&record.run)
            .with_help(format!("run `launch attach {}` on {host}", record.run)));
    }
    let summary = JournalSummary::read(directory).map_err(|error| {
        let path = directory.join("events.jsonl");
        output::path_error(command::RUN_FILE_UNREADABLE, "cannot read", &path, &error)
    })?;
    let mut transport = find_cluster(&job)?.transport(&job).map_err(build_hosts_error)?;
    transport.update_hosts(&control.addresses);
    let names: Vec<String> = control.hosts.iter().map(|host| host.name.clone()).collect();
    transport.add_adopted_hosts(&names);
    let requeue = if control.requeue { cluster::find_batch_job(&job)? } else { None };
    let attach = AttachOptions {
        key: control.key().unwrap_or_else(|| unreachable!("the file was checked")),
        epoch: control.epoch + 1,
        placement: summary.placement,
        is_forced: args.force,
    };
    let plan = Plan {
        run: RunId(record.run),
        run_dir: record.run_dir.clone(),
        world: record.world,
        master_address: None,
        master_port: None,
        host_plans: Vec::new(),
        host_names: Vec::new(),
        warnings: Vec::new(),
    };
    let mlflow = resolve_mlflow_settings(&job, &record.run_dir);
    let options = RunOptions {
        json: context.format.json,
        schema: context.format.schema,
        command,
        on_controller_loss: ControllerLossAction::Continue,
        secrets: SecretVariables::default(),
        mlflow,
        requeue,
        batch_job: record.batch_job,
        starter,
        signals,
        job_file: None,
        addresses: control.addresses,
        hostfile: FilteredHostfile::from_job(&job),
    };
    let request = RunRequest {
        job,
        plan,
        hosts: control.hosts,
        transport,
        local_inventory: discover_inventory()?,
        prepare_resume: PREPARE_PROGRAM_RESUME_FN,
    };
    Ok(controller::attach_to_run(request, options, attach))
}

/// Returns how MLflow records the rest of a run that a new controller takes over. If this is not
/// possible, prints the reason and returns `None`.
fn resolve_mlflow_settings(job: &JobSpec, run_dir: &Path) -> Option<MlflowSettings> {
    mlflow::resolve_stored_settings(job, run_dir).unwrap_or_else(|errors| {
        let errors: Vec<String> = errors.iter().map(ToString::to_string).collect();
        let message = format!("launch: MLflow does not record the rest of the run: {}\n", errors.join("; "));
        command_output::write_message(&message);
        None
    })
}

/// Starts a controller in a separate session, and blocks until the controller has taken over the
/// run or has ended. Returns 0, or the exit code of a controller that has not taken over the run.
fn start_detached_takeover(args: &AttachArgs, run: &Run, context: &CommandContext) -> diagnostic::Result<u8> {
    let (name, directory) = (&run.record.run, &run.record.run_dir);
    let console = directory.join("console.log");
    let cannot_write = |error: io::Error| {
        output::path_error(run_codes::RUN_DIRECTORY_UNWRITABLE, "cannot write", &console, &error)
    };
    let file = open_private_file_for_appending(&console).map_err(cannot_write)?;
    let earlier_bytes = file.metadata().map_err(cannot_write)?.len();
    let build_args = |fd| -> Vec<OsString> {
        let mut words: Vec<OsString> = vec!["attach".into()];
        words.extend((0..context.verbosity).map(|_| "--verbose".into()));
        words.extend(args.force.then(|| "--force".into()));
        words.extend(["--detached".into(), format!("{name}:{fd}").into(), directory.into()]);
        words
    };
    let started = start_detached_controller(build_args, &[], file).map_err(|error| {
        Diagnostic::error(command::CONTROLLER_START_FAILED, "cannot start the controller").with_cause(&error)
    })?;
    match started {
        DetachedStart::Started(pid) => {
            if context.format.json {
                return output::print_json(
                    &serde_json::json!({"run": name, "run_dir": directory, "pid": pid}),
                );
            }
            let message = format!("launch: run {name} continues in the background (pid {pid})\n");
            command_output::write_message(&message);
            output::print_line(name)
        }
        DetachedStart::Ended(status) => {
            command_output::write_message(
                &read_file_from_offset(&console, earlier_bytes).unwrap_or_default(),
            );
            Ok(match status {
                ExitStatus::Code(code) => code,
                ExitStatus::Signal(..) => protocol::exit::FAILED,
            })
        }
    }
}

/// Reads a text file from the byte offset `position` to the end of the file.
fn read_file_from_offset(path: &Path, position: u64) -> io::Result<String> {
    let mut file = File::open(path)?;
    file.seek(SeekFrom::Start(position))?;
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}
