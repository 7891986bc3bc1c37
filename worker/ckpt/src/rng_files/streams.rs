//! The random generator states (RNG) of one rank: those of Python, of NumPy, and of torch on the
//! CPU and on each GPU.
use crate::error::RngStateError;
use crate::format_constants::{CPU_RNG_STATE_BYTES, CUDA_RNG_STATE_BYTES, MERSENNE_TWISTER_WORDS};
use crate::hash::Hash;
pub use crate::rng_stream_kind::RngStreamKind;
use serde::Serialize;
use std::fmt;

/// Byte offset of the first Mersenne Twister word in the state of torch's CPU generator. Each word
/// takes 8 bytes.
const CPU_WORDS_OFFSET: usize = 24;

/// The state of a Mersenne Twister (MT19937) random generator: its 624 words, and how many of them
/// were used since they were last generated.
#[derive(Clone, PartialEq, Eq)]
pub struct MersenneTwister {
    pub(crate) words: Box<[u32; MERSENNE_TWISTER_WORDS]>,
    /// Words used since the last refill, 0 to 624.
    pub(crate) position: u32,
}

impl MersenneTwister {
    /// Seeds a Mersenne Twister with `init_genrand` of the reference implementation (mt19937ar.c).
    fn from_seed(seed: u32) -> MersenneTwister {
        let mut words = Box::new([0u32; MERSENNE_TWISTER_WORDS]);
        let mut last = seed;
        for (i, word) in (0u32..).zip(words.iter_mut()) {
            last =
                if i == 0 { seed } else { 1_812_433_253u32.wrapping_mul(last ^ last >> 30).wrapping_add(i) };
            *word = last;
        }
        MersenneTwister { words, position: MERSENNE_TWISTER_WORDS as u32 }
    }

    /// Seeds a Mersenne Twister with a list of 32-bit words, by the function `init_by_array` of the
    /// reference implementation (mt19937ar.c).
    pub(crate) fn from_key(key: &[u32]) -> MersenneTwister {
        let mut mt = MersenneTwister::from_seed(19_650_218);
        let w = &mut mt.words;
        let mixed = |before: u32, factor: u32| (before ^ before >> 30).wrapping_mul(factor);
        let (mut i, mut j) = (1, 0);
        for _ in 0..MERSENNE_TWISTER_WORDS.max(key.len()) {
            let add = key.get(j).copied().unwrap_or(0).wrapping_add(j as u32);
            w[i] = (w[i] ^ mixed(w[i - 1], 1_664_525)).wrapping_add(add);
            (i, j) = (i + 1, if j + 1 >= key.len() { 0 } else { j + 1 });
            if i >= MERSENNE_TWISTER_WORDS {
                (w[0], i) = (w[MERSENNE_TWISTER_WORDS - 1], 1);
            }
        }
        for _ in 1..MERSENNE_TWISTER_WORDS {
            w[i] = (w[i] ^ mixed(w[i - 1], 1_566_083_941)).wrapping_sub(i as u32);
            i += 1;
            if i >= MERSENNE_TWISTER_WORDS {
                (w[0], i) = (w[MERSENNE_TWISTER_WORDS - 1], 1);
            }
        }
        w[0] = 0x8000_0000;
        mt
    }

    /// Returns the words and the position of the Mersenne Twister as little-endian u32.
    fn to_bytes(&self) -> Vec<u8> {
        self.words.iter().chain([&self.position]).flat_map(|w| w.to_le_bytes()).collect()
    }
}

impl fmt::Debug for MersenneTwister {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Twister({:08x}…, {})", self.words[0], self.position)
    }
}

/// The state of Python's random generator: the value of `random.getstate()`, version 3.
#[derive(Clone, Debug, PartialEq)]
pub struct PythonRngState {
    pub(crate) twister: MersenneTwister,
    /// The second number of a pair of normally distributed numbers, which `gauss()` returns next.
    /// `None` if no number is cached.
    pub(crate) gauss_next: Option<f64>,
}

