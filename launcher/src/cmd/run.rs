//! `launch run`: prepares a job and runs the job's controller.
use super::{
    context::CommandContext,
    controller_replacement::{parse_supervised_option, run_with_replaced_controllers},
    job_preparation::{JobLoadRequest, LoadedJob, PreparedJob, prepare_job},
    node_role::{NodeArgs, NodeRole, choose_role},
    output::{self, OutputFormat},
    run_args::{
        RunArgs, build_controller_args, create_run_id, draw_random_bits, encode_overrides,
        parse_detached_option, read_overrides_from_stdin,
    },
};
use crate::{
    cluster::{self, Cluster, ClusterError},
    controller,
    detached_controller::{DetachedStart, start_detached_controller},
    private_files::{create_private_dir, open_private_file_for_appending},
    report::command_output,
};
use diagnostic::{
    Category, Diagnostic,
    codes::{command, host, run as run_codes},
};
use jobspec::{
    ControllerLossAction, JobArgument, JobSource, JobSpec, env, hide_secret_values, hosts::RendezvousAddress,
    make_job_name,
};
use protocol::{
    control::ExitStatus,
    event::{Event, FailureReport},
    failure::FailureReason,
};
use std::{
    fs,
    path::Path,
    time::{Duration, Instant, SystemTime},
};

/// The function by which the controller finds the checkpoint for `resume.from` and adapts this
/// checkpoint to the world size of the job.
pub(super) const PREPARE_PROGRAM_RESUME_FN: controller::ResumePreparer =
    super::ckpt::program_resume::prepare_program_resume;

/// Runs `launch run`: runs a job in this process, starts a detached run or, with `--dry-run`,
/// prints the plan. Prints errors and returns the exit code.
pub(crate) fn run(args: RunArgs, context: &CommandContext) -> diagnostic::Result<u8> {
    let began = Instant::now();
    let args = RunArgs { set: read_overrides_from_stdin(&args)?, ..args };
    let request = build_job_load_request(&args);
    run_or_detach_job(&args, request, context, began)
}

/// Runs, in this process, the job with the YAML text `text`, which a command such as `launch
/// torchrun` has built from its arguments. `node` are the options of this node. Returns the exit
/// code.
pub(super) fn run_command_line_job(
    text: String,
    node: NodeArgs,
    context: &CommandContext,
) -> diagnostic::Result<u8> {
    let source = JobSource::CommandLine { text, arguments: Vec::new() };
    let request = JobLoadRequest { source, set: Vec::new() };
    run_or_detach_job(&RunArgs { node, ..RunArgs::default() }, Ok(request), context, Instant::now())
}

/// Runs the requested job in this process or detached, or only prints its plan, as the options in
/// `args` require. `began` is the time at which the command started.
fn run_or_detach_job(
    args: &RunArgs,
    request: diagnostic::Result<JobLoadRequest>,
    context: &CommandContext,
    began: Instant,
) -> diagnostic::Result<u8> {
    let format = context.format;
    let role = request.and_then(|request| choose_role(&args.node, request));
    let result = role.and_then(|role| match role {
        NodeRole::Alone(request)
        | NodeRole::Controller { request, .. }
        | NodeRole::Member { request, .. }
            if args.dry_run =>
        {
            super::plan::print_dry_run_plan(&request, context)
        }
        NodeRole::Alone(request) if args.detach => start_detached_run(args, &request, context, began),
        NodeRole::Alone(request) if args.replace_controller => {
            run_with_replaced_controllers(args, &request, context)
        }
        NodeRole::Alone(request) => run_controller(args, &request, context),
        _ if args.replace_controller => Err(build_outliving_run_error("--replace-controller")),
        _ if args.detach || args.detached.is_some() => Err(build_outliving_run_error("--detach")),
        NodeRole::Controller { request, fallback } => {
            match (run_controller(args, &request, context), fallback) {
                (Err(error), Some(address)) if error.code() == host::JOIN_ADDRESS_IN_USE => {
                    join_run_as_node(&request, &address, None)
                }
                (result, _) => result,
            }
        }
        NodeRole::Member { request, address, node_rank } => join_run_as_node(&request, &address, node_rank),
    });
    match result {
        Err(error) if format.json && !args.dry_run => {
            // The events replace the JSON object that other commands print for an error.
            let exit_code = error.category().exit_code();
            print_failure_events(&error, exit_code, began.elapsed(), format);
            Ok(output::report_error(&error, OutputFormat::default()))
        }
        result => result,
    }
}

