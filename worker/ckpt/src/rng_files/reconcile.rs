//! Assigns the random generator states that N ranks saved to M ranks, by the rule in
//! docs/numerics.md.
//!
//! The functions are pure: they take states and options, and return states and a record of the
//! decisions.
use super::streams::{
    MersenneTwister, NumpyRngState, PythonRngState, RankRngStates, TorchCpuState, TorchCudaState,
    TorchCudaStates,
};
use crate::error::ReconcileError;
use crate::hash::Hash;
use crate::rng_stream_kind::RngStreamKind;
use diagnostic::quantity::format_count;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// How random generator states are assigned to ranks when the number of ranks changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ReconcilePolicy {
    /// Restore every stream that can be restored. If the number of ranks changes, reseed the
    /// streams of [`RngStreamScope::PerDataRank`].
    Reconcile,
    /// Fail if a stream would have to be reseeded.
    Strict,
    /// Reseed every stream, even when the number of ranks is unchanged.
    Reseed,
}

/// The ranks that share the state of a random generator: all ranks, only one data-parallel rank, or
/// the ranks that hold one part of the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RngStreamScope {
    /// All ranks have equal streams.
    Replicated,
    /// Each data-parallel rank has a separate stream.
    PerDataRank,
    /// Each owner, such as an expert or a tensor-parallel shard, has a separate stream. The stream
    /// moves to the rank that the owner moves to.
    PerOwner,
}

/// Where ranks get the state of a random generator after a change of the number of ranks: from old
/// ranks, or from a new seed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RngStreamAssignment {
    /// Each rank continues with its own stream, byte for byte.
    Restored,
    /// All ranks continue with the stream that all old ranks shared.
    Replicated,
    /// Each rank continues with the stream of its owner, such as the expert that the rank computes.
    Followed,
    /// Each rank begins a new stream with a new seed.
    Reseeded,
}

/// Options for assigning saved random generator states to a new number of ranks, such as this
/// number and the seed of new states.
#[derive(Clone, Debug)]
pub struct ReconcileOptions {
    /// Number of ranks that resume.
    pub world: u32,
    /// What to do if `world` differs from the number of ranks that saved.
    pub policy: ReconcilePolicy,
    /// Seed that is hashed into every new stream. `None` stands for the seed of rank 0's torch
    /// generator.
    pub run_seed: Option<u64>,
    /// Number of reconciliations in the history of the run, including this one.
    pub generation: u64,
    /// Number of optimizer steps that were completed when the checkpoint was saved.
    pub step: u64,
    /// Number of GPUs that each new rank sees. `None` if the saved states determine the number.
    pub gpus: Option<u32>,
    /// Maps each kind of stream whose scope is known to this scope. The scope of any other stream
    /// is derived from the states.
    pub scopes: BTreeMap<RngStreamKind, RngStreamScope>,
    /// The number of the owner of each old rank, and of each new rank, for
    /// [`RngStreamScope::PerOwner`].
    pub owners: Option<(Vec<u32>, Vec<u32>)>,
}

