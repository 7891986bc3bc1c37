//! Decodes a file with the random generator states (RNG) of one rank, which is untrusted input.
use super::streams::{
    MersenneTwister, NumpyModule, NumpyRngState, PythonRngState, RankRngStates, RngFormat, TorchCpuState,
    TorchCudaState, TorchCudaStates,
};
use crate::codec::disk::Directory;
use crate::codec::pickle::PickleView;
use crate::codec::torch_file::{TENSOR_GLOBALS, TorchFile};
use crate::error::{CkptError, CloneableIoError, Result, RngStateError};
use crate::format_constants::{CPU_RNG_STATE_BYTES, MERSENNE_TWISTER_WORDS};
use crate::tensor::Dtype;
use nix::fcntl::OFlag;
use std::fs::File;
use std::os::unix::fs::FileExt;

/// Limit on the size in bytes of a file with the random generator states of a rank. A usual file
/// has 14 kB plus 16 bytes per GPU.
const RNG_FILE_BYTES_MAX: u64 = 16 << 20;
/// Limit on the size in bytes of the tensor storage that contains the state of one random
/// generator. Each state is stored separately.
const STORAGE_BYTES_MAX: u64 = 64 << 10;
/// Limit on the number of GPUs for which one rank may have random generator states.
const GPUS_PER_RANK_MAX: usize = 1024;
/// Names of the Python classes and functions that are allowed in the pickle of a rank's random
/// generator states, such as those of NumPy arrays.
const ALLOWED_GLOBALS: &[&[&str]] = &[
    TENSOR_GLOBALS,
    &[
        "numpy._core.multiarray._reconstruct",
        "numpy.core.multiarray._reconstruct",
        "numpy.ndarray",
        "numpy.dtype",
        "_codecs.encode",
    ],
];

/// The result of decoding a part of a file with random generator states. An error does not contain
/// the name of the file yet.
type RngDecodeResult<T> = std::result::Result<T, RngStateError>;

/// Reads the file `name` with the random generator states of one rank, and checks them. Returns the
/// states, and the program whose keys the file's dict has.
///
/// # Errors
/// Fails if the file is missing, too large or damaged, or if a state is invalid.
pub(super) fn read_rank_rng_file(directory: &Directory, name: &str) -> Result<(RngFormat, RankRngStates)> {
    let damaged = |error: RngStateError| CkptError::damaged(directory.path(), name, error);
    match directory.file_size(name)? {
        Some(bytes) if bytes > RNG_FILE_BYTES_MAX => {
            return Err(damaged(RngStateError::FileTooLarge { bytes, limit: RNG_FILE_BYTES_MAX }));
        }
        _ => {}
    }
    let file = TorchFile::open(directory, name, ALLOWED_GLOBALS)?;
    let (reader, _) = directory.open_file(name, OFlag::empty())?;
    let root = file.value();
    let keys: Vec<&str> = match root.as_pairs() {
        Some(pairs) => pairs.filter_map(|(key, _)| key.as_str()).collect(),
        None => return Err(damaged(RngStateError::NotADict)),
    };
    let (format, [python, numpy, cpu, cuda]) = match keys.contains(&"random_state") {
        true => (
            RngFormat::Accelerate,
            ["random_state", "numpy_random_seed", "torch_manual_seed", "torch_cuda_manual_seed"],
        ),
        false => (RngFormat::Trainer, ["python", "numpy", "cpu", "cuda"]),
    };
    let known = [python, numpy, cpu, cuda, "step"];
    if let Some(other) = keys.iter().find(|k| !known.contains(k)) {
        let key: String = other.chars().filter(|c| !c.is_control()).take(60).collect();
        return Err(damaged(RngStateError::UnknownStream { key }));
    }
    let bytes = |value: PickleView<'_>| read_tensor_bytes(&reader, &file, value);
    let need = |key: &'static str| root.get(key).ok_or(RngStateError::MissingStream { key });
    let states = || -> RngDecodeResult<RankRngStates> {
        let (numpy_names, numpy) = decode_numpy_state(need(numpy)?)?;
        Ok(RankRngStates {
            python: decode_python_state(need(python)?)?,
            numpy,
            numpy_module: numpy_names,
            cpu: TorchCpuState::new(&bytes(need(cpu)?)?)?,
            cuda: root
                .get(cuda)
                .filter(|v| !v.is_none())
                .map(|v| decode_cuda_states(v, bytes))
                .transpose()?,
            step: root.get("step").and_then(PickleView::as_int),
        })
    };
    Ok((format, states().map_err(damaged)?))
}

