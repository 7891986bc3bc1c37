//! `launch ckpt rng`: reshards the random states of a program for another world size.
use super::{describe::printable, log, print};
use ckpt::rng_files::{
    prepare::{self, Destination},
    reconcile::{ReconcileOptions, ReconcilePolicy, StreamScope},
    streams::StreamKind,
};
use clap::{Args, ValueEnum};
use contract::exit;
use serde_json::json;
use std::path::PathBuf;

/// Arguments of `launch ckpt rng`.
#[derive(Debug, Args)]
pub(super) struct RngArgs {
    /// Directory with rng_state*.pth (HF Trainer) or random_states_*.pkl (Accelerate)
    #[arg(value_name = "CHECKPOINT")]
    pub(super) dir: PathBuf,
    /// World size that will resume
    #[arg(long, value_name = "M", alias = "world", value_parser = clap::value_parser!(u32).range(1..=65536))]
    pub(super) world_size: u32,
    /// Fail instead of reseeding a stream
    #[arg(long, conflicts_with = "reseed")]
    pub(super) strict: bool,
    /// Reseed every stream
    #[arg(long)]
    pub(super) reseed: bool,
    /// Directory to create [default: launch-wM/NAME next to the directory NAME]
    #[arg(long, value_name = "DIR", conflicts_with = "in_place")]
    pub(super) out: Option<PathBuf>,
    /// Replace the directory atomically
    #[arg(long)]
    pub(super) in_place: bool,
    /// Seed of the run, part of every new seed [default: that of rank 0's torch generator]
    #[arg(long, value_name = "N")]
    pub(super) seed: Option<u64>,
    /// GPUs that each new rank sees [default: one if each rank had one, else as before]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub(super) gpus: Option<u32>,
    /// Streams that are equal on all ranks; an error if they differ
    #[arg(long, value_enum, value_name = "KIND", value_delimiter = ',')]
    pub(super) replicated: Vec<Stream>,
    /// Streams that each rank has separately, even if they are equal
    #[arg(long, value_enum, value_name = "KIND", value_delimiter = ',')]
    pub(super) per_rank: Vec<Stream>,
}

/// A random stream in `--replicated` and `--per-rank`.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(super) enum Stream {
    Python,
    Numpy,
    #[value(name = "torch_cpu")]
    TorchCpu,
    #[value(name = "torch_cuda")]
    TorchCuda,
}

impl Stream {
    fn kind(self) -> StreamKind {
        match self {
            Stream::Python => StreamKind::Python,
            Stream::Numpy => StreamKind::Numpy,
            Stream::TorchCpu => StreamKind::TorchCpu,
            Stream::TorchCuda => StreamKind::TorchCuda,
        }
    }
}

/// Writes the directory and prints its path.
pub(super) fn run(args: RngArgs, json: bool) -> diagnostic::Result<u8> {
    let policy = match (args.strict, args.reseed) {
        (true, _) => ReconcilePolicy::Strict,
        (_, true) => ReconcilePolicy::Reseed,
        _ => ReconcilePolicy::Reconcile,
    };
    let mut options = ReconcileOptions::new(args.world_size, policy);
    (options.run_seed, options.gpus) = (args.seed, args.gpus);
    options.scopes.extend(args.per_rank.iter().map(|s| (s.kind(), StreamScope::PerDataRank)));
    options.scopes.extend(args.replicated.iter().map(|s| (s.kind(), StreamScope::Replicated)));
    let destination = match (args.out, args.in_place) {
        (Some(dir), _) => Destination::At(dir),
        (None, true) => Destination::InPlace,
        (None, false) => Destination::Sibling,
    };
    let prepared = prepare::prepare_rng(&args.dir, &options, &destination)?;
    if json {
        print(&format!("{}\n", json!({ "path": prepared.path, "decision": prepared.decision })))?;
    } else {
        prepared.lines.iter().for_each(|line| log(format_args!("{}", printable(line))));
        print(&format!("{}\n", prepared.path.display()))?;
    }
    Ok(exit::DONE)
}
