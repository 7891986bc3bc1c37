//! What happens to random streams when N ranks become M. Pure: states in, states and a record out. docs/numerics.md has
//! the rule in words.
use super::streams::{CpuState, CudaState, CudaStates, Kind, NumpyState, PythonState, RankStates, Twister};
use crate::hash::Hash;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// What to do with streams that don't fit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Policy {
    /// Restore what can be restored; seed anew what belongs to ranks that came or went.
    Reconcile,
    /// Refuse to seed anew.
    Strict,
    /// Seed every stream anew, even when the ranks are the same.
    Reseed,
}

/// To whom a stream belongs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Scope {
    /// Every rank has the same one.
    Replicated,
    /// Each data-parallel rank has its own.
    PerDataRank,
    /// It belongs to an expert or a tensor-parallel part, which moves with its owner.
    PerOwner,
}

/// What was done with a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    /// Each rank goes on with its own, byte for byte.
    Restored,
    /// All go on with the one that all had.
    Replicated,
    /// Each rank goes on with that of its owner.
    Followed,
    /// Each rank begins a new one.
    Reseeded,
}

/// What is asked for.
#[derive(Clone, Debug)]
pub struct Asked {
    /// Ranks that go on.
    pub world: u32,
    pub policy: Policy,
    /// Goes into every new seed; the seed of rank 0's torch generator when not given.
    pub run_seed: Option<u64>,
    /// Reconciliations so far, this one included.
    pub generation: u64,
    /// Optimizer steps done.
    pub step: u64,
    /// GPUs that each new rank sees, where it must be said.
    pub gpus: Option<u32>,
    /// Scopes that are known; others are found out from the states.
    pub scopes: BTreeMap<Kind, Scope>,
    /// Logical owner of each old and of each new rank, for [`Scope::PerOwner`].
    pub owners: Option<(Vec<u32>, Vec<u32>)>,
}

impl Asked {
    /// For `world` ranks by this policy, with nothing else said.
    pub fn new(world: u32, policy: Policy) -> Asked {
        Asked {
            world,
            policy,
            run_seed: None,
            generation: 1,
            step: 0,
            gpus: None,
            scopes: BTreeMap::new(),
            owners: None,
        }
    }
}

/// One kind of stream in a [`Decision`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stream {
    pub kind: String,
    pub scope: Scope,
    pub mode: Mode,
}

/// The record of a reconciliation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Decision {
    /// Ranks that wrote the states.
    pub from_world: u32,
    /// Ranks that go on.
    pub world: u32,
    pub policy: Policy,
    pub generation: u64,
    pub step: u64,
    pub run_seed: u64,
    pub streams: Vec<Stream>,
}

impl Decision {
    /// The one line that a person sees.
    pub fn line(&self) -> String {
        let of = |mode: Mode| -> Vec<&str> {
            self.streams.iter().filter(|s| s.mode == mode).map(|s| s.kind.as_str()).collect()
        };
        let modes = [
            (Mode::Restored, "restored"),
            (Mode::Replicated, "the same on all ranks"),
            (Mode::Followed, "followed their owners"),
            (Mode::Reseeded, "seeded anew for each rank"),
        ];
        let parts: Vec<String> = modes
            .into_iter()
            .filter(|(mode, _)| !of(*mode).is_empty())
            .map(|(mode, said)| format!("{} {said}", of(mode).join(", ")))
            .collect();
        format!(
            "random states of {} ranks for {}: {} (generation {})",
            self.from_world,
            self.world,
            parts.join("; "),
            self.generation
        )
    }

    /// True when any stream was seeded anew.
    pub fn reseeded(&self) -> bool {
        self.streams.iter().any(|s| s.mode == Mode::Reseeded)
    }
}

/// The seed of a new stream: BLAKE3 of the run's seed, the word `rng-reconcile`, generation, step, kind and rank, numbers
/// as little-endian u64. The number of ranks isn't in it.
pub fn seed(run_seed: u64, generation: u64, step: u64, kind: Kind, rank: u64) -> Hash {
    let mut message = run_seed.to_le_bytes().to_vec();
    message.extend(b"rng-reconcile");
    message.extend([generation, step].iter().flat_map(|n| n.to_le_bytes()));
    message.extend(kind.name().as_bytes());
    message.extend(rank.to_le_bytes());
    Hash::of(&message)
}