/// Decodes the state of Python's random generator, a pickled value of `random.getstate()`.
fn decode_python_state(value: PickleView<'_>) -> RngDecodeResult<PythonRngState> {
    let unusual = || RngStateError::UnknownLayout { generator: "Python's random" };
    let items = value.as_items().ok_or_else(unusual)?;
    let (Some(version), Some(state), Some(gauss)) = (items.get(0), items.get(1), items.get(2)) else {
        return Err(unusual());
    };
    if version.as_int() != Some(3) {
        return Err(RngStateError::PythonVersion { version: version.as_int() });
    }
    let numbers = state.as_items().and_then(|i| i.to_counts()).ok_or_else(unusual)?;
    let (words, position) = match numbers.split_last() {
        Some((position, words)) if words.len() == MERSENNE_TWISTER_WORDS => (words, *position),
        _ => return Err(unusual()),
    };
    let mut twister_words = Box::new([0u32; MERSENNE_TWISTER_WORDS]);
    for (slot, word) in twister_words.iter_mut().zip(words) {
        *slot = u32::try_from(*word).map_err(|_| unusual())?;
    }
    let gauss_next = match (gauss.is_none(), gauss.as_float()) {
        (true, _) => None,
        (false, Some(g)) => Some(g),
        (false, None) => return Err(unusual()),
    };
    Ok(PythonRngState {
        twister: MersenneTwister { words: twister_words, position: check_twister_position(position)? },
        gauss_next,
    })
}

/// Checks the position of the next unused word in a Mersenne Twister's state, and returns it as a
/// u32. Fails if the position is beyond the 624 words.
fn check_twister_position(position: u64) -> RngDecodeResult<u32> {
    match u32::try_from(position) {
        Ok(p) if p as usize <= MERSENNE_TWISTER_WORDS => Ok(p),
        _ => Err(RngStateError::TwisterPosition { position }),
    }
}

/// Decodes the state of NumPy's random generator, a pickled value of `numpy.random.get_state()`.
/// Also returns the NumPy module that the pickled array names.
fn decode_numpy_state(value: PickleView<'_>) -> RngDecodeResult<(NumpyModule, NumpyRngState)> {
    let unusual = || RngStateError::UnknownLayout { generator: "NumPy" };
    let items = value.as_items().ok_or_else(unusual)?;
    let item = |i: usize| items.get(i).ok_or_else(unusual);
    if item(0)?.as_str() != Some("MT19937") {
        return Err(RngStateError::NumpyGenerator);
    }
    let (names, words) = decode_twister_words(item(1)?).ok_or_else(unusual)?;
    let position = check_twister_position(item(2)?.as_count().ok_or_else(unusual)?)?;
    let has_gauss = match item(3)?.as_int() {
        Some(0) => false,
        Some(1) => true,
        _ => return Err(unusual()),
    };
    let cached_gaussian = item(4)?.as_float().ok_or_else(unusual)?;
    Ok((names, NumpyRngState { twister: MersenneTwister { words, position }, has_gauss, cached_gaussian }))
}

