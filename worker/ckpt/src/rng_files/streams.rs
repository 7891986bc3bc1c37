//! RNG states of one rank: Python's generator, NumPy's, torch's on the CPU and on each GPU.
use crate::error::{CkptError, ReadFailure};
use crate::formats::torch_error::TorchFileError;
use crate::hash::Hash;
use serde::Serialize;
use std::fmt;
use std::path::Path;

/// Why the content of an RNG state file is rejected.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RngStateError {
    /// The file is larger than any RNG state file, so it isn't read.
    #[error("the file has {bytes} bytes, more than the limit of {limit} bytes")]
    FileTooLarge {
        /// Size of the file.
        bytes: u64,
        /// The limit, bytes.
        limit: u64,
    },
    /// The pickle's root is another object than a dict.
    #[error("the file is not a dict of RNG states")]
    NotADict,
    /// The dict has a stream that this version can't reassign to other ranks.
    #[error("unknown RNG stream {key:?}")]
    UnknownStream {
        /// Its key in the dict, shortened.
        key: String,
    },
    /// A stream that every file of this format has is missing.
    #[error("the file has no entry {key:?}")]
    MissingStream {
        /// Its key in the dict.
        key: &'static str,
    },
    /// A value has another structure than the generator's own `getstate`.
    #[error("the state of {generator} has an unknown layout")]
    UnknownLayout {
        /// The generator's name for messages.
        generator: &'static str,
    },
    /// Python changed the layout of `random.getstate()`.
    #[error("the state of Python's random has version {}, expected 3", .version.map_or("unknown".to_owned(), |v| v.to_string()))]
    PythonVersion {
        /// The version in the file; `None` when it isn't an integer.
        version: Option<i64>,
    },
    /// NumPy's global generator is of another algorithm.
    #[error("the state of NumPy's generator is not one of MT19937")]
    NumpyGenerator,
    /// A twister claims more used words than it has.
    #[error("position {position} is outside of a Mersenne Twister of {WORDS} words")]
    TwisterPosition {
        /// The position in the file.
        position: u64,
    },
    /// The byte tensor of torch's CPU generator has another size.
    #[error("torch's CPU state has {bytes} bytes, expected {CPU_BYTES}")]
    CpuStateSize {
        /// Size of the tensor.
        bytes: usize,
    },
    /// The position fields of torch's CPU generator contradict each other.
    #[error("torch's CPU state is damaged (left {left}, next {next})")]
    CpuPosition {
        /// Words left until the next refill.
        left: i32,
        /// Index of the next word.
        next: u64,
    },
    /// A word of torch's CPU generator doesn't fit in 32 bits.
    #[error("torch's CPU state is damaged (word {word} has more than 32 bits)")]
    CpuWordTooWide {
        /// Index of the word.
        word: usize,
    },
    /// The byte tensor of a CUDA generator has another size.
    #[error("torch's CUDA state has {bytes} bytes, expected {CUDA_BYTES}")]
    CudaStateSize {
        /// Size of the tensor.
        bytes: usize,
    },
    /// The Philox offset of a CUDA generator is invalid.
    #[error("torch's CUDA state is damaged (offset {offset} is not a non-negative multiple of 4)")]
    CudaOffset {
        /// The offset in the file.
        offset: i64,
    },
    /// The list of CUDA states is longer than any host has GPUs.
    #[error("the file has states of more than {limit} GPUs")]
    TooManyGpus {
        /// The limit.
        limit: usize,
    },
    /// The bytes of a tensor don't match the CRC-32 of the zip container.
    #[error("{member} doesn't match its CRC-32")]
    Crc {
        /// Name of the zip member.
        member: String,
    },
    /// The torch container is invalid.
    #[error("{0}")]
    Container(#[from] TorchFileError),
    /// The file can't be read.
    #[error("read error: {0}")]
    Read(#[from] ReadFailure),
}

impl RngStateError {
    /// This error as damage of the file `name` in the checkpoint at `path`.
    pub(super) fn at(self, path: &Path, name: &str) -> CkptError {
        CkptError::damaged(path, name, self)
    }
}

/// Words in the state of a Mersenne Twister (MT19937).
pub(crate) const WORDS: usize = 624;
/// Bytes in the state of torch's CPU generator.
pub(crate) const CPU_BYTES: usize = 5056;
/// Bytes in the state of torch's CUDA generator: seed (u64) and Philox offset (i64).
pub(crate) const CUDA_BYTES: usize = 16;
/// Byte offset of the first word in the state of torch's CPU generator; each word takes 8 bytes.
const CPU_WORDS_OFFSET: usize = 24;

/// A random number generator that has a stream in each rank's file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum StreamKind {
    /// Python's module `random`.
    Python,
    /// NumPy's global generator, `numpy.random`.
    Numpy,
    /// torch's default generator on the CPU.
    TorchCpu,
    /// torch's default generators on all GPUs that a rank sees.
    TorchCuda,
}