/// Carries the states of `old` ranks to `asked.world`. `Err` is one line that says why not.
pub fn reconcile(old: &[RankStates], asked: &Asked) -> Result<(Vec<RankStates>, Decision), String> {
    let Some(first) = old.first() else { return Err("there are no random states".into()) };
    if asked.world == 0 {
        return Err("a world of 0 ranks".into());
    }
    let run_seed = asked.run_seed.unwrap_or_else(|| first.cpu.seed());
    let mut new: Vec<RankStates> =
        (0..asked.world as usize).map(|r| old.get(r).unwrap_or(first).clone()).collect();
    let mut streams = Vec::new();
    for kind in Kind::ALL {
        let having = old.iter().filter(|s| s.digest(kind).is_some()).count();
        if having == 0 {
            continue;
        }
        if let Some(rank) = old.iter().position(|s| s.digest(kind).is_none()) {
            return Err(format!("rank {rank} has no {kind} stream, others have one"));
        }
        let scope = scope(old, kind, asked)?;
        let mode = mode(old.len(), scope, kind, asked)?;
        for (rank, states) in new.iter_mut().enumerate() {
            match mode {
                Mode::Restored => {}
                Mode::Replicated => copy(states, first, kind, 0),
                Mode::Followed => {
                    let from = owner(old.len(), rank, kind, asked)?;
                    copy(states, &old[from], kind, from);
                }
                Mode::Reseeded => {
                    // a stream that is the same everywhere stays so
                    let rank = if scope == Scope::Replicated { 0 } else { rank as u64 };
                    reseed(states, kind, &seed(run_seed, asked.generation, asked.step, kind, rank));
                }
            }
            if kind == Kind::TorchCuda && mode != Mode::Restored {
                shape_cuda(states, old, asked);
            }
        }
        streams.push(Stream { kind: kind.name().into(), scope, mode });
    }
    let (from_world, world) = (old.len() as u32, asked.world);
    let (policy, generation, step) = (asked.policy, asked.generation, asked.step);
    Ok((new, Decision { from_world, world, policy, generation, step, run_seed, streams }))
}

/// What decides whether two ranks' streams are the same: of CUDA the rank's own device, the others are idle.
fn identity(states: &RankStates, kind: Kind, rank: usize) -> Option<Hash> {
    match (kind, &states.cuda) {
        (Kind::TorchCuda, Some(cuda)) => own_device(cuda, rank).map(|d| Hash::of(&d.0)),
        _ => states.digest(kind),
    }
}

fn own_device(cuda: &CudaStates, rank: usize) -> Option<CudaState> {
    let devices = cuda.devices();
    devices.get(rank.checked_rem(devices.len())?).copied()
}

/// The scope that was said, or what the states show.
fn scope(old: &[RankStates], kind: Kind, asked: &Asked) -> Result<Scope, String> {
    let own = identity(&old[0], kind, 0);
    let other: Vec<String> = old
        .iter()
        .enumerate()
        .filter(|(rank, s)| identity(s, kind, *rank) != own)
        .map(|(rank, _)| rank.to_string())
        .collect();
    match asked.scopes.get(&kind) {
        Some(Scope::Replicated) if !other.is_empty() => Err(format!(
            "the {kind} stream should be the same on all ranks, but that of rank {} isn't that of rank 0",
            other.iter().take(8).cloned().collect::<Vec<_>>().join(", ")
        )),
        Some(scope) => Ok(*scope),
        None if !other.is_empty() => Ok(Scope::PerDataRank),
        None if old.len() > 1 => Ok(Scope::Replicated),
        // One rank shows nothing. torch's draw dropout masks, of which no two ranks should have the same; the others
        // decide what all ranks must decide alike (a shuffle of files, say).
        None => Ok(match kind {
            Kind::Python | Kind::Numpy => Scope::Replicated,
            Kind::TorchCpu | Kind::TorchCuda => Scope::PerDataRank,
        }),
    }
}