/// The state of NumPy's random generator: the value of `numpy.random.get_state()` for an MT19937
/// generator.
#[derive(Clone, Debug, PartialEq)]
pub struct NumpyRngState {
    pub(crate) twister: MersenneTwister,
    /// True if `cached_gaussian` is valid.
    pub(crate) has_gauss: bool,
    /// The second number of a pair of normally distributed numbers, which NumPy returns next.
    pub(crate) cached_gaussian: f64,
}

/// The state of torch's random generator on the CPU: the bytes of `torch.get_rng_state()`.
#[derive(Clone, PartialEq, Eq)]
pub struct TorchCpuState(pub(crate) Box<[u8; CPU_RNG_STATE_BYTES]>);

impl fmt::Debug for TorchCpuState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TorchCpuState(seed {})", self.seed())
    }
}

impl TorchCpuState {
    /// Creates the state of torch's CPU random generator from untrusted bytes, which are checked.
    /// Fails if the size is wrong, the position fields contradict each other, or a word has more
    /// than 32 bits.
    pub(crate) fn new(bytes: &[u8]) -> Result<TorchCpuState, RngStateError> {
        let bytes: Box<[u8; CPU_RNG_STATE_BYTES]> = bytes
            .to_vec()
            .into_boxed_slice()
            .try_into()
            .map_err(|_| RngStateError::CpuStateSize { bytes: bytes.len() })?;
        let state = TorchCpuState(bytes);
        let (left, next) = (state.read_u64_at(8) as u32 as i32, state.read_u64_at(16));
        if !(1..=MERSENNE_TWISTER_WORDS as i32).contains(&left) || next > MERSENNE_TWISTER_WORDS as u64 {
            return Err(RngStateError::CpuPosition { left, next });
        }
        match (0..MERSENNE_TWISTER_WORDS)
            .find(|i| state.read_u64_at(CPU_WORDS_OFFSET + 8 * i) > u64::from(u32::MAX))
        {
            Some(word) => Err(RngStateError::CpuWordTooWide { word }),
            None => Ok(state),
        }
    }

    /// Reads a little-endian u64 at the byte offset `offset` of the bytes that
    /// `torch.get_rng_state()` returned.
    fn read_u64_at(&self, offset: usize) -> u64 {
        let mut word = [0u8; 8];
        word.copy_from_slice(&self.0[offset..offset + 8]);
        u64::from_le_bytes(word)
    }

    /// Returns the seed of the random generator, the argument of the last `torch.manual_seed`.
    pub fn seed(&self) -> u64 {
        self.read_u64_at(0)
    }

    /// Creates the state of a newly seeded CPU random generator of torch from the words of the
    /// Mersenne Twister `twister`. `seed` is the seed that torch reports.
    pub(crate) fn from_seed(seed: u64, twister: &MersenneTwister) -> TorchCpuState {
        let mut bytes = Box::new([0u8; CPU_RNG_STATE_BYTES]);
        bytes[..8].copy_from_slice(&seed.to_le_bytes());
        bytes[8..12].copy_from_slice(&1i32.to_le_bytes());
        bytes[12..16].copy_from_slice(&1i32.to_le_bytes());
        for (slot, word) in bytes[CPU_WORDS_OFFSET..].chunks_exact_mut(8).zip(twister.words.iter()) {
            slot.copy_from_slice(&u64::from(*word).to_le_bytes());
        }
        TorchCpuState(bytes)
    }
}

/// The state of torch's random generator on one GPU: the bytes of `torch.cuda.get_rng_state()`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TorchCudaState(pub(crate) [u8; CUDA_RNG_STATE_BYTES]);

impl TorchCudaState {
    /// Creates the state of torch's random generator on a GPU from untrusted bytes, which are
    /// checked. Fails if the size is wrong, or the Philox offset is not a non-negative multiple of
    /// 4.
    pub(crate) fn new(bytes: &[u8]) -> Result<TorchCudaState, RngStateError> {
        let bytes = bytes.try_into().map_err(|_| RngStateError::CudaStateSize { bytes: bytes.len() })?;
        let state = TorchCudaState(bytes);
        let mut offset = [0u8; 8];
        offset.copy_from_slice(&state.0[8..]);
        match i64::from_le_bytes(offset) {
            offset if offset >= 0 && offset % 4 == 0 => Ok(state),
            offset => Err(RngStateError::CudaOffset { offset }),
        }
    }