/// Joins the run that node 0 at `address` controls, with this machine as another node. Returns the
/// exit code of the run.
fn join_run_as_node(
    request: &JobLoadRequest,
    address: &RendezvousAddress,
    node_rank: Option<u32>,
) -> diagnostic::Result<u8> {
    cluster::join_run(&LoadedJob::load(request)?.job, address, node_rank)
}

/// Creates the error that `option`, with which a run outlives its controller, cannot be used on
/// nodes that join.
fn build_outliving_run_error(option: &str) -> Diagnostic {
    let message =
        format!("`{option}` cannot be used on nodes that join, because a run must not outlive node 0");
    Diagnostic::error(host::JOIN_OPTION_UNSUPPORTED, message)
        .with_subject(option)
        .with_help("start launch in the background of each node, for example with `nohup`")
}

/// Returns a request to load the given job file or, without a job file, a job that runs the program
/// on the command line.
fn build_job_load_request(args: &RunArgs) -> diagnostic::Result<JobLoadRequest> {
    let mut set = args.set.clone();
    set.extend(args.pdb.then(|| "run.terminal=0".to_owned()));
    if let Some(job) = &args.job {
        return Ok(JobLoadRequest { source: JobSource::File(job.clone()), set });
    }
    let words = args.command.iter().map(|word| word.to_str()).collect::<Option<Vec<_>>>();
    let words = words.ok_or_else(|| {
        let message = "an argument of the program is not UTF-8 text";
        Diagnostic::error(command::ARGUMENT_NOT_UTF8, message)
    })?;
    Ok(JobLoadRequest { source: build_program_job(&words, &choose_worker_count(args)), set })
}

/// Returns the number of workers per host: the value of `--workers`, otherwise of the environment
/// variable `PET_NPROC_PER_NODE`, and otherwise 1.
fn choose_worker_count(args: &RunArgs) -> WorkerCount {
    let Some(workers) = args.workers else {
        let value = std::env::var(env::PET_NPROC_PER_NODE).unwrap_or_default();
        return match value.as_str() {
            "" => WorkerCount { value: "1".to_owned(), argument: None },
            "auto" | "gpu" => {
                WorkerCount { value: "auto".to_owned(), argument: Some(env::PET_NPROC_PER_NODE.to_owned()) }
            }
            number => {
                let is_number = number.bytes().all(|b| b.is_ascii_digit());
                let value = if is_number { number.to_owned() } else { jobspec::quote_yaml(number) };
                WorkerCount { value, argument: Some(env::PET_NPROC_PER_NODE.to_owned()) }
            }
        };
    };
    WorkerCount { value: workers.to_string(), argument: Some(format!("--workers {workers}")) }
}

/// The number of workers of a program, and the name of the option or variable that sets it.
#[derive(Debug)]
struct WorkerCount {
    /// The value of `cluster.workers_per_host` in YAML.
    value: String,
    /// The option or variable; `None` for the default.
    argument: Option<String>,
}

/// Builds the job that runs the command `words` as `workers` processes on this machine.
fn build_program_job(words: &[&str], workers: &WorkerCount) -> JobSource {
    let mut text = format!(
        "name: {}\ncluster: {{hosts: local, workers_per_host: ",
        jobspec::quote_yaml(&derive_job_name(words))
    );
    let workers_start = text.len();
    text.push_str(&workers.value);
    let workers_range = workers_start..text.len();
    text.push_str("}\nrun: {command: ");
    let command_start = text.len();
    let quoted: Vec<String> = words.iter().map(|word| jobspec::quote_yaml(word)).collect();
    text.push_str(&format!("[{}]", quoted.join(", ")));
    let command_range = command_start..text.len();
    text.push_str("}\n");
    let program = words.first().filter(|word| !word.is_empty()).unwrap_or(&"''");
    let command = JobArgument { range: command_range, argument: format!("-- {program}") };
    let workers = workers
        .argument
        .iter()
        .map(|argument| JobArgument { range: workers_range.clone(), argument: argument.clone() });
    JobSource::CommandLine { text, arguments: workers.chain([command]).collect() }
}

