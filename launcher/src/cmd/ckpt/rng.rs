//! `launch ckpt rng`: converts the states of the random generators (RNG streams) in a program's
//! checkpoint to another world size.
use super::output::write_stderr_line;
use crate::cmd::output::{print_json, print_line};
use ckpt::rng_files::{
    reconcile::{ReconcileOptions, ReconcilePolicy, RngStreamScope},
    resume_preparation::{self, PrepareDestination},
    streams::RngStreamKind,
};
use clap::{Args, ValueEnum};
use serde_json::json;
use std::path::PathBuf;

/// Arguments of `launch ckpt rng`.
#[derive(Debug, Args)]
pub(super) struct RngArgs {
    /// Directory with rng_state*.pth (HF Trainer) or random_states_*.pkl (Accelerate)
    #[arg(value_name = "CHECKPOINT")]
    pub(super) dir: PathBuf,
    /// World size of the run that will resume
    #[arg(long, value_name = "M", alias = "world", value_parser = clap::value_parser!(u32).range(1..=65536))]
    pub(super) world_size: u32,
    /// Fail instead of reseeding a stream
    #[arg(long, conflicts_with = "reseed")]
    pub(super) strict: bool,
    /// Reseed every stream
    #[arg(long)]
    pub(super) reseed: bool,
    /// Directory to create [default: launch-wM/NAME next to CHECKPOINT, where NAME is the name of
    /// CHECKPOINT]
    #[arg(long, value_name = "DIR", conflicts_with = "in_place")]
    pub(super) out: Option<PathBuf>,
    /// Replace CHECKPOINT atomically
    #[arg(long)]
    pub(super) in_place: bool,
    /// Seed of the run, from which new seeds are derived [default: that of rank 0's torch
    /// generator]
    #[arg(long, value_name = "N")]
    pub(super) seed: Option<u64>,
    /// Number of GPUs that each of the M ranks sees [default: M if each rank of the checkpoint saw
    /// as many GPUs as the checkpoint has ranks, else the number of GPUs that each rank saw]
    #[arg(long, value_name = "G", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub(super) gpus: Option<u32>,
    /// Kinds of streams that must be equal on all ranks; different streams are an error
    #[arg(long, value_enum, value_name = "KIND,…", value_delimiter = ',')]
    pub(super) replicated: Vec<StreamKindOption>,
    /// Kinds of streams that each rank has separately, even if they are equal
    #[arg(long, value_enum, value_name = "KIND,…", value_delimiter = ',')]
    pub(super) per_rank: Vec<StreamKindOption>,
}

/// The library and device of a random generator, such as `torch_cuda`, that the options
/// `--replicated` and `--per-rank` name.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(super) enum StreamKindOption {
    Python,
    Numpy,
    #[value(name = "torch_cpu")]
    TorchCpu,
    #[value(name = "torch_cuda")]
    TorchCuda,
}

impl StreamKindOption {
    /// Returns the kind of random generator, such as that of PyTorch on GPUs, that this option
    /// value names.
    fn to_stream_kind(self) -> RngStreamKind {
        match self {
            StreamKindOption::Python => RngStreamKind::Python,
            StreamKindOption::Numpy => RngStreamKind::Numpy,
            StreamKindOption::TorchCpu => RngStreamKind::TorchCpu,
            StreamKindOption::TorchCuda => RngStreamKind::TorchCuda,
        }
    }
}

/// Runs `launch ckpt rng`: writes a directory with the random generator states (RNG streams) for
/// the requested world size, and prints the path of the directory.
pub(super) fn run(args: RngArgs, json: bool) -> diagnostic::Result<u8> {
    let policy = match (args.strict, args.reseed) {
        (true, _) => ReconcilePolicy::Strict,
        (_, true) => ReconcilePolicy::Reseed,
        _ => ReconcilePolicy::Reconcile,
    };
    let mut options = ReconcileOptions::new(args.world_size, policy);
    (options.run_seed, options.gpus) = (args.seed, args.gpus);
    options.scopes.extend(args.per_rank.iter().map(|s| (s.to_stream_kind(), RngStreamScope::PerDataRank)));
    options.scopes.extend(args.replicated.iter().map(|s| (s.to_stream_kind(), RngStreamScope::Replicated)));
    let destination = match (args.out, args.in_place) {
        (Some(dir), _) => PrepareDestination::At(dir),
        (None, true) => PrepareDestination::InPlace,
        (None, false) => PrepareDestination::Sibling,
    };
    let prepared = resume_preparation::prepare_rng_states(&args.dir, &options, &destination)?;
    if json {
        return print_json(&json!({ "path": prepared.path, "decision": prepared.decision }));
    }
    prepared.lines.iter().for_each(|line| write_stderr_line(format_args!("{line}")));
    print_line(prepared.path.display())
}