impl ReconcileOptions {
    /// Creates options for assigning random generator states to `world` ranks with the policy
    /// `policy`, and default values of all other options.
    pub fn new(world: u32, policy: ReconcilePolicy) -> ReconcileOptions {
        ReconcileOptions {
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

/// How the new ranks get the state of one random generator, such as NumPy's, after the number of
/// ranks has changed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RngStreamDecision {
    /// Name of the kind of stream ([`RngStreamKind::name`]).
    pub kind: String,
    /// Which of the old ranks shared the stream.
    pub scope: RngStreamScope,
    /// Where the new ranks' streams come from.
    pub mode: RngStreamAssignment,
}

/// How all random generator states were assigned to the new ranks, as `launch_rng.json` records it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RngDecision {
    /// Number of ranks that saved the states.
    pub from_world: u32,
    /// Number of ranks that resume.
    pub world: u32,
    /// The policy that was applied.
    pub policy: ReconcilePolicy,
    /// Number of reconciliations in the history of the run, including this one.
    pub generation: u64,
    /// Number of optimizer steps that were completed when the checkpoint was saved.
    pub step: u64,
    /// The seed that was hashed into new streams.
    pub run_seed: u64,
    /// One entry per kind of stream that the states have.
    pub streams: Vec<RngStreamDecision>,
}

impl RngDecision {
    /// Describes in one line for the user how the random generator states were assigned to the new
    /// ranks.
    pub fn summary(&self) -> String {
        let kinds_with = |mode: RngStreamAssignment| -> Vec<&str> {
            self.streams.iter().filter(|s| s.mode == mode).map(|s| s.kind.as_str()).collect()
        };
        let modes = [
            (RngStreamAssignment::Restored, "restored"),
            (RngStreamAssignment::Replicated, "replicated to all ranks"),
            (RngStreamAssignment::Followed, "moved with their owners"),
            (RngStreamAssignment::Reseeded, "reseeded per rank"),
        ];
        let parts: Vec<String> = modes
            .into_iter()
            .filter(|(mode, _)| !kinds_with(*mode).is_empty())
            .map(|(mode, action)| format!("{} {action}", kinds_with(mode).join(", ")))
            .collect();
        format!(
            "RNG states of {} assigned to {}: {} (generation {})",
            format_count(self.from_world, "rank"),
            self.world,
            parts.join("; "),
            self.generation
        )
    }
}

/// Computes the hash from which a rank's random generator is seeded again after a change of the
/// number of ranks. The number of ranks is not hashed, so that a rank gets equal streams in any
/// world size.
pub fn derive_stream_seed(run_seed: u64, generation: u64, step: u64, kind: RngStreamKind, rank: u64) -> Hash {
    let mut message = run_seed.to_le_bytes().to_vec();
    message.extend(b"rng-reconcile");
    message.extend([generation, step].iter().flat_map(|n| n.to_le_bytes()));
    message.extend(kind.name().as_bytes());
    message.extend(rank.to_le_bytes());
    Hash::digest(&message)
}

/// Assigns the random generator states of the `old` ranks to `options.world` new ranks. Returns the
/// states of the new ranks, and a record of the decisions.
///
/// # Errors
/// Fails if the states are incomplete or contradict the options, if the options lack a needed
/// owner, or if the policy `strict` forbids a necessary reseed.
pub fn reconcile_rng_states(
    old: &[RankRngStates],
    options: &ReconcileOptions,
) -> Result<(Vec<RankRngStates>, RngDecision), ReconcileError> {
    let Some(first) = old.first() else { return Err(ReconcileError::NoStates) };
    if options.world == 0 {
        return Err(ReconcileError::NoRanks);
    }
    let run_seed = options.run_seed.unwrap_or_else(|| first.cpu.seed());
    let mut new: Vec<RankRngStates> =
        (0..options.world as usize).map(|r| old.get(r).unwrap_or(first).clone()).collect();
    let mut streams = Vec::new();
    for kind in RngStreamKind::ALL {
        let ranks_with_stream = old.iter().filter(|s| s.compute_rng_state_digest(kind).is_some()).count();
        if ranks_with_stream == 0 {
            continue;
        }
        if let Some(rank) = old.iter().position(|s| s.compute_rng_state_digest(kind).is_none()) {
            return Err(ReconcileError::MissingStream { kind, rank });
        }
        let scope = determine_rng_stream_scope(old, kind, options)?;
        let mode = decide_stream_assignment(old.len(), scope, kind, options)?;
        for (rank, states) in new.iter_mut().enumerate() {
            match mode {
                RngStreamAssignment::Restored => {}
                RngStreamAssignment::Replicated => copy_rng_stream(states, first, kind, 0),
                RngStreamAssignment::Followed => {
                    let from = find_old_rank_with_same_owner(old.len(), rank, kind, options)?;
                    copy_rng_stream(states, &old[from], kind, from);
                }
                RngStreamAssignment::Reseeded => {
                    // a replicated stream stays equal on all ranks
                    let rank = if scope == RngStreamScope::Replicated { 0 } else { rank as u64 };
                    let seed = derive_stream_seed(run_seed, options.generation, options.step, kind, rank);
                    reseed_rng_stream(states, kind, &seed);
                }
            }
            if kind == RngStreamKind::TorchCuda && mode != RngStreamAssignment::Restored {
                expand_cuda_states(states, old, options);
            }
        }
        streams.push(RngStreamDecision { kind: kind.name().into(), scope, mode });
    }
    let (from_world, world) = (old.len() as u32, options.world);
    let (policy, generation, step) = (options.policy, options.generation, options.step);
    Ok((new, RngDecision { from_world, world, policy, generation, step, run_seed, streams }))
}

/// Returns the hash of a rank's random generator state, by which launch determines whether several
/// ranks have the same state. Of the CUDA states, only the state of the rank's device is hashed,
/// since a rank leaves the generators of other devices idle. Returns `None` if the rank has no
/// stream of this kind.
fn compute_comparable_digest(states: &RankRngStates, kind: RngStreamKind, rank: usize) -> Option<Hash> {
    match (kind, &states.cuda) {
        (RngStreamKind::TorchCuda, Some(cuda)) => rank_cuda_state(cuda, rank).map(|d| Hash::digest(&d.0)),
        _ => states.compute_rng_state_digest(kind),
    }
}

/// Returns the state of the CUDA generator that a rank uses: that of the device number `rank`
/// modulo the number of devices. Returns `None` if there are no devices.
fn rank_cuda_state(cuda: &TorchCudaStates, rank: usize) -> Option<TorchCudaState> {
    let devices = cuda.device_states();
    devices.get(rank.checked_rem(devices.len())?).copied()
}

/// Determines which of the old ranks share the state of the random generator `kind`, from the
/// options or by a comparison of their states.
///
/// # Errors
/// Fails if the options declare a stream as replicated and the states of the ranks differ.
fn determine_rng_stream_scope(
    old: &[RankRngStates],
    kind: RngStreamKind,
    options: &ReconcileOptions,
) -> Result<RngStreamScope, ReconcileError> {
    let first = compute_comparable_digest(&old[0], kind, 0);
    let differing: Vec<usize> =
        (0..old.len()).filter(|&rank| compute_comparable_digest(&old[rank], kind, rank) != first).collect();
    match options.scopes.get(&kind) {
        Some(RngStreamScope::Replicated) if !differing.is_empty() => {
            Err(ReconcileError::NotReplicated { kind, ranks: differing })
        }
        Some(scope) => Ok(*scope),
        None if !differing.is_empty() => Ok(RngStreamScope::PerDataRank),
        None if old.len() > 1 => Ok(RngStreamScope::Replicated),
        // A single rank doesn't show the scope. torch's generators draw dropout masks, which must
        // differ between ranks. Python's and NumPy's generators make decisions that all ranks must
        // share, such as a shuffle of files.
        None => Ok(match kind {
            RngStreamKind::Python | RngStreamKind::Numpy => RngStreamScope::Replicated,
            RngStreamKind::TorchCpu | RngStreamKind::TorchCuda => RngStreamScope::PerDataRank,
        }),
    }
}

/// Decides from which old rank each new rank gets the state of one random generator, or whether it
/// gets a new seed.
///
/// # Errors
/// Fails if the policy `strict` forbids a necessary reseed.
fn decide_stream_assignment(
    from_world: usize,
    scope: RngStreamScope,
    kind: RngStreamKind,
    options: &ReconcileOptions,
) -> Result<RngStreamAssignment, ReconcileError> {
    let world = options.world;
    match (options.policy, scope) {
        (ReconcilePolicy::Reseed, _) => Ok(RngStreamAssignment::Reseeded),
        _ if from_world == world as usize && scope != RngStreamScope::PerOwner => {
            Ok(RngStreamAssignment::Restored)
        }
        (_, RngStreamScope::Replicated) => Ok(RngStreamAssignment::Replicated),
        (_, RngStreamScope::PerOwner) => Ok(RngStreamAssignment::Followed),
        (ReconcilePolicy::Reconcile, RngStreamScope::PerDataRank) => Ok(RngStreamAssignment::Reseeded),
        (ReconcilePolicy::Strict, RngStreamScope::PerDataRank) => {
            Err(ReconcileError::StrictWouldReseed { kind, from_world, world })
        }
    }
}

/// Finds the old rank whose random generator state the new rank `rank` takes over, because both
/// hold the same part of the model.
///
/// # Errors
/// Fails if the options list no owners, or if no old rank had this owner.
fn find_old_rank_with_same_owner(
    from_world: usize,
    rank: usize,
    kind: RngStreamKind,
    options: &ReconcileOptions,
) -> Result<usize, ReconcileError> {
    let Some((before, after)) = &options.owners else {
        return Err(ReconcileError::OwnersUnknown { kind });
    };
    let old_rank = after.get(rank).and_then(|owner| before.iter().take(from_world).position(|o| o == owner));
    old_rank.ok_or(ReconcileError::OwnerWithoutStream { kind, rank })
}

/// Copies the state of the random generator `kind` from the old rank `rank` to a new rank. Of the
/// CUDA states, only the state of the old rank's device is copied.
fn copy_rng_stream(to: &mut RankRngStates, from: &RankRngStates, kind: RngStreamKind, rank: usize) {
    match kind {
        RngStreamKind::Python => to.python.clone_from(&from.python),
        RngStreamKind::Numpy => to.numpy.clone_from(&from.numpy),
        RngStreamKind::TorchCpu => to.cpu.clone_from(&from.cpu),
        RngStreamKind::TorchCuda => {
            to.cuda =
                from.cuda.as_ref().and_then(|c| rank_cuda_state(c, rank)).map(TorchCudaStates::SingleDevice)
        }
    }
}

/// Replaces one rank's state of the random generator `kind` by a new state that is seeded with
/// `hash`. All 256 bits of the hash seed a Mersenne Twister (`init_by_array` of the hash as eight
/// little-endian words). The first eight bytes of the hash become the seed that torch reports, and
/// the only seed of a CUDA generator.
fn reseed_rng_stream(states: &mut RankRngStates, kind: RngStreamKind, hash: &Hash) {
    let words: Vec<u32> = hash.0.as_chunks::<4>().0.iter().map(|b| u32::from_le_bytes(*b)).collect();
    let mut first = [0u8; 8];
    first.copy_from_slice(&hash.0[..8]);
    let number = u64::from_le_bytes(first);
    match kind {
        RngStreamKind::Python => {
            // equals `random.seed(int.from_bytes(hash, "little"))`, which drops leading zero words
            let used = words.iter().rposition(|w| *w != 0).map_or(1, |last| last + 1);
            states.python =
                PythonRngState { twister: MersenneTwister::from_key(&words[..used]), gauss_next: None };
        }
        RngStreamKind::Numpy => {
            let twister = MersenneTwister::from_key(&words);
            states.numpy = NumpyRngState { twister, has_gauss: false, cached_gaussian: 0.0 };
        }
        RngStreamKind::TorchCpu => {
            states.cpu = TorchCpuState::from_seed(number, &MersenneTwister::from_key(&words))
        }
        RngStreamKind::TorchCuda => {
            states.cuda = Some(TorchCudaStates::SingleDevice(TorchCudaState::from_seed(number)))
        }
    }
}

/// Replaces a rank's single CUDA generator state by a list of states, one per visible GPU, which
/// programs with several ranks expect in the file. `options.gpus` is the number of visible GPUs. If
/// `options.gpus` is `None`, derives the number from `old`, the states of the old ranks. Does
/// nothing if the rank has no single CUDA state.
fn expand_cuda_states(states: &mut RankRngStates, old: &[RankRngStates], options: &ReconcileOptions) {
    let Some(TorchCudaStates::SingleDevice(state)) = states.cuda else { return };
    if options.world == 1 && options.gpus.is_none() {
        return;
    }
    let visible =
        old.iter().filter_map(|s| s.cuda.as_ref()).map(|c| c.device_states().len()).max().unwrap_or(1);
    // if each old rank used a separate GPU of one host, so do the new ranks
    let devices = if visible == old.len() { options.world as usize } else { visible };
    states.cuda = Some(TorchCudaStates::PerDevice(vec![state; options.gpus.map_or(devices, |g| g as usize)]));
}
