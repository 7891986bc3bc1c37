//! The commands of `launch`, one module each.
pub(crate) mod agent;
pub(crate) mod attach;
pub(crate) mod check;
pub(crate) mod ckpt;
pub(crate) mod completions;
pub(crate) mod context;
mod controller_replacement;
mod dashboard_runs;
pub(crate) mod drop_in;
pub(crate) mod events;
pub(crate) mod exec;
pub(crate) mod explain;
pub(crate) mod gpu_check;
pub(crate) mod import;
mod job_preparation;
pub(crate) mod logs;
mod machine_memory;
pub(crate) mod man;
pub(crate) mod manifest;
pub(crate) mod node_role;
pub(crate) mod option_value;
pub(crate) mod output;
pub(crate) mod plan;
pub(crate) mod ps;
pub(crate) mod quickstart;
pub(crate) mod report;
pub(crate) mod run;
pub(crate) mod run_args;
pub(crate) mod sbatch;
pub(crate) mod schema;
pub(crate) mod serve;
pub(crate) mod shims;
pub(crate) mod stop;
mod terminal_check;
pub(crate) mod top;

use clap::Subcommand;
use context::CommandContext;
use drop_in::OtherLauncher;

/// A command of `launch` with its arguments. A command is a module of [`crate::cmd`] with a struct
/// of arguments and a function `run`.
#[derive(Debug, Subcommand)]
pub(crate) enum LaunchCommand {
    /// Run a job (the default command)
    Run(run_args::RunArgs),
    /// Show the ranks, environment and memory of a job without starting anything
    #[command(after_help = plan::HELP)]
    Plan(job_preparation::JobArgs),
    /// Check every host of a job: connection, GPUs, storage, ports, clocks, network
    Check(check::CheckArgs),
    /// Write a small job with its training text, to try launch
    Quickstart(quickstart::QuickstartArgs),
    /// Show active and past runs
    Ps(ps::PsArgs),
    /// Show the output of the ranks of a run
    Logs(logs::LogsArgs),
    /// Show the events of a run
    Events(events::EventsArgs),
    /// Show a run live in a full-screen view
    Top(top::TopArgs),
    /// Serve a page on this machine that shows runs live, and their metrics
    Serve(serve::ServeArgs),
    /// Write the page of `launch serve`, with the data of runs, to one HTML file
    Report(report::ReportArgs),
    /// Save and stop a run, or kill it
    Stop(stop::StopArgs),
    /// Run a command next to a worker of a run
    Exec(exec::ExecArgs),
    /// Continue a run whose controller was lost
    Attach(attach::AttachArgs),
    /// Inspect, verify, convert and repair checkpoints
    Ckpt(ckpt::CkptArgs),
    /// Submit a job to Slurm
    Sbatch(sbatch::SbatchArgs),
    /// Print Kubernetes objects or a batch script that run a job
    Manifest(manifest::ManifestArgs),
    /// Convert the settings of Accelerate, DeepSpeed or torchrun to a job.yaml
    Import(import::ImportArgs),
    /// Run a script as torchrun does, with the options of torchrun
    #[command(
        override_usage = "launch torchrun [OPTION OF TORCHRUN]… SCRIPT [ARGUMENT]…",
        after_help = drop_in::TORCHRUN_HELP
    )]
    Torchrun(drop_in::DropInArgs),
    /// Run a script as `accelerate launch` does; other commands run the original Accelerate
    #[command(
        override_usage = "launch accelerate launch [OPTION OF ACCELERATE]… SCRIPT [ARGUMENT]…",
        after_help = drop_in::ACCELERATE_HELP
    )]
    Accelerate(drop_in::DropInArgs),
    /// Run a script as deepspeed does, with the options of deepspeed
    #[command(
        override_usage = "launch deepspeed [OPTION OF DEEPSPEED]… SCRIPT [ARGUMENT]…",
        after_help = drop_in::DEEPSPEED_HELP
    )]
    Deepspeed(drop_in::DropInArgs),
    /// Create links to launch with the names torchrun, accelerate and deepspeed
    Shims(shims::ShimsArgs),
    /// Explain an error code, or list all codes
    Explain(explain::ExplainArgs),
    /// Print the JSON Schema of job.yaml
    Schema(schema::SchemaArgs),
    /// Print the completion script of a shell
    Completions(completions::CompletionsArgs),
    /// Print the man page, or write the man pages of all commands
    Man(man::ManArgs),
    /// Compare the results of a GPU with those of the CPU, and measure the speed of the GPU
    GpuCheck(gpu_check::args::GpuCheckArgs),
    /// Internal: run the agent, which the controller starts on each host
    #[command(hide = true)]
    Agent(agent::AgentArgs),
}

impl LaunchCommand {
    /// Returns whether the command is the internal `launch agent`, which makes this process an
    /// agent.
    pub(crate) fn is_agent(&self) -> bool {
        matches!(self, LaunchCommand::Agent(_))
    }

    /// Runs the command and returns its exit code.
    pub(crate) fn run(self, context: &CommandContext) -> diagnostic::Result<u8> {
        match self {
            LaunchCommand::Run(args) => run::run(args, context),
            LaunchCommand::Plan(args) => plan::run(args, context),
            LaunchCommand::Check(args) => check::run(args, context),
            LaunchCommand::Quickstart(args) => quickstart::run(args, context),
            LaunchCommand::Ps(args) => ps::run(args, context),
            LaunchCommand::Logs(args) => logs::run(args, context),
            LaunchCommand::Events(args) => events::run(args, context),
            LaunchCommand::Top(args) => top::run(&args),
            LaunchCommand::Serve(args) => serve::run(args, context),
            LaunchCommand::Report(args) => report::run(args, context),
            LaunchCommand::Stop(args) => stop::run(args, context),
            LaunchCommand::Exec(args) => exec::run(args, context),
            LaunchCommand::Attach(args) => attach::run(args, context),
            LaunchCommand::Ckpt(args) => ckpt::run(args, context),
            LaunchCommand::Sbatch(args) => sbatch::run(args, context),
            LaunchCommand::Manifest(args) => manifest::run(args, context),
            LaunchCommand::Import(args) => import::run(args, context),
            LaunchCommand::Torchrun(args) => drop_in::run(OtherLauncher::Torchrun, args, context),
            LaunchCommand::Accelerate(args) => drop_in::run(OtherLauncher::Accelerate, args, context),
            LaunchCommand::Deepspeed(args) => drop_in::run(OtherLauncher::Deepspeed, args, context),
            LaunchCommand::Shims(args) => shims::run(args, context),
            LaunchCommand::Explain(args) => explain::run(args, context),
            LaunchCommand::Schema(args) => schema::run(args, context),
            LaunchCommand::Completions(args) => completions::run(args, context),
            LaunchCommand::Man(args) => man::run(args, context),
            LaunchCommand::GpuCheck(args) => gpu_check::run(args, context),
            LaunchCommand::Agent(args) => agent::run(args, context),
        }
    }
}
