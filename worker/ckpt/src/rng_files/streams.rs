//! What one rank's file holds: Python's generator, numpy's, torch's on the CPU and on each GPU.
use crate::hash::Hash;
use serde::Serialize;
use std::fmt;

/// Words of a Mersenne Twister (MT19937).
pub(crate) const WORDS: usize = 624;
/// Bytes of torch's CPU generator.
pub(crate) const CPU_BYTES: usize = 5056;
/// Bytes of torch's CUDA generator: seed (u64) and Philox offset (i64).
pub(crate) const CUDA_BYTES: usize = 16;
/// Where the words of torch's CPU generator begin; each takes eight bytes.
const CPU_WORDS_AT: usize = 24;

/// Which generator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// `random`.
    Python,
    /// `numpy.random`.
    Numpy,
    /// `torch` on the CPU.
    TorchCpu,
    /// `torch.cuda`, all devices of a rank.
    TorchCuda,
}

impl Kind {
    /// All of them.
    pub const ALL: [Kind; 4] = [Kind::Python, Kind::Numpy, Kind::TorchCpu, Kind::TorchCuda];

    /// Its name in tables, and in the hash that seeds a new stream.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Python => "python",
            Kind::Numpy => "numpy",
            Kind::TorchCpu => "torch_cpu",
            Kind::TorchCuda => "torch_cuda",
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A Mersenne Twister: its words and how many of them are used up.
#[derive(Clone, PartialEq, Eq)]
pub struct Twister {
    pub(crate) words: Box<[u32; WORDS]>,
    /// 0 to 624.
    pub(crate) position: u32,
}

impl Twister {
    /// The reference `init_genrand`.
    fn by_number(seed: u32) -> Twister {
        let mut words = Box::new([0u32; WORDS]);
        let mut last = seed;
        for (i, word) in (0u32..).zip(words.iter_mut()) {
            last =
                if i == 0 { seed } else { 1_812_433_253u32.wrapping_mul(last ^ last >> 30).wrapping_add(i) };
            *word = last;
        }
        Twister { words, position: WORDS as u32 }
    }

    /// The reference `init_by_array`: what `random.seed(integer)` and `numpy.random.seed(list)` do.
    pub(crate) fn by_array(key: &[u32]) -> Twister {
        let mut mt = Twister::by_number(19_650_218);
        let w = &mut mt.words;
        let mixed = |before: u32, factor: u32| (before ^ before >> 30).wrapping_mul(factor);
        let (mut i, mut j) = (1, 0);
        for _ in 0..WORDS.max(key.len()) {
            let add = key.get(j).copied().unwrap_or(0).wrapping_add(j as u32);
            w[i] = (w[i] ^ mixed(w[i - 1], 1_664_525)).wrapping_add(add);
            (i, j) = (i + 1, if j + 1 >= key.len() { 0 } else { j + 1 });
            if i >= WORDS {
                (w[0], i) = (w[WORDS - 1], 1);
            }
        }
        for _ in 1..WORDS {
            w[i] = (w[i] ^ mixed(w[i - 1], 1_566_083_941)).wrapping_sub(i as u32);
            i += 1;
            if i >= WORDS {
                (w[0], i) = (w[WORDS - 1], 1);
            }
        }
        w[0] = 0x8000_0000;
        mt
    }

    fn bytes(&self) -> Vec<u8> {
        self.words.iter().chain([&self.position]).flat_map(|w| w.to_le_bytes()).collect()
    }
}

impl fmt::Debug for Twister {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Twister({:08x}…, {})", self.words[0], self.position)
    }
}

/// `random.getstate()`, version 3.
#[derive(Clone, Debug, PartialEq)]
pub struct PythonState {
    pub(crate) twister: Twister,
    /// The second of a pair of normal numbers.
    pub(crate) gauss_next: Option<f64>,
}

/// `numpy.random.get_state()` of MT19937.
#[derive(Clone, Debug, PartialEq)]
pub struct NumpyState {
    pub(crate) twister: Twister,
    pub(crate) has_gauss: bool,
    pub(crate) cached_gaussian: f64,
}

/// `torch.get_rng_state()`.
#[derive(Clone, PartialEq, Eq)]
pub struct CpuState(pub(crate) Box<[u8; CPU_BYTES]>);

impl fmt::Debug for CpuState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CpuState(seed {})", self.seed())
    }
}

impl CpuState {
    /// Checks what torch checks, and that the words are of 32 bits.
    pub(crate) fn new(bytes: &[u8]) -> Result<CpuState, String> {
        let bytes: Box<[u8; CPU_BYTES]> = bytes
            .to_vec()
            .into_boxed_slice()
            .try_into()
            .map_err(|_| format!("torch's CPU state has {} bytes, not {CPU_BYTES}", bytes.len()))?;
        let state = CpuState(bytes);
        let (left, next) = (state.u64_at(8) as u32 as i32, state.u64_at(16));
        if !(1..=WORDS as i32).contains(&left) || next > WORDS as u64 {
            return Err(format!("torch's CPU state is damaged (left {left}, next {next})"));
        }
        match (0..WORDS).find(|i| state.u64_at(CPU_WORDS_AT + 8 * i) > u64::from(u32::MAX)) {
            Some(word) => Err(format!("torch's CPU state is damaged (word {word} has more than 32 bits)")),
            None => Ok(state),
        }
    }