/// Derives the name of a job from the command `words`: the name of the program or, if the program
/// is an interpreter, the name of the script (`python -u train.py` → `train`).
fn derive_job_name(words: &[&str]) -> String {
    let stem = |word: &str| Path::new(word).file_stem().map(|s| s.to_string_lossy().into_owned());
    let program = words.first().and_then(|word| stem(word)).unwrap_or_default();
    let script = words.iter().skip(1).find(|word| !word.starts_with('-')).and_then(|word| stem(word));
    let interpreted = ["python", "sh", "bash"].iter().any(|i| program.starts_with(i));
    let is_script = |name: &String| name.chars().all(|c| c.is_ascii_alphanumeric() || "._-".contains(c));
    let name = script.filter(|name| interpreted && is_script(name)).unwrap_or(program);
    make_job_name(&name, "program")
}

/// Starts a controller in a separate session, and blocks until the workers run or the controller
/// has ended. Prints the run ID.
///
/// Returns 0, or the exit code of a controller that ended before the workers ran. In this case,
/// prints the output of the controller and, with `--json`, the events of the run.
fn start_detached_run(
    args: &RunArgs,
    request: &JobLoadRequest,
    context: &CommandContext,
    began: Instant,
) -> diagnostic::Result<u8> {
    let (format, preflight) = (context.format, context.preflight);
    let run = create_run_id(SystemTime::now(), draw_random_bits());
    // The job is prepared here as well as in the controller, so that mistakes are reported on this
    // terminal.
    let PreparedJob { plan, warnings, .. } = prepare_job(request, &run, preflight)?;
    output::print_warnings(&warnings);
    let directory = &plan.run_dir;
    let console = directory.join("console.log");
    let file = create_private_dir(directory)
        .and_then(|()| open_private_file_for_appending(&console))
        .map_err(|e| output::path_error(run_codes::RUN_DIRECTORY_UNWRITABLE, "cannot write", &console, &e))?;
    let started = start_detached_controller(
        |fd| build_controller_args(args, "--detached", &run, fd, context.verbosity),
        &encode_overrides(&args.set),
        file,
    )
    .map_err(|e| {
        Diagnostic::error(command::CONTROLLER_START_FAILED, "cannot start the controller").with_cause(&e)
    })?;
    match started {
        DetachedStart::Started(pid) => {
            if format.json {
                return output::print_json(
                    &serde_json::json!({"run": run.0, "run_dir": directory, "pid": pid}),
                );
            }
            command_output::write_message(&format!(
                "launch: run {run} continues in the background (pid {pid}, files in {})\n  \
                 launch logs {run} --follow    launch events {run} --follow    launch stop {run}\n",
                directory.display()
            ));
            output::print_line(run)
        }
        DetachedStart::Ended(status) => {
            command_output::write_message(&fs::read_to_string(&console).unwrap_or_default());
            let exit_code = match status {
                ExitStatus::Code(code) => code,
                ExitStatus::Signal(..) => protocol::exit::FAILED,
            };
            if format.json {
                print_recorded_events(directory, exit_code, began.elapsed(), format);
            }
            Ok(exit_code)
        }
    }
}

/// Prepares the job and runs the controller of the job in this process. Blocks until the run ends
/// and returns the exit code of the run.
fn run_controller(
    args: &RunArgs,
    request: &JobLoadRequest,
    context: &CommandContext,
) -> diagnostic::Result<u8> {
    let CommandContext { format, preflight, .. } = *context;
    let mut command_line = context.command_line.clone();
    let detached = args.detached.as_deref().map(parse_detached_option).transpose()?;
    let supervised = args.supervised.as_deref().map(parse_supervised_option).transpose()?;
    let (run, starter, signals) = match (detached, supervised) {
        (Some((run, starter)), _) => (run, Some(starter), None),
        (None, Some((run, signals))) => (run, None, Some(signals)),
        (None, None) => (create_run_id(SystemTime::now(), draw_random_bits()), None, None),
    };
    for (internal, instead) in
        [("--detached", None), ("--supervised", Some("--replace-controller".to_owned()))]
    {
        if let Some(at) = command_line.iter().position(|word| word == internal) {
            command_line.splice(at..(at + 2).min(command_line.len()), instead);
        }
    }
    if let Some(at) = command_line.iter().position(|word| word == "--set-from-stdin") {
        let overrides = args.set.iter().map(|set| format!("--set={}", hide_secret_values(set)));
        command_line.splice(at..=at, overrides);
    }
    let PreparedJob { job, inventory, hosts, mut plan, warnings, secrets, mlflow, .. } =
        prepare_job(request, &run, preflight)?;
    let outlives_controller = starter.is_some() || signals.is_some();
    super::terminal_check::check_terminal(&job, &plan, &hosts, outlives_controller)?;
    // The controller reports the warnings, so that the journal contains them too.
    plan.warnings = warnings;
    let prepare_resume = PREPARE_PROGRAM_RESUME_FN;
    prepare_resume(&job, &mut plan)?;
    let cluster = find_cluster(&job)?;
    let transport = cluster.transport(&job).map_err(build_hosts_error)?;
    let default = cluster.default_controller_loss_action();
    let on_controller_loss = choose_controller_loss_action(&job, outlives_controller, default);
    if signals.is_some() && on_controller_loss == ControllerLossAction::Stop {
        return Err(build_replacement_conflict_error());
    }
    let requeue = if args.requeue { cluster::find_batch_job(&job)? } else { None };
    let batch_job = cluster::identify_batch_job(&command_line)?;
    let job_file = match &request.source {
        JobSource::File(path) => Some(controller::JobFile { path: path.clone(), set: request.set.clone() }),
        JobSource::Text { .. } | JobSource::CommandLine { .. } => None,
    };
    let hostfile = controller::FilteredHostfile::from_job(&job);
    let request =
        controller::RunRequest { job, plan, hosts, transport, local_inventory: inventory, prepare_resume };
    let options = controller::RunOptions {
        json: format.json,
        schema: format.schema,
        command: command_line,
        on_controller_loss,
        secrets,
        mlflow,
        requeue,
        batch_job,
        starter,
        signals,
        job_file,
        addresses: Vec::new(),
        hostfile,
    };
    Ok(controller::run_job(request, options))
}