impl StreamKind {
    /// Every kind, in the order of the files.
    pub const ALL: [StreamKind; 4] =
        [StreamKind::Python, StreamKind::Numpy, StreamKind::TorchCpu, StreamKind::TorchCuda];

    /// The name that tables show. It is also hashed into the seed of a new stream, so it is stable.
    pub fn name(self) -> &'static str {
        match self {
            StreamKind::Python => "python",
            StreamKind::Numpy => "numpy",
            StreamKind::TorchCpu => "torch_cpu",
            StreamKind::TorchCuda => "torch_cuda",
        }
    }
}

impl fmt::Display for StreamKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// State of a Mersenne Twister: its words, and how many of them are used.
#[derive(Clone, PartialEq, Eq)]
pub struct MersenneTwister {
    pub(crate) words: Box<[u32; WORDS]>,
    /// Words used since the last refill, 0 to 624.
    pub(crate) position: u32,
}

impl MersenneTwister {
    /// Seeds a twister with `init_genrand` of the reference implementation (mt19937ar.c).
    fn from_seed(seed: u32) -> MersenneTwister {
        let mut words = Box::new([0u32; WORDS]);
        let mut last = seed;
        for (i, word) in (0u32..).zip(words.iter_mut()) {
            last =
                if i == 0 { seed } else { 1_812_433_253u32.wrapping_mul(last ^ last >> 30).wrapping_add(i) };
            *word = last;
        }
        MersenneTwister { words, position: WORDS as u32 }
    }

    /// Seeds a twister with `init_by_array` of the reference implementation (mt19937ar.c), which
    /// `random.seed(integer)` and `numpy.random.seed(list)` use too.
    pub(crate) fn from_key(key: &[u32]) -> MersenneTwister {
        let mut mt = MersenneTwister::from_seed(19_650_218);
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

    fn to_bytes(&self) -> Vec<u8> {
        self.words.iter().chain([&self.position]).flat_map(|w| w.to_le_bytes()).collect()
    }
}

impl fmt::Debug for MersenneTwister {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Twister({:08x}…, {})", self.words[0], self.position)
    }
}

/// The value of `random.getstate()`, version 3.
#[derive(Clone, Debug, PartialEq)]
pub struct PythonState {
    pub(crate) twister: MersenneTwister,
    /// The cached second value of a pair of normal numbers.
    pub(crate) gauss_next: Option<f64>,
}

/// The value of `numpy.random.get_state()` of an MT19937 generator.
#[derive(Clone, Debug, PartialEq)]
pub struct NumpyState {
    pub(crate) twister: MersenneTwister,
    pub(crate) has_gauss: bool,
    pub(crate) cached_gaussian: f64,
}

/// The bytes of `torch.get_rng_state()`, 5056 of them.
#[derive(Clone, PartialEq, Eq)]
pub struct CpuState(pub(crate) Box<[u8; CPU_BYTES]>);

impl fmt::Debug for CpuState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CpuState(seed {})", self.seed())
    }
}

impl CpuState {
    /// Validates an untrusted state: the fields that torch checks, and that each word has 32 bits.
    pub(crate) fn new(bytes: &[u8]) -> Result<CpuState, RngStateError> {
        let bytes: Box<[u8; CPU_BYTES]> = bytes
            .to_vec()
            .into_boxed_slice()
            .try_into()
            .map_err(|_| RngStateError::CpuStateSize { bytes: bytes.len() })?;
        let state = CpuState(bytes);
        let (left, next) = (state.u64_at(8) as u32 as i32, state.u64_at(16));
        if !(1..=WORDS as i32).contains(&left) || next > WORDS as u64 {
            return Err(RngStateError::CpuPosition { left, next });
        }
        match (0..WORDS).find(|i| state.u64_at(CPU_WORDS_OFFSET + 8 * i) > u64::from(u32::MAX)) {
            Some(word) => Err(RngStateError::CpuWordTooWide { word }),
            None => Ok(state),
        }
    }

    fn u64_at(&self, offset: usize) -> u64 {
        let mut word = [0u8; 8];
        word.copy_from_slice(&self.0[offset..offset + 8]);
        u64::from_le_bytes(word)
    }

    /// The argument of the last `torch.manual_seed`.
    pub fn seed(&self) -> u64 {
        self.u64_at(0)
    }