    /// Creates the state of a newly seeded CUDA random generator of torch, with the seed `seed` and
    /// the Philox offset 0.
    pub(crate) fn from_seed(seed: u64) -> TorchCudaState {
        let mut bytes = [0u8; CUDA_RNG_STATE_BYTES];
        bytes[..8].copy_from_slice(&seed.to_le_bytes());
        TorchCudaState(bytes)
    }
}

/// The states of torch's random generators on all GPUs of one rank, in one of the two forms in
/// which programs save them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TorchCudaStates {
    /// The state of the only device, in a run of one process.
    SingleDevice(TorchCudaState),
    /// One state for each device that the rank sees.
    PerDevice(Vec<TorchCudaState>),
}

impl TorchCudaStates {
    /// Returns the states of the CUDA generators in the order of the devices.
    pub fn device_states(&self) -> &[TorchCudaState] {
        match self {
            TorchCudaStates::SingleDevice(state) => std::slice::from_ref(state),
            TorchCudaStates::PerDevice(states) => states,
        }
    }
}

/// The name under which a pickled NumPy array refers to its module, `numpy.core` before NumPy 2 and
/// `numpy._core` since then. A rewritten file keeps the name, so that the NumPy version of the
/// original file reads the file without a warning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NumpyModule {
    /// `numpy.core`, written by NumPy 1.
    Core,
    /// `numpy._core`, written by NumPy 2.
    PrivateCore,
}

impl NumpyModule {
    /// Returns the full name of the NumPy module, as pickles contain it.
    pub(crate) fn module_name(self) -> &'static str {
        match self {
            NumpyModule::Core => "numpy.core.multiarray",
            NumpyModule::PrivateCore => "numpy._core.multiarray",
        }
    }
}

/// The program whose file names and dict keys a random generator state file uses: HF Trainer or
/// Accelerate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum RngFormat {
    /// Files of HF Trainer: `rng_state.pth`, or `rng_state_R.pth` for each rank R.
    Trainer,
    /// Files of Accelerate: `random_states_R.pkl` for each rank R.
    Accelerate,
}

/// The random generator states of one rank, which are the content of one file.
#[derive(Clone, Debug, PartialEq)]
pub struct RankRngStates {
    /// State of Python's `random`.
    pub python: PythonRngState,
    /// State of NumPy's global generator.
    pub numpy: NumpyRngState,
    /// The NumPy module that the pickled array of the file names.
    pub numpy_module: NumpyModule,
    /// State of torch's CPU generator.
    pub cpu: TorchCpuState,
    /// States of torch's CUDA generators; `None` in a run without GPUs.
    pub cuda: Option<TorchCudaStates>,
    /// The step counter of Accelerate. `None` in HF Trainer's files, which have no such counter.
    pub step: Option<i64>,
}

impl RankRngStates {
    /// Computes the BLAKE3 hash of the state of the random generator `kind` of this rank. Two
    /// hashes are equal exactly if the streams continue with equal numbers. Returns `None` if the
    /// rank has no such stream.
    pub fn compute_rng_state_digest(&self, kind: RngStreamKind) -> Option<Hash> {
        let bytes = match kind {
            RngStreamKind::Python => {
                let gauss = self.python.gauss_next.map_or(Vec::new(), |g| g.to_bits().to_le_bytes().to_vec());
                [self.python.twister.to_bytes(), gauss].concat()
            }
            RngStreamKind::Numpy => {
                let n = &self.numpy;
                let cached = if n.has_gauss { n.cached_gaussian.to_bits() } else { 0 };
                [n.twister.to_bytes(), vec![n.has_gauss.into()], cached.to_le_bytes().to_vec()].concat()
            }
            RngStreamKind::TorchCpu => self.cpu.0.to_vec(),
            RngStreamKind::TorchCuda => {
                self.cuda.as_ref()?.device_states().iter().flat_map(|d| d.0).collect()
            }
        };
        Some(Hash::digest(&bytes))
    }
}