/// Creates the error that `--replace-controller` contradicts the job, which ends with its
/// controller.
fn build_replacement_conflict_error() -> Diagnostic {
    let message = "`--replace-controller` needs a job that outlives its controller";
    Diagnostic::error(command::USAGE, message)
        .with_subject("--replace-controller")
        .with_help("remove `run.on_controller_loss: stop` from the job, or the option")
}

/// Returns what the agents of a run do when its controller is lost: the value of
/// `run.on_controller_loss`, or its default. By default, a detached or supervised run outlives its
/// controller. A
/// run with `run.terminal` does not, because its rank uses the terminal of the controller.
/// `provider` is the default of the hosts' provider for other runs.
fn choose_controller_loss_action(
    job: &JobSpec,
    outlives_controller: bool,
    provider: ControllerLossAction,
) -> ControllerLossAction {
    job.run.on_controller_loss.unwrap_or(match (job.run.terminal, outlives_controller) {
        (Some(_), _) => ControllerLossAction::Stop,
        (None, true) => ControllerLossAction::Continue,
        (None, false) => provider,
    })
}

/// Returns the provider of the hosts of a job, such as a hostfile, Slurm, or nodes on which the
/// user starts launch.
pub(super) fn find_cluster(job: &JobSpec) -> diagnostic::Result<&'static dyn Cluster> {
    cluster::find_host_provider(job).map_err(build_hosts_error)
}

/// Converts an error about finding the hosts of a job, such as an unreadable hostfile, to a
/// diagnostic for the user.
pub(super) fn build_hosts_error(error: ClusterError) -> Diagnostic {
    error.into_diagnostic(|mistakes| {
        output::invalid_job_error("the list of hosts", mistakes).with_category(Category::Cluster)
    })
}

/// Prints the events that a detached run recorded in its journal as JSON lines, after the run has
/// ended before any worker ran. If the controller did not record its end, prints that it ended with
/// `exit_code`.
fn print_recorded_events(run_dir: &Path, exit_code: u8, elapsed: Duration, format: OutputFormat) {
    let journal = fs::read_to_string(run_dir.join("events.jsonl")).unwrap_or_default();
    let events: Vec<Event> = journal.lines().filter_map(|line| Event::from_json(line).ok()).collect();
    print_events(&events, format);
    if !events.iter().any(|event| matches!(event, Event::Done { .. })) {
        let message = "the controller ended before the workers ran";
        let error = Diagnostic::error(command::CONTROLLER_START_FAILED, message);
        print_failure_events(&error, exit_code, elapsed, format);
    }
}

/// Prints the `failure` and `done` events of a run that failed before the controller started, as
/// JSON lines to stdout. `elapsed` is the duration of the run.
fn print_failure_events(error: &Diagnostic, exit_code: u8, elapsed: Duration, format: OutputFormat) {
    let failure = Event::Failure(Box::new(FailureReport {
        reason: FailureReason::Rejected { code: error.code() },
        message: error.to_string(),
        help: error.help().to_vec(),
        diagnostics: vec![error.clone()],
        ..FailureReport::default()
    }));
    let done = Event::Done { exit_code, step: None, seconds: elapsed.as_secs_f64() };
    print_events(&[failure, done], format);
}