/// Decodes the words of a Mersenne Twister, a pickled NumPy array of 624 little-endian u32. Also
/// returns the NumPy module that the pickle of the array names. Returns `None` for any other value.
/// Pickle protocol 2 stores the bytes of the array as Latin-1 text.
fn decode_twister_words(value: PickleView<'_>) -> Option<(NumpyModule, Box<[u32; MERSENNE_TWISTER_WORDS]>)> {
    let (function, _, state) = value.as_object()?;
    let names = match function {
        "numpy._core.multiarray._reconstruct" => NumpyModule::PrivateCore,
        "numpy.core.multiarray._reconstruct" => NumpyModule::Core,
        _ => return None,
    };
    let state = state.as_items()?;
    let (dtype, args, order) = state.get(2)?.as_object()?;
    let shape = state.get(1)?.as_items()?.to_counts()?;
    let of_u32 = dtype == "numpy.dtype"
        && args.as_items()?.get(0)?.as_str() == Some("u4")
        && order.as_items()?.get(1)?.as_str() == Some("<");
    let (encode, text, _) = state.get(4)?.as_object()?;
    if shape != [MERSENNE_TWISTER_WORDS as u64] || !of_u32 || encode != "_codecs.encode" {
        return None;
    }
    let bytes: Option<Vec<u8>> =
        text.as_items()?.get(0)?.as_str()?.chars().map(|c| u8::try_from(u32::from(c)).ok()).collect();
    let bytes = bytes.filter(|b| b.len() == 4 * MERSENNE_TWISTER_WORDS)?;
    let mut words = Box::new([0u32; MERSENNE_TWISTER_WORDS]);
    for (word, b) in words.iter_mut().zip(bytes.as_chunks::<4>().0) {
        *word = u32::from_le_bytes(*b);
    }
    Some((names, words))
}

/// Decodes the states of torch's CUDA random generators: a single state, or a list of states.
/// `bytes(value)` must return the content of the tensor that `value` describes. Fails if the list
/// has more than [`GPUS_PER_RANK_MAX`] states.
fn decode_cuda_states(
    value: PickleView<'_>,
    bytes: impl Fn(PickleView<'_>) -> RngDecodeResult<Vec<u8>>,
) -> RngDecodeResult<TorchCudaStates> {
    match value.as_items() {
        None => TorchCudaState::new(&bytes(value)?).map(TorchCudaStates::SingleDevice),
        Some(list) if list.iter().take(GPUS_PER_RANK_MAX + 1).count() > GPUS_PER_RANK_MAX => {
            Err(RngStateError::TooManyGpus { limit: GPUS_PER_RANK_MAX })
        }
        Some(list) => {
            let devices =
                list.iter().map(|v| TorchCudaState::new(&bytes(v)?)).collect::<RngDecodeResult<Vec<_>>>()?;
            Ok(TorchCudaStates::PerDevice(devices))
        }
    }
}

/// Returns the bytes of a tensor that contains a random generator's state. Fails for any other
/// value, or if the tensor's zip member does not match its CRC-32.
fn read_tensor_bytes(reader: &File, file: &TorchFile, value: PickleView<'_>) -> RngDecodeResult<Vec<u8>> {
    let unusual = || RngStateError::UnknownLayout { generator: "torch" };
    let view = file.parse_tensor(value)?.ok_or_else(unusual)?;
    let len = view.element_count();
    if view.dtype != Dtype::U8
        || !view.is_contiguous()
        || view.shape.len() != 1
        || len > CPU_RNG_STATE_BYTES as u64
    {
        return Err(unusual());
    }
    let member = file.members.get(view.member).ok_or_else(unusual)?;
    let stored = member.size();
    if stored > STORAGE_BYTES_MAX {
        return Err(unusual());
    }
    let mut bytes = vec![0u8; stored as usize];
    reader.read_exact_at(&mut bytes, member.data.start).map_err(CloneableIoError::from)?;
    if member.crc.is_some_and(|crc| crc != crc32fast::hash(&bytes)) {
        return Err(RngStateError::Crc { member: member.name.clone() });
    }
    let range = view.offset as usize..(view.offset + len) as usize;
    bytes.get(range).map(<[u8]>::to_vec).ok_or_else(unusual)
}
