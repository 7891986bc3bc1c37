//! `launch ckpt rng`: random states for exactly as many ranks as will go on.
use super::{Failure, describe::clean, print, say};
use ckpt::rng_files::{
    prepare::{self, Place},
    rule::{Asked, Policy, Scope},
    streams::Kind,
};
use clap::{Args, ValueEnum};
use contract::exit;
use serde_json::json;
use std::path::PathBuf;

/// Arguments of `launch ckpt rng`.
#[derive(Debug, Args)]
pub(super) struct RngArgs {
    /// A folder with rng_state*.pth (HF Trainer) or random_states_*.pkl (Accelerate)
    pub(super) dir: PathBuf,
    /// Ranks that will go on
    #[arg(long, value_name = "M", value_parser = clap::value_parser!(u32).range(1..=65536))]
    pub(super) world_size: u32,
    /// Refuse to seed any stream anew
    #[arg(long, conflicts_with = "reseed")]
    pub(super) strict: bool,
    /// Seed every stream anew
    #[arg(long)]
    pub(super) reseed: bool,
    /// The folder to make [default: launch-wM/NAME beside the folder NAME]
    #[arg(long, value_name = "DIR", conflicts_with = "in_place")]
    pub(super) out: Option<PathBuf>,
    /// Replace the folder itself, in one go
    #[arg(long)]
    pub(super) in_place: bool,
    /// Seed of the run, which goes into every new seed [default: that of rank 0's torch generator]
    #[arg(long, value_name = "N")]
    pub(super) seed: Option<u64>,
    /// GPUs that each new rank sees [default: as many as it takes when each rank had one, else as before]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub(super) gpus: Option<u32>,
    /// These streams are the same on all ranks; an error when they aren't
    #[arg(long, value_enum, value_name = "KIND", value_delimiter = ',')]
    pub(super) replicated: Vec<Stream>,
    /// Each rank has its own of these streams, even when they look the same
    #[arg(long, value_enum, value_name = "KIND", value_delimiter = ',')]
    pub(super) per_rank: Vec<Stream>,
}

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
    fn kind(self) -> Kind {
        match self {
            Stream::Python => Kind::Python,
            Stream::Numpy => Kind::Numpy,
            Stream::TorchCpu => Kind::TorchCpu,
            Stream::TorchCuda => Kind::TorchCuda,
        }
    }
}

/// Makes the folder; its path is on stdout.
pub(super) fn run(args: RngArgs, json: bool) -> Result<u8, Failure> {
    let policy = match (args.strict, args.reseed) {
        (true, _) => Policy::Strict,
        (_, true) => Policy::Reseed,
        _ => Policy::Reconcile,
    };
    let mut asked = Asked::new(args.world_size, policy);
    (asked.run_seed, asked.gpus) = (args.seed, args.gpus);
    asked.scopes.extend(args.per_rank.iter().map(|s| (s.kind(), Scope::PerDataRank)));
    asked.scopes.extend(args.replicated.iter().map(|s| (s.kind(), Scope::Replicated)));
    let place = match (args.out, args.in_place) {
        (Some(dir), _) => Place::At(dir),
        (None, true) => Place::InPlace,
        (None, false) => Place::Sibling,
    };
    let made = prepare::rng(&args.dir, &asked, &place)?;
    if json {
        print(&format!("{}\n", json!({ "path": made.path, "decision": made.decision })))?;
    } else {
        made.lines.iter().for_each(|line| say(format_args!("{}", clean(line))));
        print(&format!("{}\n", made.path.display()))?;
    }
    Ok(exit::DONE)
}