/// Prints events of a run as JSON lines to stdout.
fn print_events(events: &[Event], format: OutputFormat) {
    for line in events.iter().filter_map(|event| event.to_json(format.schema).ok()) {
        // The exit code reports the failure to a program that has closed stdout.
        _ = command_output::write_json(&format!("{line}\n"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Returns the number of workers that the option `--workers` requests with the value `workers`.
    fn parse_worker_count(workers: u32) -> WorkerCount {
        WorkerCount { value: workers.to_string(), argument: Some(format!("--workers {workers}")) }
    }

    /// Loads the job that runs the command `words`. Panics if the job is invalid.
    fn load_program_job(words: &[&str], workers: u32) -> jobspec::JobSpec {
        let source = build_program_job(words, &parse_worker_count(workers));
        match jobspec::load_job(source.clone(), &[]) {
            Ok((job, _, _)) => job,
            Err(mistakes) => panic!("{source:?}: {mistakes:?}"),
        }
    }

    #[test]
    fn mistakes_on_the_command_line_are_located_at_its_arguments() {
        let source = build_program_job(&["./prog", "x"], &parse_worker_count(64));
        let (_, map, _) = jobspec::load_job(source, &["run.restarts=2".to_owned()]).expect("a job");
        let locations = [
            ("cluster.workers_per_host", "--workers 64"),
            ("run.command", "-- ./prog"),
            ("run.command[1]", "-- ./prog"),
            ("run.restarts", "--set run.restarts=2"),
            ("cluster.hosts", "the command line"),
            ("cluster.ssh", "the command line"),
        ];
        for (key, expected) in locations {
            assert_eq!(map.locate_key(key).to_string(), expected, "{key}");
        }
        let mistakes = jobspec::load_job(
            build_program_job(&[""], &WorkerCount { value: "1".into(), argument: None }),
            &[],
        )
        .expect_err("no program");
        assert_eq!(mistakes[0].location().map(ToString::to_string).as_deref(), Some("-- ''"));
    }

    #[test]
    fn the_job_of_a_program_is_named_after_its_script() {
        for (words, name) in [
            (&["python", "train.py", "--lr", "1"][..], "train"),
            (&["/usr/bin/python3.11", "-u", "src/my train.py"], "python3"),
            (&["python", "-m", "package.main"], "package"),
            (&["./a.out", "x"], "a"),
            (&["sh", "-c", "echo a; exit 1"], "sh"),
            (&[".."], "program"),
            (&["-"], "program"),
        ] {
            assert_eq!(load_program_job(words, 1).name, name, "{words:?}");
        }
    }

    proptest! {
        #[test]
        fn any_command_line_of_a_program_makes_a_valid_job(words in proptest::collection::vec("[^\0]{0,12}", 0..4), workers in 1u32..=1024) {
            let words: Vec<&str> = std::iter::once("program").chain(words.iter().map(String::as_str)).collect();
            let job = load_program_job(&words, workers);
            prop_assert_eq!(job.run.command, Some(words.iter().map(|w| (*w).to_owned()).collect()));
            prop_assert_eq!(job.cluster.workers_per_host, jobspec::WorkersPerHost::Exactly(workers));
        }
    }

    #[test]
    fn a_run_that_uses_a_terminal_ends_with_its_controller() {
        use ControllerLossAction::{Continue, Stop};
        let mut job = load_program_job(&["true"], 1);
        for (terminal, is_detached, provider, expected) in [
            (None, false, Stop, Stop),
            (None, true, Stop, Continue),
            (None, false, Continue, Continue),
            (Some(0), false, Continue, Stop),
        ] {
            job.run.terminal = terminal;
            assert_eq!(choose_controller_loss_action(&job, is_detached, provider), expected);
        }
    }

    #[test]
    fn run_ids_sort_by_time() {
        let at = |seconds| create_run_id(SystemTime::UNIX_EPOCH + Duration::from_secs(seconds), 0xabc).0;
        assert_eq!(at(0), "19700101-000000-0abc");
        assert_eq!(at(951_782_400), "20000229-000000-0abc");
        assert_eq!(at(1_795_215_105), "20261120-225145-0abc");
        assert_eq!(at(4_102_444_799), "20991231-235959-0abc");
    }
}