fn mode(old: usize, scope: Scope, kind: Kind, asked: &Asked) -> Result<Mode, String> {
    match (asked.policy, scope) {
        (Policy::Reseed, _) => Ok(Mode::Reseeded),
        _ if old == asked.world as usize && scope != Scope::PerOwner => Ok(Mode::Restored),
        (_, Scope::Replicated) => Ok(Mode::Replicated),
        (_, Scope::PerOwner) => Ok(Mode::Followed),
        (Policy::Reconcile, Scope::PerDataRank) => Ok(Mode::Reseeded),
        (Policy::Strict, Scope::PerDataRank) => Err(format!(
            "each of {old} ranks has a {kind} stream of its own and {} ranks would go on; strict refuses to seed new \
             ones: use as many ranks, or reconcile",
            asked.world
        )),
    }
}

/// The old rank with the owner of new rank `rank`.
fn owner(old: usize, rank: usize, kind: Kind, asked: &Asked) -> Result<usize, String> {
    let Some((before, now)) = &asked.owners else {
        return Err(format!("the {kind} stream belongs to owners, and nobody said who they are"));
    };
    let found = now.get(rank).and_then(|owner| before.iter().take(old).position(|o| o == owner));
    found.ok_or_else(|| format!("no old rank has the {kind} stream of the owner of rank {rank}"))
}

/// `from` is the stream of old rank `rank`.
fn copy(to: &mut RankStates, from: &RankStates, kind: Kind, rank: usize) {
    match kind {
        Kind::Python => to.python.clone_from(&from.python),
        Kind::Numpy => to.numpy.clone_from(&from.numpy),
        Kind::TorchCpu => to.cpu.clone_from(&from.cpu),
        Kind::TorchCuda => {
            to.cuda = from.cuda.as_ref().and_then(|c| own_device(c, rank)).map(CudaStates::One)
        }
    }
}

/// A new stream. All 256 bits of the hash go into a Mersenne Twister (`init_by_array` of its eight little-endian words), and
/// its first eight bytes are what torch calls the seed.
fn reseed(states: &mut RankStates, kind: Kind, hash: &Hash) {
    let words: Vec<u32> = hash.0.as_chunks::<4>().0.iter().map(|b| u32::from_le_bytes(*b)).collect();
    let mut first = [0u8; 8];
    first.copy_from_slice(&hash.0[..8]);
    let number = u64::from_le_bytes(first);
    match kind {
        Kind::Python => {
            // as `random.seed(int.from_bytes(hash, "little"))`, whose integer has no leading zeros
            let used = words.iter().rposition(|w| *w != 0).map_or(1, |last| last + 1);
            states.python = PythonState { twister: Twister::by_array(&words[..used]), gauss_next: None };
        }
        Kind::Numpy => {
            let twister = Twister::by_array(&words);
            states.numpy = NumpyState { twister, has_gauss: false, cached_gaussian: 0.0 };
        }
        Kind::TorchCpu => states.cpu = CpuState::fresh(number, &Twister::by_array(&words)),
        Kind::TorchCuda => states.cuda = Some(CudaStates::One(CudaState::fresh(number))),
    }
}

/// The one state of a rank, in the shape that a run of `asked.world` ranks reads: a list with one for each visible GPU,
/// and a single one for a run without ranks.
fn shape_cuda(states: &mut RankStates, old: &[RankStates], asked: &Asked) {
    let Some(CudaStates::One(own)) = states.cuda else { return };
    if asked.world == 1 && asked.gpus.is_none() {
        return;
    }
    let seen = old.iter().filter_map(|s| s.cuda.as_ref()).map(|c| c.devices().len()).max().unwrap_or(1);
    // ranks of one host saw a GPU each: so will the new ones
    let devices = if seen == old.len() { asked.world as usize } else { seen };
    states.cuda = Some(CudaStates::All(vec![own; asked.gpus.map_or(devices, |g| g as usize)]));
}