    fn u64_at(&self, at: usize) -> u64 {
        let mut wide = [0u8; 8];
        wide.copy_from_slice(&self.0[at..at + 8]);
        u64::from_le_bytes(wide)
    }

    /// What `manual_seed` was given.
    pub fn seed(&self) -> u64 {
        self.u64_at(0)
    }

    /// A fresh generator with these words: as after `manual_seed(seed)`, which leaves `left` 1 and `next` 0.
    pub(crate) fn fresh(seed: u64, twister: &Twister) -> CpuState {
        let mut bytes = Box::new([0u8; CPU_BYTES]);
        bytes[..8].copy_from_slice(&seed.to_le_bytes());
        bytes[8..12].copy_from_slice(&1i32.to_le_bytes());
        bytes[12..16].copy_from_slice(&1i32.to_le_bytes());
        for (slot, word) in bytes[CPU_WORDS_AT..].chunks_exact_mut(8).zip(twister.words.iter()) {
            slot.copy_from_slice(&u64::from(*word).to_le_bytes());
        }
        CpuState(bytes)
    }
}

/// `torch.cuda.get_rng_state()` of one device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CudaState(pub(crate) [u8; CUDA_BYTES]);

impl CudaState {
    pub(crate) fn new(bytes: &[u8]) -> Result<CudaState, String> {
        let bytes = bytes
            .try_into()
            .map_err(|_| format!("torch's CUDA state has {} bytes, not {CUDA_BYTES}", bytes.len()))?;
        let state = CudaState(bytes);
        let mut wide = [0u8; 8];
        wide.copy_from_slice(&state.0[8..]);
        match i64::from_le_bytes(wide) {
            offset if offset >= 0 && offset % 4 == 0 => Ok(state),
            offset => Err(format!("torch's CUDA state is damaged (offset {offset} is no multiple of 4)")),
        }
    }

    /// A generator of this seed at its beginning.
    pub(crate) fn fresh(seed: u64) -> CudaState {
        let mut bytes = [0u8; CUDA_BYTES];
        bytes[..8].copy_from_slice(&seed.to_le_bytes());
        CudaState(bytes)
    }
}

/// States of a rank's GPUs, in the two shapes in which they are saved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CudaStates {
    /// Of the one device of a run without ranks.
    One(CudaState),
    /// Of every visible device.
    All(Vec<CudaState>),
}

impl CudaStates {
    /// Each device's.
    pub fn devices(&self) -> &[CudaState] {
        match self {
            CudaStates::One(state) => std::slice::from_ref(state),
            CudaStates::All(states) => states,
        }
    }
}

/// Which numpy wrote it: the names of its functions changed with numpy 2, and each major version reads its own best.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NumpyNames {
    /// `numpy.core`, before 2.
    Core,
    /// `numpy._core`.
    PrivateCore,
}

impl NumpyNames {
    pub(crate) fn module(self) -> &'static str {
        match self {
            NumpyNames::Core => "numpy.core.multiarray",
            NumpyNames::PrivateCore => "numpy._core.multiarray",
        }
    }
}

/// Which program's file it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Writer {
    /// `rng_state.pth` and `rng_state_R.pth` of HF Trainer.
    Trainer,
    /// `random_states_R.pkl` of Accelerate.
    Accelerate,
}

/// Everything in one rank's file.
#[derive(Clone, Debug, PartialEq)]
pub struct RankStates {
    pub python: PythonState,
    pub numpy: NumpyState,
    pub numpy_names: NumpyNames,
    pub cpu: CpuState,
    pub cuda: Option<CudaStates>,
    /// Accelerate's own counter.
    pub step: Option<i64>,
}

impl RankStates {
    /// BLAKE3 of a stream, the same exactly when it goes on with the same numbers; `None` when the rank has none.
    pub fn digest(&self, kind: Kind) -> Option<Hash> {
        let bytes = match kind {
            Kind::Python => {
                let gauss = self.python.gauss_next.map_or(Vec::new(), |g| g.to_bits().to_le_bytes().to_vec());
                [self.python.twister.bytes(), gauss].concat()
            }
            Kind::Numpy => {
                let n = &self.numpy;
                let cached = if n.has_gauss { n.cached_gaussian.to_bits() } else { 0 };
                [n.twister.bytes(), vec![n.has_gauss.into()], cached.to_le_bytes().to_vec()].concat()
            }
            Kind::TorchCpu => self.cpu.0.to_vec(),
            Kind::TorchCuda => self.cuda.as_ref()?.devices().iter().flat_map(|d| d.0).collect(),
        };
        Some(Hash::of(&bytes))
    }
}