    /// A generator with these words in the position after `manual_seed(seed)`: `left` is 1, `next`
    /// 0.
    pub(crate) fn fresh(seed: u64, twister: &MersenneTwister) -> CpuState {
        let mut bytes = Box::new([0u8; CPU_BYTES]);
        bytes[..8].copy_from_slice(&seed.to_le_bytes());
        bytes[8..12].copy_from_slice(&1i32.to_le_bytes());
        bytes[12..16].copy_from_slice(&1i32.to_le_bytes());
        for (slot, word) in bytes[CPU_WORDS_OFFSET..].chunks_exact_mut(8).zip(twister.words.iter()) {
            slot.copy_from_slice(&u64::from(*word).to_le_bytes());
        }
        CpuState(bytes)
    }
}

/// The bytes of `torch.cuda.get_rng_state()` of one device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CudaState(pub(crate) [u8; CUDA_BYTES]);

impl CudaState {
    /// Validates an untrusted state: its Philox offset is a non-negative multiple of 4.
    pub(crate) fn new(bytes: &[u8]) -> Result<CudaState, RngStateError> {
        let bytes = bytes.try_into().map_err(|_| RngStateError::CudaStateSize { bytes: bytes.len() })?;
        let state = CudaState(bytes);
        let mut offset = [0u8; 8];
        offset.copy_from_slice(&state.0[8..]);
        match i64::from_le_bytes(offset) {
            offset if offset >= 0 && offset % 4 == 0 => Ok(state),
            offset => Err(RngStateError::CudaOffset { offset }),
        }
    }

    /// A generator of this seed with Philox offset 0.
    pub(crate) fn fresh(seed: u64) -> CudaState {
        let mut bytes = [0u8; CUDA_BYTES];
        bytes[..8].copy_from_slice(&seed.to_le_bytes());
        CudaState(bytes)
    }
}

/// CUDA states of one rank, in the two shapes in which programs save them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CudaStates {
    /// The state of the only device of a run without ranks.
    One(CudaState),
    /// One state per visible device.
    All(Vec<CudaState>),
}

impl CudaStates {
    /// The states by device, one or more.
    pub fn devices(&self) -> &[CudaState] {
        match self {
            CudaStates::One(state) => std::slice::from_ref(state),
            CudaStates::All(states) => states,
        }
    }
}

/// The NumPy module that a pickled array names. NumPy 2 renamed it; each major version reads the
/// file of its NumPy version without a warning, so a rewritten file keeps the name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NumpyModule {
    /// `numpy.core`, written by NumPy 1.
    Core,
    /// `numpy._core`, written by NumPy 2.
    PrivateCore,
}

impl NumpyModule {
    pub(crate) fn module_name(self) -> &'static str {
        match self {
            NumpyModule::Core => "numpy.core.multiarray",
            NumpyModule::PrivateCore => "numpy._core.multiarray",
        }
    }
}

/// The program whose file names and dict keys a set of RNG state files uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum RngFormat {
    /// `rng_state.pth` and `rng_state_R.pth` of HF Trainer.
    Trainer,
    /// `random_states_R.pkl` of Accelerate.
    Accelerate,
}

/// The RNG states of one rank, which is the content of one file.
#[derive(Clone, Debug, PartialEq)]
pub struct RankStates {
    /// State of Python's `random`.
    pub python: PythonState,
    /// State of NumPy's global generator.
    pub numpy: NumpyState,
    /// The module that the file's pickled array names.
    pub numpy_module: NumpyModule,
    /// State of torch's CPU generator.
    pub cpu: CpuState,
    /// States of torch's CUDA generators; `None` in a run without GPUs.
    pub cuda: Option<CudaStates>,
    /// Accelerate's step counter.
    pub step: Option<i64>,
}

impl RankStates {
    /// BLAKE3 of a stream's state, equal exactly when two streams continue with equal numbers;
    /// `None` when the rank has no such stream.
    pub fn digest(&self, kind: StreamKind) -> Option<Hash> {
        let bytes = match kind {
            StreamKind::Python => {
                let gauss = self.python.gauss_next.map_or(Vec::new(), |g| g.to_bits().to_le_bytes().to_vec());
                [self.python.twister.to_bytes(), gauss].concat()
            }
            StreamKind::Numpy => {
                let n = &self.numpy;
                let cached = if n.has_gauss { n.cached_gaussian.to_bits() } else { 0 };
                [n.twister.to_bytes(), vec![n.has_gauss.into()], cached.to_le_bytes().to_vec()].concat()
            }
            StreamKind::TorchCpu => self.cpu.0.to_vec(),
            StreamKind::TorchCuda => self.cuda.as_ref()?.devices().iter().flat_map(|d| d.0).collect(),
        };
        Some(Hash::digest(&bytes))
    }
}
